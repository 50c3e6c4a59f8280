"""The proof of exported block drafters."""

import copy
from pathlib import Path

import torch

from draftsmith.medusa.block.blocks import Anchors, attend_to
from draftsmith.medusa.block.formats import readers
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.proof import TOLERANCE, read_apart, relative_error

PLACES = 4
"""Whose blocks the proof compares."""


@torch.no_grad()
def prove_block(drafter: BlockDrafter, directory: Path) -> None:
    """Require that a directory reads as this drafter: what its blocks give, its Markov head and its confidence.

    Args:
        drafter: on the CPU, rounded to the written weights.
        directory: what was written.

    Raises:
        RuntimeError: a reader finds something else, or fails.
    """
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    wide, slots = config.hidden_size * len(config.target_layer_ids), config.block_size
    features_TF = torch.randn(PLACES, wide, generator=generator)
    embeddings_TSH = torch.randn(PLACES, slots, config.hidden_size, generator=generator)
    found_TKX = read_apart(readers, "block", directory, features_TF, embeddings_TSH)
    exact, places_1T = copy.deepcopy(drafter).float(), torch.arange(PLACES)[None]
    context = exact.context(exact.fuse(features_TF[None]), places_1T)
    anchors = Anchors(places_1T, places_1T, places_1T)
    attend, positions_1Q = attend_to(exact, context, anchors)
    hidden_TSH = exact(embeddings_TSH.flatten(0, 1)[None], positions_1Q, attend)[0].unflatten(0, (PLACES, slots))
    hidden_TKH = exact.guessing(hidden_TSH)
    guesses, vocab_size, drafted = config.guesses, config.vocab_size, config.draft_vocab_size
    tokens_TK = torch.tensor([[readers.before(t, k, vocab_size) for k in range(guesses)] for t in range(PLACES)])
    added_TKD, sure_TK = torch.zeros(PLACES, guesses, drafted), torch.zeros(PLACES, guesses)
    if exact.markov_head is not None:
        added_TKD = exact.markov_head.markov_w2(exact.markov_head.markov_w1(tokens_TK))
    if exact.confidence_head is not None:
        sure_TK = exact.confidence(hidden_TKH, tokens_TK)
    sizes = [config.hidden_size, drafted, 1]
    expected = hidden_TKH, added_TKD, sure_TK[..., None]
    for what, found, wanted in zip(
        ("states", "Markov head", "confidence"), found_TKX.split(sizes, dim=-1), expected, strict=True
    ):
        error = relative_error(found, wanted)
        if not error <= TOLERANCE:
            raise RuntimeError(f"export: expected a reader to find the same {what}, found them off by {error:.1e}")
