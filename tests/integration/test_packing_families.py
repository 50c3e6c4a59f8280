"""Packed samples are as if alone: in every family that claims it, in the loss and its gradients, in a training run."""

import random
from itertools import pairwise

import pytest
import torch
from conftest import tiny_llama
from double import InDouble
from families import STATEFUL, VOCAB, left_padded, tiny_model
from pipelines import training_data
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel, TrainingArguments
from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

from draftsmith.decode.cache.features import collect_features
from draftsmith.decode.errors import InputError
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.data.examples import CompletionCollator, TrainingData
from draftsmith.train.data.packing import pack, require_packing
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import set_attention, uses_varlen_attention, wants_bounds
from draftsmith.train.trainer import texts

PACKING = [
    "llama", "qwen2", "qwen2-window", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi", "phi3",
]  # fmt: skip
# Families that do not hand positions to the mask, have a mask or a recurrence of their own, or take no positions.
# States are kept apart by kernels for GPUs alone, which the library does not have here.
REFUSED = ["opt", "falcon", "gpt-oss", "bloom", *STATEFUL]
EAGER_ONLY = ("gemma2",)


def build(name: str, **options: object) -> PreTrainedModel:
    return tiny_model(name, max_position_embeddings=32, **options)  # fewer than a row's tokens


def samples(sizes: list[int], vocab_size: int = VOCAB, seed: int = 0) -> TrainingData:
    generator = random.Random(seed)
    rows = []
    for number, size in enumerate(sizes):
        ids = [generator.randrange(2, vocab_size) for _ in range(size)]
        rows.append(
            {"id": f"s{number}", "input_ids": ids, "labels": [IGNORED] * (1 + size // 4) + ids[1 + size // 4 :]}
        )
    return training_data(rows)


SIZES = [20, 3, 11, 6, 17, 9, 1, 13, 2, 25]  # within the window and far past it


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PACKING)
def test_hidden_states_are_those_of_each_sample_alone(name, attention, tokenizer):
    if attention == "sdpa" and name in EAGER_ONLY:
        pytest.skip("the family has no sdpa")
    model = build(name, attn_implementation=attention)
    require_packing(model, "draft")
    dataset = samples(SIZES)
    packed = pack(dataset, 40)
    batch = CompletionCollator(tokenizer)(list(packed))
    assert (batch["labels"] == IGNORED)[:, -1].any()  # some rows are padded
    ids = {sample["id"]: sample["input_ids"] for sample in dataset}
    hidden = last_hidden(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    seen = 0
    for row, samples_of_row in enumerate(packed):
        start = 0
        for sample in samples_of_row["ids"]:
            alone = last_hidden(model, input_ids=torch.tensor([ids[sample]]))[0]
            # float32: the same sums in other shapes.
            assert torch.allclose(hidden[row, start : start + len(alone)], alone, atol=1e-4, rtol=1e-4)
            start, seen = start + len(alone), seen + 1
    assert seen == len(SIZES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_samples_see_each_other_is_refused(name):
    model = build(name).train()
    message = rf"^draft: packs samples only where .*, found {type(model).__name__} with .*; set packing false$"
    with pytest.raises(InputError, match=message):
        require_packing(model, "draft")
    assert model.training


def packs(model, rows: int = 2) -> bool:
    try:
        require_packing(model, "draft", rows)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", STATEFUL)
def test_padding_reaches_no_state(name, side, tokenizer):
    """On the right as in training, which has no mask; on the left with one.

    In float32 the library's decays, summed over padding too, round to 2e-4 of qwen3-5's logits: as much as a leak may.
    """
    model = tiny_model(name, experts_implementation="eager").double()  # the grouped kernel has no float64
    rows = [torch.tensor(sample["input_ids"]) for sample in samples([9, 20, 4])]
    longest, depths = max(map(len, rows)), [1, model.config.num_hidden_layers]
    right = CompletionCollator(tokenizer)([{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows])
    inputs = left_padded(rows) if side == "left" else {"input_ids": right["input_ids"]}
    with InDouble(), collect_features(model, depths) as features:
        logits = model(**inputs, use_cache=False).logits
        for number, row in enumerate(rows):
            own = slice(longest - len(row), None) if side == "left" else slice(len(row))
            alone = model(row[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[number, own], alone, atol=1e-11, rtol=0)
            torch.testing.assert_close(features[0][number, own], features[-1][0], atol=1e-11, rtol=0)


def test_half_precision_is_told_from_leaks():
    assert packs(build("llama").bfloat16()) and packs(build("gemma3").bfloat16())
    assert not packs(build("opt").bfloat16()) and not packs(build("falcon").bfloat16())


def test_trying_leaves_the_model_and_the_generator_as_they_were():
    model = build("gpt2").train()
    state = torch.get_rng_state()
    assert packs(model) and model.training
    assert torch.equal(torch.get_rng_state(), state)


def varlen(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """Flash attention's own way with positions, around another kernel: no mask, but bounds where it finds any."""
    assert attention_mask is None
    positions, length = kwargs["position_ids"], query.shape[2]
    bounds = [0, length]
    if _is_packed_sequence(positions, len(query)):
        bounds = prepare_fa_kwargs_from_position_ids(positions)[0][0].tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, start:end] for x in (query, key, value)), is_causal=True, enable_gqa=True
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def test_an_attention_without_masks_packs_in_batches_of_one_row():
    """What flash attention reads positions for, by the library's functions, on a device that has no flash attention."""
    AttentionInterface.register("varlen", varlen)
    model = build("llama", attn_implementation="varlen")
    assert packs(model, rows=1) and not packs(model, rows=2)
    with pytest.raises(InputError, match=r"found LlamaForCausalLM with varlen attention, 8 rows a batch"):
        require_packing(model, "target", rows=8)


def flash_reference(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """A kernel that is told where texts begin and end in the flattened batch, as flash attention's own is."""
    assert attention_mask is None
    bounds = [*range(0, query.shape[0] * query.shape[2] + 1, query.shape[2])]
    if "cu_seq_lens_q" in kwargs:
        assert (
            torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]) and kwargs["cu_seq_lens_q"][-1] == bounds[-1]
        )
        bounds = kwargs["cu_seq_lens_q"].tolist()
        longest = max(end - start for start, end in pairwise(bounds))
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == longest
    flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (query, key, value)]  # (1, heads, B·T, D)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, start:end] for x in flat), is_causal=True, enable_gqa=True
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1).unflatten(0, (len(query), query.shape[2])), None


@pytest.mark.parametrize("packed", [False, True])
def test_an_attention_that_is_told_bounds_has_the_same_hidden_states(tokenizer, packed):
    AttentionInterface.register("flash_reference", flash_reference)
    told, masked = build("llama"), build("llama")
    masked.load_state_dict(told.state_dict())
    told.config._attn_implementation = "flash_reference"  # by its name the library would look for a kernel
    assert uses_varlen_attention(told) and not uses_varlen_attention(masked) and packs(told)
    dataset = samples(SIZES)
    rows = list(pack(dataset, 40) if packed else dataset)
    batch = CompletionCollator(tokenizer, bounds=True)(rows)
    texts_of = [last_hidden(model, **texts(batch)) for model in (told, masked)]
    inside = batch["labels"] != IGNORED
    assert torch.allclose(texts_of[0][inside], texts_of[1][inside], atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-5", "lfm2"])
def test_models_with_states_are_told_no_bounds(name):
    """Their kernels would take them for bounds of their own, in one row, or end the run without them."""
    AttentionInterface.register("flash_reference", flash_reference)
    told, plain = build(name), build("llama")
    for model in (told, plain):
        model.config._attn_implementation = "flash_reference"
    assert wants_bounds(plain) and not wants_bounds(told) and not wants_bounds(plain, told)
    assert not packs(told, rows=1)


def test_a_forward_makes_no_mask_where_nothing_is_packed_and_waits_for_no_look(tokenizer):
    """A mask has T² entries a row; a look at the positions on a GPU is a synchronisation."""

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names, self.largest = set(), 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.names.add(str(func))
            if isinstance(out, Tensor) and out.dtype == torch.bool:
                self.largest = max(self.largest, out.numel())
            return out

    model, dataset = build("llama"), samples(SIZES)
    for rows in (dataset, pack(dataset, 40)):
        batch = CompletionCollator(tokenizer)(list(rows))
        with Seen() as seen:
            last_hidden(model, **texts(batch))
        assert "aten._local_scalar_dense.default" not in seen.names
        assert (seen.largest > 0) == ("position_ids" in batch)


def test_attention_is_chosen_by_name_or_refused(tokenizer):
    model = build("llama")
    set_attention(model, None)
    assert model.config._attn_implementation == "sdpa"
    set_attention(model, "eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match=r"^attn_implementation: expected an attention that LlamaForCausalLM can have"):
        set_attention(model, "flash_attention_2")
    with pytest.raises(InputError, match="attn_implementation: expected an attention"):
        set_attention(model, "none such")


def test_padding_is_seen_by_none_and_no_sample_by_another(tokenizer):
    """Gradients of a sample's states reach its own tokens before them, and nothing else."""
    model = build("mistral")
    packed = pack(samples(SIZES), 40)
    batch = CompletionCollator(tokenizer)(list(packed))
    embedded = model.get_input_embeddings()(batch["input_ids"]).requires_grad_(True)
    hidden = last_hidden(model, inputs_embeds=embedded, position_ids=batch["position_ids"])
    texts = (batch["position_ids"] == 0).cumsum(1)  # each padding token is a text of its own
    for row in range(len(hidden)):
        for t in range(0, hidden.shape[1], 3):
            (gradient,) = torch.autograd.grad(hidden[row, t].sum(), embedded, retain_graph=True)
            reached = gradient.abs().sum(-1) > 0
            own = torch.zeros_like(reached)
            own[row, : t + 1] = texts[row, : t + 1] == texts[row, t]
            assert not (reached & ~own).any() and reached[row, t]


def trainer(tmp_path, tokenizer, dataset: TrainingData, divergence: str) -> DistillTrainer:
    vocab = len(tokenizer)
    draft, target = tiny_llama(1, vocab, layers=1).requires_grad_(True), tiny_llama(0, vocab)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=4, max_steps=3, logging_steps=1, learning_rate=3e-3,
        remove_unused_columns=False, lr_scheduler_type="constant",
    )  # fmt: skip
    target.save_pretrained(tmp_path / "target")
    config = DistillConfig(str(tmp_path / "target"), ["none"], draft="draft", training=arguments, divergence=divergence)
    return DistillTrainer(draft, target, tokenizer, config, dataset)


def test_the_loss_and_its_gradients_are_those_of_the_samples(tmp_path, tokenizer):
    dataset = samples(SIZES, len(tokenizer))
    packed = pack(dataset, 40)
    one = trainer(tmp_path, tokenizer, dataset, "forward_kl")
    found = []
    for rows in (dataset, packed):
        loss = one.compute_loss(one.model, CompletionCollator(tokenizer)(list(rows)))
        one.model.zero_grad()
        loss.backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in one.model.named_parameters()}))
    (apart, gradients), (together, own) = found
    assert together == pytest.approx(apart, rel=1e-5)
    for name, gradient in gradients.items():
        # float32: the same terms in another order.
        assert (gradient - own[name]).abs().max() <= 1e-5 * gradient.abs().max() + 1e-8, name
