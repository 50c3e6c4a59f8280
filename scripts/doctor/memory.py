"""The memory of a setup on this machine: weights, keys and values, next to what is free."""

from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]
import torch

from draftsmith.decode.cache import state_bytes
from draftsmith.scripts.doctor.checks import Setup
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.train.checkpoint import files_of
from draftsmith.train.kinds.parts import Part
from draftsmith.train.kinds.quantities import size
from draftsmith.train.models import DTYPES
from draftsmith.train.quantization import UNPACKED, quantization_of

GAMMA = 4


def check_memory(
    setup: Setup, batch_sizes: Sequence[int], context: int | None, dtype: str, device: torch.device
) -> Finding:
    """Compare weights, keys and values with the free memory.

    Activations are not counted. `context` is the length of texts in tokens, or None for the models' positions. Models
    run in `dtype`, quantised checkpoints as they are stored.
    """
    free, width = free_memory(device), DTYPES[dtype].itemsize
    weights = {part.role: _weights_bytes(part, width) for part in setup.parts}
    cached = {part.role: part.cached_numbers * width for part in setup.parts if part.cached_numbers}
    total, token = sum(weights.values()), sum(cached.values())
    text = f"{dtype} weights: {', '.join(f'{role} {size(bytes)}' for role, bytes in weights.items())}"
    place = f"{size(free)} free ({device.type})"
    if total > free:
        largest = max(weights, key=lambda role: weights[role])
        remedy = f"find a device with more than {size(total)}, or take a smaller {largest}"
        remedy += ", or --dtype bfloat16" if width > 2 else ""
        return Finding("warning", "memory", f"{text}; {place}: they do not fit", remedy)
    if cached:
        text += f"; a token in the cache: {' + '.join(size(bytes) for bytes in cached.values())}"
    states = {side.role: held for side in setup.sides if (held := state_bytes(side.model, width))}
    if states:
        # One before a round's block and one after each of its K + 1 tokens.
        sizes = " + ".join(size(bytes) for bytes in states.values())
        text += f"; states: {sizes} a row, K + 2 kept in a round"
    tokens = context or min(setup.positions.values(), default=None)
    if not cached or tokens is None:
        return Finding("ok", "memory", f"{text}; {place}")
    kept = (GAMMA + 2) * sum(states.values())
    needed = {rows: total + rows * (tokens * token + kept) for rows in batch_sizes}
    text += f"; {tokens} tokens × batch size {', '.join(f'{rows}: {size(bytes)}' for rows, bytes in needed.items())}"
    text += f", of {place}"
    if max(needed.values()) <= free:
        return Finding("ok", "memory", text)
    most = {rows: int((free - total - rows * kept) // (rows * token)) for rows in batch_sizes}
    fitting = ", ".join(f"{tokens} at batch size {rows}" for rows, tokens in most.items())
    return Finding("warning", "memory", text, f"texts that fit, in tokens: {fitting} (--context to check them)")


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of this machine without swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _weights_bytes(part: Part, width: int) -> int:
    quantization = quantization_of(part.model.config)
    if quantization and not quantization.startswith(UNPACKED):  # packed weights: the files' size
        return sum(file.stat().st_size for file in files_of(part.path).glob("*.safetensors"))
    return part.model.num_parameters() * width
