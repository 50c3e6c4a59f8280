"""What is saved of each kind in the list: damaged files are refused, exports are written, training goes on."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import tiny_llama
from pipelines import furthest
from safetensors.torch import load_file
from specimens import every_kind, specimen

from draftsmith.decode.errors import InputError
from draftsmith.scripts.cli import main
from draftsmith.scripts.kinds import KINDS, drafter_specs, kind_named
from draftsmith.train.kinds.drafter import Loading
from draftsmith.train.runs import save_model
from draftsmith.train.trainer import RecipeTrainer


@pytest.fixture(scope="module")
def target(tmp_path_factory, tokenizer):
    """A saved target, and the model."""
    model, path = tiny_llama(0, len(tokenizer)), tmp_path_factory.mktemp("target")
    save_model(model, tokenizer, path)
    return path, model


@pytest.fixture(scope="module")
def saved(target, tokenizer, tmp_path_factory):
    """Return the directory of a kind's specimen, written once."""
    root, written = tmp_path_factory.mktemp("specimens"), {}

    def directory(kind: str) -> Path:
        if kind not in written:
            written[kind] = Path(specimen(kind).named(kind, target[1], tokenizer, root / kind))
        return written[kind]

    return directory


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FAULTS = [("config.json", Path.unlink), ("config.json", halved)]
FAULTS += [("model.safetensors", Path.unlink), ("model.safetensors", halved)]


@every_kind(stored=True)
def test_files_that_are_missing_or_cut_are_refused_in_one_line(target, saved, tokenizer, tmp_path, capsys, kind):
    path, model = target
    for place, (file, damage) in enumerate(FAULTS):
        directory = shutil.copytree(saved(kind), tmp_path / str(place))
        damage(directory / file)
        (spec,) = drafter_specs([f"{kind}:{directory}"], [2])
        loading = Loading(str(path), tokenizer, dtype="float32", model=model)
        with pytest.raises(InputError) as error:
            kind_named(kind).check(spec, loading)
            kind_named(kind).load(spec, loading)
        said = str(error.value)
        assert "\n" not in said and str(directory) in said and "expected " in said, (file, damage, said)
    # The last through a command.
    capsys.readouterr()
    flags = ["--target", str(path), "--drafter", f"{kind}:{directory}", "--prompt", "def", "--dtype", "float32"]
    assert main(["generate", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("error: ") and str(directory) in line


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS if kind.formats])
def test_it_is_exported_in_its_first_format(target, saved, tmp_path, capsys, kind):
    flags = ["--drafter", f"{kind}:{saved(kind)}", "--target", str(target[0]), "--format", kind_named(kind).formats[0]]
    if main(["export", *flags]):  # what does not stay as it is must be told where to go
        assert "output: expected a directory to write in, found none" in capsys.readouterr().err
        assert main(["export", *flags, "--output", str(tmp_path / "out")]) == 0
        assert (tmp_path / "out/config.json").is_file()
    assert capsys.readouterr().out.strip()
    assert main(["export", *flags[:-1], "none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "format: expected one of " in line and line.endswith("found 'none'")


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS if kind.recipe])
def test_an_interrupted_run_goes_on_and_ends_the_same(pipeline, tmp_path, monkeypatch, kind):
    taken, step = [], RecipeTrainer.training_step

    def trained(name: str) -> int:
        fields = {"target": pipeline / "target", "completions": json.dumps([str(pipeline / "short")])}
        fields |= {"training.output_dir": tmp_path / name, "training.max_steps": 4, "training.save_strategy": "steps"}
        fields |= {"training.save_steps": 2, "training.report_to": "none", "training.use_cpu": "true"}
        flags = [f"--{field}={value}" for field, value in fields.items()]
        return main([kind_named(kind).recipe.command, *flags, *specimen(kind).training(pipeline)])

    def counted(*args, **options):
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(*args, **options)

    monkeypatch.setattr(RecipeTrainer, "training_step", counted)
    assert trained("cut") == 130
    assert trained("cut") == 0 and len(taken) == 6  # the third step again, and the fourth
    assert trained("whole") == 0 and len(taken) == 10
    assert furthest(*(load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))) == 0
