"""A first layer that begins by looking back: where it attends to, what it hands on, and how well it guesses at once."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.medusa.block.blocks import Anchors, states_of_blocks, visible
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.initial import begin_as_last_layers, choose_init
from draftsmith.medusa.block.look_back import begin_looking_back
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.target_states import TargetStates, states_from_forward
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.data.first_look import Text
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_model, load_tokenizer

TARGET = Path(__file__).parents[4] / "assets" / "tiny-target"
PROMPT = 16
SLOTS = 3


@pytest.fixture(scope="module")
def target():
    target = load_model(str(TARGET), dtype="float32", device="cpu")
    target.generation_config = GenerationConfig(pad_token_id=0)
    return target


@pytest.fixture(scope="module")
def texts(target) -> list[Text]:
    prompts = [torch.tensor(ids) for ids in encoded_prompts(None, load_tokenizer(str(TARGET)), 12, PROMPT)]
    made = []
    for ids in plain_texts(target, prompts, len(prompts), max_new_tokens=32):
        labels = ids.clone()
        labels[: len(ids) - 32] = IGNORED
        made.append(Text(ids, labels))
    return made


def drafter_of(target, texts, **shape) -> BlockDrafter:
    torch.manual_seed(0)
    fields = {"layer_ids": [1, 8], "block_size": SLOTS, **shape}
    drafter = BlockDrafter.of_target(target, 1, **fields)
    begin_as_last_layers(drafter, target)
    return drafter


def begun(target, texts, **shape) -> BlockDrafter:
    drafter = drafter_of(target, texts, **shape)
    states_of = partial(states_from_forward, target, drafter.layer_ids)
    begin_looking_back(drafter, target, states_of, texts, target.config.vocab_size)
    return drafter


@torch.no_grad()
def test_it_attends_to_the_nearest_place_and_hands_on_its_features(target, texts):
    """Of the heads that look back the first sees the nearest place far above all others, and no slot of its block."""
    drafter, text = begun(target, texts), texts[0]
    attention = drafter.layers[0].self_attn
    seen = states_from_forward(target, drafter.layer_ids, text)
    fused = drafter.fuse(seen.features)
    length = len(text.ids_T)
    positions = torch.arange(length)[None]
    anchors = Anchors.at(torch.arange(2, length)[None], text.ids_T[None], positions)
    context = drafter.context(fused, positions)[0]
    slots = drafter.block(anchors.tokens, target.get_input_embeddings()).flatten(1, 2)
    indices = (anchors.positions[..., None] + torch.arange(SLOTS)).flatten(1)
    rotation = drafter.rotary_emb(slots, indices)
    normed = drafter.layers[0].input_layernorm(slots)
    queries, own = attention.queries(normed, rotation), attention.keys_values(normed, rotation)
    keys = torch.cat([context.keys, own.keys], dim=2)[:, 0]
    scores = queries[:, 0] @ keys.transpose(1, 2) / attention.head_dim**0.5
    weights = scores.masked_fill(~visible(anchors, length, SLOTS)[:, 0], -torch.inf).softmax(-1)[0]
    weights = weights.unflatten(0, (-1, SLOTS))  # anchors, slots, keys
    nearest = weights[..., :length].gather(-1, (anchors.indices[0] - 1)[:, None, None].expand(-1, SLOTS, 1))
    assert (nearest[:, 0] > 0.5).all() and nearest[:, 0].mean() > 0.8
    assert (weights[..., :length].argmax(-1) == anchors.indices[0][:, None] - 1).all()
    assert weights[..., length:].sum(-1).max() < 1e-3

    width, group = attention.head_dim, attention.q_proj.out_features // attention.k_proj.out_features
    handed_on = context.values[0, 0] @ attention.o_proj.weight[:, : group * width].unflatten(1, (group, width)).sum(1).T
    deepest = seen.features[0, :, -drafter.config.hidden_size :]
    assert torch.cosine_similarity(handed_on, deepest, dim=-1).mean() > 0.8


def test_the_first_guess_is_better_before_any_training(target, texts):
    @torch.no_grad()
    def loss(drafter: BlockDrafter) -> float:
        found = []
        for text in texts:
            seen = states_from_forward(target, drafter.layer_ids, text)
            positions = torch.arange(PROMPT, len(text.ids_T) - 1)[None]
            hidden = states_of_blocks(drafter, target.get_input_embeddings(), seen, text.ids_T[None], None, positions)
            logits = drafter.head_for(target).project(hidden[0, :, 0])
            found.append(torch.nn.functional.cross_entropy(logits, text.ids_T[positions[0] + 1]))
        return float(torch.stack(found).mean())

    plain = drafter_of(target, texts)
    plain.norm.weight.data.copy_(target.get_decoder().norm.weight)
    losses = []
    for scale in (1.0, 0.5, 0.25, 0.125):  # the best that one number can do for the last layer as it is
        plain.norm.weight.data.copy_(target.get_decoder().norm.weight * scale)
        losses.append(loss(plain))
    assert loss(begun(target, texts)) < min(losses) - 1


def test_norms_of_queries_and_keys_do_not_matter(target, texts):
    """As of Qwen 3, whose norms weigh some entries of a head far more than others, or not at all."""
    torch.manual_seed(1)
    drafter = drafter_of(target, texts)
    attention = drafter.layers[0].self_attn
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.copy_(torch.rand(len(norm.weight)) * 3)
            norm.weight[0] = 0
    begin_looking_back(
        drafter, target, partial(states_from_forward, target, drafter.layer_ids), texts, target.config.vocab_size
    )
    text = texts[1]
    seen = states_from_forward(target, drafter.layer_ids, text)
    positions = torch.arange(len(text.ids_T))[None]
    keys = drafter.context(drafter.fuse(seen.features), positions)[0].keys[0, 0]
    slot = drafter.block(text.ids_T[-1:], target.get_input_embeddings())
    normed = drafter.layers[0].input_layernorm(slot)
    at = torch.arange(len(text.ids_T), len(text.ids_T) + SLOTS)[None]
    queries = attention.queries(normed, drafter.rotary_emb(slot, at))[0, 0]
    assert (queries @ keys.T).argmax(-1).tolist() == [len(text.ids_T) - 1] * SLOTS


def test_guesses_that_no_head_corrects_begin_at_random(target, texts):
    config = BlockTrainingConfig("t", ["c"], training=TrainingArguments("unused", use_cpu=True))
    corrected = drafter_of(target, texts, markov_rank=2)
    assert choose_init(config, drafter_of(target, texts), target)[0] == "random"
    assert choose_init(config, corrected, target)[0] == "look_back"
    config.target_sharded = True
    assert choose_init(config, corrected, target)[0] == "last_layers"
    config.init = "look_back"
    with pytest.raises(InputError, match="with a target on several devices, found look_back"):
        choose_init(config, corrected, target)


def test_places_that_a_cache_has_nothing_of_are_left_out(target, texts):
    drafter = drafter_of(target, texts)

    def cached(text: Text) -> TargetStates:
        return TargetStates(
            *(
                state * (torch.arange(state.shape[1]) < state.shape[1] - 1)[None, :, None]
                for state in states_from_forward(target, drafter.layer_ids, text)
            )
        )

    begin_looking_back(drafter, target, cached, texts, target.config.vocab_size)
    assert all(weight.isfinite().all() for weight in drafter.parameters())
