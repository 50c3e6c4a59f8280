"""What the proposers draft, in cases worked out by hand."""

import re

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from transformers import LogitsProcessorList

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.early_exit import early_exit
from draftsmith.decode.proposers.lookahead import LookaheadProposer, NgramPool
from draftsmith.decode.proposers.prompt_lookup import PromptLookupProposer
from draftsmith.decode.proposers.unigram import BlindProposer
from draftsmith.decode.sampling import Sampler

VOCAB = 20


def started(proposer, draft_length: int, do_sample: bool = False, rows: int = 1, seed: int = 0):
    generators = [torch.Generator().manual_seed(seed + row) for row in range(rows)]
    sampler = Sampler(LogitsProcessorList(), do_sample)
    proposer.start(DraftTask(sampler, VOCAB, generators, 100, draft_length, draw_siblings=True, compiled=False))
    return proposer


def draft(proposer, text: list[int], draft_length: int) -> Proposal:
    return proposer.propose([torch.tensor(text)], [draft_length])[0]


# Prompt lookup


def reference_lookup(text: list[int], draft_length: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The longest match wins; of its places the latest that a whole draft follows, or else the earliest."""
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if ends:
            whole = [end for end in ends if len(text) - end >= draft_length]
            end = max(whole) if whole else min(ends)
            return text[end : end + draft_length]
    return []


def reference_simple(text: list[int], m: int, n: int) -> list[int]:
    """llama.cpp's `ngram-simple`: the latest place before the last token, if n tokens or more follow before that."""
    starts = [at for at in range(1, len(text) - n - 1) if text[at : at + n] == text[-n:]]
    if not starts or len(text) <= n + m + 2 or len(text) - 1 - (starts[-1] + n) < n:
        return []
    return text[starts[-1] + n : -1][:m]


def test_lookup_is_the_plain_search():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        length, draft_length, min_ngram, more = (
            int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 30), (1, 6), (1, 4), (0, 4))
        )
        text = torch.randint(0, 3, (length,), generator=generator).tolist()
        proposer = started(PromptLookupProposer(min_ngram + more, min_ngram), draft_length)
        expected = reference_lookup(text, draft_length, min_ngram + more, min_ngram)
        proposal = draft(proposer, text, draft_length)
        assert proposal.tokens.tolist() == expected and proposal.probabilities is None, text
        assert proposal.tree.is_chain and len(proposal.tree) == len(expected)
        simple = draft(started(PromptLookupProposer(min_ngram, latest=True), draft_length), text, draft_length)
        assert simple.tokens.tolist() == reference_simple(text, draft_length, min_ngram), text


# Blind guesses


def test_blind_drafts_the_most_frequent_token_at_t0():
    blind = started(BlindProposer(), 3)
    assert draft(blind, [4, 7, 7, 2], 3).tokens.tolist() == [7, 7, 7]
    assert draft(blind, [4, 7, 7, 4], 2).tokens.tolist() == [4, 4]
    assert draft(blind, [4], 0).tokens.tolist() == []
    assert draft(blind, [4], 1).probabilities is None


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


def test_ngram_pool_forgets_the_oldest():
    pool = NgramPool(per_token=2, tokens=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    pool.add([2, 0, 0])
    pool.add([1, 8, 8])
    pool.add([3, 0, 0])
    assert (pool.after(1), pool.after(2), pool.after(3)) == ([(8, 8), (6, 7)], [], [(0, 0)])


@pytest.mark.parametrize(
    ("field", "make", "arguments"),
    [
        *(("ngram", PromptLookupProposer, sizes) for sizes in ((0, 0), (3, 0), (1, 2), (-1, 1))),
        ("ngram", LookaheadProposer, (1,)),
        ("guesses", LookaheadProposer, (3, 0)),
    ],
)
def test_bad_sizes_are_refused_by_their_field(field, make, arguments):
    with pytest.raises(InputError, match=f"^{field}: expected"):
        make(*arguments)


# Early exit

EXITS = ("llama", "qwen2-window", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt-neox", "opt", "phi", "gpt-neo")
TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def family(name: str, kept: list[int]):
    options = {"num_hidden_layers": len(kept)}
    if name in ("qwen2-window", "gemma2", "gemma3"):
        options["layer_types"] = [TYPES[i] for i in kept]
    if name == "gpt-neo":
        options["attention_types"] = [[["global"], len(kept)]]
    return tiny_model(name, **options)


@pytest.mark.parametrize("name", EXITS)
@pytest.mark.parametrize("layers", [1, [0, 3], [2]])
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
    before, config = {key: (t.data_ptr(), t.clone()) for key, t in whole.state_dict().items()}, whole.config.to_dict()
    modules = {key: (id(module), vars(module).get("layer_idx")) for key, module in whole.named_modules()}
    exit_ = early_exit(whole, layers)
    assert type(exit_) is type(whole) and exit_.config.num_hidden_layers == len(kept)
    ids = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(exit_(ids).logits, small(ids).logits)
    # Step by step through the library's own cache: each layer knows its place in it.
    cache, steps = None, []
    for i in range(12):
        out = exit_(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert len(cache.layers) == len(kept)
    assert torch.allclose(torch.cat(steps, 1), small(ids).logits, atol=1e-4)
    # The weights are the target's own, which stays as it is.
    assert {t.data_ptr() for t in exit_.state_dict().values()} < {pointer for pointer, _ in before.values()}
    assert whole.config.to_dict() == config
    assert {key: (id(m), vars(m).get("layer_idx")) for key, m in whole.named_modules()} == modules
    for key, tensor in whole.state_dict().items():
        assert tensor.data_ptr() == before[key][0] and torch.equal(tensor, before[key][1])


@pytest.mark.parametrize("layers", [0, 3, -1, [], [0, 2], [-1], [1, 0], [0, 0]])
def test_early_exit_refuses_layers_that_are_not_there(layers):
    with pytest.raises(InputError, match=r"layers: expected (between 1 and 2|ascending indices between 0 and 1)"):
        early_exit(tiny_llama(0, layers=2), layers)
