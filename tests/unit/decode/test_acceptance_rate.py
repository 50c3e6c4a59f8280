"""Counts of a run, and the acceptance rate they make."""

import json
import re
import sys

import pytest
import torch
from pages import ROOT

from draftsmith.decode import Counts, DraftModelProposer, InputError, speculative_generate
from draftsmith.decode.measurement.intervals import ratio


def test_ratios_are_derived_from_sums():
    total = Counts.of_round(4, 2, 3) + Counts.of_round(4, 0, 1) + Counts.of_round(2, 2, 3)
    assert total.num_drafts == 3
    assert total.num_draft_tokens == 10
    assert total.num_accepted_tokens == 4
    assert total.num_accepted_tokens_per_pos == (2, 2, 0, 0)
    assert total.num_draft_tokens_per_pos == (3, 3, 2, 2)
    assert total.num_reached_per_pos == (3, 2, 1, 0)
    assert total.draft_acceptance_rate() == 0.4
    assert total.mean_acceptance_length() == 7 / 3
    assert total.acceptance_per_position() == [2 / 3, 2 / 3, 0.0, 0.0]
    assert total.conditional_acceptance() == [2 / 3, 1.0, 0.0, None]


def test_nothing_counted_has_no_ratio_and_is_neutral():
    assert Counts().draft_acceptance_rate() is None
    assert Counts().mean_acceptance_length() is None
    one = Counts.of_round(3, 1, 2)
    assert one + Counts() == one == Counts() + one


def test_plain_decoding_has_length_one():
    assert Counts(num_drafts=7, num_emitted_tokens=7).mean_acceptance_length() == 1.0


FOLDER = ROOT / "decode" / "acceptance_rate"
FOUR = {
    "num_drafts": 10,
    "num_draft_tokens": 40,
    "num_accepted_tokens": 17,
    "num_accepted_tokens_per_pos": [8, 5, 3, 1],
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`evaluate.load` of the metric, from another working directory and with a cache of its own."""
    import evaluate

    place = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", place / "modules")
        yield lambda *config: evaluate.load(str(FOLDER), *config, cache_dir=str(place))


class Recorded(DraftModelProposer):
    """Remembers what it drafted."""

    drafted: list[list[int]]

    def propose(self, contexts, draft_lengths):
        proposals = super().propose(contexts, draft_lengths)
        self.drafted += [proposal.tokens.tolist() for proposal in proposals]
        return proposals


def decoded(target, draft, **options):
    """Decode five prompts; return the counts, the drafted tokens and the rounds of each."""
    counts, drafted, rounds = [], [], []
    for seed in range(5):
        proposer, seen = Recorded(draft), []
        proposer.drafted = []
        ids = torch.randint(0, 97, (1, 8), generator=torch.Generator().manual_seed(seed))
        out = speculative_generate(
            target, proposer, ids, draft_length=3, seed=seed, max_new_tokens=24, observer=seen.append, **options
        )
        counts.append(out.counts)
        drafted.append(proposer.drafted)
        rounds.append(seen)
    return counts, drafted, rounds


def figures(prompts: list[Counts]) -> dict:
    total = sum(prompts, Counts())
    rate = ratio([c.num_accepted_tokens for c in prompts], [c.num_draft_tokens for c in prompts])
    length = ratio([c.num_emitted_tokens for c in prompts], [c.num_drafts for c in prompts])
    return {
        "draft_acceptance_rate": total.draft_acceptance_rate(),
        "draft_acceptance_rate_ci95": rate.to_dict()["ci95"],
        "mean_acceptance_length": total.mean_acceptance_length(),
        "mean_acceptance_length_ci95": length.to_dict()["ci95"],
        "acceptance_per_position": total.acceptance_per_position(),
        "conditional_acceptance": total.conditional_acceptance(),
        "counts": total.to_dict(),
    }


@pytest.mark.parametrize("sampled", [False, True])
def test_counts_and_tokens_give_the_decoders_own_figures(load, target, draft, sampled):
    options = {"do_sample": sampled, "top_k": 0}
    _, _, rounds = decoded(target, draft, **options)
    # The second token of a block of accepted ones ends the texts from now on: some end inside a draft.
    ending = next(r.tokens[1] for seen in rounds for r in seen[1:] if r.accepted == 3)
    counts, drafted, rounds = decoded(target, draft, eos_token_id=ending, **options)
    last = [(len(tokens[-1]), seen[-1]) for tokens, seen in zip(drafted, rounds, strict=True)]
    assert any(len(r.tokens) == r.accepted < length for length, r in last)

    expected = figures(counts)
    assert expected["draft_acceptance_rate_ci95"] is not None
    from_counts = load().compute(predictions=[c.to_dict() for c in counts])
    emitted = [[r.tokens for r in seen] for seen in rounds]
    from_tokens = load("tokens").compute(predictions=drafted, references=emitted)
    assert from_counts == from_tokens == expected
    assert json.loads(json.dumps(from_counts)) == expected


def test_prompts_may_come_one_by_one(load):
    metric = load("counts")
    metric.add(prediction=FOUR)
    metric.add_batch(predictions=[FOUR, FOUR])
    assert metric.compute() == load().compute(predictions=[FOUR] * 3)

    metric = load("tokens")
    metric.add(prediction=[[5, 6], [7, 8]], reference=[[5, 6, 9], [3]])
    assert metric.compute() == figures([Counts.of_round(2, 2, 3) + Counts.of_round(2, 0, 1)])


def test_vllms_four_counts_suffice_where_every_round_drafted_every_position(load):
    found = load().compute(predictions=[FOUR])
    assert found["mean_acceptance_length"] == 2.7
    assert found["mean_acceptance_length_ci95"] is None
    assert found["acceptance_per_position"] == [0.8, 0.5, 0.3, 0.1]
    assert found["conditional_acceptance"] == [0.8, 5 / 8, 3 / 5, 1 / 3]


def test_what_cannot_be_told_of_one_prompt_is_none(load):
    found = load().compute(predictions=[FOUR, {**FOUR, "num_draft_tokens": 39}])
    assert found["draft_acceptance_rate"] == 34 / 79
    assert found["acceptance_per_position"] == found["conditional_acceptance"] == [None] * 4
    assert found["counts"]["num_draft_tokens_per_pos"] is found["counts"]["num_reached_per_pos"] is None
    assert found["counts"]["num_accepted_tokens_per_pos"] == [16, 10, 6, 2]


FAULTS = [
    ("counts", [], None, "predictions"),
    ("counts", [[[1]]], None, "predictions[0]"),
    ("counts", [FOUR, {"num_drafts": 1}], None, "predictions[1]"),
    ("counts", [FOUR | {"drafts": 1}], None, "predictions[0]"),
    ("counts", [FOUR | {"num_accepted_tokens": 16}], None, "predictions[0].num_accepted_tokens"),
    ("counts", [FOUR | {"num_emitted_tokens": 28}], None, "predictions[0].num_emitted_tokens"),
    ("counts", [FOUR | {"num_reached_per_pos": [9, 4, 4, 4]}], None, "predictions[0].num_reached_per_pos"),
    ("tokens", [[[1]]], None, "references"),
    ("tokens", [[[1]]], [[[1, 2]], [[3]]], "references"),
    ("tokens", [[[1, 2], [3]]], [[[1, 5]]], "references[0]"),
    ("tokens", [[[1, 2], [3]]], [[[1], [4]]], "references[0][0]"),
    ("tokens", [[[1, 2]]], [[[1, 5, 2]]], "references[0][0]"),
]


@pytest.mark.parametrize(("config", "predictions", "references", "place"), FAULTS)
def test_a_fault_is_named_by_its_place(load, config, predictions, references, place):
    with pytest.raises(InputError, match=f"^{re.escape(place)}: expected"):
        load(config).compute(predictions=predictions, references=references)


def test_an_unknown_config_is_refused(load):
    with pytest.raises(InputError, match=r"config_name: expected 'counts' or 'tokens', found 'token'"):
        load("token")
