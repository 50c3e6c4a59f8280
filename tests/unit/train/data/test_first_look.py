"""How loud a beginning should be: losses of scales, and what few texts are looked at."""

import math
from functools import partial

import numpy as np
import torch
from pipelines import training_data

from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import begin_as_last_layer
from draftsmith.medusa.heads.__main__ import scale_logits
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.target_states import states_from_forward
from draftsmith.medusa.trainer import scale_of_steps
from draftsmith.train.data import first_look
from draftsmith.train.data.first_look import SCALES, Text, few_texts, losses_of_scales, stack_guesses
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.losses.positions import IGNORED


def test_losses_of_scales_are_cross_entropies(monkeypatch):
    monkeypatch.setattr(first_look, "LOGITS", 3 * 7)  # chunks of three positions
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(10, 4, generator=generator), torch.randn(7, 4, generator=generator)
    head = OutputHead(weight, torch.randn(7, generator=generator), softcap=3.0)
    labels = torch.randint(7, (10, 2), generator=generator)
    labels[2:5, 1] = IGNORED
    found = losses_of_scales(hidden, head, labels)
    for row, scale in zip(found, SCALES, strict=True):
        logits = head(scale * hidden)
        expected = [torch.nn.functional.cross_entropy(logits, labels[:, k], ignore_index=IGNORED) for k in (0, 1)]
        assert torch.allclose(row, torch.stack(expected), atol=1e-5)


def test_nothing_to_guess_is_no_loss():
    assert not losses_of_scales(torch.ones(3, 2), OutputHead(torch.ones(5, 2)), torch.full((3, 1), IGNORED)).any()


def test_few_texts_are_the_beginnings_of_completions_behind_their_prompts(monkeypatch):
    monkeypatch.setattr(first_look, "POSITIONS", 4)
    monkeypatch.setattr(first_look, "CONTEXT", 6)
    ids = list(range(20))
    samples = [{"id": str(n), "input_ids": ids, "labels": [IGNORED] * 8 + ids[8:]} for n in range(20)]
    texts = few_texts(training_data(samples))
    assert len(texts) == first_look.TEXTS
    for text in texts:
        assert text.ids_T.tolist() == [6, 7, 8, 9, 10, 11]
        assert text.labels_T.tolist() == [IGNORED, IGNORED, 8, 9, 10, 11]
    assert len(few_texts(training_data(samples[:2]))) == 2


def test_positions_are_kept_that_guess_something():
    text = Text(torch.tensor([5, 6, 7, 8]), torch.tensor([IGNORED, IGNORED, 7, 8]))
    values, labels = stack_guesses([text], [torch.arange(4.0)], 2)
    assert values.tolist() == [0, 1, 2]  # from the token 0 the one after next is guessed
    assert labels.tolist() == [[IGNORED, 7], [7, 8], [8, IGNORED]]
    assert text.ahead(9).tolist() == [IGNORED] * 4


def test_copies_of_a_loud_head_are_quietened_each_as_it_needs(tokenizer, capsys):
    from conftest import tiny_llama

    target = tiny_llama(0, len(tokenizer))
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(60)
    ids = torch.from_numpy(np.random.default_rng(0).integers(len(tokenizer), size=(4, 24)))
    texts = [Text(row, row) for row in ids]
    for shape in ({}, {"original_lm_head": True}, {"token_map": torch.arange(0, len(tokenizer), 2)}):
        heads = MedusaHeads.of_target(target, 2, **shape)
        scale_logits(heads, partial(states_from_forward, target, ()), texts, len(tokenizer))
        line = capsys.readouterr().err
        first = target.get_output_embeddings().weight[heads.token_map if "token_map" in shape else slice(None)]
        for lm_head in heads.all_lm_heads:
            scale = (lm_head.weight.norm() / first.norm()).item()
            assert any(math.isclose(scale, each, rel_tol=1e-5) for each in SCALES[1:])
        assert line.startswith("init: the target's head × ") and line.count("\n") == 1


def test_a_loud_last_layer_is_quietened_as_all_steps_need(tokenizer):
    from conftest import tiny_llama

    target = tiny_llama(0, len(tokenizer), layers=4)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(60)
    heads = EagleHeads.of_target(target)
    begin_as_last_layer(heads, target)
    texts = [
        Text(row, row) for row in torch.randint(len(tokenizer), (3, 20), generator=torch.Generator().manual_seed(0))
    ]
    look = partial(states_from_forward, target, heads.layer_ids)
    scale = scale_of_steps(heads, look, texts, 3, lambda: heads.head, len(tokenizer), sharded=False)
    assert scale in SCALES[1:]
