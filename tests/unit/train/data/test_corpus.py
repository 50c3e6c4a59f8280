"""What models are made from: the corpus and its split, the tokenizer, the optimizer, and saving."""

import random

import pytest
import torch
from bpe import train_bpe
from conftest import TEXTS, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.decode.errors import InputError
from draftsmith.train.data.corpus import Module, stdlib_modules
from draftsmith.train.job.optimizer import MuonAdamW
from draftsmith.train.runs import last_checkpoint, save_model


@pytest.mark.parametrize("name", ["ast", "asyncio.threads", "email", "enum", "tarfile", "threading", "unittest", "uu"])
def test_held_out_for_ever(name):
    assert Module(name, "").heldout


@pytest.mark.parametrize("name", ["argparse", "json", "os", "asyncio", "heapq", "email.message", "abc", "typing"])
def test_trained_on_for_ever(name):
    assert not Module(name, "").heldout


def test_the_split_goes_by_the_name_alone(tmp_path):
    assert Module("ast", "x = 1").heldout and Module("ast", "").heldout
    share = sum(Module(f"module{i}", "").heldout for i in range(5000)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)  # sd 0.004


def test_modules_are_named_sorted_and_library_sources_only(tmp_path):
    for name in (
        "b.py", "a.py", "pkg/__init__.py", "pkg/inner.py", "empty.py", "notes.txt",
        "site-packages/x.py", "dist-packages/x.py", "test/x.py", "pkg/tests/x.py", "idlelib/idle_test/x.py",
        "__pycache__/x.py", "encodings/x.py", "pydoc_data/x.py", "_sysconfigdata_x.py", "config-3.11-x/x.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")  # not UTF-8: read with a mark in its place, never a failure
    modules = stdlib_modules(tmp_path)
    assert [module.name for module in modules] == ["a", "b", "latin", "pkg", "pkg.inner"]
    assert modules[0].source == "# a.py\n"


def test_an_empty_folder_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}: expected the sources .* found no .py file"):
        stdlib_modules(tmp_path)


def test_the_running_interpreter_has_both_sides():
    modules = stdlib_modules()
    assert len({module.name for module in modules}) == len(modules) > 300
    assert 0.05 < sum(module.heldout for module in modules) / len(modules) < 0.2
    assert not any("test" in module.name.split(".") or "site-packages" in module.name for module in modules)


def test_every_string_survives_the_tokenizer(tokenizer):
    rng = random.Random(0)
    anything = ["".join(chr(c) for c in rng.choices(range(0xD800), k=40)) for _ in range(20)]
    for text in [*TEXTS, *anything, " lead", "trail ", "\t\r\n\0", "日本語 🙂\u2028é", ""]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_has_the_size_asked_for_and_survives_saving(tokenizer, tmp_path):
    assert len(tokenizer) == 300
    assert len(train_bpe(TEXTS, 258)) == 258  # the bytes and the special tokens alone
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]
    assert again.padding_side == "left"


def trainable(seed: int = 0, **config: object) -> nn.Module:
    return tiny_llama(seed, layers=1, hidden=16, **config).requires_grad_(True)


def take_steps(model: nn.Module, optimizer: MuonAdamW, first: int, count: int, scheduler=None) -> None:
    for step in range(first, first + count):
        ids = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def test_muon_takes_the_hidden_matrices_and_adamw_embeddings_and_vectors():
    model = trainable(tie_word_embeddings=True)
    optimizer = MuonAdamW(model, lr=1e-2, weight_decay=0.1)
    muon, adamw = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    by_muon, by_adamw = ({names[id(p)] for p in group["params"]} for group in (muon, adamw))
    assert by_muon == {name for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    assert by_adamw == set(names.values()) - by_muon
    assert "model.embed_tokens.weight" in by_adamw and "model.norm.weight" in by_adamw
    assert (muon["weight_decay"], adamw["weight_decay"]) == (0.1, 0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, optimizer, 0, 1)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_matrix_of_one_row_is_a_vector():
    model = trainable()
    model.confidence = nn.Linear(16, 1, bias=False)
    _, adamw = MuonAdamW(model, lr=1e-2, weight_decay=0.1).param_groups
    assert any(p is model.confidence.weight for p in adamw["params"])


def test_frozen_parameters_stay():
    model = trainable(tie_word_embeddings=True)
    model.model.embed_tokens.requires_grad_(False)
    optimizer = MuonAdamW(model, lr=1e-2, weight_decay=0.1)
    before = model.model.embed_tokens.weight.clone()
    take_steps(model, optimizer, 0, 2)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_scheduler_drives_both_halves():
    model = trainable(tie_word_embeddings=True)
    optimizer = MuonAdamW(model, lr=1e-2, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    take_steps(model, optimizer, 0, 1, scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    before = [p.detach().clone() for p in model.parameters()]
    take_steps(model, optimizer, 1, 2, scheduler)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_restored_optimizer_goes_on_bit_by_bit(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = trainable(tie_word_embeddings=True)
    optimizer = MuonAdamW(model, lr=1e-2, weight_decay=0.1)
    scheduler = schedule(optimizer)
    take_steps(model, optimizer, 0, 3, scheduler)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    take_steps(model, optimizer, 3, 3, scheduler)

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = trainable(5, tie_word_embeddings=True)
    restored = MuonAdamW(other, lr=1e-2, weight_decay=0.1)
    again = schedule(restored)
    other.load_state_dict(state["model"])
    restored.load_state_dict(state["optimizer"])
    again.load_state_dict(state["scheduler"])
    take_steps(other, restored, 3, 3, again)
    assert again.get_last_lr() == scheduler.get_last_lr()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def weights(directory) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_saving_replaces_a_directory_and_leaves_nothing_else(tokenizer, tmp_path):
    first, second = tiny_llama(0, len(tokenizer)), tiny_llama(1, len(tokenizer))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale.txt").write_text("of another run")
    for model in (first, second):
        save_model(model, tokenizer, tmp_path / "model")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        found = weights(tmp_path / "model")
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()


def test_an_interrupted_save_leaves_the_old_model_whole(tokenizer, tmp_path, monkeypatch):
    old, new = tiny_llama(0, len(tokenizer)), tiny_llama(1, len(tokenizer))
    save_model(old, tokenizer, tmp_path / "model")

    def full(directory, **kwargs):
        (directory / "tokenizer.json").write_text("{")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            save_model(new, tokenizer, tmp_path / "model")
    found = weights(tmp_path / "model")
    assert all(torch.equal(found[name], value) for name, value in old.state_dict().items())
    save_model(new, tokenizer, tmp_path / "model")  # what was left aside is in nobody's way
    found = weights(tmp_path / "model")
    assert all(torch.equal(found[name], value) for name, value in new.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_newest_checkpoint_is_found(tmp_path):
    assert last_checkpoint(tmp_path / "nowhere") is None
    assert last_checkpoint(tmp_path) is None
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
