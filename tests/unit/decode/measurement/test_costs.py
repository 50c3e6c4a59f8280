"""The table of costs by hand, and its measurement by a clock that the test turns."""

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from draftsmith.decode import DraftModelProposer, InputError, Tree
from draftsmith.decode import clock as decode_clock
from draftsmith.decode.cache import CachedModel
from draftsmith.decode.measurement import costs, turns
from draftsmith.decode.measurement.costs import CostTable, DraftCosts, ValidTable, measure_costs
from draftsmith.decode.planning.costs import RoundCosts
from draftsmith.decode.proposers.base import Proposal, StatelessProposer
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.validation import parse

TABLE = CostTable(
    context=50,
    temperature=0.0,
    target_seconds={1: {1: 1.0, 5: 2.0}, 4: {1: 1.6, 5: 4.4}},
    plain_overhead_seconds={1: 0.1, 4: 0.4},
    prefill_seconds={1: 3.0, 4: 9.0},
    prompt=20,
    drafters={
        "draft": {1: DraftCosts(0.2, 0.1, 0.3, 0.5), 4: DraftCosts(0.5, 0.4, 0.6, 2.0)},
        "lookup": {1: DraftCosts(0.01, 0.0, 0.2, 0.0), 4: DraftCosts(0.04, 0.0, 0.2, 0.0)},
    },
)


def test_a_draft_of_four_tokens_is_timed_as_four_forwards(target, monkeypatch):
    """By a clock that ticks with the draft's forwards: all drafts but the first, which reads the text, are alike."""
    ticks, draft = [0], tiny_llama(1, layers=1)
    draft.register_forward_hook(lambda *args: ticks.__setitem__(0, ticks[0] + 1))
    monkeypatch.setattr(decode_clock, "now", lambda device: ticks[0])
    for rows in (1, 3):
        texts = torch.ones(rows, 28, dtype=torch.long)
        assert costs.drafting_seconds(target, DraftModelProposer(draft), texts, 20, 4)[0] == 4


def test_costs_lie_between_those_of_the_batch_sizes_that_were_measured():
    one, two = TABLE.at("draft", 1), TABLE.at("draft", 2)
    assert one == RoundCosts({1: 1.0, 5: 2.0}, 0.1, overhead=0.3, draft_start=0.2, plain_overhead=0.1)
    assert two.target == pytest.approx({1: 1.2, 5: 2.8})
    assert [two.draft_step, two.overhead, two.draft_start, two.plain_overhead] == pytest.approx([0.2, 0.4, 0.3, 0.2])
    assert two.round_seconds(4) == pytest.approx(0.3 + 4 * 0.2 + 2.8 + 0.4)
    assert two.round_seconds(4, nodes=2) == pytest.approx(0.3 + 4 * 0.2 + 2.0 + 0.4)
    assert TABLE.at("lookup", 7).target == pytest.approx({1: 2.2, 5: 6.8})  # a line beyond


def played(steps: list[int], seconds) -> float:
    """A batch, step by step: every row that has a step left takes part in it."""
    total, left = 0.0, list(steps)
    while any(left):
        total += seconds(sum(own > 0 for own in left))
        left = [max(0, own - 1) for own in left]
    return total


@pytest.mark.parametrize("steps", [[7, 1, 3, 3], [2, 9, 9]])
def test_rows_that_end_early_leave_a_faster_batch(steps):
    rows = len(steps)
    prompts = 3.0 + (rows - 1) * 2.0

    def plain(left: int) -> float:
        own = TABLE.at("draft", left)
        return own.target[1] + own.plain_overhead

    assert TABLE.plain_seconds(steps, 20) == pytest.approx(prompts + played(steps, plain))
    first_draft = 0.5 + (rows - 1) * 0.5
    drafting = played(steps, lambda left: TABLE.at("draft", left).round_seconds(3))
    assert TABLE.speculative_seconds("draft", steps, 3, None, 20) == pytest.approx(prompts + first_draft + drafting)
    # Without prompts it is the rounds alone, and every token a step.
    assert TABLE.plain_seconds(steps, 0) == pytest.approx(played(steps, plain))
    assert TABLE.speculative_seconds("draft", steps, 3, None, 0) == pytest.approx(drafting)


def test_one_row_verifies_its_first_draft_with_the_prompt():
    # The prompt's forward (3.0) gives the first token of plain decoding, and verifies the first draft of a round.
    assert TABLE.plain_seconds([6], 20) == pytest.approx(3.0 + 5 * (1.0 + 0.1))
    one = 0.2 + 3 * 0.1 + 0.3  # a draft and the rest of its round
    assert TABLE.speculative_seconds("draft", [4], 3, None, 20) == pytest.approx(3.0 + 0.5 + one + 3 * (one + 1.75))
    assert TABLE.plain_seconds([6], 0) == pytest.approx(6 * (1.0 + 0.1))
    assert TABLE.speculative_seconds("draft", [4], 3, None, 0) == pytest.approx(4 * (one + 1.75))
    # Replay expects parts of rounds: half a round more takes half as long.
    more = TABLE.speculative_seconds("draft", [4.5], 3, None, 20) - TABLE.speculative_seconds("draft", [4], 3, None, 20)
    assert more == pytest.approx(0.5 * (one + 1.75))


def test_noise_that_leaves_the_rest_below_nothing_makes_no_text_faster_than_its_forwards():
    noisy = DraftCosts(0.2, 0.1, -9.0, 0.5)
    table = replace(TABLE, prefill_seconds={1: 0.1, 4: 0.1}, drafters={"draft": dict.fromkeys((1, 4), noisy)})
    # The prompt's forward verifies the first draft; two rounds take a forward each.
    assert table.speculative_seconds("draft", [3], 3, None, 20) == pytest.approx(0.1 + 0.5 + 2 * 1.0)
    sizes = np.array([[0.0, 0.0, 0.0, 3.0]])
    assert table.taking_turns_seconds(["draft"], [sizes], [3], 20) == pytest.approx(0.1 + 0.5 + 2 * 1.0)
    assert table.taking_turns_seconds(["draft"], [sizes], [3], 0) == pytest.approx(3 * 1.0)
    # Nor does a prompt take less for being longer.
    assert table.prompt_seconds(1, 40) == pytest.approx(0.1)


def test_a_prompt_takes_what_its_length_does():
    """Measured: 3 s for 20 tokens of one row, 9 s of four; one token takes 1 and 1.6 s."""
    assert [TABLE.prompt_seconds(1, n) for n in (1, 20, 39)] == pytest.approx([1.0, 3.0, 5.0])
    assert [TABLE.prompt_seconds(4, n) for n in (1, 20)] == pytest.approx([1.6, 9.0])
    # And the drafter reads it too: 0.5 s for 20 tokens.
    longer = TABLE.speculative_seconds("draft", [4], 3, None, 39) - TABLE.speculative_seconds("draft", [4], 3, None, 20)
    assert longer == pytest.approx(2.0 + 0.5 * 19 / 20)


def test_a_table_outlives_json():
    noisy = replace(TABLE, plain_overhead_seconds=dict.fromkeys(TABLE.plain_overhead_seconds, -9.0))
    for table in (TABLE, noisy):
        assert parse(ValidTable, json.dumps(asdict(table)), "it") == table


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context", 0),
        ("temperature", float("nan")),
        ("target_seconds", {b: dict.fromkeys(s, 0.0) for b, s in TABLE.target_seconds.items()}),
        ("target_seconds", {b: {5: 1.0} for b in TABLE.target_seconds}),
        ("plain_overhead_seconds", {}),
        ("plain_overhead_seconds", dict.fromkeys(TABLE.plain_overhead_seconds, float("-inf"))),
        ("drafters", {"draft": {}}),
        ("drafters", {"draft": {b: DraftCosts(-1.0, 1.0, 1.0, 1.0).__dict__ for b in TABLE.target_seconds}}),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(field, value):
    damaged = asdict(TABLE) | {field: value}
    for found in (damaged, {name: own for name, own in damaged.items() if name != field}):
        with pytest.raises(InputError, match=r"^costs: .*expected .*, found") as error:
            parse(ValidTable, json.dumps(found), "costs")
        assert "\n" not in str(error.value)


class Clock:
    """What time it is: only what the test lets take time does."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds


class Warper(TemperatureLogitsWarper):
    """The law's own work, which takes a known time a call."""

    def __init__(self, clock: Clock):
        super().__init__(1.0)
        self.pass_time = clock.pass_time  # a processor that held the clock would hold a state

    def __call__(self, input_ids, scores):
        self.pass_time(WARPING)
        return scores


class Timed(StatelessProposer):
    """Drafts a token over and over, in a known time; the first draft of a text takes longer."""

    def __init__(self, clock: Clock, token: int):
        self.clock, self.token = clock, token

    def start(self, task):
        self.first = True
        return super().start(task)

    def propose(self, contexts, draft_lengths):
        self.clock.seconds += START + STEP * max(draft_lengths) * len(contexts) + self.first * FIRST
        self.first = False
        return [Proposal(torch.full((k,), self.token), None, Tree.chain(k)) for k in draft_lengths]

    def commit(self, outcomes):
        self.clock.seconds += REST


WARPING, START, STEP, FIRST, REST = 0.01, 0.3, 0.07, 0.9, 0.2


def forward(rows: int, tokens: int) -> float:
    return 2.0 + 0.5 * rows + 0.1 * rows * tokens


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(decode_clock, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    for name in ("prefill", "feed"):
        own = getattr(CachedModel, name)

        def timed(self, tokens, *args, own=own, **kwargs):
            clock.seconds += forward(*tokens.shape)
            return own(self, tokens, *args, **kwargs)

        monkeypatch.setattr(CachedModel, name, timed)
    return clock


@pytest.mark.parametrize(("accepted", "draft_length"), [(True, 16), (False, 4)])
def test_each_part_gets_back_the_time_that_it_took(clock, monkeypatch, accepted, draft_length):
    monkeypatch.setattr(turns, "WRITTEN", 12)
    target = tiny_llama(0, layers=1)
    target.lm_head.weight.zero_()  # it always writes token 0, which would end the text
    target.generation_config.eos_token_id = 0
    sampler = Sampler(LogitsProcessorList([Warper(clock)]), do_sample=False)
    proposers, text = {"timed": Timed(clock, 0 if accepted else 1)}, torch.arange(60)
    lengths = {"timed": draft_length}
    (table,) = measure_costs(target, proposers, lengths, text, {0.0: sampler}, [1, 3], 30, 12, repeats=1)
    assert target.generation_config.eos_token_id == 0
    for rows in (1, 3):
        assert table.target_seconds[rows] == pytest.approx({k: forward(rows, k) for k in costs.BLOCKS})
        assert table.prefill_seconds[rows] == pytest.approx(forward(rows, 12))
        assert table.plain_overhead_seconds[rows] == pytest.approx(WARPING)
        own = table.drafters["timed"][rows]
        assert [own.start, own.step, own.prefill] == pytest.approx([START, STEP * rows, FIRST])
        # All rows' verdicts apply the processors in one call.
        assert own.overhead == pytest.approx(REST + WARPING)


def test_a_slow_prompt_takes_no_time_from_the_tokens_behind_it(clock, monkeypatch):
    monkeypatch.setattr(turns, "WRITTEN", 12)
    target, calls, own = tiny_llama(0, layers=1), itertools.count(), CachedModel.prefill

    def noisy(self, tokens, *args, **kwargs):
        clock.seconds += 1000.0 * (next(calls) % 2)
        return own(self, tokens, *args, **kwargs)

    monkeypatch.setattr(CachedModel, "prefill", noisy)
    sampler = Sampler(LogitsProcessorList([Warper(clock)]), do_sample=False)
    found = turns.loop_turns(target, {}, {}, torch.arange(60), 1, 30, {0.0: sampler}, repeats=2)
    assert found[0.0].token == pytest.approx(forward(1, 1) + WARPING)


class Slow(Timed):
    """Takes longer for a round at T=0, for as long as it is slow."""

    rounds = 10**9

    def start(self, task):
        self.greedy = not task.sampler.do_sample
        return super().start(task)

    def commit(self, outcomes):
        super().commit(outcomes)
        if self.greedy and self.rounds > 0:
            self.rounds -= 1
            self.clock.seconds += REST + 1.0


@pytest.mark.parametrize(("rounds", "attempts"), [(10**9, turns.ATTEMPTS), (70, 2), (0, 1)])
def test_a_drafter_whose_rounds_are_dearer_at_one_temperature_is_measured_again_and_named(
    clock, monkeypatch, rounds, attempts
):
    """By this the wrong winner was once chosen: only rounds of two drafters, and only at T=0, were too dear."""
    monkeypatch.setattr(turns, "WRITTEN", 12)
    forwards, own = [], costs.verification_costs
    monkeypatch.setattr(costs, "verification_costs", lambda *args: forwards.append(args[1]) or own(*args))
    target = tiny_llama(0, layers=1)
    slow = Slow(clock, 1)
    slow.rounds = rounds
    samplers = {0.0: Sampler.of(0.0), 1.0: Sampler.of(1.0)}
    proposers, text = {"slow": slow, "other": Timed(clock, 1)}, torch.arange(60)
    tables = measure_costs(target, proposers, dict.fromkeys(proposers, 3), text, samplers, [1], 30, 12, (1, 4), 2)
    assert forwards == [1] * attempts
    if rounds < 10**9:
        assert [table.doubts for table in tables] == [[], []]
        assert tables[0].drafters["slow"][1].overhead == pytest.approx(tables[0].drafters["other"][1].overhead)
        return
    greedy, sampled = tables
    assert greedy.doubts == []
    (line,) = sampled.doubts
    assert line.startswith("T=1, 1 at a time: apart from draft and forward a round of slow, of ")
    assert "1400.00 ms at T=0, 200.00 ms at T=1" in line


@pytest.mark.parametrize(("slower", "doubts"), [(1.0, 0), (1.05, 0), (1.3, 1)])
def test_plain_decoding_after_the_rounds_takes_what_it_took_before(clock, monkeypatch, slower, doubts):
    monkeypatch.setattr(turns, "WRITTEN", 12)
    pace, own = [1.0], costs.verification_costs
    monkeypatch.setitem(globals(), "forward", lambda rows, tokens: pace[0] * (2.0 + 0.1 * tokens))

    def slowed(*args):
        pace[0] *= slower
        return own(*args)

    monkeypatch.setattr(costs, "verification_costs", slowed)
    (table,) = measure_costs(
        tiny_llama(0, layers=1), {}, {}, torch.arange(60), {0.0: Sampler.of(0.0)}, [1], 30, 12, (1, 4), 2
    )
    assert len(table.doubts) == doubts
    assert all(" a token of plain decoding takes " in line for line in table.doubts)


def test_little_time_makes_few_turns_and_no_second_attempt(clock, monkeypatch):
    monkeypatch.setattr(turns, "WRITTEN", 4)
    target, slow, texts, own = tiny_llama(0, layers=1), Slow(clock, 1), [], turns.autoregressive_generate
    monkeypatch.setattr(turns, "autoregressive_generate", lambda *args, **kw: texts.append(1) or own(*args, **kw))
    samplers = {0.0: Sampler.of(0.0), 1.0: Sampler.of(1.0)}

    def measured(seconds):
        texts.clear()
        text = torch.arange(60)
        measure_costs(target, {"slow": slow}, {"slow": 3}, text, samplers, [1], 30, 12, (1, 4), 3, False, seconds)
        return len(texts)

    # Of each temperature one to warm up and two or three, before the parts and after them.
    assert measured(1.0) == 2 * 2 * (1 + 2)
    assert measured(None) == 2 * (1 + turns.ATTEMPTS) * (1 + 3)


class Now(Timed):
    """Finds four tokens in every second round, and nothing in the others, always in the same time."""

    def start(self, task):
        self.round = 0
        return super().start(task)

    def propose(self, contexts, draft_lengths):
        self.clock.seconds += START
        self.round += 1
        count = 4 * (self.round % 2)
        return [Proposal(torch.full((count,), self.token), None, Tree.chain(count)) for _ in draft_lengths]


def test_forwards_of_many_tokens_are_priced_block_by_block(clock, monkeypatch):
    """Were the mean block priced, what its forwards take beyond it would pass for work beside them."""
    monkeypatch.setattr(turns, "WRITTEN", 12)
    monkeypatch.setitem(globals(), "forward", lambda rows, tokens: 2.0 if tokens < 4 else 5.0)
    target = tiny_llama(0, layers=1)
    target.lm_head.weight.zero_()
    sampler = Sampler(LogitsProcessorList([Warper(clock)]), do_sample=False)
    proposers, text = {"now": Now(clock, 1)}, torch.arange(60)
    (table,) = measure_costs(target, proposers, {"now": 4}, text, {0.0: sampler}, [1], 30, 12, repeats=1)
    assert table.drafters["now"][1].overhead == pytest.approx(REST + WARPING)
