"""The package: what is in it, its entry points, and its cards."""

import re
import tomllib
from pathlib import Path

import pytest

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


CARDS = [path for folder in ("distill", "medusa") for path in sorted((ROOT / folder).rglob("card.md.j2"))]
IMPORTS = sorted({
    line
    for card in CARDS
    for line in re.findall(r"^(?:from|import) draftsmith\S*.*$", card.read_text(encoding="utf-8"), re.MULTILINE)
})  # fmt: skip


def test_there_are_cards_and_some_import():
    assert len(CARDS) == 5 and IMPORTS


@pytest.mark.parametrize("line", IMPORTS)
def test_what_cards_import_is_there(line):
    exec(line, {})
