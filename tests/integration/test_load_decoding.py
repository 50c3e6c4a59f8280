"""Whether the forwards of a pair are compiled: what is timed, what is tried, and what is taken as given."""

import pytest
import torch
from conftest import tiny_llama

from draftsmith.decode.cache import program
from draftsmith.scripts import pair as module
from draftsmith.scripts.pair import load_decoding
from draftsmith.train.models import load_tokenizer
from draftsmith.train.runs import save_model

MACHINE = torch.get_num_threads()


@pytest.fixture
def target(tmp_path, tokenizer, untraced):
    save_model(tiny_llama(0, len(tokenizer)), tokenizer, tmp_path / "target")
    yield str(tmp_path / "target")
    torch.set_num_threads(MACHINE)


def compiled(target, monkeypatch, seconds: float | None = None, **options) -> bool:
    """Load, where an eager token takes this long; if None nothing may be timed."""

    def clock(calls, repeats, device):
        assert seconds is not None
        calls[""]()
        return {"": seconds}

    monkeypatch.setattr(module, "least_seconds", clock)
    return load_decoding(target, load_tokenizer(target), [], **options)[1]


def test_fast_tokens_are_compiled_unless_told(target, monkeypatch, untraced):
    assert compiled(target, monkeypatch, 0.099, threads=1) and len(untraced) == 1 and torch.get_num_threads() == 1
    assert not compiled(target, monkeypatch, 0.1)
    assert compiled(target, monkeypatch, compiled=True) and not compiled(target, monkeypatch, compiled=False)
    assert len(untraced) == 1


def test_a_machine_without_a_compiler_decodes_eagerly_and_names_the_reason(target, monkeypatch, capsys):
    def failing(*_):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(program, "Program", failing)
    assert not compiled(target, monkeypatch, 0.01)
    assert capsys.readouterr().err.endswith("forwards are eager; compiling failed: no C++ compiler\n")


def test_other_devices_are_not_timed(target, monkeypatch):
    loaded = module.load_pair

    def elsewhere(*args):
        pair = loaded(*args)
        monkeypatch.setattr(type(pair.target), "device", torch.device("meta"))
        monkeypatch.setattr(module, "forward_after_text", lambda *_, **__: pytest.fail("timed"))
        return pair

    monkeypatch.setattr(module, "load_pair", elsewhere)
    assert not compiled(target, monkeypatch)
