"""Acceptance by part, turn and length of context: whose tokens and prompts are in a group, and what its figures are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from unit.scripts.measure.test_taking_turns import TABLE, hybrid
from unit.scripts.measure.test_verdict import LENGTHS, measured
from unit.train.data.chat.test_masks import byte_level, user
from unit.train.data.chat.test_parts import WITH_TAGS

from draftsmith.decode import DraftModelProposer, Replay
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.replay import TextReplay
from draftsmith.decode.replay.batch_replay import replay_by_position
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.scripts.measure.predictions import curve_of
from draftsmith.scripts.measure.replays import contexts_of, groups_of_tokens, number_stretches
from draftsmith.scripts.measure.state import PROBABILISTIC, Method
from draftsmith.train.data.prompts import Prompt

ASKED = [user("say"), {"role": "assistant", "content": "hello"}, user("go on")]
WRITTEN = ["<think>hello world</think>say hello", "<think>say</think>hello", "say", "hello", "def add(a, b)", "a"]


@pytest.fixture(scope="module")
def own():
    """Six texts of a target that thinks in two: the second asks for another turn, the last is no conversation."""
    reader = byte_level(False)
    reader.chat_template = WITH_TAGS + "{% endif %}"
    found = measured(reader, [reader(text, add_special_tokens=False).input_ids for text in WRITTEN], {})
    found.prompts = [Prompt(str(i), None, ASKED[2 * (i != 1) :], None) for i in range(len(WRITTEN) - 1)]
    found.prompts.append(Prompt("5", "a text", None, None))
    found.prompt_ids = [[5] * length for length in (1022, 2044, 3, 3, 3, 4095)]
    return found


def replayed(own, sources: int = 1, certain: bool = False) -> tuple[Replay, dict[int, list[list[float]]]]:
    """Return a replay in which drafters take turns token by token, and by γ the probabilities of starts, by hand."""
    texts, starts = [], {k: [] for k in LENGTHS}
    for prompt, text, labels in zip(own.prompt_ids, own.texts[0.0], number_stretches(own, 0.0), strict=True):
        a = torch.rand(len(text), generator=torch.Generator().manual_seed(len(text))).double().clamp(min=float(certain))
        written = [WrittenText(torch.tensor(prompt + text), len(prompt), len(text))]
        chain = replay_by_position(written, [a], [a])
        chain = replace(chain, sources=[torch.arange(len(text)) % sources])
        [stretches] = chain.stretches(written, [labels], LENGTHS)
        counts = {k: chain.counts(k)[0] for k in LENGTHS}
        texts.append(TextReplay(counts, float(a.sum()), len(a), tuple(a.tolist()), stretches=stretches))
        for k in LENGTHS:
            starts[k].append([1.0] + [0.0] * (len(a) + k))
            for t in range(len(a)):
                reach = starts[k][-1][t]
                for j in range(k + 1):
                    rejected = 1 - float(a[t + j]) if j < k and t + j < len(a) else 1.0
                    starts[k][-1][t + j + 1] += reach * rejected
                    reach *= 1 - rejected
    return Replay(texts), starts


def test_tokens_are_in_their_part_and_length_of_context(own):
    # <think> and "hello" are before 1,024 tokens of context, and the second text ends after 2,048.
    assert [labels.tolist() for labels in number_stretches(own, 0.0)] == [
        [1, 1, 4, 4, 3, 3, 3], [4, 4, 4, 4, 6], [0, 0], [0], [0] * 7, [6],
    ]  # fmt: skip
    assert [contexts_of(name) for name in ("1024", "2048")] == [range(1024), range(1024, 2048)]


def test_a_curve_has_the_figures_of_each_group(own):
    replay, starts = replayed(own)
    curve = curve_of(own, 0.0, "draft", PROBABILISTIC, replay)
    labels = number_stretches(own, 0.0)
    groups = {
        "thinking": (curve.by_part, lambda label: label % 3 == 1, 2, 8),
        "answer": (curve.by_part, lambda label: label % 3 == 0, 6, 15),
        "1024": (curve.by_context, lambda label: label < 3, 4, 12),
        "2048": (curve.by_context, lambda label: 3 <= label < 6, 2, 9),
        "4096": (curve.by_context, lambda label: label == 6, 2, 2),
    }
    assert (list(curve.by_part), list(curve.by_context)) == (["answer", "thinking"], ["1024", "2048", "4096"])
    for name, (found, has, prompts, tokens) in groups.items():
        group = found[name]
        assert (group.prompts, group.tokens, group.alpha.n) == (prompts, tokens, prompts)
        a = [
            x
            for text, of in zip(replay.texts, labels, strict=True)
            for x, n in zip(text.acceptance, of, strict=True)
            if has(n)
        ]
        assert group.alpha.value == pytest.approx(sum(a) / tokens)
        for k in LENGTHS:
            rounds = sum(
                s for of, row in zip(labels, starts[k], strict=True) for n, s in zip(of, row, strict=False) if has(n)
            )
            assert group.mean_acceptance_length[k].value == pytest.approx(tokens / rounds)
            # Costs were measured after 30 tokens, which says nothing of contexts beyond 1,024.
            assert bool(group.predicted_speedup) == (name not in ("2048", "4096"))
            if group.predicted_speedup:
                factor = 1.1 / (0.1 + k * 0.05 + 0.2 + 1.0 + k * 0.2)
                assert group.predicted_speedup[1][k].value == pytest.approx(factor * tokens / rounds)
    assert {turn: group.prompts for turn, group in curve.by_turn.items()} == {"1": 4, "2": 1}
    second = replay.texts[1].counts[4]
    assert curve.by_turn["2"].mean_acceptance_length[4].value == pytest.approx(5 / second.num_drafts)
    # One part and one length of context are no groups.
    short = replay.within([0])
    assert groups_of_tokens(short) == {} and len(short.texts) == 3


def test_who_drafted_what_in_each_part(own, monkeypatch):
    monkeypatch.setattr(own, "pair", replace(own.pair, drafters=[hybrid(DraftModelProposer(own.pair.target))]))
    monkeypatch.setattr(own, "tables", [])
    replay, starts = replayed(own, sources=2)
    drafters = curve_of(own, 0.0, "hybrid", PROBABILISTIC, replay).by_part["thinking"].drafters
    labels, shares = number_stretches(own, 0.0), {"rounds": [0.0, 0.0], "accepted": [0.0, 0.0]}
    for text, of, row in zip(replay.texts, labels, starts[4], strict=True):
        for t, (n, start) in enumerate(zip(of, row, strict=False)):
            shares["rounds"][t % 2] += start * (n % 3 == 1)
            reach = start
            for j in range(t, min(t + 4, len(of) - 1)):  # the last token is the target's own
                reach *= text.acceptance[j]
                shares["accepted"][t % 2] += reach * (of[j] % 3 == 1)
    rounds = sum(shares["rounds"])
    for index, name in enumerate(("lookup", "draft")):
        assert drafters[name][4].rounds.value == pytest.approx(shares["rounds"][index] / rounds)
        assert drafters[name][4].accepted.value == pytest.approx(shares["accepted"][index] / 8)
    # Every token is an accepted draft or the target's own, one a round, but where a draft reaches into the answer.
    assert sum(drafters[name][4].accepted.value for name in drafters) == pytest.approx(sum(shares["accepted"]) / 8)


@pytest.mark.parametrize("kind", ["lookup", "hybrid"])
def test_a_group_in_which_no_round_starts_has_no_speed_up(own, monkeypatch, kind):
    """All drafts are accepted, and the one token after 2,048 tokens of context is the end of one."""
    monkeypatch.setattr(own, "prompt_ids", [[5] * length for length in (1022, 2044, 3, 3, 3, 3)])
    monkeypatch.setattr(own, "observations", {(0.0, 2, Method()): []})
    monkeypatch.setattr(own, "tables", [replace(own.tables[0], context=3000)])
    if kind == "hybrid":
        monkeypatch.setattr(own, "pair", replace(own.pair, drafters=[hybrid(DraftModelProposer(own.pair.target))]))
        monkeypatch.setattr(own, "tables", [replace(TABLE, context=3000)])
    replay, _ = replayed(own, 1 + (kind == "hybrid"), certain=True)
    with np.errstate(invalid="raise"):
        group = curve_of(own, 0.0, kind, PROBABILISTIC, replay).by_context["4096"]
    assert (group.tokens, group.mean_acceptance_length[4]) == (1, Estimate(None, None, 1))
    assert group.predicted_speedup[2][4] == Estimate(None, None, 1)
