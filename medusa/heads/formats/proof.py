"""The proof of exported Medusa heads, in each of their formats."""

import copy
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.medusa.heads.formats import readers
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.proof import TOLERANCE, read_apart, relative_error
from draftsmith.train.losses.output_head import OutputHead


@torch.no_grad()
def prove(heads: MedusaHeads, directory: Path, format: str, reader: str, dtype: torch.dtype, by_rank: bool) -> None:
    """Require that a directory reads as the heads it was written from.

    Where the heads have no logit, for a token outside of a truncated vocabulary, a format of whole vocabularies may
    have one, which must not be the largest.

    Args:
        heads: as they were given.
        directory: what was written.
        format: in which.
        reader: whose way of reading is tried, a name of `readers.READERS`.
        dtype: of the written weights.
        by_rank: as in `export_heads`.

    Raises:
        RuntimeError: a reader finds other logits, or fails.
    """
    config, generator = heads.config, torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(4, config.hidden_size, generator=generator)
    embeddings_NKH = torch.randn(4, config.num_heads, config.hidden_size, generator=generator)
    logits_NKV = read_apart(readers, reader, directory, hidden_NH, embeddings_NKH)
    shape = (4, config.num_heads, config.vocab_size)
    if logits_NKV.shape != shape:
        found_shape = tuple(logits_NKV.shape)
        raise RuntimeError(f"export: expected {reader} to read logits of shape {shape}, found {found_shape}")
    for k in range(config.num_heads):
        expected = _rounded_logits(heads, k, format, dtype, by_rank, hidden_NH, embeddings_NKH)
        there = expected.isfinite()
        found, others = (logits_NKV[:, k].masked_fill(mask, float("-inf")) for mask in (~there, there))
        if not (found.isfinite() == there).all():
            raise RuntimeError(f"export: expected {reader} to read finite logits for head {k}, found others")
        error = relative_error(found[there], expected[there])
        if not error <= TOLERANCE:
            raise RuntimeError(f"export: expected {reader} to read the same logits, found head {k} off by {error:.1e}")
        if not (others.amax(-1) < found.amax(-1)).all():
            raise RuntimeError(f"export: expected {reader} to draft what head {k} can, found a token that it cannot")


def _rounded_logits(
    heads: MedusaHeads,
    k: int,
    format: str,
    dtype: torch.dtype,
    by_rank: bool,
    hidden_NH: Tensor,
    embeddings_NKH: Tensor,
) -> Tensor:
    """Return the float32 logits of head k, (N, V), as it is here but for its weights, which are rounded."""
    block = copy.deepcopy(heads.blocks[k]).to("cpu", dtype).float()
    lm_head = copy.deepcopy(heads.lm_head_of(k)).to("cpu", dtype).float()
    head, dropped = heads.head(k), by_rank and format != "own"
    scale = 1.0 if dropped and format != "vllm" else head.scale
    finished = OutputHead(lm_head.weight, lm_head.bias, scale, None if dropped else head.softcap)
    logits = finished(block(hidden_NH, heads.seen(k, embeddings_NKH)))
    return heads.widened(logits.to(heads.device)).cpu()
