"""The proof of exported heads: another process, which knows the format alone, computes the same logits."""

import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.medusa.eagle.heads import EagleHeads, KeysValues, Step
from draftsmith.medusa.heads import readers
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.losses.output_head import OutputHead

TOLERANCE = 1e-5  # of the largest logit: float32 sums of a few thousand terms, in another order


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
        dtype: of the weights there.
        by_rank: as in `export_heads`.

    Raises:
        RuntimeError: it reads otherwise, or not at all.
    """
    config, generator = heads.config, torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(4, config.hidden_size, generator=generator)
    embeddings_NKH = torch.randn(4, config.num_heads, config.hidden_size, generator=generator)
    logits_NKV = read_apart(reader, directory, hidden_NH, embeddings_NKH)
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
        error = float((found - expected)[there].abs().max() / expected[there].abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise RuntimeError(f"export: expected {reader} to read the same logits, found head {k} off by {error:.1e}")
        if not (others.amax(-1) < found.amax(-1)).all():
            raise RuntimeError(f"export: expected {reader} to draft what head {k} can, found a token that it cannot")


STEPS = 3
"""Of the layer on its own states that are compared."""


@torch.no_grad()
def prove_eagle(heads: EagleHeads, directory: Path) -> None:
    """Require that a directory of EAGLE-3 heads reads as these, on features and on their own states.

    Args:
        heads: on the CPU, rounded to the weights there.
        directory: what was written.

    Raises:
        RuntimeError: it reads otherwise, or not at all.
    """
    config, generator = heads.config, torch.Generator().manual_seed(0)
    wide = config.target_hidden_size * len(heads.layer_ids)
    features_TF = torch.randn(4, wide, generator=generator)
    embeddings_TKH = torch.randn(4, STEPS, config.hidden_size, generator=generator)
    found_TKV = read_apart("eagle3", directory, features_TF, embeddings_TKH)
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
            error = float((found_V - expected_V)[there].abs().max() / expected_V[there].abs().max().clamp_min(1e-30))
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"export: expected a reader to find the same logits, found step {k} off by {error:.1e}"
                )


def read_apart(reader: str, directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that `readers` compute in a fresh process, (N, K, V).

    `hidden_NH` are features, (T, F), for EAGLE-3 heads.

    Raises:
        RuntimeError: it could not read them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": hidden_NH, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the folder of the file, which has other modules, out of the path.
        command = [sys.executable, "-P", str(Path(readers.__file__)), reader, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {reader}, found: {messages[-1]}")
        return load_file(output)["logits"]


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
