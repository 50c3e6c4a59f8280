"""The costs of a setup on this machine: memory, and the acceptance from which drafting pays."""

from collections.abc import Iterator, Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache import positions_of, state_bytes
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import drafting_seconds
from draftsmith.decode.planning.costs import RoundCosts, acceptance_length, verification_costs
from draftsmith.decode.proposers.base import Proposer
from draftsmith.scripts.doctor.checks import Setup
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.train.checkpoint import files_of
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind
from draftsmith.train.kinds.parts import Part
from draftsmith.train.kinds.quantities import size
from draftsmith.train.models import DTYPES, load_model
from draftsmith.train.quantization import UNPACKED, quantization_of

GAMMA = 4
CONTEXT = 64
ROUNDS = 5
HARD = 0.9  # an acceptance rate that few drafts reach


def check_memory(
    setup: Setup, batch_sizes: Sequence[int], context: int | None, dtype: str, device: torch.device
) -> tuple[bool, Finding]:
    """Compare weights, keys and values with the free memory; return whether the weights fit, and the finding.

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
        return False, Finding("warning", "memory", f"{text}; {place}: they do not fit", remedy)
    if cached:
        text += f"; a token in the cache: {' + '.join(size(bytes) for bytes in cached.values())}"
    states = {side.role: held for side in setup.sides if (held := state_bytes(side.model, width))}
    if states:
        # One before a round's block and one after each of its K + 1 tokens.
        sizes = " + ".join(size(bytes) for bytes in states.values())
        text += f"; states: {sizes} a row, K + 2 kept in a round"
    tokens = context or min(setup.positions.values(), default=None)
    if not cached or tokens is None:
        return True, Finding("ok", "memory", f"{text}; {place}")
    kept = (GAMMA + 2) * sum(states.values())
    needed = {rows: total + rows * (tokens * token + kept) for rows in batch_sizes}
    text += f"; {tokens} tokens × batch size {', '.join(f'{rows}: {size(bytes)}' for rows, bytes in needed.items())}"
    text += f", of {place}"
    if max(needed.values()) <= free:
        return True, Finding("ok", "memory", text)
    most = {rows: int((free - total - rows * kept) // (rows * token)) for rows in batch_sizes}
    fitting = ", ".join(f"{tokens} at batch size {rows}" for rows, tokens in most.items())
    return True, Finding("warning", "memory", text, f"texts that fit, in tokens: {fitting} (--context to check them)")


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of this machine without swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def check_costs(
    drafters: Sequence[tuple[DrafterKind, DrafterSpec]],
    loading: Loading,
    batch_sizes: Sequence[int],
    device: torch.device,
) -> Iterator[Finding]:
    """Load the models, and measure the acceptance from which each drafter pays, for each batch size."""
    name = "costs"
    try:
        options: dict[str, Any] = {"dtype": loading.dtype, "trust_remote_code": loading.trust_remote_code}
        loading.model = load_model(loading.path, field="target", device=device, **options)
        loaded = [kind.load(spec, loading) for kind, spec in drafters]
        for rows in batch_sizes:
            for drafter in loaded:
                name = f"{drafter.name}, B = {rows}"
                yield cost_of(loading.target, drafter, rows, name)
    except InputError as error:
        yield Finding.of(error, name)
    except torch.OutOfMemoryError:
        yield Finding("warning", name, "out of memory", "free some of it, or give a smaller --batch-size or --dtype")


def cost_of(target: PreTrainedModel, drafter: Drafter, rows: int, name: str) -> Finding:
    """Measure rounds of a number of texts; find the α, or for a tree the τ, from which they pay."""
    tree, proposer = drafter.tree, drafter.proposer
    depth = min(GAMMA, proposer.longest or GAMMA) if tree is None else tree.depth
    drafted = depth if tree is None else len(tree)
    # The context must leave room for the timed rounds.
    limits = [limit for limit in (positions_of(target.config), proposer.positions) if limit is not None]
    context = max(1, min([CONTEXT, *(limit - ROUNDS - drafted - 2 for limit in limits)]))
    verifying, drafting = measure(target, proposer, rows, depth, drafted, context)
    one, block = verifying[1], verifying[1 + drafted]
    text = f"t(1) = {one * 1000:.2f} ms after {context} tokens, t({1 + drafted}) = {block / one:.2f} t(1), "
    text += f"drafting {drafting / one:.2f} t(1): "
    needed, most = (drafting + block) / one, depth + 1
    what = f"γ = {depth}" if tree is None else f"a tree of {drafted}"
    alpha = None if tree is not None else RoundCosts(verifying, drafting / depth).break_even_acceptance(depth)
    if needed >= most or (tree is None and alpha is None):
        text += f"{what} pays at no acceptance: τ = {needed:.2f} is asked, and {most} the most"
    elif tree is not None:
        text += f"{what} pays from τ = {needed:.2f} on, of {most} at most"
    else:
        text += f"{what} pays from α = {alpha:.2f} on"
    if needed > acceptance_length([HARD] * depth):
        return Finding("warning", name, text, "few drafts agree that often: take a cheaper drafter or a smaller tree")
    return Finding("ok", name, text)


def measure(
    target: PreTrainedModel, proposer: Proposer, rows: int, depth: int, drafted: int, context: int
) -> tuple[dict[int, float], float]:
    """Return t(1) and t(1 + drafted), and the seconds of a draft, at T=0 after the same context."""
    verifying = verification_costs(target, rows, context, [1, 1 + drafted])
    texts = torch.ones(rows, context + ROUNDS + 2, dtype=torch.long, device=target.device)
    return verifying, drafting_seconds(target, proposer, texts, context, depth, repeats=ROUNDS)[0]


def _weights_bytes(part: Part, width: int) -> int:
    quantization = quantization_of(part.model.config)
    if quantization and not quantization.startswith(UNPACKED):  # packed weights: the files' size
        return sum(file.stat().st_size for file in files_of(part.path).glob("*.safetensors"))
    return part.model.num_parameters() * width
