"""Drafts behind remembered texts are the model's own greedy chains, whatever was told, taken back or forgotten.

With drafters that copy they are those of a hybrid.
"""

import random

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model

from draftsmith.decode import DraftModelProposer, HybridProposer, PromptLookupProposer, SuffixProposer, Switch
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.proposers.copied import CopyProposer
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.services.draft_protocol import DraftRow
from draftsmith.scripts.services.serve_draft.texts import Copies, DraftTexts

VOCABULARY = 97


@torch.inference_mode()
def chain(model, tokens: list[int], length: int) -> list[int]:
    """The reference: the whole text anew for every token."""
    text = list(tokens)
    for _ in range(length):
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(tokens) :]


@torch.inference_mode()
def is_chain(model, tokens: list[int], drafted: list[int]) -> bool:
    """Whether these are the tokens of `chain`, by one forward."""
    logits = model(torch.tensor([[*tokens, *drafted]]), use_cache=False).logits[0]
    return logits[len(tokens) - 1 : -1].argmax(-1).tolist() == drafted


def texts_of(model, cache_tokens: int = 4096, max_length: int = 128) -> DraftTexts:
    return DraftTexts(model, max_length, 8, cache_tokens)


def test_ragged_rows_are_drafted_together(draft):
    texts = texts_of(draft)
    told = [[5], [7, 8], list(range(20)), list(range(40, 90))]
    rows = [DraftRow(i, 0, tokens, want) for i, (tokens, want) in enumerate(zip(told, [4, 1, 8, 3], strict=True))]
    assert texts.draft(range(4), rows) == [chain(draft, row.tokens, row.want) for row in rows]


def test_what_was_accepted_is_not_fed_again(draft, monkeypatch):
    texts, fed = texts_of(draft), []
    (first,) = texts.draft(["a"], [DraftRow(0, 0, [1, 2, 3], 4)])
    forward = draft.forward
    monkeypatch.setattr(draft, "forward", lambda *a, **k: fed.append(k["input_ids"].tolist()) or forward(*a, **k))
    bonus = 50
    (after,) = texts.draft(["a"], [DraftRow(0, 3, [*first, bonus], 2)])
    assert fed == [[[first[-1], bonus]], [[after[0]]]]  # of the last drafted token nothing was cached
    del fed[:]
    texts.draft(["a"], [DraftRow(0, 8, [after[0], bonus], 1)])
    assert fed == [[[bonus]]]


def random_calls(seed: int, rounds: int):
    """Texts that come, grow by what was drafted or otherwise, are taken back, told anew, left alone, and ended."""
    rng = random.Random(seed)
    told: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    for step in range(rounds):
        rows = []
        for key in rng.sample(range(6), rng.randint(1, 5)):
            text = told.get(key, [])
            action = rng.random() if text else 0.0
            if action < 0.1:
                start, tokens = 0, [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
            elif action < 0.2:
                start = rng.randint(0, len(text))
                tokens = text[start:] or [rng.randrange(VOCABULARY)]
            else:
                accepted = drafts.get(key, [])[: rng.randint(0, 8)]
                start, tokens = len(text), [*accepted, *[rng.randrange(VOCABULARY)] * rng.choice([1, 1, 1, 7])]
            told[key] = [*text[:start], *tokens]
            rows.append(DraftRow(key, start, tokens, rng.randint(0, 8)))
        yield step, rows, told, drafts


@pytest.mark.parametrize("cache_tokens", [4096, 160], ids=["room for all", "evictions"])
@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("qwen3-5", 3), ("lfm2", 4), ("gemma2", 5)])
def test_random_calls_are_as_without_a_cache(name, seed, cache_tokens):
    """A draft with states returns to few tokens of a text that is taken back, and else begins anew."""
    draft = tiny_llama() if name == "llama" else tiny_model(name, vocab_size=VOCABULARY, num_hidden_layers=2)
    texts, unknown = texts_of(draft, cache_tokens), 0
    for _, rows, told, drafts in random_calls(seed, 25):
        keys = [row.id for row in rows]
        answers = texts.draft(keys, rows)
        assert texts.cached_tokens <= cache_tokens
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if answer is None:
                unknown += 1
                (answer,) = texts.draft(keys[place : place + 1], [DraftRow(row.id, 0, told[row.id], row.want)])
            assert len(answer) == min(row.want, max(128 - len(told[row.id]), 0))
            assert is_chain(draft, told[row.id], answer)
            drafts[row.id] = answer
    assert (unknown > 0) == (texts.evictions > 0) == (cache_tokens < 4096)


def test_a_text_ends_where_the_positions_do(draft):
    texts = texts_of(draft, max_length=12)
    long = list(range(10))
    assert texts.draft([0], [DraftRow(0, 0, long, 8)]) == [chain(draft, long, 2)]
    assert texts.draft([0], [DraftRow(0, 10, [1, 2], 8)]) == [[]]
    assert texts.draft([0], [DraftRow(0, 12, [1], 8)]) == [[]]


def test_a_token_of_the_target_alone_is_read_as_another(draft):
    assert texts_of(draft).draft([0], [DraftRow(0, 0, [5, VOCABULARY + 3, 6], 4)]) == [chain(draft, [5, 0, 6], 4)]


def test_texts_that_nothing_is_drafted_for_take_room_too(draft):
    texts = texts_of(draft, 256)
    for key in range(100):
        texts.draft([key], [DraftRow(key, 0, [1] * 50, 0)])
    assert len(texts) == 5
    assert texts.draft([0], [DraftRow(0, 50, [1], 0)]) == [None]


def test_the_text_that_was_drafted_for_longest_ago_is_forgotten(draft):
    texts = texts_of(draft, cache_tokens=30, max_length=24)
    for key in (0, 1, 0, 2):
        texts.draft([key], [DraftRow(key, 0, list(range(10)), 2)])
    assert texts.draft([0, 1], [DraftRow(0, 10, [], 0), DraftRow(1, 10, [], 0)]) == [[], None]


def test_what_is_forgotten_is_unknown(draft):
    texts = texts_of(draft)
    texts.draft([0, 1], [DraftRow(0, 0, [1, 2], 2), DraftRow(1, 0, [3, 4], 2)])
    texts.forget([0, 7])
    assert texts.draft([0, 1], [DraftRow(0, 2, [5], 2), DraftRow(1, 2, [5], 2)]) == [None, chain(draft, [3, 4, 5], 2)]
    assert len(texts) == 1
    texts.clear()
    assert texts.cached_tokens == len(texts) == 0
    assert texts.draft([1], [DraftRow(1, 3, [6], 2)]) == [None]


LOOKUP, SUFFIX = "prompt lookup", "suffix"


def drafters_of(name: str) -> list[CopyProposer]:
    return [PromptLookupProposer()] if name == LOOKUP else [SuffixProposer(1), PromptLookupProposer()]


def of_hybrid(drafters, switch, model, tokens: list[int], want: int) -> list[int]:
    """The reference: a hybrid of the decoder that sees the text for the first time."""
    hybrid = HybridProposer([*drafters, DraftModelProposer(model, greedy=True)], switch)
    hybrid.start(DraftTask(Sampler.of(0), VOCABULARY, [None], 200, 8, True, False))
    (proposal,) = hybrid.propose([torch.tensor(tokens)], [want])
    return proposal.tokens.tolist()


@pytest.mark.parametrize("cache_tokens", [4096, 160], ids=["room for all", "evictions"])
@pytest.mark.parametrize("name", [LOOKUP, SUFFIX])
def test_random_calls_are_as_of_a_hybrid(draft, name, cache_tokens):
    switch = Switch(match=2)
    texts = DraftTexts(draft, 128, 8, cache_tokens, Copies(drafters_of(name), switch))
    rounds = 0
    for _, rows, told, drafts in random_calls(3, 25):
        keys = [row.id for row in rows]
        answers = texts.draft(keys, rows)
        assert texts.cached_tokens <= cache_tokens
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if answer is None:
                (answer,) = texts.draft(keys[place : place + 1], [DraftRow(row.id, 0, told[row.id], row.want)])
            want = min(row.want, max(128 - len(told[row.id]), 0))
            assert answer == (of_hybrid(drafters_of(name), switch, draft, told[row.id], want) if want else [])
            drafts[row.id] = answer
            rounds += bool(want)
    assert 0 < texts.copied < rounds


def test_the_model_drafts_no_more_than_its_own_length(draft):
    texts = DraftTexts(draft, 128, 8, 4096, Copies([SuffixProposer()], Switch(match=3), last_length=2))
    tokens = [1, 2, 3, 4, 5, 6, 7, 50]
    assert texts.draft(["a"], [DraftRow(0, 0, tokens, 4)]) == [chain(draft, tokens, 2)]
    assert texts.draft(["a"], [DraftRow(0, 8, [1, 2, 3], 4)]) == [[4, 5, 6, 7]]


def test_nothing_is_fed_for_a_copy_and_what_it_brought_is_fed_at_once(draft, monkeypatch):
    texts, fed = DraftTexts(draft, 128, 8, 4096, Copies([SuffixProposer()], Switch(match=3))), []
    texts.draft(["a"], [DraftRow(0, 0, [1, 2, 3, 4, 5, 6, 7, 50], 1)])
    forward = draft.forward
    monkeypatch.setattr(draft, "forward", lambda *a, **k: fed.append(k["input_ids"].tolist()) or forward(*a, **k))
    assert texts.draft(["a"], [DraftRow(0, 8, [1, 2, 3], 3)]) == [[4, 5, 6]]
    assert (fed, texts.copied) == ([], 1)
    (after,) = texts.draft(["a"], [DraftRow(0, 11, [4, 5, 60], 1)])
    assert fed == [[[1, 2, 3, 4, 5, 60]]]
    monkeypatch.undo()
    assert after == chain(draft, [1, 2, 3, 4, 5, 6, 7, 50, 1, 2, 3, 4, 5, 60], 1)


def test_a_text_that_outgrows_its_room_is_still_searched_from_its_beginning(draft):
    texts, text = DraftTexts(draft, 400, 8, 4096, Copies([SuffixProposer(4)], Switch(match=4))), [1, 2, 3, 4, 5]
    for token in range(6, 91):
        texts.draft([0], [DraftRow(0, 0, text, 1)])
        text += [token] * 4
    assert len(text) > 256
    assert texts.draft([0], [DraftRow(0, 0, [*text, 1, 2, 3, 4], 1)]) == [[5]]


def test_a_text_that_is_rewritten_is_searched_anew(draft):
    texts = DraftTexts(draft, 128, 8, 4096, Copies([SuffixProposer(2)], Switch(match=2)))
    assert texts.draft([0], [DraftRow(0, 0, [1, 2, 3, 9, 1, 2], 1)]) == [[3]]
    assert texts.draft([0], [DraftRow(0, 2, [4, 9, 1, 2], 1)]) == [[4]]
    assert texts.draft([0], [DraftRow(0, 2, [4, 9, 1, 2, 4, 9], 1)]) == [[1]]  # said twice, and longer
    assert texts.draft([0], [DraftRow(0, 5, [], 1)]) == [chain(draft, [1, 2, 4, 9, 1], 1)]  # taken back
    assert texts.draft([0], [DraftRow(0, 5, [2], 1)]) == [[4]]


def test_a_copy_ends_before_a_token_that_no_draft_has(draft):
    texts = DraftTexts(draft, 128, 8, 4096, Copies([SuffixProposer(2)], Switch(match=2)))
    other = VOCABULARY + 3
    assert texts.draft([0], [DraftRow(0, 0, [1, 2, 3, other, 5, 1, 2], 4)]) == [[3]]
    assert texts.draft([0], [DraftRow(0, 7, [3], 2)]) == [chain(draft, [1, 2, 3, 0, 5, 1, 2, 3], 2)]
