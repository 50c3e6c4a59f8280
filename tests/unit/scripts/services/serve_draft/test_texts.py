"""Drafts behind remembered texts are the model's own greedy chains, whatever was told, taken back or forgotten."""

import random

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from draftsmith.scripts.services.draft_protocol import DraftRow
from draftsmith.scripts.services.serve_draft.texts import DraftTexts

VOCABULARY = 97


@torch.inference_mode()
def chain(model, tokens: list[int], length: int) -> list[int]:
    """The reference: the whole text anew for every token."""
    text = list(tokens)
    for _ in range(length):
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(tokens) :]


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
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_are_as_without_a_cache(draft, seed, cache_tokens):
    texts, unknown = texts_of(draft, cache_tokens), 0
    for _, rows, told, drafts in random_calls(seed, 25):
        keys = [row.id for row in rows]
        answers = texts.draft(keys, rows)
        assert texts.cached_tokens <= cache_tokens
        for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if answer is None:
                unknown += 1
                (answer,) = texts.draft(keys[place : place + 1], [DraftRow(row.id, 0, told[row.id], row.want)])
            want = min(row.want, max(128 - len(told[row.id]), 0))
            assert answer == chain(draft, told[row.id], want)
            drafts[row.id] = answer
    assert (unknown > 0) == (texts.evictions > 0) == (cache_tokens < 4096)


def test_a_window_is_kept_through_batches_that_change():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, sliding_window=8, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    texts, told = texts_of(model), {0: list(range(30)), 1: [3, 4]}
    for round_ in range(6):
        keys = [[0], [0, 1], [1]][round_ % 3]
        rows = []
        for key in keys:
            start = len(told[key]) if round_ > 1 else 0
            told[key] = [*told[key], 50 + round_] if start else told[key]
            rows.append(DraftRow(key, start, told[key][start:], 3))
        assert texts.draft(keys, rows) == [chain(model, told[key], 3) for key in keys]


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


def test_what_is_forgotten_is_unknown(draft):
    texts = texts_of(draft)
    texts.draft([0, 1], [DraftRow(0, 0, [1, 2], 2), DraftRow(1, 0, [3, 4], 2)])
    texts.forget([0, 7])
    assert texts.draft([0, 1], [DraftRow(0, 2, [5], 2), DraftRow(1, 2, [5], 2)]) == [None, chain(draft, [3, 4, 5], 2)]
    assert len(texts) == 1
    texts.clear()
    assert texts.cached_tokens == len(texts) == 0
    assert texts.draft([1], [DraftRow(1, 3, [6], 2)]) == [None]
