"""Model families × draft shapes × rules × batch sizes: each against the library's own `generate` or a fresh forward."""

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from families import FAMILIES, FULL, HIDDEN, VOCAB, WINDOW, tiny_model
from specimens import block, eagle
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from draftsmith.decode import (
    Cascade,
    DecodeOutput,
    DraftModelProposer,
    InputError,
    Threshold,
    Tree,
    Typical,
    autoregressive_generate,
    replay_acceptance,
    speculative_generate,
)
from draftsmith.decode.cache import CachedModel, Slots, check_rollback, pad_right
from draftsmith.decode.rules import Rule
from draftsmith.medusa import BlockProposer
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.train.losses.output_head import last_hidden

NEW = 12
LENGTHS = (3, 11, 6)  # prompts within the window and past it; with NEW tokens all are far past it

WINDOWED = [name for name, (_, options) in FAMILIES.items() if "sliding_window" in options]
LEARNED_POSITIONS = ["gpt2", "opt"]
SHAPES = {"chain": None, "tree": Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])}
RULES: dict[str, Rule] = {"threshold": Threshold(0.05), "typical": Typical(), "cascade": Cascade(0.2)}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
PENALISED = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
AT_T0 = {"greedy": GREEDY, "penalised": PENALISED}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}

# What the others lack: layers of both kinds with a dict of masks, attention sinks and experts, shared keys, chunks, an
# index of slots.
VARIANTS = ("qwen2-window", "gpt-oss", "falcon", "gemma3n", "gemma4", "llama4", "deepseek-v32")
every_family = pytest.mark.parametrize("name", FAMILIES)
MAIN = [name for name in FAMILIES if name not in VARIANTS]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def in_turn() -> list[tuple[str, str, str]]:
    """Every shape for the first family, another in turn for others: rules and processors are no family's matter."""
    cases = [(i, k, name, shape) for i, name in enumerate(MAIN) for k, shape in enumerate(SHAPES)]
    return [(name, "greedy", shape) for i, k, name, shape in cases if i == 0 or (i + k) % len(SHAPES) == 0]


def build(name: str, **options: Any) -> PreTrainedModel:
    """A random model that looks at its context and whose texts are not one token again and again."""
    model = tiny_model(name, **options)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embeddings.weight:
        # Or the residual stream would carry each token to the head that knows it best, and say it again.
        embeddings.weight.mul_(0.05)
    outer = [m for n, m in model.named_modules() if n and not any(map(str.isdigit, n)) and "per_layer" not in n]
    (final_norm,) = (m for m in outer if getattr(m, "weight", None) is not None and m.weight.ndim == 1)
    # Logits of standard deviation 3; added, for Gemma's gain is 1 + weight.
    final_norm.weight.add_(3 / float(head.weight.std() * HIDDEN**0.5) - 1)
    return model


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise on all its matrices."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.std())
    return draft


@lru_cache
def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft that agrees with it often."""
    target = build(name)
    return target, noisy(target)


def prompts(*lengths: int) -> list[Tensor]:
    return [
        torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(row)) for row, n in enumerate(lengths)
    ]


def left_padded(texts: list[Tensor]) -> dict[str, Tensor]:
    width = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in texts])
    mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
    return {"input_ids": ids, "attention_mask": mask}


@lru_cache
def plain(name: str, kind: str = "greedy") -> list[Tensor]:
    """What the library writes, each row alone."""
    target, _ = pair(name)
    return [target.generate(**left_padded([text]), **AT_T0[kind])[0] for text in prompts(*LENGTHS)]


def speculate(name: str, shape: str, rows: list[int], **options: Any) -> tuple[list[Tensor], DecodeOutput]:
    """Decode some rows of the batch, each with the seed that it has there; their texts without the padding."""
    target, draft = pair(name)
    batch = left_padded([prompts(*LENGTHS)[row] for row in rows])
    proposer = DraftModelProposer(draft, SHAPES[shape])
    out = speculative_generate(target, proposer, **batch, seed=5 + rows[0], **{"draft_length": 3, **options})
    padding = (batch["attention_mask"] == 0).sum(1).tolist()
    return [text[pad:] for text, pad in zip(out.sequences, padding, strict=True)], out


def assert_row_is_as_alone(
    row: int, texts: list[Tensor], out: DecodeOutput, name: str, shape: str, **options: Any
) -> None:
    (alone,), own = speculate(name, shape, [row], **options)
    assert torch.equal(texts[row], alone)
    assert out.row_counts[row] == own.counts
    assert len(alone) == LENGTHS[row] + NEW and own.counts.num_emitted_tokens == NEW


@every_family
def test_the_pairs_are_worth_testing(name):
    """Neither flat nor degenerate laws, no ties, texts of many tokens, windows that matter, drafts that err."""
    target, _ = pair(name)
    agreement, entropies, found = [], [], set()
    for prompt, text in zip(prompts(*LENGTHS), plain(name), strict=True):
        logits, drafted = (model(text[None, :-1]).logits[0, len(prompt) - 1 :] for model in pair(name))
        top = logits.topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 1e-4  # ten times what float32 rounds such logits by
        entropies += torch.special.entr(logits.softmax(-1)).sum(-1).tolist()
        agreement += (logits.argmax(-1) == drafted.argmax(-1)).tolist()
        found |= set(text[len(prompt) :].tolist())
    assert 0.3 < sum(agreement) / len(agreement) < 0.95
    assert 0.5 < sum(entropies) / len(entropies) < 3  # nats; log 64 = 4.2
    assert len(found) >= 8
    if name in WINDOWED:
        far_sighted = build(name, sliding_window=64)
        text = plain(name)[1][None]
        assert torch.allclose(far_sighted(text).logits[:, :WINDOW], target(text).logits[:, :WINDOW], atol=1e-4)
        assert (far_sighted(text).logits - target(text).logits)[:, 2 * WINDOW :].abs().max() > 0.5


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    dict.fromkeys(
        [
            *((name, "greedy", shape) for name in VARIANTS for shape in ("chain", "tree")),
            *((MAIN[0], "penalised", shape) for shape in SHAPES),
            *in_turn(),
        ]
    ),
)
def test_exact_texts_at_t0_are_the_librarys(name, kind, shape):
    texts, out = speculate(name, shape, [0, 1, 2], **AT_T0[kind])
    for text, expected in zip(texts, plain(name, kind), strict=True):
        assert torch.equal(text, expected)
    assert_row_is_as_alone(0, texts, out, name, shape, **AT_T0[kind])
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    assert out.departure is None


@every_shape
def test_exact_draws_of_a_row_are_those_it_has_alone(shape):
    name = MAIN[0]
    texts, out = speculate(name, shape, [0, 1, 2], **SAMPLED)
    for row in (0, 2):
        assert_row_is_as_alone(row, texts, out, name, shape, **SAMPLED)
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    assert out.departure is None


@pytest.mark.parametrize(("rule", "shape"), [*zip(RULES, ("chain", "tree", "chain"), strict=True)])
def test_lossy_rules_at_t0_say_which_tokens_are_not_the_argmax(rule, shape):
    name = MAIN[0]
    texts, out = speculate(name, shape, [0, 1, 2], rule=RULES[rule], **GREEDY)
    wrong = 0  # tokens that one fresh forward of the whole text would not have said
    for text, n in zip(texts, LENGTHS, strict=True):
        assert len(text) == n + NEW
        wrong += int((pair(name)[0](text[None, :-1]).logits[0, n - 1 :].argmax(-1) != text[n:]).sum())
    assert out.counts.num_accepted_tokens > 0
    assert out.departure.num_tokens == out.counts.num_emitted_tokens == 3 * NEW
    assert out.departure.disagreements == out.departure.total_variation == wrong
    assert wrong > 0


def fresh(model: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    """The logits after each text, by one forward without a cache, (N, V); padding on the right is never seen."""
    logits = model(pad_right(texts, max(map(len, texts))), use_cache=False).logits
    return logits[range(len(texts)), [len(text) - 1 for text in texts]]


def assert_same(logits: Tensor, model: PreTrainedModel, texts: list[list[Tensor]]) -> None:
    """Compare (B, K, V) with a fresh forward of B × K texts: 4e-15 apart in float64, 1e-4 in float32 of Gemma 4."""
    expected = fresh(model, [text for row in texts for text in row]).view_as(logits)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, (3, 6, 11)) for name in FAMILIES),
        *((name, lengths) for name in (MAIN[0], WINDOWED[0]) for lengths in ((11,), (6, 6))),
    ],
)
def test_cached_forwards_are_fresh_ones(name, lengths):
    """Chains and trees, fed at once or a level at a time, of which parts stand; rows advance evenly or not."""
    model, _ = pair(name)
    generator = torch.Generator().manual_seed(0)
    texts, ragged = prompts(*lengths), len(set(lengths)) > 1
    cached = CachedModel(model, len(texts), max_length=64, block=8)
    logits = cached.prefill(pad_right([text[:-1] for text in texts], max(lengths) - 1), keep=2)
    longest = [text for text in texts if len(text) == max(lengths)]
    assert_same(logits[[len(text) == max(lengths) for text in texts]], model, [[t[:-2], t[:-1]] for t in longest])
    trees = [Tree.chain(3), SHAPES["tree"], Tree.from_choices([(0,), (0, 0), (0, 1), (0, 1, 0), (0, 2), (0, 1, 1)])]
    for round in range(9):
        starts = [len(text) - 1 for text in texts]
        shapes = [trees[(round + row * ragged) % 3] for row in range(len(texts))]
        size = max(map(len, shapes))
        drafted = torch.randint(1, VOCAB, (len(texts), size), generator=generator)
        blocks = torch.cat([torch.stack([text[-1:] for text in texts]), drafted], 1)
        paths = [[tree.path(min(node, len(tree) - 1)) for node in range(-1, size)] for tree in shapes]
        expected = [[torch.cat([t, d[p]]) for p in path] for t, d, path in zip(texts, drafted, paths, strict=True)]
        if all(tree.is_chain for tree in shapes):
            logits = cached.feed(blocks, starts)
        else:
            visible = torch.eye(1 + size, dtype=torch.bool).repeat(len(texts), 1, 1)
            depths = torch.zeros(len(texts), 1 + size, dtype=torch.long)
            for row, tree in enumerate(shapes):
                visible[row, : 1 + len(tree), : 1 + len(tree)] = tree.visible
                depths[row, 1 : 1 + len(tree)] = torch.tensor(tree.depths)
            if not ragged:
                visible, depths = visible[0], depths[0]  # one for all rows
            cut = 1 + round % 3  # in two parts, the later one seeing some of the earlier
            first = cached.feed(blocks[:, :cut], starts, visible=visible[..., :cut, :cut], depths=depths[..., :cut])
            second = cached.feed(
                blocks[:, cut:],
                [start + cut for start in starts],
                visible=visible[..., cut:, :],
                depths=depths[..., cut:] - cut,
            )
            logits = torch.cat([first, second], 1)
        for row, tree in enumerate(shapes):  # a row's entries behind its own tree mean nothing
            assert_same(logits[row : row + 1, : 1 + len(tree)], model, [expected[row][: 1 + len(tree)]])
        # A leaf, an inner node or none at all, and a token that was not fed.
        kept = [t.path((len(t) - 1, 2, -1, 1)[(round + row * ragged) % 4]) for row, t in enumerate(shapes)]
        cached.keep_paths(Slots(starts, blocks.device), [[node + 1 for node in path] for path in kept])
        for row, path in enumerate(kept):
            correction = torch.randint(1, VOCAB, (1,), generator=generator)
            texts[row] = torch.cat([texts[row], drafted[row, path], correction])
        if round == 5 and len(texts) > 1:
            cached.select([0, len(texts) - 1] if ragged else [1])
            texts = [texts[0], texts[-1]] if ragged else texts[1:]
    assert min(map(len, texts)) > 2 * WINDOW
    assert_same(
        cached.feed(torch.stack([t[-1:] for t in texts]), [len(t) - 1 for t in texts]), model, [[t] for t in texts]
    )


@every_shape
@pytest.mark.parametrize("name", LEARNED_POSITIONS)
def test_texts_may_use_every_learned_position(name, shape):
    """No position is left behind the end of the longest rows for what the others' longer drafts would put there."""
    texts = prompts(3, 11, 11, 11)
    target = build(name, max_position_embeddings=11 + NEW)
    draft = noisy(target)
    for options in (GREEDY, SAMPLED):
        proposer = DraftModelProposer(draft, SHAPES[shape])
        out = speculative_generate(target, proposer, **left_padded(texts), draft_length=6, **options)
        assert out.counts.num_emitted_tokens == NEW * len(texts)
        if options is GREEDY:
            for text, row in zip(texts, out.sequences, strict=True):
                assert torch.equal(row[11 - len(text) :], target.generate(**left_padded([text]), **GREEDY)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"min_new_tokens": 3, "eos_token_id": list(range(1, 40))},
        {"begin_suppress_tokens": list(range(1, 40))},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},
        {"forced_eos_token_id": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_take_no_notice_of_padding(options):
    """They count from the prompt's end, or over its tokens; `generate` prepares them for padded prompts."""
    target, draft = pair("llama")
    options = {**GREEDY, **options}
    texts = prompts(*LENGTHS)
    expected = [target.generate(**left_padded([text]), **options)[0] for text in texts]
    alone = {"input_ids": torch.nn.functional.pad(texts[0], (5, 0))[None], "attention_mask": torch.ones(1, 8).long()}
    alone["attention_mask"][0, :5] = 0
    for batch in (left_padded(texts), alone):
        for out in (
            speculative_generate(target, DraftModelProposer(draft), **batch, **options),
            autoregressive_generate(target, **batch, **options),
        ):
            padding = (batch["attention_mask"] == 0).sum(1).tolist()
            for row, (pad, counts) in enumerate(zip(padding, out.row_counts, strict=True)):
                written = out.sequences[row, pad:][: LENGTHS[row] + counts.num_emitted_tokens]
                assert torch.equal(written, expected[row])


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_rotary_angles_that_change_with_the_length_are_refused_where_they_would(name):
    """Keys in the cache were turned by the angles of a shorter text."""
    family, kind = name.split("-")
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limit = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
    model = build(family, rope_parameters=rope, **{limit: 20})
    proposer, (short, long) = DraftModelProposer(model), prompts(6, 24)
    for text, new in ((short, 14), (long, 10)):
        batch = left_padded([text])
        if new == 14 or kind == "longrope":
            out = speculative_generate(model, proposer, **batch, max_new_tokens=new, do_sample=False)
            assert torch.equal(out.sequences, model.generate(**batch, max_new_tokens=new, do_sample=False))
            continue
        with pytest.raises(InputError, match="max_length: expected at most 20 tokens"):
            speculative_generate(model, proposer, **batch, max_new_tokens=new, do_sample=False)
    with pytest.raises(InputError, match=f"max_length: expected at most 20 tokens, .* {kind} .* found 21"):
        speculative_generate(model, proposer, **left_padded([short]), max_new_tokens=15, do_sample=False)


@every_shape
def test_layers_with_a_window_forget_what_is_behind_it(shape, monkeypatch):
    """Texts of some 25 windows, with drafts that are rejected on the way; rows of different lengths."""
    target, draft = pair("gemma3")  # has both kinds of layers
    models: list[CachedModel] = []
    start = CachedModel.__init__
    monkeypatch.setattr(
        CachedModel, "__init__", lambda self, *args, **kw: (models.append(self), start(self, *args, **kw))[1]
    )
    texts = prompts(40, 61)
    options = {"max_new_tokens": 140, "do_sample": False}
    out = speculative_generate(
        target, DraftModelProposer(draft, SHAPES[shape]), **left_padded(texts), draft_length=3, **options
    )
    assert out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    for text, padding, written in zip(texts, (21, 0), out.sequences, strict=True):
        assert torch.equal(written[padding:], target.generate(text[None], **options)[0])
    assert len(models) == 2
    for model in models:
        for layer in model.cache.layers:
            # At most twice the window, some blocks and what the rows are apart, against 201 slots.
            assert (layer.first > 0 and layer.keys.shape[2] < 201) == layer.is_sliding


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma4", "gpt-oss"])
@torch.inference_mode()
def test_decoder_replay_and_training_see_the_same_window(name):
    """At four times its length: a draft with its target's windows, and one that sees farther, which fails there."""
    target, draft = pair(name)
    lengths, length = [3, 11], 4 * WINDOW
    seen = {}
    for window in (WINDOW, 128):
        other = noisy(build(name, sliding_window=window))
        proposer, options = DraftModelProposer(other), {"max_new_tokens": length, "do_sample": False}
        out = speculative_generate(target, proposer, **left_padded(prompts(*lengths)), draft_length=3, **options)
        written = [row[max(lengths) - n :] for n, row in zip(lengths, out.sequences, strict=True)]
        replay = replay_acceptance(target, proposer, written, lengths, [3], 0, max_new_tokens=length)
        for text, counts in zip(replay.texts, out.row_counts, strict=True):
            assert text.counts[3].num_accepted_tokens == counts.num_accepted_tokens
            assert text.counts[3].num_drafts == counts.num_drafts
        seen[window] = last_hidden(other, input_ids=written[1][None])
        if name == "gpt-oss":  # whose texts are not packed
            continue
        packed = torch.cat(written)[None]
        positions = torch.cat([torch.arange(len(text)) for text in written])[None]
        found = last_hidden(other, input_ids=packed, position_ids=positions)[:, -len(written[1]) :]
        torch.testing.assert_close(found, seen[window], atol=1e-3, rtol=1e-4)  # Gemma 4's have a deviation of 36
    apart = (seen[WINDOW] - seen[128]).abs().amax(-1)[0]
    assert apart[:WINDOW].max() < 1e-4 < apart[2 * WINDOW :].max()
    assert torch.equal(seen[WINDOW], last_hidden(draft, input_ids=written[1][None]))


WINDOWED_HEADS = {
    "eagle chain": lambda target: EagleProposer(eagle(target, sliding_window=4)),
    "block chain": lambda target: BlockProposer(
        block(target, layers=2, layer_types=["sliding_attention", FULL], sliding_window=4)
    ),
}


@pytest.mark.parametrize("name", WINDOWED_HEADS)
def test_heads_with_a_window_forget_what_is_behind_it(name):
    """Texts of some 60 windows in rows of different lengths; replay, which forgets nothing, counts the same."""
    torch.manual_seed(0)
    target, texts = tiny_llama(0, 7, layers=3, scale=3.0), [text % 7 for text in prompts(40, 61)]
    proposer, options = WINDOWED_HEADS[name](target), {"max_new_tokens": 200, "do_sample": False}
    out = speculative_generate(target, proposer, **left_padded(texts), draft_length=3, **options)
    plain = autoregressive_generate(target, **left_padded(texts), **options).sequences
    assert torch.equal(out.sequences, plain)
    assert 0 < out.counts.num_accepted_tokens < out.counts.num_draft_tokens
    for layer in proposer.feeder.model.cache.layers:
        assert (layer.first > 0 and layer.keys.shape[2] < 261) == layer.is_sliding
    written = [row[61 - len(text) :] for text, row in zip(texts, plain, strict=True)]
    replay = replay_acceptance(target, proposer, written, [40, 61], [3], 0, max_new_tokens=200)
    accepted = [text.counts[3].num_accepted_tokens for text in replay.texts]
    assert accepted == [counts.num_accepted_tokens for counts in out.row_counts]


def test_a_window_that_was_forgotten_is_not_read(monkeypatch):
    target, _ = pair("mistral")
    model = CachedModel(target, rows=1, max_length=200, rollback=4)
    ids = prompts(150)[0][None]
    model.prefill(ids[:, :60])
    for i in range(60, 150):
        model.feed(ids[:, i : i + 1], [i])
    with pytest.raises(RuntimeError, match="a window from slot 33 on, found the slots before"):
        model.feed(ids[:, :1], [40])


@pytest.mark.usefixtures("traced")
def test_compiled_forwards_keep_their_windows():
    """A tree, with two kinds of layers."""
    name, options = "gemma3", {**GREEDY, "draft_length": 2}
    texts, out = speculate(name, "tree", [0, 1, 2], compiled=True, **options)
    for text, expected in zip(texts, plain(name), strict=True):
        assert torch.equal(text, expected)
    assert out.row_counts == speculate(name, "tree", [0, 1, 2], **options)[1].row_counts


REFUSED = {
    "recurrent-gemma": (
        "expected a state in the library's cache, which can drop rejected tokens, found {}, whose state is elsewhere"
    ),
    "inkling": "expected positions by position_ids, found {}, which counts them in the cache",
    "gpt-neo": "expected full or sliding attention layers, found local ones in {}",
    "falcon-alibi": "expected positions by position_ids, found alibi in {}",
    "roberta": "expected positions from 0 on, found {}, whose own begin after pad_token_id",
    "bert-generation": "expected causal attention, found {} with is_decoder = False, an encoder",
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_rolled_back_are_refused_by_name(name):
    model = tiny_model(name)
    message = REFUSED[name].format(type(model).__name__)
    with pytest.raises(InputError) as error:
        DraftModelProposer(model)
    assert str(error.value) == f"draft model: {message}"
    target, _ = pair("llama")
    with pytest.raises(InputError) as error:
        speculative_generate(model, DraftModelProposer(target), **left_padded(prompts(3)), **GREEDY)
    assert str(error.value) == f"target: {message}"


def test_encoder_decoders_are_refused_by_name():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(InputError) as error:
        check_rollback(t5, "target")
    assert (
        str(error.value)
        == "target: expected a decoder-only model, found the encoder-decoder T5ForConditionalGeneration"
    )


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_kernels_that_take_no_masks_are_refused_by_name(kernel):
    model = build("llama")
    model.config._attn_implementation = kernel  # as it stands after loading, where the kernel is installed
    with pytest.raises(InputError) as error:
        check_rollback(model, "draft model")
    assert (
        str(error.value)
        == f"draft model: expected attn_implementation eager or sdpa, found {kernel}, which takes no masks"
    )
