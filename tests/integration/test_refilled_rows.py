"""Plain decoding of more prompts than rows: whatever a row wrote before, a text is what it would be alone."""

import pytest
import torch
from conftest import tiny_llama
from families import VOCAB, tiny_model

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.cache import CachedModel

LENGTHS = (14, 12, 11, 9, 6, 6, 3, 2, 1)
NEW = 12
SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "penalised": {"do_sample": True, "top_k": 20, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "at least": {"do_sample": True, "top_k": 0, "min_new_tokens": 3},
}
in_each_way = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def prompts_of(size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, size, (length,), generator=generator).tolist() for length in LENGTHS]


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, (torch.arange(width) >= torch.tensor([[width - len(prompt)] for prompt in prompts])).long()


def written(model, prompts, **options) -> list[list[int]]:
    output = autoregressive_generate(model, *left_padded(prompts), **options)
    width = max(map(len, prompts))
    counts = (counts.num_emitted_tokens for counts in output.row_counts)
    return [ids[width : width + count].tolist() for ids, count in zip(output.sequences, counts, strict=True)]


def alone(model, prompts, seed=0, **options) -> list[list[int]]:
    return [written(model, [prompt], seed=seed + i, **options)[0] for i, prompt in enumerate(prompts)]


@in_each_way
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_texts_are_what_they_would_be_alone(rows, settings):
    model = tiny_llama(0, scale=20.0)
    prompts = prompts_of(97)
    options = {"max_new_tokens": NEW, "eos_token_id": list(range(40, 60)), "seed": 5, **settings}
    expected = alone(model, prompts, **options)
    assert len(set(map(len, expected))) > 3  # they end at different times
    assert written(model, prompts, rows=rows, **options) == expected


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "deepseek-v32"])
def test_every_family_refills_rows(name):
    """Prompts on both sides of the window: a newcomer needs the slots that the others' windows have left."""
    model, prompts = tiny_model(name), prompts_of(VOCAB)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "eos_token_id": [7, 8, 9]}
    assert written(model, prompts, rows=3, **options) == alone(model, prompts, **options)


@pytest.mark.usefixtures("untraced")
def test_compiled_forwards_refill_rows_too():
    """One layer, for each takes a compiler seconds."""
    model, prompts = tiny_llama(0, scale=20.0, layers=1), prompts_of(97)
    options = {"max_new_tokens": NEW, "eos_token_id": list(range(40, 60)), "do_sample": False}
    assert written(model, prompts, rows=3, compiled=True, **options) == alone(model, prompts, **options)


def test_a_row_is_refilled_at_once_and_no_text_is_decoded_twice(monkeypatch):
    """As many forwards as rows that are always full take, and one a refill for the newcomers' prompts."""
    model, prompts = tiny_llama(0), prompts_of(97)
    fed, prefilled = [], []
    feed, prefill = CachedModel.feed, CachedModel.prefill
    monkeypatch.setattr(CachedModel, "feed", lambda self, *args: fed.append(len(args[0])) or feed(self, *args))
    monkeypatch.setattr(
        CachedModel, "prefill", lambda self, *args: prefilled.append(args[0].shape) or prefill(self, *args)
    )
    written(model, prompts, rows=3, max_new_tokens=4, do_sample=False)
    assert fed == [3] * 12
    assert prefilled == [(3, 13), (3, 8), (3, 2)]


def test_an_observer_hears_of_each_token():
    model, prompts = tiny_llama(0, scale=20.0), prompts_of(97)
    options = {"max_new_tokens": NEW, "eos_token_id": list(range(40, 60)), "do_sample": False}
    heard = []
    observer = lambda row, token: heard.append((row.index, len(row.rounds), token, row.done))  # noqa: E731
    texts = written(model, prompts, rows=2, observer=observer, **options)
    tokens = [(i, n, token, n == len(text)) for i, text in enumerate(texts) for n, token in enumerate(text, 1)]
    assert sorted(heard) == tokens
    assert heard != tokens


def test_logits_that_are_no_numbers_name_the_text():
    model, prompts = tiny_llama(0), prompts_of(97)
    model.lm_head.weight[5] = float("nan")
    with pytest.raises(InputError, match=r"^target: expected finite logits, found NaN after 14 tokens of row 0$"):
        written(model, prompts, rows=2, max_new_tokens=4, do_sample=False)
