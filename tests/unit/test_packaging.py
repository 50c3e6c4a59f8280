"""What is built and shipped: pyproject.toml names every package, and a wheel would lack none."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("decode", "train", "distill", "medusa", "scripts")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def packages_on_disk() -> set[str]:
    return {
        ".".join(["draftsmith", *path.parent.relative_to(ROOT).parts])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }


def test_every_package_is_named():
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    # A metric of `evaluate` is a folder that is loaded by its path, not imported.
    lacking = {folder for folder in folders if not (folder / "__init__.py").is_file()}
    assert lacking == {ROOT / "decode" / "acceptance_rate"}


def test_data_files_exist():
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            folder = ROOT.joinpath(*package.split(".")[1:])
            assert list(folder.glob(pattern)), f"{package} names {pattern}"


def test_no_folder_holds_more_than_sixteen_modules():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("__init__.py"):
            modules = sorted(path.parent.glob("*.py"))
            assert len(modules) <= 16, f"{path.parent.relative_to(ROOT)}: {len(modules)} modules"


def test_the_version_is_one():
    version = PYPROJECT["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
