"""The proof of exported EAGLE-3 heads."""

import copy
from pathlib import Path

import torch

from draftsmith.medusa.eagle.formats import readers
from draftsmith.medusa.eagle.heads import EagleHeads, Step
from draftsmith.medusa.proof import TOLERANCE, read_apart, relative_error
from draftsmith.medusa.seen import KeysValues

STEPS = 3
"""Of the layer on its own states that the proof compares."""


@torch.no_grad()
def prove_eagle(heads: EagleHeads, directory: Path) -> None:
    """Require that a directory of EAGLE-3 heads reads as these, on features and on their own states.

    Args:
        heads: on the CPU, rounded to the written weights.
        directory: what was written.

    Raises:
        RuntimeError: a reader finds other logits, or fails.
    """
    config, generator = heads.config, torch.Generator().manual_seed(0)
    wide = config.target_hidden_size * len(heads.layer_ids)
    features_TF = torch.randn(4, wide, generator=generator)
    embeddings_TKH = torch.randn(4, STEPS, config.hidden_size, generator=generator)
    found_TKV = read_apart(readers, "eagle3", directory, features_TF, embeddings_TKH)
    exact, places = copy.deepcopy(heads).float(), torch.arange(4 + STEPS)[None]
    given = exact(embeddings_TKH[None, :, 0], exact.fuse(features_TF[None]), places[:, :4])
    for start in range(4):
        step = Step(given.states[:, start : start + 1], given.hidden[:, start : start + 1], given.own)
        seen = KeysValues(*(own[:, :, : start + 1] for own in given.own))
        for k in range(STEPS):
            if k > 0:
                everything = torch.ones(1, 1, 1, seen.keys.shape[2] + 1, dtype=torch.bool)
                at = places[:, start + k : start + k + 1]
                step = exact(embeddings_TKH[None, None, start, k], step.states, at, seen, everything)
                seen = KeysValues(*(torch.cat(pair, 2) for pair in zip(seen, step.own, strict=True)))
            expected_V = exact.widened(exact.head(step.hidden))[0, 0]
            there, found_V = expected_V.isfinite(), found_TKV[start, k]
            if not torch.equal(found_V.isfinite(), there):
                raise RuntimeError("export: expected a reader to draft the same tokens, found others")
            error = relative_error(found_V[there], expected_V[there])
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"export: expected a reader to find the same logits, found step {k} off by {error:.1e}"
                )
