"""Replay in two processes over gloo: texts in the same order, the same counts and intervals, the same refusals.

Rank 0 takes the texts at even places, rank 1 those at odd ones.
"""

import pytest
import torch
from conftest import perturbed, tiny_llama
from processes import enter, forked

from draftsmith.decode import DraftModelProposer, InputError, PromptLookupProposer, autoregressive_generate
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.sampling import Sampler

PROMPT, NEW = 5, 24
LENGTHS = (1, 2, 5)
HOT_ROWS, HOT = 48, 1.65
"""Texts that are 7.7 standard errors too surprising at T=1, of which 6 are refused; the ranks' shares 5.5 and 5.4."""


def replayed(strategy: str, cases: dict[str, dict]) -> dict:
    """What a rank does: replay each case's texts with two drafters; return what it says, or how it refuses."""
    enter(strategy)
    target = tiny_llama(0)
    drafters = {"draft": DraftModelProposer(perturbed(target, 0.05)), "lookup": PromptLookupProposer()}
    found = {}
    for name, case in cases.items():
        texts = [torch.tensor(text) for text in case["texts"]]
        sampler = Sampler.of(case["temperature"])
        try:
            replays = replay_drafters(target, drafters, texts, case["prompts"], LENGTHS, sampler, NEW)
        except InputError as error:
            found[name] = str(error)
            continue
        found[name] = {
            drafter: {
                "alpha": replay.alpha.to_dict(),
                "tau": {k: tau.to_dict() for k, tau in replay.mean_acceptance_length.items()},
                "positions": {k: [a.to_dict() for a in own] for k, own in replay.acceptance_per_position.items()},
                "texts": [{k: vars(counts) for k, counts in text.counts.items()} for text in replay.texts],
                "acceptance": [text.acceptance for text in replay.texts],
            }
            for drafter, replay in replays.items()
        }
    if strategy != "one":
        from accelerate import PartialState

        state = PartialState()
        found["ran"] = (state.num_processes, state.distributed_type.value, torch.distributed.get_backend())
    return found


def written(rows: int, temperature: float) -> list[list[int]]:
    """Texts of the target's own, of 4 tokens to `NEW`, no two as long as one another."""
    target = tiny_llama(0)
    ids = torch.randint(97, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    texts = autoregressive_generate(target, ids, max_new_tokens=NEW, **sampling).sequences
    return [text[: PROMPT + 4 + 3 * row % (NEW - 3)].tolist() for row, text in enumerate(texts)]


def case(texts: list[list[int]], temperature: float, first: int = 0) -> dict:
    """Prompts of several lengths, so that each process cuts its logits elsewhere."""
    return {
        "texts": texts,
        "prompts": [PROMPT + (first + i) % 3 for i in range(len(texts))],
        "temperature": temperature,
    }


def cases() -> dict[str, dict]:
    greedy, sampled = written(5, 0), written(5, 1)
    foreign = [list(text) for text in greedy]
    foreign[3][PROMPT + 2] = (foreign[3][PROMPT + 2] + 1) % 97
    return {
        "odd, T=0": case(greedy, 0),
        "odd, T=1": case(sampled, 1),
        "fewer than processes": case(greedy[2:3], 0, first=2),
        "foreign": case(foreign, 0),  # one rank alone sees it
        "a little too hot": case(written(HOT_ROWS, HOT), 1),  # either rank's share alone would pass
    }


@pytest.fixture(scope="module")
def planned():
    return cases()


@pytest.fixture(scope="module")
def alone(planned):
    return replayed("one", planned)


@pytest.fixture(scope="module")
def together(planned):
    return forked(replayed, planned, strategy="ddp")


def close(found, expected) -> bool:
    """Whether two results are the same but for rounding: texts share their forward with others than in one process."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found is None if expected is None else found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_two_processes_say_what_one_does(alone, together):
    for rank in together:
        assert rank["ran"] == (2, "MULTI_CPU", "gloo")
        for name in ("odd, T=0", "odd, T=1", "fewer than processes"):
            assert rank[name] == together[0][name]
            assert close(rank[name], alone[name]), name
        # Whole numbers are the same to the bit, in the order of the texts.
        assert [t["texts"] for t in rank["odd, T=0"].values()] == [t["texts"] for t in alone["odd, T=0"].values()]
    draft = alone["odd, T=1"]["draft"]
    assert len({len(a) for a in draft["acceptance"]}) == 5 and draft["tau"][5]["ci95"] is not None
    assert 1.2 < draft["tau"][5]["value"] < 5
    for drafter, own in alone["fewer than processes"].items():
        assert own["tau"][5]["ci95"] is None
        assert own["texts"] == alone["odd, T=0"][drafter]["texts"][2:3]


def test_bad_input_is_refused_by_all_processes(alone, together):
    """The one that sees nothing wrong would wait for the other's counts for ever."""
    assert "the target's argmax" in alone["foreign"]
    assert "less likely than its own" in alone["a little too hot"]
    for rank in together:
        assert rank["foreign"] == alone["foreign"]
        assert "less likely than its own" in rank["a little too hot"]


def test_a_share_of_the_texts_is_not_suspicious_enough(planned):
    hot = planned["a little too hot"]
    for own in (slice(0, None, 2), slice(1, None, 2)):
        share = hot | {name: hot[name][own] for name in ("texts", "prompts")}
        assert isinstance(replayed("one", {"half": share})["half"], dict)
