"""Programs as the compiler makes them: the model's numbers, its changes, and what lies on disk."""

import copy
import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.decode import InputError
from draftsmith.decode.cache import CachedModel, program
from draftsmith.decode.cache.forward import BlockForward

SHARED = os.environ[program.FOLDER]


def model(seed=0, **config):
    return tiny_llama(seed, layers=1, **config)


def logits(model, rows=1, compiled=True, blocks=(3, 1, 4)):
    """Feed blocks behind texts of different lengths; return the logits, (rows, tokens, V)."""
    ids = torch.randint(1, 97, (rows, 40), generator=torch.Generator().manual_seed(3))
    cached = CachedModel(model, rows, 60, block=8, compiled=compiled)
    cached.prefill_texts([ids[row, : 9 + row] for row in range(rows)])
    starts, given = [8 + row for row in range(rows)], []
    for k in blocks:
        given.append(cached.feed(ids[:, :k], starts))
        starts = [start + k for start in starts]
    return torch.cat(given, 1)


def same(one, other):
    torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def name(model, further=(), depths=(), written=(True,)):
    return program._key(model, BlockForward(model, further, depths, written))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Keep programs in a folder of this module's, with one that all tests share: some damage it."""
    logits(model())
    with pytest.MonkeyPatch.context() as patched:
        path = tmp_path_factory.mktemp("programs")
        for file in Path(SHARED).glob(f"{name(model())}.*"):
            shutil.copy(file, path)
        patched.setenv(program.FOLDER, str(path))
        yield path


@pytest.fixture
def known(folder, monkeypatch):
    """Let nothing be compiled beyond what is on disk after the first forward."""
    compiled = logits(model())
    monkeypatch.setattr(program, "_write", lambda *_: pytest.fail("compiled again"))
    return compiled


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("rows", [1, 3])
def test_one_program_gives_the_models_logits_for_any_rows_and_blocks(rows):
    same(logits(model(), rows), logits(model(), rows, compiled=False))
    same(logits(model(), rows, blocks=(1, 1, 7, 2)), logits(model(), rows, compiled=False, blocks=(1, 1, 7, 2)))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.mul_(0.5),
        lambda model: model.lm_head.weight.data.mul_(0.5),
        lambda model: model.model.norm.weight.mul_(0.5),
        lambda model: model.load_state_dict(tiny_llama(5, layers=1).state_dict()),
        lambda model: model.to(torch.bfloat16).float(),  # which is kept in half the bytes
        lambda model: setattr(
            model.model.layers[0].mlp.up_proj, "weight", torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
        ),
    ],
    ids=["in place", "data", "a vector", "loaded", "rounded", "another tensor"],
)
def test_changed_weights_are_computed_with(change):
    changed = model()
    before = logits(changed)
    change(changed)
    after = logits(changed)
    assert (after - before).abs().max() > 1e-3
    same(after, logits(changed, compiled=False))


def test_half_precision_is_that_of_the_model(monkeypatch):
    monkeypatch.setenv(program.FOLDER, SHARED)
    half = model(hidden=64).to(torch.bfloat16)
    given, exact = logits(half, rows=3), logits(half.float(), rows=3, compiled=False)
    torch.testing.assert_close(given.float(), exact, atol=0.03, rtol=0)


@pytest.mark.usefixtures("known")
def test_a_copy_has_programs_of_its_own():
    first = model()
    logits(first)
    copied = copy.deepcopy(first)
    copied.lm_head.weight.mul_(0.5)
    same(logits(copied), logits(copied, compiled=False))
    same(logits(first), logits(first, compiled=False))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: setattr(model.config, "rms_norm_eps", 0.1),
        lambda model: setattr(model.model.layers[0], "mlp", torch.nn.Identity()),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.1),  # as adapters have one
        lambda model: torch.set_num_threads(2),
    ],
    ids=["dtype", "config", "module", "number", "threads"],
)
def test_another_structure_is_another_program(change, untraced):
    changed, threads = model(), torch.get_num_threads()
    try:
        logits(changed)
        change(changed)
        logits(changed)
    finally:
        torch.set_num_threads(threads)
    assert len(untraced) == 2


@pytest.mark.usefixtures("known")
def test_programs_and_their_model_are_freed_together():
    gone = model()
    logits(gone)
    gone = weakref.ref(gone)
    gc.collect()
    assert gone() is None


def test_a_damaged_program_is_made_again(folder, monkeypatch):
    expected = logits(model())
    path = folder / f"{name(model())}.pt2"
    whole, beside, made = path.read_bytes(), path.with_suffix(".safetensors").read_bytes(), []
    monkeypatch.setattr(program, "export_program", lambda *_: None)
    monkeypatch.setattr(program, "_write", lambda _program, _model, path: made.append(path.write_bytes(whole)))
    path.write_bytes(whole[: len(whole) // 2])
    same(logits(model()), expected)
    path.with_suffix(".safetensors").write_bytes(b"")
    monkeypatch.setattr(program, "_write", lambda *_: pytest.fail("made again"))
    with pytest.raises(pytest.fail.Exception, match="made again"):
        logits(model())
    assert len(made) == 1
    path.with_suffix(".safetensors").write_bytes(beside)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(program.FOLDER, str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"^compiled: expected a folder .* in \$DRAFTSMITH_PROGRAMS, found: "):
        logits(model())


def test_programs_of_a_model_share_its_weights(monkeypatch, untraced):
    copies, lay_out_weights = [], program.lay_out_weights
    monkeypatch.setattr(program, "lay_out_weights", lambda model: copies.append(model) or lay_out_weights(model))
    shared = model()
    for depths in ((), (1,)):
        cached = CachedModel(shared, 1, 20, compiled=True, wants_features=depths)
        cached.feed(torch.tensor([[1]]), [0])
    assert len(untraced) == 2 and len(copies) == 1


def test_a_program_has_another_name_for_other_inputs():
    plain = model()
    others = [name(model(hidden=64)), name(model().to(torch.bfloat16))]
    names = {name(plain), name(plain, depths=(1,)), name(plain, further=("states",)), name(plain, written=(False,))}
    assert len(names | set(others)) == 6
    assert name(model(1)) == name(model(2))


@pytest.mark.usefixtures("traced")
def test_models_of_one_shape_share_programs_wherever_they_were_read_from(tmp_path):
    names = set()
    for folder in ("first", "second"):
        model().save_pretrained(tmp_path / folder)
        read = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        names.add(name(read))
    assert len(names) == 1


def test_a_forward_that_decides_by_its_tokens_is_refused():
    class Deciding(type(model())):
        def forward(self, input_ids, **inputs):
            if input_ids.max() > 50:
                input_ids = input_ids - 1
            return super().forward(input_ids=input_ids, **inputs)

    deciding = Deciding(LlamaConfig(**model().config.to_dict())).eval()
    with pytest.raises(InputError, match=r"^compiled: expected a forward of Deciding that torch.export traces, found "):
        logits(deciding)


def test_weights_from_outside_the_model_are_refused():
    """They would be on disk with the program, for the next model too."""
    outside = torch.ones(97 * 32).view(97, 32)

    class Lending(type(model())):
        def forward(self, input_ids, **inputs):
            output = super().forward(input_ids=input_ids, **inputs)
            output.logits = output.logits + outside.sum(1)
            return output

    lending = Lending(LlamaConfig(**model().config.to_dict())).eval()
    with pytest.raises(InputError, match=r"^compiled: expected Lending to compute with its own .*, found .* of 3104 "):
        logits(lending)
