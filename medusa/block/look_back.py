"""A beginning for a drafter's first layer: it looks back at the token before its block, where the target's state is.

A slot's own state is an embedding alone; what the target made of the text comes by attention. The target's last layer
attends for ends of its own, so that a drafter that begins as it does must first learn where to look. Here half of the
first layer's key-value heads begin by attending to the nearest place of the text, and hand on its deepest features: the
rest of the layer then does from there what it does in the target.

All of it is weights. Keys are one vector at every place, turned by the place, of one sign for fused features and of the
other for slots; queries are one vector for all slots. So a score is Σ cos(ω Δ) over the rotary frequencies: greatest at
the nearest place of the text, and least at the block's own slots.

Shape suffixes: N places, H hidden, D a key-value head's width, C what key-value heads hand on together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_of
from draftsmith.decode.progress import phase
from draftsmith.medusa.block.blocks import states_of_blocks
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.seen import TargetStates
from draftsmith.train.data.first_look import Text, best_scale, chosen_once
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.positions import IGNORED

TEXTS, TOKENS = 32, 64
"""How many texts are looked at, and how many tokens of the completion of each."""
SHARPNESS = 4.0
"""What the norms of queries and keys multiply scores by at least: with less a head looks at many places."""
MIDDLE = 0.08, 0.5
"""Frequencies, in radians a token, of every second head: these see the last dozen tokens alike."""
RIDGE = 0.01
"""Of a fit, beside the mean square of what it is fitted on."""
MASKS = 3
"""One mask for so many tokens, among what slots are."""


class LookBack(NamedTuple):
    """What the maps of heads that look back are made of."""

    query: Tensor
    """(H,), about 1 on what slots are behind the layer's norm."""
    key: Tensor
    """(H,), about 1 on fused features and −1 on slots."""
    values: Tensor
    """The principal directions of fused features, (C, H)."""
    outputs: Tensor
    """From these to the deepest features, (H, C)."""


@phase("looking at a few texts")
def begin_looking_back(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    seen_of: Callable[[Text], TargetStates],
    texts: Sequence[Text],
    tokens: int,
) -> None:
    """Let the first layer look back, and scale the last norm so that the loss on some texts is the least.

    The same weights on all processes, of which the first looks at the texts.

    Args:
        drafter: begun as the target's last layers.
        target: with embeddings and head.
        seen_of: what the target leaves of a text.
        texts: what to look at.
        tokens: of the tokenizer; the target's head may have more rows.
    """
    embed: Any = target.get_input_embeddings()
    layer: Any = drafter.layers[0]
    home = drafter.device
    width = layer.self_attn.head_dim * _heads(drafter)

    def fit() -> LookBack:
        seen = [seen_of(text) for text in texts]
        nn.Module.to(drafter, seen[0].features.device)  # on the host a large layer is slow
        fused_NH = torch.cat([drafter.fuse(each.features.float())[0] for each in seen])
        deepest_NH = torch.cat([each.features[0, :, -drafter.config.hidden_size :].float() for each in seen])
        tokens_NH = torch.cat([each.embeddings[0] for each in seen])
        mask = embed(torch.tensor([drafter.config.mask_token_id], device=embed.weight.device)).to(tokens_NH)
        slots_NH = layer.input_layernorm(torch.cat([tokens_NH, mask.expand(len(tokens_NH) // MASKS, -1)]).float())
        known_N = deepest_NH.any(1)  # a cache has nothing of a text's last place
        made = fitted(fused_NH[known_N], deepest_NH[known_N], slots_NH, width)
        return LookBack(*(part.cpu() for part in made))

    def scale() -> float:
        states, labels = list[Tensor](), list[Tensor]()
        guesses = drafter.config.guesses
        for text in texts:
            places_N = (text.ahead(1) != IGNORED).nonzero()[:, 0]
            places_N = places_N[(places_N > 0) & (places_N < len(text.ids_T) - guesses)].to(drafter.device)
            ids_T = text.ids_T.to(drafter.device)
            states.append(
                states_of_blocks(drafter, embed, seen_of(text), ids_T[None], None, places_N[None]).flatten(0, 2)
            )
            behind_K = torch.arange(1, guesses + 1, device=drafter.device)
            labels.append(ids_T[places_N[:, None] + behind_K].flatten())
        cut = None if drafter.token_map is None else CutVocabulary(drafter.token_map, drafter.config.vocab_size)
        return best_scale(states, torch.cat(labels), drafter.head_for(target), cut, tokens)

    with torch.no_grad():
        look_back(drafter, chosen_once(fit))
        decoder = decoder_of(target)
        drafter.norm.weight.copy_(decoder.norm.weight)
        best = chosen_once(scale)
        nn.Module.to(drafter, home)
        drafter.norm.weight.mul_(best)


def fitted(fused_NH: Tensor, deepest_NH: Tensor, slots_NH: Tensor, width: int) -> LookBack:
    """Return what heads that look back are made of, in float32.

    Args:
        fused_NH: fused features of places.
        deepest_NH: the deepest features of the same, as the target left them.
        slots_NH: what slots are behind the first layer's norm.
        width: C.
    """
    fused, deepest, slots = fused_NH.double(), deepest_NH.double(), slots_NH.double()
    query = _fit(slots, slots.new_ones(len(slots)))
    signs = torch.cat([fused.new_ones(len(fused)), -slots.new_ones(len(slots))])
    key = _fit(torch.cat([fused, slots]), signs)
    values = torch.linalg.eigh(fused.T @ fused).eigenvectors[:, -width:].T
    # As large at all places: where a text begins, features can be a hundred times larger, and would decide the fit.
    squares_N1 = deepest.square().mean(1, keepdim=True)
    alike = deepest * (squares_N1.median() / squares_N1).sqrt()
    outputs = _fit(fused @ values.T, alike, ridge=1e-6).T
    return LookBack(*(part.float() for part in (query, key, values, outputs)))


def _fit(inputs: Tensor, outputs: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the weights of least squares, with a little of a ridge."""
    squares = inputs.T @ inputs
    squares.diagonal().add_(ridge * squares.diagonal().mean())
    return torch.linalg.solve(squares, inputs.T @ outputs)


def _heads(drafter: BlockDrafter) -> int:
    """Return how many key-value heads of the first layer look back."""
    attention: Any = drafter.layers[0].self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    most = drafter.config.hidden_size // attention.head_dim  # principal directions
    return min(-(-heads // 2), most)


@torch.no_grad()
def look_back(drafter: BlockDrafter, made: LookBack) -> None:
    """Write the weights of the first layer's heads that look back."""
    attention: Any = drafter.layers[0].self_attn
    width = attention.head_dim
    group = attention.q_proj.out_features // attention.k_proj.out_features
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.clamp_(min=norm.weight.mean() / 8)  # what cannot be divided by
    # The norms' weights stand behind a vector of length 1 a number; these vectors come out of them as one number each.
    scales = [norm.weight.reciprocal().square().mean().rsqrt() for norm in (attention.q_norm, attention.k_norm)]
    sharper = max(1.0, SHARPNESS / float(scales[0] * scales[1]))
    frequencies = drafter.rotary_emb.inv_freq
    bands = [torch.ones_like(frequencies), ((frequencies > MIDDLE[0]) & (frequencies < MIDDLE[1])).float()]
    if not bands[1].any():
        bands[1] = bands[0]
    for kv in range(_heads(drafter)):
        rows = slice(kv * width, (kv + 1) * width)
        attention.k_proj.weight[rows] = torch.outer(attention.k_norm.weight.reciprocal(), made.key.to(drafter.device))
        attention.v_proj.weight[rows] = made.values[rows].to(drafter.device)
        for member in range(group):
            columns = slice((kv * group + member) * width, (kv * group + member + 1) * width)
            band = bands[member % 2].to(drafter.device).repeat(2)
            attention.q_proj.weight[columns] = torch.outer(
                band / attention.q_norm.weight, made.query.to(drafter.device)
            )
            attention.o_proj.weight[:, columns] = made.outputs[:, rows].to(drafter.device) / group
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.mul_(math.sqrt(sharper))
