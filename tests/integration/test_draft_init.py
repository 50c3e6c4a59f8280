"""Drafts carved from a target, made at random, with adapters, and with vocabularies that differ at their ends."""

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from families import WINDOW, tiny_model
from pipelines import configured, furthest, history, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from draftsmith.decode.cache import check_rollback
from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.distill.__main__ import distill
from draftsmith.distill.carving import choose, scale_norm, ways_to_keep
from draftsmith.distill.draft_init import DraftInit, finish_draft, make_draft
from draftsmith.distill.vocabulary import silence_padding
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.data.first_look import Text
from draftsmith.train.lora import merged_state
from draftsmith.train.losses.output_head import OutputHead, inside_model, last_hidden, open_forward
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model

ASSETS = Path(__file__).parents[2] / "assets"
DEPTH = 6
FUSED = ["gpt2", "gpt-neox", "opt", "phi", "phi3"]
SHAPED = ["llama", "llama-tied", "qwen2-window", "qwen3", "mistral", "gemma2", "gemma3"]
FAMILIES = [*SHAPED, *FUSED]
TIED = ["llama-tied", "gemma2", "gemma3", "gpt2", "opt"]
OWN: dict[str, dict[str, Any]] = {
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2-window": {"max_window_layers": 3},
    "gemma3": {"layer_types": None},  # the family's own pattern: every sixth layer sees everything
}


def build(name: str, vocab_size: int, **options: Any) -> PreTrainedModel:
    """A random target in which every weight matters, biases and norms included."""
    shape = {"vocab_size": vocab_size, "num_hidden_layers": DEPTH, "initializer_range": 0.2, **OWN.get(name, {})}
    model = tiny_model(name.removesuffix("-tied"), **shape | options)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def texts(vocab_size: int, length: int = 3 * WINDOW) -> Tensor:
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    depth = model.config.num_hidden_layers
    return next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == depth)


def reloaded(model: PreTrainedModel, tokenizer: Any, directory: Path, **options: Any) -> PreTrainedModel:
    model.save_pretrained(directory, **options)
    tokenizer.save_pretrained(directory)
    return load_model(directory, device="cpu")


@pytest.mark.parametrize(
    ("name", "layers"),
    [*((name, 3) for name in FAMILIES), *((name, [1, 2, 4]) for name in ("qwen2-window", "gemma3", "gpt2"))],
    ids=str,
)
def test_carved_layers_are_the_targets(name, layers, tokenizer, tmp_path):
    """As the target is with its other layers left out, in memory and reloaded, with a cache and without."""
    target, vocab = build(name, len(tokenizer)), len(tokenizer)
    before, state = target.config.to_dict(), {k: v.clone() for k, v in target.state_dict().items()}
    draft, own = make_draft(None, DraftInit(layers), target, tokenizer)
    kept, ids = [0, 2, 5] if layers == 3 else layers, texts(vocab)
    assert own is tokenizer
    assert draft.config.num_hidden_layers == 3
    assert all(p.requires_grad and p.dtype == torch.float32 for p in draft.parameters())
    tied = draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    assert tied == (name in TIED)
    shared = {t.data_ptr() for t in target.parameters()}
    assert not any(t.data_ptr() in shared for t in draft.parameters())

    hooks = [
        layer.register_forward_hook(
            lambda module, args, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
        )
        for index, layer in enumerate(layers_of(target))
        if index not in kept
    ]
    expected = logits(target, ids)
    for hook in hooks:
        hook.remove()
    assert torch.equal(logits(draft, ids), expected)
    again = reloaded(draft, tokenizer, tmp_path / "draft")
    assert torch.equal(logits(again, ids), expected)
    assert again.config.to_dict() | {"_name_or_path": ""} == draft.config.to_dict() | {"_name_or_path": ""}
    options = {"max_new_tokens": WINDOW, "do_sample": False}
    assert torch.equal(draft.generate(ids, **options), draft.generate(ids, use_cache=False, **options))
    assert target.config.to_dict() == before
    assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "shape", "layers", "kept", "line"),
    [
        (
            "qwen3-5",
            {"layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2},
            4,
            [0, 2, 5, 7],
            f"3 {LINEAR} (0, 2, 5), 1 {FULL} (7)",
        ),
        ("qwen3-5", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2}, 2, [0, 7], f"1 {LINEAR} (0), 1 {FULL} (7)"),
        ("lfm2", {"layer_types": ["conv", "conv", FULL] * 2 + ["conv"]}, 3, [0, 3, 5], f"2 conv (0, 3), 1 {FULL} (5)"),
        (
            "nemotron-h",
            {"layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"]},
            3,
            [1, 2, 3],
            f"1 {LINEAR} (2), 1 other (1), 1 {FULL} (3)",
        ),
    ],
    ids=str,
)
def test_a_target_with_states_is_carved_with_its_attention(
    name, shape, layers, kept, line, tokenizer, tmp_path, capsys
):
    depth = len(next(iter(shape.values())))
    target, ids = build(name, len(tokenizer), num_hidden_layers=depth, **shape), texts(len(tokenizer))
    draft, _ = make_draft(None, DraftInit(layers), target, tokenizer)
    assert capsys.readouterr().err.count(f"init: of the target's layers {line}\n") == 1
    expected = logits(early_exit(target, kept), ids)
    assert torch.equal(logits(draft, ids), expected)
    assert torch.equal(logits(reloaded(draft, tokenizer, tmp_path), ids), expected)
    check_rollback(draft, "draft")
    with pytest.raises(InputError, match=r"^init.layers: expected some of the layers with attention, .*, found 0, 1, "):
        make_draft(None, DraftInit([0, 1]), target, tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_last_norm_is_scaled_whatever_its_kind(name, tokenizer):
    """Norms of w, of 1 + w, with a bias, by the mean or not: what leaves them is so much smaller."""
    target, ids = build(name, len(tokenizer)), texts(len(tokenizer))
    before = last_hidden(target, input_ids=ids)
    norm = last_norm(target)
    assert norm is not None
    scale_norm(norm, 0.25)
    assert torch.allclose(last_hidden(target, input_ids=ids), 0.25 * before, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_beginning_that_loses_least_on_texts_is_taken(name, tokenizer, capsys):
    target = build(name, len(tokenizer))
    looked = [Text(row, row) for row in texts(len(tokenizer))]

    def loss(model: PreTrainedModel) -> float:
        each = [logits(model, text.ids_T[None])[0, :-1].log_softmax(-1) for text in looked]
        each = [log_q.gather(1, text.ids_T[1:, None]) for log_q, text in zip(each, looked, strict=True)]
        return -float(torch.cat(each).mean())

    look = partial(choose, texts=looked, tokens=len(tokenizer))
    draft, _ = make_draft(None, DraftInit(3), target, tokenizer, look)
    said = capsys.readouterr().err
    ways = ways_to_keep([0, 2, 5], ["full_attention"] * DEPTH)
    assert ways == [[0, 2, 5], [0, 1, 2], [0, 1, 5]]
    plain = {str(kept): loss(early_exit(target, kept)) for kept in ways}
    assert loss(draft) < min(plain.values())
    assert f"the loss begins at {loss(draft):.2f}" in said and said.startswith("init: layers 0, ")
    given, _ = make_draft(None, DraftInit([1, 4]), target, tokenizer, look)
    assert "init: layers 1, 4, " in capsys.readouterr().err
    assert loss(given) < loss(early_exit(target, [1, 4]))


def test_layers_that_scale_by_their_depth_stay_in_place(tokenizer):
    target = build("gpt2", len(tokenizer), scale_attn_by_inverse_layer_idx=True)
    make_draft(None, DraftInit([0, 1]), target, tokenizer)
    with pytest.raises(InputError, match=r"^init.layers: expected the first 2, as the target scales by depth"):
        make_draft(None, DraftInit(2), target, tokenizer)


def test_a_target_in_half_precision_gives_masters(tokenizer):
    target = build("llama", len(tokenizer)).bfloat16()
    draft, _ = make_draft(None, DraftInit([0, 1]), target, tokenizer)
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    assert draft.config.dtype in (torch.float32, "float32")
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight.float())


def test_random_weights_are_those_of_their_seed(tokenizer, tmp_path):
    target = build("gemma3", len(tokenizer))
    changes = {"num_hidden_layers": 7, "hidden_size": 16, "initializer_range": 0.1}
    state = torch.random.get_rng_state()
    one, _ = make_draft(None, DraftInit(config=changes, seed=1), target, tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    same, _ = make_draft(None, DraftInit(config=changes, seed=1), target, tokenizer)
    other, _ = make_draft(None, DraftInit(config=changes, seed=2), target, tokenizer)
    ids = texts(len(tokenizer))
    assert torch.equal(logits(one, ids), logits(same, ids))
    assert not torch.equal(logits(one, ids), logits(other, ids))
    assert one.model.layers[3].mlp.up_proj.weight.std().item() == pytest.approx(0.1, rel=0.1)
    # The family's own pattern for seven layers: every sixth sees everything.
    assert one.config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (one.config.hidden_size, one.config.head_dim) == (16, 8)
    assert torch.equal(logits(reloaded(one, tokenizer, tmp_path), ids), logits(one, ids))


def test_random_weights_under_a_familys_own_names(tokenizer):
    target = build("gpt2", len(tokenizer))
    draft, _ = make_draft(None, DraftInit(config={"num_hidden_layers": 2, "n_embd": 16}), target, tokenizer)
    assert len(layers_of(draft)) == 2
    assert draft.config.hidden_size == 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"hidden": 16}, "expected fields of GPT2Config, found 'hidden'"),
        ("gpt2", {"model_type": "llama"}, "expected fields of GPT2Config, found 'model_type'"),
        ("gpt2", {"n_embd": 18}, "expected a valid GPT2Config, found: "),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factr": 2.0}},
            "rope_parameters: expected factor, found",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "expected a valid LlamaConfig, found: .*factor"),
    ],
)
def test_fields_that_a_config_lacks_are_one_line(name, changes, message, tokenizer):
    with pytest.raises(InputError, match=f"^init.config: {message}"):
        make_draft(None, DraftInit(config=changes), build(name, len(tokenizer)), tokenizer)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("init", [{"layers": 2}, {"config": {"num_hidden_layers": 1}}], ids=["carved", "random"])
def test_shared_embeddings_are_the_targets_and_are_not_trained(name, init, tokenizer, tmp_path):
    target = build(name, len(tokenizer))
    draft, _ = make_draft(None, DraftInit(**init, share="embeddings"), target, tokenizer)
    ends = [key for key, p in draft.named_parameters() if not p.requires_grad]
    assert ends == ["model.embed_tokens.weight"] + ([] if name in TIED else ["lm_head.weight"])
    saved = reloaded(draft, tokenizer, tmp_path)
    for model in (draft, saved):
        for own, its in (
            (model.get_input_embeddings(), target.get_input_embeddings()),
            (model.get_output_embeddings(), target.get_output_embeddings()),
        ):
            assert torch.equal(own.weight, its.weight)
            assert own.weight.data_ptr() != its.weight.data_ptr()
    if "config" in init:
        with pytest.raises(InputError, match=r"^init.share: expected embeddings of the target's shape, found: size"):
            make_draft(None, DraftInit(config={"hidden_size": 16}, share="embeddings"), target, tokenizer)


def trained(draft: PreTrainedModel, ids: Tensor, steps: int = 3) -> None:
    """Train what is to be trained, by the way that the trainer takes its loss."""
    open_forward(draft, draft.get_output_embeddings())
    optimizer = torch.optim.SGD([p for p in draft.parameters() if p.requires_grad], lr=0.3)
    draft.train()

    def loss_of(hidden: Tensor, head: OutputHead) -> Tensor:
        return nn.functional.cross_entropy(head(hidden)[:, 0], ids[:, 1])

    for _ in range(steps):
        loss = draft(input_ids=ids, inside=inside_model(draft, loss_of))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.eval()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2-window", "gpt2"])
def test_adapters_alone_learn_and_are_merged(name, tokenizer, tmp_path):
    target, ids = build(name, len(tokenizer)), texts(len(tokenizer))
    options = LoraOptions(4, 8.0)
    draft, _ = make_draft(None, DraftInit(2, lora=options), target, tokenizer)
    plain, _ = make_draft(None, DraftInit(2), target, tokenizer)
    assert isinstance(draft, type(target))
    assert torch.equal(logits(draft, ids), logits(plain, ids))
    names = [key for key, p in draft.named_parameters() if p.requires_grad]
    linear = 4 if name == "gpt2" else 7
    assert len(names) == 2 * 2 * linear
    assert all("lora_" in key for key in names)
    trained(draft, ids)
    after = logits(draft, ids)
    assert (after - logits(plain, ids)).abs().max() > 0.1
    assert merged_state(draft).keys() == plain.state_dict().keys()
    saved = reloaded(draft, tokenizer, tmp_path, state_dict=merged_state(draft))
    # Float32 sums in another order: (W + BA)x beside Wx + B(Ax).
    assert torch.allclose(logits(saved, ids), after, rtol=0, atol=1e-4 * float(after.abs().max()))
    assert torch.equal(logits(draft, ids), after)
    assert (saved.get_output_embeddings().weight is saved.get_input_embeddings().weight) == (name in TIED)
    assert merged_state(plain).keys() == plain.state_dict().keys()


def test_adapters_go_where_they_are_asked_for(tokenizer, tmp_path):
    target = build("llama", len(tokenizer))

    def adapted(*names: str) -> set[str]:
        lora = LoraOptions(2, target_modules=list(names))
        draft, _ = make_draft(None, DraftInit(2, lora=lora), target, tokenizer)
        return {key.split(".lora_")[0] for key, p in draft.named_parameters() if p.requires_grad}

    assert adapted("q_proj") == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert adapted("1.mlp.up_proj") == {"model.layers.1.mlp.up_proj"}
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(InputError, match=f"expected neither embeddings nor head, found '{name}'"):
            adapted(name)
    with pytest.raises(InputError, match=r"expected names among down_proj, gate_proj, .* found 'query'"):
        adapted("query")
    draft, _ = make_draft(None, DraftInit(2, lora=LoraOptions(2)), target, tokenizer)
    with pytest.raises(
        InputError, match=r"^model: expected all weights of a Llama.* more, a checkpoint with adapters$"
    ):
        reloaded(draft, tokenizer, tmp_path)


def test_adapters_resume_and_the_best_are_kept(pipeline, tmp_path):
    """Four steps at once, and from a checkpoint after two: the same draft, its adapters merged; the best is the first.

    Acceptance falls, so the greatest is the first, and has to be found again.
    """
    training = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    training |= {"load_best_model_at_end": True, "metric_for_best_model": "alpha", "greater_is_better": True}
    options = {"draft": None, "init": DraftInit(1, lora=LoraOptions(4)), "heldout": [str(pipeline / "heldout")]}
    whole = distill(configured(pipeline, tmp_path / "whole", training=training, **options))
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "parts" / "checkpoint-2")
    parts = distill(configured(pipeline, tmp_path / "parts", training=training, **options))
    assert history(parts, "loss") == history(whole, "loss") and len(history(whole, "loss")) == 4
    first, second = history(whole, "eval_alpha")
    assert first > second and whole.kept_step.step == 2
    assert furthest(weights(tmp_path / "whole"), weights(tmp_path / "parts")) == 0
    names = load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert names == load_file(pipeline / "draft" / "model.safetensors").keys()
    assert any("lora_" in name for name in load_file(tmp_path / "whole" / "checkpoint-4" / "model.safetensors"))


@pytest.mark.parametrize(
    "init",
    [{"layers": 2}, {"config": {"num_hidden_layers": 1}}, {"config": {}, "share": "embeddings"}],
    ids=["carved", "random", "shared"],
)
def test_a_target_may_be_named(init, tokenizer, tmp_path):
    """What is made of a directory is what is made of the model in it; without its weights where none are copied."""
    target, ids = build("llama", len(tokenizer)), texts(len(tokenizer))
    reloaded(target, tokenizer, tmp_path)
    if init == {"config": {"num_hidden_layers": 1}}:
        (tmp_path / "model.safetensors").unlink()
    named, _ = make_draft(None, DraftInit(**init), tmp_path, tokenizer)
    given, _ = make_draft(None, DraftInit(**init), target, tokenizer)
    assert torch.equal(logits(named, ids), logits(given, ids))


def saved_draft(tokenizer: Any, vocab_size: int, directory: Path, **options: Any) -> Path:
    save_model(tiny_llama(1, vocab_size, layers=1, **options), tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def longer(tokenizer):
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["<extra>", "<more>"])
    return longer


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_draft_that_lacks_the_last_tokens_gets_them(tied, tokenizer, longer, tmp_path):
    size = len(tokenizer)
    path = saved_draft(tokenizer, size, tmp_path / "d", tie_word_embeddings=tied)
    target = tiny_llama(0, size + 2 + 30)
    draft, own = make_draft(str(path), DraftInit(), target, longer)
    assert own is longer
    assert draft.config.vocab_size == size + 32
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    before = load_model(path, device="cpu")
    assert torch.equal(draft.lm_head.weight[:size], before.lm_head.weight)
    new, old = draft.model.embed_tokens.weight[size : size + 2], before.model.embed_tokens.weight
    assert (new - old.mean(0)).abs().max() < 0.1 * old.std()
    exact, _ = make_draft(str(path), DraftInit(pad_vocabulary=False), target, longer)
    assert exact.config.vocab_size == size + 2
    ids = torch.tensor([[1, size, size + 1, 2]])
    again = reloaded(draft, own, tmp_path / "saved")
    assert torch.equal(logits(again, ids), logits(draft, ids))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == longer.get_vocab()


def test_a_draft_with_further_tokens_takes_the_targets_tokenizer(tokenizer, longer, tmp_path):
    size = len(tokenizer)
    path = saved_draft(longer, size + 2, tmp_path / "d")
    draft, own = make_draft(str(path), DraftInit(), tiny_llama(0, size), tokenizer)
    assert own is tokenizer
    assert draft.config.vocab_size == draft.lm_head.weight.shape[0] == size
    assert torch.equal(draft.lm_head.weight, load_model(path, device="cpu").lm_head.weight[:size])
    left, _ = make_draft(str(path), DraftInit(pad_vocabulary=False), tiny_llama(0, size), tokenizer)
    assert left.config.vocab_size == size + 2


def test_a_given_draft_keeps_its_own_tokenizer_where_all_tokens_agree(tokenizer, tmp_path):
    path = saved_draft(tokenizer, len(tokenizer), tmp_path / "d")
    draft, own = make_draft(str(path), DraftInit(), tiny_llama(0, len(tokenizer)), tokenizer)
    assert own is not tokenizer
    assert own.get_vocab() == tokenizer.get_vocab()
    assert all(torch.equal(v, draft.state_dict()[k]) for k, v in load_model(path, device="cpu").state_dict().items())
    other = load_tokenizer(ASSETS / "tiny-draft")
    with pytest.raises(InputError, match=rf"^draft {path}: .* carve a draft from the target \(init.layers\)"):
        make_draft(str(path), DraftInit(), tiny_llama(0, len(other)), other)


def test_models_are_whole_under_zero_3(tokenizer, tmp_path):
    path = saved_draft(tokenizer, len(tokenizer), tmp_path / "d")
    zero = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    draft, _ = make_draft(str(path), DraftInit(), tiny_llama(0, len(tokenizer) + 8), tokenizer)
    assert draft.lm_head.weight.shape[0] == len(tokenizer) + 8
    assert is_deepspeed_zero3_enabled()
    del zero


@pytest.mark.parametrize("name", ["tiny-target", "tiny-draft"])
def test_silenced_rows_are_never_drafted(name, tmp_path):
    """On texts that the rows were not chosen on; and after a training that left them far above all tokens."""
    tokenizer, model = load_tokenizer(ASSETS / name), load_model(ASSETS / name, device="cpu")
    found = encoded_prompts(None, tokenizer, 64, 128)
    ids = torch.tensor([row[:40] for row in found if len(row) >= 40][:8])
    tokens = token_count(tokenizer, model.config)
    plain = logits(model, ids)
    model.resize_token_embeddings(tokens + 64, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokens:] = 3 * model.get_output_embeddings().weight[:64]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    silence_padding(model, tokens)
    finish_draft(tmp_path, tokens)
    saved = load_model(tmp_path, device="cpu")
    for draft in (model, saved):
        found = logits(draft, ids)
        assert torch.equal(found[..., :tokens], plain)
        assert float(found.softmax(-1)[..., tokens:].sum(-1).max()) < 1e-3
        assert int(found.argmax(-1).max()) < tokens
    assert saved.config.vocab_size == tokens + 64
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_head_without_padding_is_left_alone(tokenizer, tmp_path):
    path = saved_draft(tokenizer, len(tokenizer), tmp_path / "d")
    before = (path / "model.safetensors").stat().st_mtime_ns
    finish_draft(path, len(tokenizer))
    assert (path / "model.safetensors").stat().st_mtime_ns == before
