"""What the proposers draft, in cases worked out by hand."""

import re

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chisquare
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.decode.proposers.lookahead import LookaheadProposer, NgramPool
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer
from draftsmith.decode.proposers.unigram import BlindProposer
from draftsmith.decode.sampling import Sampler, draw

VOCAB = 20
FALSE_ALARM = 1e-4


def started(proposer, draft_length: int, do_sample: bool = False, rows: int = 1, seed: int = 0):
    generators = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
    sampler = Sampler(LogitsProcessorList(), do_sample)
    proposer.start(DraftTask(sampler, VOCAB, generators, 100, draft_length, draw_siblings=True, compiled=False))
    return proposer


def draft(proposer, text: list[int], draft_length: int) -> Proposal:
    return proposer.propose([torch.tensor(text)], [draft_length])[0]


# Prompt lookup


@pytest.mark.parametrize(
    ("text", "draft_length", "expected"),
    [
        # The longest match wins over a more recent shorter one: 1 2 3 before 3 alone.
        ([1, 2, 3, 7, 8, 9, 3, 5, 5, 1, 2, 3], 3, [7, 8, 9]),
        # Of equally long matches the most recent one wins.
        ([1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2], 2, [8, 8]),
        # It is passed over where too little follows it.
        ([1, 2, 7, 7, 7, 1, 2, 1, 2], 4, [7, 7, 7, 1]),
        # Where no match has a whole draft behind it, the longest continuation is, cut by the text's end.
        ([4, 1, 1, 1], 3, [1]),
        ([5, 6, 5, 6, 5], 4, [6, 5]),
        # A match may overlap what it is matched with, but never is the text's own end.
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_lookup_drafts_what_followed(text, draft_length, expected):
    proposal = draft(started(PromptLookupProposer(), draft_length), text, draft_length)
    assert proposal.tokens.tolist() == expected
    assert proposal.probabilities is None
    assert proposal.tree.is_chain and len(proposal.tree) == len(expected)


def test_lookup_heeds_its_ngram_sizes():
    text = [1, 2, 3, 7, 9, 2, 3, 8, 0, 3, 6, 1, 2, 3]
    for sizes, expected in {(3, 1): [7], (2, 1): [8], (1, 1): [6], (3, 3): [7], (9, 1): [7]}.items():
        assert draft(started(PromptLookupProposer(*sizes), 1), text, 1).tokens.tolist() == expected
    assert draft(started(PromptLookupProposer(9, 4), 1), text, 1).tokens.tolist() == []
    assert draft(started(PromptLookupProposer(9, 1), 1), [5, 5, 5], 1).tokens.tolist() == [5]


def reference_lookup(text: list[int], draft_length: int, max_ngram: int, min_ngram: int) -> list[int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if ends:
            whole = [end for end in ends if len(text) - end >= draft_length]
            end = max(whole) if whole else min(ends)
            return text[end : end + draft_length]
    return []


def test_lookup_is_the_plain_search():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        length, draft_length, min_ngram, more = (
            int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 30), (1, 6), (1, 4), (0, 4))
        )
        text = torch.randint(0, 3, (length,), generator=generator).tolist()
        proposer = started(PromptLookupProposer(min_ngram + more, min_ngram), draft_length)
        expected = reference_lookup(text, draft_length, min_ngram + more, min_ngram)
        assert draft(proposer, text, draft_length).tokens.tolist() == expected, text


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (1, 2), (-1, 1)])
def test_lookup_refuses_bad_sizes(sizes):
    with pytest.raises(InputError, match=f"ngram: expected 1 ≤ min_ngram ≤ max_ngram, found {sizes[1]} and {sizes[0]}"):
        PromptLookupProposer(*sizes)


# Blind guesses


def test_blind_drafts_the_most_frequent_token_at_t0():
    blind = started(BlindProposer(), 3)
    assert draft(blind, [4, 7, 7, 2], 3).tokens.tolist() == [7, 7, 7]
    assert draft(blind, [4, 7, 7, 4], 2).tokens.tolist() == [4, 4]
    assert draft(blind, [4], 0).tokens.tolist() == []
    given = started(BlindProposer(torch.arange(12)), 3)  # narrower than V, as where a head is padded
    proposal = draft(given, [4, 7, 7, 2], 3)
    assert proposal.tokens.tolist() == [11, 11, 11]
    assert proposal.probabilities is None


@pytest.mark.parametrize("frequencies", [None, torch.tensor([0.0, 3, 1, 0, 6])])
def test_blind_says_what_it_drew_from(frequencies):
    text = [4, 4, 4, 4, 1, 1, 2, 4, 4, 1]
    sampler = torch.zeros(VOCAB, dtype=torch.float64)
    sampler[[1, 2, 4]] = torch.tensor([0.3, 0.1, 0.6], dtype=torch.float64)
    blind, twin = started(BlindProposer(frequencies), 3, do_sample=True), torch.Generator().manual_seed(0)
    drawn = torch.zeros(VOCAB)
    for _ in range(1000):
        proposal = draft(blind, text, 3)
        assert torch.equal(proposal.tokens, torch.cat([draw(q, twin) for q in proposal.probabilities]))
        drawn += torch.bincount(proposal.tokens, minlength=VOCAB)
    assert proposal.probabilities.shape == (3, VOCAB)
    assert torch.allclose(proposal.probabilities, sampler.expand(3, -1), atol=1e-15)
    assert drawn[sampler == 0].sum() == 0
    p = chisquare(drawn[sampler > 0].double(), sampler[sampler > 0] * 3000).pvalue
    assert p > FALSE_ALARM, f"p = {p:.2g} (a right drafter falls below {FALSE_ALARM} once in 10000 seeds)"


def test_blind_counts_each_row_by_itself_and_keeps_its_generator():
    blind = started(BlindProposer(), 4, do_sample=True, rows=3)
    texts = [torch.tensor(t) for t in ([1, 2], [3, 4], [5, 6])]
    drafts = blind.propose(texts, [4, 0, 4])
    assert [set(d.tokens.tolist()) - {2 * i + 1, 2 * i + 2} for i, d in enumerate(drafts)] == [set()] * 3
    blind.select([2])
    (kept,) = blind.propose(texts[2:], [4])
    alone = started(BlindProposer(), 4, do_sample=True, seed=2)
    alone.propose(texts[2:], [4])
    assert torch.equal(kept.tokens, alone.propose(texts[2:], [4])[0].tokens)


def test_blind_refuses_bad_frequencies():
    with pytest.raises(InputError, match=r"frequencies: expected a vector \(V,\), found shape \(1, 3\)"):
        BlindProposer(torch.ones(1, 3))
    for bad in ([0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], []):
        with pytest.raises(InputError, match="frequencies: expected finite values ≥ 0, not all zero"):
            BlindProposer(torch.tensor(bad))
    with pytest.raises(InputError, match="frequencies: expected at most V = 20, found 21"):
        started(BlindProposer(torch.ones(21)), 2)


# Lookahead


def outcome(proposal: Proposal, chosen: dict[int, int], path: list[int]) -> Outcome:
    """Logits whose argmax after node i is chosen[i], and a token that occurs nowhere else after the others."""
    logits = torch.zeros(len(proposal.tokens) + 1, VOCAB)
    logits[:, 19] = 1.0
    for node, token in chosen.items():
        logits[node + 1, token] = 2.0
    return Outcome(path, logits)


def test_lookahead_window_and_pool_by_hand():
    """N = 3, W = 2: column j is level 0 up to j, then level 1 at j."""
    lookahead = started(LookaheadProposer(ngram=3, guesses=2), 3)
    (row,) = lookahead._rows

    first = draft(lookahead, [1, 2, 3, 4], 3)
    assert row.levels == [[1, 2], [3, 4]]
    assert first.tokens.tolist() == [1, 3, 2, 4]  # 1 3 and 1 2 4
    assert first.tree.parents == (-1, 0, 0, 2)
    lookahead.commit([outcome(first, {1: 5, 3: 6}, [0])])
    assert row.levels == [[3, 4], [5, 6]]
    assert row.pool.after(1) == [(3, 5), (2, 3)]  # the window's before the prompt's
    assert row.pool.after(2) == [(4, 6), (3, 4)]

    second = draft(lookahead, [1, 2, 3, 4, 7, 1], 3)
    assert row.pool.after(3) == [(4, 7)] and row.pool.after(4) == [(7, 1)]
    # Guesses 3 5 and 2 3, columns 3 5 (which is there already) and 3 4 6.
    assert second.tokens.tolist() == [3, 5, 2, 3, 4, 6]
    assert second.tree.parents == (-1, 0, -1, 2, 0, 4)
    lookahead.commit([outcome(second, {1: 8, 5: 9}, [])])
    assert row.levels == [[5, 6], [8, 9]]
    assert row.pool.after(3) == [(5, 8), (4, 7)]

    # Cut to depth 2, column 1 lacks its end: it stays as it is. At depth 0 nothing is drafted and nothing learnt.
    third = draft(lookahead, [1, 2, 3, 4, 7, 1, 10], 2)
    assert third.tokens.tolist() == [5, 8, 6]  # 5 8 and 5 6 (9)
    assert third.tree.parents == (-1, 0, 0)
    lookahead.commit([outcome(third, {1: 11, 2: 12}, [])])
    assert row.levels == [[8, 6], [11, 9]]
    assert row.pool.after(5) == [(8, 11)] and row.pool.after(6) == []
    last = draft(lookahead, [1, 2, 3, 4, 7, 1, 10, 10], 0)
    assert len(last.tokens) == len(last.tree) == 0
    lookahead.commit([outcome(last, {}, [])])
    assert row.levels == [[8, 6], [11, 9]]


@pytest.mark.parametrize(("ngram", "draft_length"), [(2, 1), (2, 4), (3, 1), (3, 5), (5, 3), (4, 9)])
def test_lookahead_keeps_to_its_limits(ngram, draft_length):
    lookahead = LookaheadProposer(ngram, guesses=3)
    generator = torch.Generator().manual_seed(0)
    largest = lookahead.start(
        DraftTask(Sampler(LogitsProcessorList(), False), 4, [None], 100, draft_length, True, False)
    )
    text, sizes = [1], set()
    for _ in range(40):
        proposal = draft(lookahead, text, draft_length)
        tree, tokens = proposal.tree, proposal.tokens.tolist()
        assert 1 <= tree.depth <= draft_length and len(tree) <= largest
        for children in tree.children:
            assert len({tokens[child] for child in children}) == len(children), "siblings are equal"
        sizes.add(len(tree))
        lookahead.commit([Outcome([], torch.rand(len(tree) + 1, 4, generator=generator))])
        text.append(int(torch.randint(0, 4, (1,), generator=generator)))
    assert len(sizes) > 1 or largest == 1 + 3


def test_lookahead_rows_are_apart_and_selected():
    lookahead = started(LookaheadProposer(), 3, rows=3)
    texts = [torch.tensor(text) for text in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]
    drafts = lookahead.propose(texts, [3, 3, 3])
    for proposal, text in zip(drafts, texts, strict=True):
        assert set(proposal.tokens.tolist()) <= set(text.tolist())
    rows = list(lookahead._rows)
    lookahead.select([2, 0])
    assert lookahead._rows == [rows[2], rows[0]] and lookahead._rows[0] is rows[2]


def test_ngram_pool_forgets_the_oldest():
    pool = NgramPool(per_token=2, tokens=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    pool.add([2, 0, 0])
    pool.add([1, 8, 8])
    pool.add([3, 0, 0])
    assert (pool.after(1), pool.after(2), pool.after(3)) == ([(8, 8), (6, 7)], [], [(0, 0)])


def test_lookahead_refuses_bad_sizes():
    for options, message in (
        ({"ngram": 1}, "ngram: expected at least 2, found 1"),
        ({"guesses": 0}, "guesses: expected at least 1, found 0"),
        ({"pool_tokens": 0}, "pool_tokens: expected at least 1, found 0"),
    ):
        with pytest.raises(InputError, match=message):
            LookaheadProposer(**options)


# Early exit

SIZES = dict(
    vocab_size=97, hidden_size=32, num_attention_heads=4, max_position_embeddings=64,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
GATED = SIZES | dict(num_key_value_heads=2, intermediate_size=64)
GEMMA = GATED | dict(head_dim=8, sliding_window=4)
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def types(kept: list[int]) -> dict[str, object]:
    return {"layer_types": [TYPES[i] for i in kept], "num_hidden_layers": len(kept)}


def number(kept: list[int]) -> dict[str, object]:
    return {"num_hidden_layers": len(kept)}


FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, GATED, number),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GATED | dict(use_sliding_window=True, sliding_window=4), types),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GATED | dict(head_dim=8), number),
    "mistral": (MistralForCausalLM, MistralConfig, GATED | dict(sliding_window=4), number),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GEMMA | dict(attn_implementation="eager"), types),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA, types),
    "gpt2": (GPT2LMHeadModel, GPT2Config, SIZES, number),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, SIZES | dict(intermediate_size=64), number),
    "opt": (OPTForCausalLM, OPTConfig, SIZES | dict(ffn_dim=64, word_embed_proj_dim=32), number),
    "phi": (PhiForCausalLM, PhiConfig, GATED, number),
    "gpt_neo": (
        GPTNeoForCausalLM,
        GPTNeoConfig,
        SIZES,
        lambda kept: number(kept) | {"attention_types": [[["global"], len(kept)]]},
    ),
}


def family(name: str, kept: list[int]):
    model, config, sizes, of_layers = FAMILIES[name]
    torch.manual_seed(0)
    built = model(config(**sizes, **of_layers(kept))).eval().requires_grad_(False)
    for parameter in built.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layers", [1, 3, [0, 3], [2]])
def test_early_exit_is_the_model_of_those_layers(name, layers):
    kept = list(range(layers)) if isinstance(layers, int) else layers
    whole, small = family(name, [0, 1, 2, 3]), family(name, kept)
    renamed = {}
    for key, value in whole.state_dict().items():
        layer = re.search(r"\.(layers|h)\.(\d+)\.", key)
        if layer is None:
            renamed[key] = value
        elif int(layer[2]) in kept:
            renamed[key.replace(layer[0], f".{layer[1]}.{kept.index(int(layer[2]))}.")] = value
    small.load_state_dict(renamed)
    exit_ = early_exit(whole, layers)
    assert type(exit_) is type(whole)
    ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(exit_(ids).logits, small(ids).logits)
    # Step by step through the library's own cache: each layer knows its place in it.
    cache, steps = None, []
    for i in range(12):
        out = exit_(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert len(cache.layers) == len(kept)
    assert torch.allclose(torch.cat(steps, 1), small(ids).logits, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_early_exit_applies_norm_and_head_to_a_hidden_state(layers):
    target = tiny_llama(0, layers=4)
    ids = torch.arange(1, 9)[None, :]
    hidden = target(ids, output_hidden_states=True).hidden_states[layers]
    expected = target.lm_head(target.model.norm(hidden))
    assert torch.equal(early_exit(target, layers)(ids).logits, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_early_exit_shares_the_weights_and_leaves_the_target_alone(name):
    target = family(name, [0, 1, 2, 3])
    ids = torch.arange(1, 9)[None, :]
    logits, config = target(ids).logits, target.config.to_dict()
    state = {key: (value.data_ptr(), value.clone()) for key, value in target.state_dict().items()}
    modules = {key: (id(module), vars(module).get("layer_idx")) for key, module in target.named_modules()}
    exit_ = early_exit(target, [1, 3])
    own = set(map(id, target.parameters()))
    assert all(id(parameter) in own for parameter in exit_.parameters())
    pointers = {value.data_ptr() for value in target.state_dict().values()}
    assert {value.data_ptr() for value in exit_.state_dict().values()} < pointers
    exit_(ids)
    assert target.config.to_dict() == config and exit_.config.num_hidden_layers == 2
    assert {key: (id(m), vars(m).get("layer_idx")) for key, m in target.named_modules()} == modules
    assert target.state_dict().keys() == state.keys()
    for key, value in target.state_dict().items():
        assert value.data_ptr() == state[key][0] and torch.equal(value, state[key][1])
    assert torch.equal(target(ids).logits, logits)


@pytest.mark.parametrize("layers", [0, 3, -1, [], [0, 2], [-1], [1, 0], [0, 0]])
def test_early_exit_refuses_layers_that_are_not_there(layers):
    with pytest.raises(InputError, match=r"layers: expected (between 1 and 2|ascending indices between 0 and 1)"):
        early_exit(tiny_llama(0, layers=2), layers)
