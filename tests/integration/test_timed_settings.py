"""The settings under which a machine decodes fastest: what is timed, what is chosen, and what is taken as given."""

from dataclasses import replace

import pytest
import torch
from conftest import perturbed, tiny_llama

from draftsmith.decode.cache import program
from draftsmith.scripts import timed_settings
from draftsmith.scripts.timed_settings import Settings, fastest_settings, load_fastest
from draftsmith.train import models
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.models import load_tokenizer
from draftsmith.train.runs import save_model

EAGER, COMPILED = {"bfloat16": 0.011, "float32": 0.009}, {"bfloat16": 0.006, "float32": 0.007}
MACHINE = torch.get_num_threads()


@pytest.fixture
def pair(tmp_path, tokenizer, monkeypatch, untraced):
    """A target and a draft, stored in bfloat16, on a machine with fast arithmetic for it."""
    target = tiny_llama(0, len(tokenizer))
    for name, model in (("target", target), ("draft", perturbed(target, 0.1))):
        save_model(model.to(torch.bfloat16), tokenizer, tmp_path / name)
    monkeypatch.setattr(models, "has_fast", lambda dtype, device: True)
    yield tmp_path / "target", tmp_path / "draft"
    torch.set_num_threads(MACHINE)


def clock(monkeypatch, *turns):
    """Let each timing have the next of these results, after each call was made once: seconds by dtype."""
    turns = list(turns)

    def seconds(calls, repeats, device):
        for call in calls.values():
            call()
        given = turns.pop(0)
        assert set(given) == set(calls)
        return given

    monkeypatch.setattr(timed_settings, "least_seconds", seconds)
    return turns


def loaded(pair, **options):
    target, draft = map(str, pair)
    return load_fastest(target, load_tokenizer(target), [DrafterSpec("draft", draft)], **options)


def test_the_fastest_is_chosen_printed_and_kept(pair, monkeypatch, tmp_path, capsys):
    clock(monkeypatch, EAGER, COMPILED)
    found, chosen = loaded(pair, threads=1, kept=tmp_path / "settings.json")
    assert (chosen.dtype, chosen.threads, chosen.compiled) == ("bfloat16", 1, True)
    assert found.target.dtype == found.drafter.model.dtype == torch.bfloat16 and torch.get_num_threads() == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "settings: bfloat16, compiled; milliseconds per token of plain decoding: "
        "bfloat16 11.0, float32 9.0, bfloat16 compiled 6.0, float32 compiled 7.0"
    )
    chosen.to_file(tmp_path / "settings.json")
    monkeypatch.setattr(timed_settings, "fastest_settings", lambda *args: pytest.fail("timed again"))
    assert loaded(pair, kept=tmp_path / "settings.json")[1] == chosen
    found, changed = loaded(pair, dtype="float32", threads=2, kept=tmp_path / "settings.json")
    assert changed == replace(chosen, dtype="float32", threads=2) and found.target.dtype == torch.float32


def test_a_cpu_without_a_compiler_decodes_eagerly_and_names_the_reason(pair, monkeypatch):
    def failing(*_):
        raise RuntimeError("no C++ compiler\nand more")

    clock(monkeypatch, EAGER)
    monkeypatch.setattr(program, "Program", failing)
    _, chosen = loaded(pair)
    assert chosen.compiled is False and str(chosen.why).endswith("; compiling failed: no C++ compiler")
    with pytest.raises(RuntimeError, match="no C"):
        loaded(pair, compiled=True)


@pytest.mark.parametrize(
    ("compiled", "turns", "chosen"),
    [
        (None, [EAGER, {"bfloat16": 0.0088, "float32": 0.0098}], ("float32", False)),  # not worth a compiler
        (None, [{"bfloat16": 0.2, "float32": 0.13}], ("float32", False)),  # too slow for one to help
        (True, [{"bfloat16": 0.03, "float32": 0.04}], ("bfloat16", True)),
        (False, [EAGER], ("float32", False)),
        (None, [EAGER, {"bfloat16": 0.0065, "float32": 0.006}], ("float32", True)),
    ],
)
def test_compiling_has_to_pay_and_plain_decoding_chooses_the_dtype(pair, monkeypatch, compiled, turns, chosen):
    left = clock(monkeypatch, *turns)
    settings = loaded(pair, compiled=compiled)[1]
    assert (settings.dtype, settings.compiled) == chosen and not left


def test_what_is_given_is_not_timed(pair, monkeypatch, capsys):
    clock(monkeypatch)
    found, chosen = loaded(pair, dtype="float32", threads=1, compiled=False)
    assert chosen == Settings("float32", 1, False, None)
    assert found.target.dtype == found.drafter.model.dtype == torch.float32
    assert "settings" not in capsys.readouterr().err
    monkeypatch.setattr(timed_settings, "SMALL", 10)  # a large model keeps the dtype that it is stored in
    assert loaded(pair, compiled=False)[1].dtype == "bfloat16"


def test_other_devices_are_not_timed(monkeypatch):
    model = tiny_llama(0)
    clock(monkeypatch)
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    assert fastest_settings(model, "target") == Settings("float32", torch.get_num_threads(), False, None)
