"""What README and docs/ show: commands parse, flags and files exist, what is cheap runs. No prose is checked."""

import logging
import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_type_hints

import pytest
from accelerate.commands.launch import launch_command_parser
from pages import GUIDES, ROOT, blocks, inline_code, shell_blocks
from transformers import TrainingArguments

from draftsmith.distill.__main__ import main as distill
from draftsmith.scripts import cli
from draftsmith.scripts.plan import planned_run
from draftsmith.train.cli import FILE_ONLY, parse_config

SHELL_ONLY = ("cat", "cd", "export", "mkdir", "pip", "source")
"""Programs whose lines are left alone."""
OPTIONS = ("--help", "--version")
"""What `draftsmith` takes in place of a command."""
FOLDERS = ("assets", "configs", "decode", "distill", "docs", "medusa", "scripts", "tests", "train")
BENCHMARKS = "benchmarks."  # their lines are parsed in tests/integration/test_benchmarks.py


def by_name(path):
    return path.name


@cache
def config_class(name: str, *argv: str) -> type[Any]:
    """Return the config of a command, or of a module that runs by itself."""
    return cli.config_class(name.removeprefix("draftsmith.").removeprefix("scripts."), argv)


def check_fields(name: str, argv: list[str]) -> None:
    """Parse flags as the command does. A placeholder for a config file is left out."""
    if "--config" in argv and argv[argv.index("--config") + 1] == "FILE.yaml":
        return
    if name == "plan":
        planned_run(argv)
        return
    cls = config_class(name, *argv)
    if any(field.name == "training" for field in fields(cls)):
        argv = [*argv, "--training.use_cpu", "true"]  # bf16 asks for it where there is no GPU
    parse_config(cls, argv)


def check_accelerate(argv: list[str]) -> None:
    args = launch_command_parser().parse_args(argv)
    assert args.module
    check_fields(args.training_script, args.training_script_args)


def check_line(words: list[str]) -> None:
    """Check one command line of ours, and let those of other programs be."""
    program, *argv = words
    if program == "draftsmith":
        name, *argv = argv
        if name in cli.launched_commands():
            command, _ = cli.launch_command(name, argv)
            check_fields(name, command[command.index(cli.launched_commands()[name]) + 1 :])
        elif name not in OPTIONS:
            assert name in cli.summaries(), f"there is no command {name!r}"
            check_fields(name, argv)
    elif words[:2] == ["accelerate", "launch"]:
        check_accelerate(argv[1:])
    elif words[:2] == ["python", "-m"]:
        if not words[2].startswith(BENCHMARKS):
            check_fields(words[2], words[3:])
    elif program == "make":
        for target in (word for word in argv if "=" not in word):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target!r}"
    else:
        assert program in SHELL_ONLY, f"expected a program that the documents use, found {program!r}"


@pytest.mark.parametrize("page", GUIDES, ids=by_name)
def test_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)  # where they are run, and their configs are read from
    for block in shell_blocks(page):
        for words in block.lines:
            check_line(words)


@cache
def field_names(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, and those of dataclasses in it behind a dot."""
    names = []
    hints = get_type_hints(cls)
    for field in fields(cls):
        names.append(field.name)
        names += [alias.name for alias in field.metadata["aliases"]()] if "aliases" in field.metadata else []
        kinds = (hints[field.name], *getattr(hints[field.name], "__args__", ()))  # of `Options | None` the parts
        for kind in kinds:
            if is_dataclass(kind) and kind is not TrainingArguments:
                names += [f"{field.name}.{inner}" for inner in field_names(kind)]
    return tuple(names)


@cache
def known_flags() -> frozenset[str]:
    names = {"config", "help", "processes", "accelerate_config"}
    names.update(f"training.{field.name}" for field in fields(TrainingArguments))
    for command in cli.summaries():
        names.update(field_names(config_class(command)))
    names.update(field_names(config_class("measure", "--server")))
    for module in iter_modules([str(ROOT / "benchmarks")]):
        for name, value in vars(import_module(BENCHMARKS + module.name)).items():
            if name.startswith("Bench") and name.endswith("Config"):
                names.update(field_names(value))
    return frozenset(f"--{name}" for name in names - FILE_ONLY)


@pytest.mark.parametrize("page", GUIDES, ids=by_name)
def test_inline_code_names_what_is_there(page):
    for text in inline_code(page):
        words = text.split()
        if words[0].startswith("--") and words[0] != "--training.*":
            flag = "--" + words[0][2:].replace("-", "_")
            assert flag in known_flags(), f"there is no flag {words[0]!r}"
        elif words[0] == "draftsmith" and len(words) > 1:
            assert words[1] in {*cli.summaries(), *OPTIONS, "COMMAND"}, f"there is no command {text!r}"
        elif words[0] == "make" and len(words) == 2:
            check_line(words)


@pytest.mark.parametrize("page", GUIDES, ids=by_name)
def test_named_files_and_modules_exist(page):
    for module in re.findall(r"-m (draftsmith(?:\.\w+)+)", page.read_text()):
        assert find_spec(module), f"there is no module {module}"
    for text in [*inline_code(page), *" ".join(blocks(page, "text")).split()]:
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", text):
            assert (ROOT / text).exists(), f"there is no {text}"


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#\s]+)|(?:src|href)=\"([^\"#]+)", page.read_text()):
            path = link[0] or link[1]
            assert "://" in path or (ROOT / path).exists(), f"{page.name}: there is no {path}"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that looks like a clone to the commands, to be written in."""
    for name in ("assets", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORTER = {
    "prepare": ["--samples", "2", "--max_new_tokens", "12"],
    "distill": ["--training.max_steps", "2", "--training.logging_steps", "1"],
    "measure": ["--max-new-tokens", "8", "--limit", "2", "--costs", "none", "--compiled", "false"],
    "generate": ["--max_new_tokens", "12"],
}
"""What shortens the commands of the page below."""


def test_getting_started_step_by_step(clone, capsys):
    """The commands of the page that begin from nothing but the embedded pair, in order; `distill` in this process."""
    names = []
    for block in shell_blocks(ROOT / "docs" / "getting-started.md"):
        for path, text in block.files.items():
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text(text)
        for program, *argv in block.lines:
            if program != "draftsmith" or not any(word.startswith("runs/first/") for word in argv):
                continue
            name, *flags = [*argv, *SHORTER.get(argv[0], ())]
            assert distill(flags) is None if name == "distill" else cli.main([name, *flags]) == 0
            names.append(name)
    assert names == ["prepare", "doctor", "distill", "measure", "generate"]
    assert (clone / "runs/first/draft/model.safetensors").is_file()
    assert (clone / "runs/first/report/report.html").is_file()


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")], ids=by_name)
def test_python_runs(page, clone):
    """The blocks of a page in order, each with the names of those before it."""
    names: dict[str, Any] = {}
    for i, text in enumerate(blocks(page, "python")):
        exec(compile(text, f"{page.name}, block {i + 1}", "exec"), names)


def test_the_reference_has_all_public_names():
    named = {
        line.rpartition(".")[2] for line in (ROOT / "docs/api.md").read_text().splitlines() if line.startswith(":::")
    }
    packages = [import_module(f"draftsmith.{name}") for name in ("decode", "distill", "medusa")]
    assert named == {name for package in packages for name in package.__all__}


def test_the_site_builds_without_a_warning(tmp_path, caplog):
    """`make docs`: a link or an anchor that leads nowhere is a warning, and a warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert not caplog.messages
    pages = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")} - {Path("404.html")}
    docs = ROOT / "docs"
    written = [*docs.rglob("*.md"), *docs.rglob("*.html")]  # a report is shown as it is
    assert pages == {path.relative_to(docs).with_suffix(".html") for path in written}
    for path in tmp_path.rglob("*.html"):
        html = path.read_text()
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://", html)  # from elsewhere
        assert "<p>|" not in html, f"{path.name}: a row that is in no table"
