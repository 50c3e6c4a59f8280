"""Rotary frequencies that change with the length: a text in a batch has those that it has alone."""

import pytest
import torch
from families import tiny_model
from transformers import GenerationConfig

from draftsmith.decode import InputError, autoregressive_generate
from draftsmith.decode.replay.texts import WrittenText, teacher_forced
from draftsmith.decode.sampling import Sampler
from draftsmith.train.data.collator import CompletionCollator
from draftsmith.train.data.decoding import complete
from draftsmith.train.losses.output_head import head_of, last_hidden
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.teacher.distribution_shards import distributions_of
from draftsmith.train.trainer import texts as read_of

LIMIT, KINDS = 12, ("llama-dynamic", "llama-longrope", "phi3-longrope")
LENGTHS = (40, 4, LIMIT, LIMIT + 1, 25)


def made(name):
    """A model whose frequencies change beyond `LIMIT` tokens."""
    family, kind = name.split("-")
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 9.0]}
    limit = "max_position_embeddings" if kind == "dynamic" else "original_max_position_embeddings"
    return tiny_model(family, rope_parameters=rope, **{limit: LIMIT})


def written(model):
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    return [torch.randint(2, size, (length + 1,), generator=generator) for length in LENGTHS]


def alone(name, ids_T):
    """The library's hidden states of a text, by a model that has read nothing else."""
    return made(name).get_decoder()(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_texts_of_a_padded_batch_are_read_as_alone(name):
    model = made(name)
    texts = written(model)
    for order in (texts, texts[::-1]):
        logits = teacher_forced(model, [WrittenText(text, 1, len(text)) for text in order])
        for text, found in zip(order, logits, strict=True):
            torch.testing.assert_close(found, model.lm_head(alone(name, text[:-1])), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_a_teacher_cache_and_training_read_them_so_too(name, tokenizer):
    model = made(name)
    texts = written(model)
    samples = [{"input_ids": text.tolist(), "labels": [IGNORED, *text[1:].tolist()]} for text in texts]
    pairs = [(sample["input_ids"], [1] * len(sample["input_ids"])) for sample in samples]
    kept = distributions_of(model, head_of(model), pairs, Sampler.of(1.0), 4)
    for pair, of_text in zip(pairs, kept, strict=True):
        (expected,) = distributions_of(made(name), head_of(model), [pair], Sampler.of(1.0), 4)
        torch.testing.assert_close(of_text.log_p_of_text, expected.log_p_of_text, atol=2e-3, rtol=2e-3)
    collate = CompletionCollator(tokenizer, by_text=True)
    hidden = last_hidden(model, **read_of(collate(samples)))
    for text, found in zip(texts, hidden, strict=True):
        torch.testing.assert_close(found[: len(text)], alone(name, text), atol=1e-4, rtol=1e-4)
    row = {"position_ids": [at for text in texts for at in range(len(text))]}
    row |= {part: [x for sample in samples for x in sample[part]] for part in ("input_ids", "labels")}
    packed = last_hidden(model, **read_of(collate([row])))[0].split([len(text) for text in texts])
    for text, found in zip(texts, packed, strict=True):
        torch.testing.assert_close(found, alone(name, text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_completions_are_those_of_each_prompt_alone(name):
    model = made(name)
    prompts = [text.tolist() for text in written(model)]
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    seen: dict[int, list[int]] = {}

    def observe(place, tokens, ended):
        seen.setdefault(place, []).extend(tokens)

    completions = complete(model, generation, prompts, 0, rows=3, observer=observe)
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([prompt])
        expected = made(name).generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        assert completion.ids == seen[place] == expected[0, len(prompt) :].tolist()
    begun = [completion.ids[:2] if place == 1 else [] for place, completion in enumerate(completions)]
    assert complete(model, generation, prompts, 0, rows=3, begun=begun) == completions


def test_our_decoder_refuses_rows_of_both_lengths():
    model = made("phi3-longrope")
    ids, options = torch.randint(2, 60, (2, 20)), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert autoregressive_generate(model, ids, **options).sequences.shape == (2, 24)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    with pytest.raises(InputError, match=f"max_length: expected at most {LIMIT} tokens"):
        autoregressive_generate(model, ids, mask, **options)
