"""The settings under which a machine decodes fastest: what is timed, what is chosen, and what is taken as given."""

from dataclasses import replace

import pytest
import torch
from conftest import perturbed, tiny_llama

from draftsmith.decode import DraftModelProposer
from draftsmith.decode.cache import program
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts import settings
from draftsmith.scripts.settings import Settings, fastest_settings, load_fastest
from draftsmith.train import models
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec
from draftsmith.train.models import load_tokenizer
from draftsmith.train.runs import save_model


@pytest.fixture
def pair(tmp_path, tokenizer, monkeypatch, untraced):
    """A target and a draft, stored in bfloat16, on a machine with fast arithmetic for it and four threads."""
    target = tiny_llama(0, len(tokenizer))
    for name, model in (("target", target), ("draft", perturbed(target, 0.1))):
        save_model(model.to(torch.bfloat16), tokenizer, tmp_path / name)
    monkeypatch.setattr(models, "has_fast", lambda dtype, device: True)
    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    return tmp_path / "target", tmp_path / "draft"


def clock(monkeypatch, *turns):
    """Let each timing have the next of these results, after each call was made once: seconds by key."""
    turns = list(turns)

    def seconds(calls, repeats):
        for call in calls.values():
            call()
        given = turns.pop(0)
        while given is None:
            given = turns.pop(0)
        assert set(given) == set(calls)
        return given

    monkeypatch.setattr(settings, "least_seconds", seconds)


EAGER = {
    ("bfloat16", 1): 0.012, ("bfloat16", 2): 0.011, ("bfloat16", 4): 0.013,
    ("float32", 1): 0.010, ("float32", 2): 0.009, ("float32", 4): 0.020,
}  # fmt: skip
COMPILED = {"bfloat16": 0.006, "float32": 0.007}
DRAFT = {"bfloat16": 0.002, "float32": 0.001}


def loaded(pair, **options):
    target, draft = map(str, pair)
    return load_fastest(target, load_tokenizer(target), [DrafterSpec("draft", draft)], **options)


def test_the_fastest_is_chosen_and_said(pair, monkeypatch, capsys):
    clock(monkeypatch, EAGER, COMPILED, DRAFT)
    found, chosen = loaded(pair)
    assert (chosen.dtype, chosen.threads, chosen.compiled) == ("bfloat16", 2, True)
    assert chosen.draft_dtypes == {str(pair[1]): "float32"}
    assert found.dtype == "bfloat16" and found.target.dtype == torch.bfloat16
    assert found.drafter.model.dtype == torch.float32 and torch.get_num_threads() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        "settings: bfloat16, compiled, 2 threads, drafts float32; milliseconds per token of plain decoding: "
        "bfloat16 11.0, float32 9.0, bfloat16 compiled 6.0, float32 compiled 7.0; "
        "by eager threads: 1 10.0, 2 9.0, 4 13.0"
    )


def test_a_cpu_without_a_compiler_decodes_eagerly_and_says_why(pair, monkeypatch):
    def failing(*_):
        raise RuntimeError("no C++ compiler\nand more")

    clock(monkeypatch, EAGER, DRAFT)
    monkeypatch.setattr(program, "Program", failing)
    _, chosen = loaded(pair)
    assert chosen.compiled is False and str(chosen.why).endswith("; compiling failed: no C++ compiler")
    clock(monkeypatch, {("bfloat16", 2): 0.011, ("float32", 2): 0.009})
    with pytest.raises(RuntimeError, match="no C"):
        loaded(pair, threads=2, compiled=True)


@pytest.mark.parametrize("compiled", [False, None])
def test_dtypes_that_are_alike_are_told_apart_by_what_verifying_takes(pair, monkeypatch, capsys, compiled):
    alike = {"bfloat16": 0.0065, "float32": 0.006}
    eager = {(name, count): 2 * alike[name] for name, count in EAGER}
    timings = [eager, alike] if compiled is None else [eager]
    clock(monkeypatch, *timings, {"bfloat16": 0.0081, "float32": 0.0104}, DRAFT)
    _, chosen = loaded(pair, compiled=compiled)
    assert (chosen.dtype, chosen.compiled) == ("bfloat16", compiled is None)
    assert "; 4 tokens at once: bfloat16 8.1, float32 10.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiled", "eager", "seconds", "expected"),
    [
        (None, EAGER, {"bfloat16": 0.0088, "float32": 0.0089}, ("float32", False)),  # not worth a compiler
        (
            None,
            {key: 10 * s for key, s in EAGER.items()} | {("float32", 2): 0.13},
            None,
            ("float32", False),
        ),  # too slow
        (True, EAGER, {"bfloat16": 0.03, "float32": 0.04}, ("bfloat16", True)),  # asked for
        (False, EAGER, None, ("float32", False)),
    ],
)
def test_compiling_has_to_pay_unless_it_is_asked_for(pair, monkeypatch, compiled, eager, seconds, expected):
    clock(monkeypatch, eager, seconds, DRAFT)
    _, chosen = loaded(pair, compiled=compiled)
    assert (chosen.dtype, chosen.compiled) == expected


def test_what_is_given_is_not_timed(pair, monkeypatch, capsys):
    clock(monkeypatch, {("float32", 3): 0.01}, None, {"float32": 0.01})
    found, chosen = loaded(pair, dtype="float32", threads=3, compiled=False)
    assert chosen == Settings("float32", 3, False, {str(pair[1]): "float32"}, None)
    assert found.target.dtype == found.drafter.model.dtype == torch.float32
    assert "settings" not in capsys.readouterr().err


def test_a_large_model_keeps_the_dtype_that_it_is_stored_in(pair, monkeypatch):
    monkeypatch.setattr(settings, "SMALL", 10)
    clock(monkeypatch, {("bfloat16", 1): 0.3}, None, {"bfloat16": 0.01})
    _, chosen = loaded(pair, threads=1)
    assert (chosen.dtype, chosen.compiled) == ("bfloat16", False)


def test_a_run_that_goes_on_has_the_settings_that_it_began_with(pair, monkeypatch, tmp_path):
    clock(monkeypatch, EAGER, COMPILED, DRAFT)
    _, chosen = loaded(pair, kept=tmp_path / "settings.json")
    chosen.to_file(tmp_path / "settings.json")
    monkeypatch.setattr(settings, "fastest_settings", lambda *args: pytest.fail("timed again"))
    found, again = loaded(pair, kept=tmp_path / "settings.json")
    assert again == chosen and found.drafter.model.dtype == torch.float32
    _, changed = loaded(pair, dtype="float32", threads=1, kept=tmp_path / "settings.json")
    assert changed == replace(chosen, dtype="float32", threads=1)


FAILED = RuntimeError("no triton\nhere")


@pytest.mark.parametrize(
    ("compiled", "eager", "with_compiler", "launching", "chosen", "told"),
    [
        (None, 0.010, 0.006, 0.0059, True, "compiled 6.0; the host is the bound, with 5.9 to launch a token"),
        (None, 0.010, 0.0099, 0.004, False, "compiled 9.9; the GPU is the bound"),
        (None, 0.010, FAILED, 0.004, False, "eager 10.0; the GPU is the bound; compiling failed: no triton"),
        (None, 0.2, None, 0.1, False, "eager 200.0; the GPU is the bound"),
        (False, 0.010, None, 0.010, False, "eager 10.0; the host is the bound"),
        (True, None, 0.010, 0.001, True, "plain decoding: compiled 10.0; the GPU is the bound"),
    ],
)
def test_on_a_gpu_compiled_forwards_have_to_pay_and_the_bound_is_told(
    monkeypatch, compiled, eager, with_compiler, launching, chosen, told
):
    seconds = {"eager": eager, "compiled": with_compiler}

    def least(calls, repeats, device):
        (name,) = calls
        if isinstance(seconds[name], Exception):
            raise seconds[name]
        return {name: seconds[name]}

    monkeypatch.setattr(settings, "forward_after_text", lambda model, compiled: None)
    monkeypatch.setattr(settings, "least_seconds", least)
    monkeypatch.setattr(settings, "launch_seconds", lambda step, device, repeats: launching)
    found, why = settings.choose_compiled_on_gpu(tiny_llama(0), compiled)
    assert found == chosen and why.startswith("milliseconds per token of plain decoding: ") and told in why


def test_a_compiler_that_fails_is_an_error_where_it_was_asked_for(monkeypatch):
    def failing(model, compiled):
        raise RuntimeError("no triton")

    monkeypatch.setattr(settings, "forward_after_text", failing)
    with pytest.raises(RuntimeError, match="no triton"):
        settings.choose_compiled_on_gpu(tiny_llama(0), True)


def test_launching_is_timed_by_a_real_forward():
    model = tiny_llama(0)
    found, why = settings.choose_compiled_on_gpu(model, False)
    assert not found and "eager" in why and "is the bound" in why


def test_other_devices_are_not_timed(monkeypatch):
    model = tiny_llama(0)
    monkeypatch.setattr(settings, "least_seconds", lambda *args: pytest.fail("timed"))
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    drafter = Drafter("draft", "draft", DraftModel(), "draft", DraftModelProposer(model), model=model)
    assert fastest_settings(model, "target", [drafter]) == Settings(
        "float32", torch.get_num_threads(), False, {"draft": "float32"}, None
    )
