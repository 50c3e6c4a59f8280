"""Predictions where drafters take turns: replayed rounds, each at the price of the drafter whose it is, by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import tiny_llama
from unit.scripts.measure.test_verdict import TABLE as PLAIN_TABLE

from draftsmith.decode import Counts, DraftModelProposer, HybridProposer, InputError, PromptLookupProposer, Tree
from draftsmith.decode.measurement.costs import DraftCosts
from draftsmith.decode.measurement.intervals import ratio
from draftsmith.decode.measurement.replay import Replay, TextReplay
from draftsmith.decode.replay.batch_replay import Stretches
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.scripts.engines.draft_lengths import ranges
from draftsmith.scripts.kinds import kind_named
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.predictions import by_load, curve_of, predicted_speedup, priced, sizes_up_to
from draftsmith.scripts.measure.round_costs import priced_proposers, served_target
from draftsmith.scripts.measure.state import PROBABILISTIC, Group, Measured, Method, Row
from draftsmith.scripts.report.entries import ByLoad, Goodput, LoadRange
from draftsmith.scripts.report.words import load_words
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.kinds.drafter import Drafter, Pair

GAMMA = 4
TABLE = replace(
    PLAIN_TABLE,
    drafters={
        "hybrid": {1: DraftCosts(7.0, 7.0, 7.0, 7.0), 2: DraftCosts(7.0, 7.0, 7.0, 7.0)},
        "hybrid/lookup": {1: DraftCosts(0.01, 0.0, 0.1, 0.02), 2: DraftCosts(0.02, 0.0, 0.2, 0.04)},
        "hybrid/draft": {1: DraftCosts(0.1, 0.05, 0.2, 0.3), 2: DraftCosts(0.2, 0.1, 0.3, 0.4)},
    },
)
# By text, rounds of lookup and of the draft with no, one, ... drafted tokens; one text is copied as a whole.
SIZES = [
    np.array([[0.0, 1.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0]]),
    np.array([[0.0, 0.0, 3.0]]),
    np.array([[0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]),
]
TOKENS = [12, 7, 9]
LOOKUP = {n: 0.01 + 1.0 + 0.2 * n + 0.1 for n in (1, 2, 3)}  # d + t(n + 1) + o
DRAFT = {0: 0.01 + 0.1 + 1.0 + 0.2, 4: 0.01 + 0.1 + 4 * 0.05 + 1.8 + 0.2}  # the lookup has looked
SECONDS = [LOOKUP[1] + 2 * LOOKUP[2] + DRAFT[0] + DRAFT[4], 3 * LOOKUP[2], LOOKUP[3] + DRAFT[4]]


def hybrid(last, **options) -> Drafter:
    proposer = HybridProposer([PromptLookupProposer(), last], **options)
    return Drafter(
        "hybrid", "hybrid", kind_named("hybrid"), None, proposer, draft_lengths=(2,), sources=("lookup", "draft")
    )


def text(tokens: int, sizes: np.ndarray) -> TextReplay:
    drafted = sum(n * float(column.sum()) for n, column in enumerate(sizes.T))
    rounds = replace(Counts(), num_drafts=float(sizes.sum()), num_draft_tokens=drafted, num_emitted_tokens=tokens)
    ones = np.ones(1)
    whole = Stretches(0 * ones, tokens * ones, tokens * ones, 0 * ones, {GAMMA: sizes[..., None]}, {})
    return TextReplay({GAMMA: rounds}, 0.0, tokens, (0.0,) * tokens, stretches=whole)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


def measured(target, tokenizer, rows=1, drafter: Drafter | None = None, sizes=SIZES, table=TABLE) -> Measured:
    drafter = drafter or hybrid(DraftModelProposer(target))
    groups = [
        Group([Row(i, [0] * TOKENS[i], Counts(num_drafts=2)) for i in range(at, min(at + rows, len(TOKENS)))], 1.0)
        for at in range(0, len(TOKENS), rows)
    ]
    config = MeasureConfig("target", "prompts.jsonl", "out", ["prompt_lookup"])
    replay = Replay([text(*each) for each in zip(TOKENS, sizes, strict=True)])
    return Measured(
        config, Pair(target, tokenizer, "float32", [drafter]),
        [Prompt(str(i), "", None, None) for i in range(3)], [[1, 2]] * 3, {0.0: [[0] * n for n in TOKENS]},
        {(0.0, rows, Method()): groups}, {(0.0, drafter.name, PROBABILISTIC): replay}, [table], {}, [],
    )  # fmt: skip


def test_each_round_of_a_run_has_the_price_of_its_drafter(target, tokenizer):
    own = measured(target, tokenizer)
    found = predicted_speedup(own, 0.0, own.drafter("hybrid"), GAMMA, 1)
    # Prompt and first draft go through the target together, and who is never asked reads no prompt.
    forwards = [(1.2 + 2 * 1.4 + 1.0 + 1.8) / 5, 1.4, (1.6 + 1.8) / 2]
    prompts = [2.0 + 0.02 + 0.3, 2.0 + 0.02, 2.0 + 0.02 + 0.3]
    seconds = [p + s - f for p, s, f in zip(prompts, SECONDS, forwards, strict=True)]
    plain = [2.0 + (n - 1) * 1.1 for n in TOKENS]
    assert found.value == pytest.approx(sum(plain) / sum(seconds))
    # The curve says the same, and the goodput leaves the prompts out.
    curve = curve_of(own, 0.0, "hybrid", PROBABILISTIC, own.replays[0.0, "hybrid", PROBABILISTIC])
    assert curve.predicted_speedup == {1: {GAMMA: found}}
    assert gain(own, 1) == pytest.approx(1.1 * sum(TOKENS) / sum(SECONDS))


def gain(own: Measured, rows: int) -> float:
    (load,) = by_load(own)
    return load.goodput[rows].drafting / load.goodput[rows].plain


def test_rows_that_are_decoded_together_wait_for_the_latest_and_the_largest(target, tokenizer):
    """Every pair of rounds, one of each row, at the price of the later drafter and of the larger draft."""
    own = measured(target, tokenizer, rows=2)
    pooled = sum(np.pad(each, ((0, 2 - each.shape[0]), (0, 5 - each.shape[1]))) for each in SIZES)
    kinds = [(source, n, pooled[source, n]) for source in (0, 1) for n in range(5) if pooled[source, n]]

    def price(source: int, n: int) -> float:
        looked, start, step, rest = ((0.0, 0.02, 0.0, 0.2), (0.02, 0.2, 0.1, 0.3))[source]
        return looked + start + (GAMMA * step if n else 0.0) + 1.2 + 0.4 * n + rest

    pairs = [(max(s, t), max(n, m), x * y) for s, n, x in kinds for t, m, y in kinds]
    seconds = sum(price(source, n) * weight for source, n, weight in pairs) / pooled.sum()
    assert gain(own, 2) == pytest.approx(sum(TOKENS) * 1.4 / seconds)
    # A run's rows are those of its batches, and one row stays when the other ends.
    assert predicted_speedup(own, 0.0, own.drafter("hybrid"), GAMMA, 2).value > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_round_of_n_grams_costs_what_it_verifies(target, tokenizer, rows):
    """The mean draft has not the mean price: here two tokens cost nearly as much as five."""
    table = replace(
        TABLE,
        target_seconds={1: {1: 1.0, 2: 1.7, 5: 1.8}, 2: {1: 1.2, 2: 2.6, 5: 2.8}},
        drafters={"lookup": TABLE.drafters["hybrid/lookup"]},
    )
    sizes = [np.array([[n, 0.0, 0.0, 0.0, m]]) for n, m in ((3, 3), (4, 1), (5, 0))]  # nothing found, four tokens found
    lookup = Drafter("lookup", "prompt_lookup", kind_named("prompt_lookup"), None, PromptLookupProposer())
    own = measured(target, tokenizer, rows, lookup, sizes, table)
    found = priced(own, table, lookup, own.replays[0.0, "lookup", PROBABILISTIC], [GAMMA], rows, with_prompts=False)
    none, four = 1.0 + 0.11, 1.8 + 0.11
    seconds, plain, alike = 12 * none + 4 * four, 28 * 1.1, 28 * 1.1 / (12 * none + 4 * four)
    if rows == 2:
        # Of eleven rounds of the first two texts seven draft nothing; both do in 7² of 11² pairs. One row is left over.
        seconds = 5 * ((7 / 11) ** 2 * 1.2 + (1 - (7 / 11) ** 2) * 2.8 + 0.22) + (7 / 11) * none + (4 / 11) * four
        plain = 7 * 1.4 + 5 * 1.1
        alike = 28 * 1.4 / (16 * ((3 / 4) ** 2 * 1.2 + (1 - (3 / 4) ** 2) * 2.8 + 0.22))
    assert gain(own, rows) == pytest.approx(alike)
    assert ratio(*found[GAMMA]).value == pytest.approx(plain / seconds)


def test_members_have_costs_of_their_own_and_a_tree_one_draft_length(target, tokenizer):
    chain = hybrid(DraftModelProposer(target))
    assert list(priced_proposers(Pair(target, tokenizer, "float32", [chain]))) == [
        "hybrid",
        "hybrid/lookup",
        "hybrid/draft",
    ]
    heads = MedusaProposer(MedusaHeads.of_target(target, 2), Tree.from_choices([(0,), (1,), (0, 0)]))
    assert (chain.has_one_length, hybrid(heads).has_one_length) == (False, True)
    tree = SimpleNamespace(pair=Pair(target, tokenizer, "float32", [chain, hybrid(heads)]))
    with pytest.raises(InputError, match="costs: expected chains"), served_target(tree):
        pass
    assert Drafter("draft", "draft", kind_named("draft"), None, DraftModelProposer(target)).members == {}


def test_sizes_are_all_small_ones_and_few_large_ones():
    assert sizes_up_to(8) == list(range(1, 9))
    many = sizes_up_to(512)
    assert many[0] == 1 and many[-1] == 512 and len(many) <= 24 and many == sorted(set(many))


def test_ranges_are_said_in_words():
    load = ByLoad("draft", [0.0], [LoadRange(*each) for each in ranges({1: 3, 2: 0}, 4)], {1: Goodput(1.0, 2.0)})
    assert load_words(load) == "1: γ = 3; 2 to 4: do not draft"
