"""First weights that let a drafter's first layer look back at the token before its block, for the target's state.

A slot's own state is only an embedding; the target's states of the text come through attention. The target's last layer
attends for purposes of its own, so a drafter that begins as its copy must first learn where to look. Here half of the
first layer's key-value heads begin by attending to the nearest position of the text, and pass on its deepest features.
The rest of the layer then computes from there what it computes in the target.

All of this is done by weights. Each key is one vector, rotated by its position, with one sign for fused features and
the other for slots; each query is one vector for all slots. So a score is Σ cos(ω Δ) over the rotary frequencies:
greatest at the nearest position of the text, and least at the block's own slots.

Shape suffixes: N positions, H hidden, D a key-value head's width, C the width of all heads that look back.
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
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.data.first_look import Text, best_scale, choose_once
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.positions import IGNORED

TEXTS, TOKENS = 32, 64
"""The number of texts to fit on, and of tokens of each completion."""
SHARPNESS = 4.0
"""The least factor on scores from the norms of queries and keys: with less a head attends to many positions."""
MIDDLE = 0.08, 0.5
"""The frequencies, in radians a token, of every second query head: these see the last dozen tokens alike."""
RIDGE = 0.01
"""The ridge of a fit, relative to the mean square of its inputs."""
MASKS = 3
"""One mask for each three tokens, among the slots of a fit."""


class LookBack(NamedTuple):
    """The vectors and matrices that make up the maps of heads that look back."""

    query: Tensor
    """(H,), with a product of about 1 with normed slots."""
    key: Tensor
    """(H,), with a product of about 1 with fused features, and −1 with normed slots."""
    values: Tensor
    """The principal directions of fused features, (C, H)."""
    outputs: Tensor
    """A map from these directions to the deepest features, (H, C)."""


@phase("looking at a few texts")
def begin_looking_back(
    drafter: BlockDrafter,
    target: PreTrainedModel,
    states_of: Callable[[Text], TargetStates],
    texts: Sequence[Text],
    tokens: int,
) -> None:
    """Let a copy of the target's last layers look back, and scale its last norm by the factor with the least loss.

    The first process fits both on a few texts, and all processes get the same weights. `states_of` returns the target's
    states of a text; the target's head may have more rows than the tokenizer has `tokens`.
    """
    embed: Any = target.get_input_embeddings()
    layer: Any = drafter.layers[0]
    home = drafter.device
    width = layer.self_attn.head_dim * _heads(drafter)

    def fit() -> LookBack:
        target_states = [states_of(text) for text in texts]
        nn.Module.to(drafter, target_states[0].features.device)  # on the CPU a large layer is slow
        # A cache has no features of a text's last position.
        features = [states.features[:, :-1].float() for states in target_states]
        fused_NH = torch.cat([drafter.fuse(features_1TF)[0] for features_1TF in features])
        deepest_NH = torch.cat([features_1TF[0, :, -drafter.config.hidden_size :] for features_1TF in features])
        tokens_NH = torch.cat([states.embeddings[0] for states in target_states])
        mask = embed(torch.tensor([drafter.config.mask_token_id], device=embed.weight.device)).to(tokens_NH)
        slots_NH = layer.input_layernorm(torch.cat([tokens_NH, mask.expand(len(tokens_NH) // MASKS, -1)]).float())
        parts = fit_look_back(fused_NH, deepest_NH, slots_NH, width)
        return LookBack(*(part.cpu() for part in parts))

    def scale() -> float:
        states, labels = list[Tensor](), list[Tensor]()
        guesses = drafter.config.guesses
        for text in texts:
            indices_N = (text.ahead(1) != IGNORED).nonzero()[:, 0]
            indices_N = indices_N[(indices_N > 0) & (indices_N < len(text.ids_T) - guesses)].to(drafter.device)
            ids_T = text.ids_T.to(drafter.device)
            hidden = states_of_blocks(drafter, embed, states_of(text), ids_T[None], None, indices_N[None])
            states.append(drafter.guessing(hidden).flatten(0, 2))
            order_K = torch.arange(1, guesses + 1, device=drafter.device)
            labels.append(ids_T[indices_N[:, None] + order_K].flatten())
        cut = None if drafter.token_map is None else CutVocabulary(drafter.token_map, drafter.config.vocab_size)
        return best_scale(states, torch.cat(labels), drafter.head_for(target), cut, tokens)

    with torch.no_grad():
        look_back(drafter, choose_once(fit))
        decoder = decoder_of(target)
        drafter.norm.weight.copy_(decoder.norm.weight)
        best = choose_once(scale)
        nn.Module.to(drafter, home)
        drafter.norm.weight.mul_(best)


def fit_look_back(fused_NH: Tensor, deepest_NH: Tensor, slots_NH: Tensor, width: int) -> LookBack:
    """Fit heads of C = `width` to fused and deepest features of the same positions, and to normed slots."""
    fused, deepest, slots = fused_NH.double(), deepest_NH.double(), slots_NH.double()
    query = _fit(slots, slots.new_ones(len(slots)))
    signs = torch.cat([fused.new_ones(len(fused)), -slots.new_ones(len(slots))])
    key = _fit(torch.cat([fused, slots]), signs)
    values = torch.linalg.eigh(fused.T @ fused).eigenvectors[:, -width:].T
    # Give all positions the same weight: where a text begins, features can be a hundred times larger.
    squares_N1 = deepest.square().mean(1, keepdim=True)
    alike = deepest * (squares_N1.median() / squares_N1).sqrt()
    outputs = _fit(fused @ values.T, alike, ridge=1e-6).T
    return LookBack(*(part.float() for part in (query, key, values, outputs)))


def _fit(inputs: Tensor, outputs: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the weights of a ridge regression."""
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
def look_back(drafter: BlockDrafter, parts: LookBack) -> None:
    """Write the weights of the first layer's heads that look back."""
    attention: Any = drafter.layers[0].self_attn
    width = attention.head_dim
    group = attention.q_proj.out_features // attention.k_proj.out_features
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.clamp_(min=norm.weight.mean() / 8)  # the weights below are divided by these
    # A norm scales a vector to a mean square of 1 and multiplies it by its weight; these are the lengths that result.
    scales = [norm.weight.reciprocal().square().mean().rsqrt() for norm in (attention.q_norm, attention.k_norm)]
    sharper = max(1.0, SHARPNESS / float(scales[0] * scales[1]))
    frequencies = drafter.rotary_emb.inv_freq
    # Every second query head of a group uses only the middle frequencies.
    bands = [torch.ones_like(frequencies), ((frequencies > MIDDLE[0]) & (frequencies < MIDDLE[1])).float()]
    if not bands[1].any():
        bands[1] = bands[0]
    for kv in range(_heads(drafter)):
        rows = slice(kv * width, (kv + 1) * width)
        attention.k_proj.weight[rows] = torch.outer(attention.k_norm.weight.reciprocal(), parts.key.to(drafter.device))
        attention.v_proj.weight[rows] = parts.values[rows].to(drafter.device)
        for member in range(group):
            columns = slice((kv * group + member) * width, (kv * group + member + 1) * width)
            band = bands[member % 2].to(drafter.device).repeat(2)
            attention.q_proj.weight[columns] = torch.outer(
                band / attention.q_norm.weight, parts.query.to(drafter.device)
            )
            attention.o_proj.weight[:, columns] = parts.outputs[:, rows].to(drafter.device) / group
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.mul_(math.sqrt(sharper))
