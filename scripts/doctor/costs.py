"""What a pair costs on this machine: the memory it takes, and the acceptance from which drafting pays."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import PreTrainedModel

from draftsmith.decode import DraftModelProposer, ParallelDraftProposer
from draftsmith.decode.cache import cached_numbers
from draftsmith.decode.draft_models.searched_tree import searched_tree
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import drafting_seconds
from draftsmith.decode.planner import RoundCosts, acceptance_length, verification_costs
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.tree import Tree
from draftsmith.distill.parallel.layout import is_parallel
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import TREE as EAGLE_TREE
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.scripts.summary import size
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import Pair, Part
from draftsmith.train.models import DTYPES, load_draft, load_model

GAMMA = 4
CONTEXT = 64
ROUNDS = 5
SEARCH = "search a smaller tree: draftsmith medusa-tree"
HARD = 0.9  # an acceptance rate that few drafts reach


def check_memory(
    pair: Pair, batch_sizes: Sequence[int], context: int | None, dtype: str, device: torch.device
) -> tuple[bool, Finding]:
    """Compare weights, keys and values with the memory that is free; activations are not counted.

    Args:
        pair: what was given, at least one part of it.
        batch_sizes: texts that are decoded together.
        context: tokens of a text; None for as many as the models have positions.
        dtype: that the models are to run in; quantised checkpoints stay as they are stored.
        device: where.

    Returns:
        Whether the weights fit, and the finding.
    """
    free, width = free_memory(device), DTYPES[dtype].itemsize
    weights = {part.role: _weights_bytes(part, width) for part in pair.parts}
    held = {side.role: numbers * width for side in pair.sides if (numbers := cached_numbers(side.model))}
    if pair.eagle is not None:
        held[pair.eagle.role] = pair.eagle.model.cached_numbers * width
    total, each = sum(weights.values()), sum(held.values())
    text = f"{dtype} weights: {', '.join(f'{role} {size(bytes)}' for role, bytes in weights.items())}"
    place = f"{size(free)} free ({device.type})"
    if total > free:
        return False, Finding(
            "warning",
            "memory",
            f"{text}; {place}: they do not fit",
            f"find a device with more than {size(total)}, or take a smaller {max(weights, key=lambda r: weights[r])}"
            + (", or --dtype bfloat16" if width > 2 else ""),
        )
    if held:
        text += f"; a token in the cache: {' + '.join(size(bytes) for bytes in held.values())}"
    tokens = context or min(pair.positions.values(), default=None)
    if not held or tokens is None:
        return True, Finding("ok", "memory", f"{text}; {place}")
    needed = {rows: total + rows * tokens * each for rows in batch_sizes}
    text += f"; {tokens} tokens × batch size {', '.join(f'{rows}: {size(bytes)}' for rows, bytes in needed.items())}"
    text += f", of {place}"
    if max(needed.values()) <= free:
        return True, Finding("ok", "memory", text)
    fitting = ", ".join(f"{int((free - total) // (rows * each))} at batch size {rows}" for rows in batch_sizes)
    return True, Finding("warning", "memory", text, f"texts that fit, in tokens: {fitting} (--context to check them)")


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or on this machine without swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def check_costs(
    pair: Pair, batch_sizes: Sequence[int], dtype: str, device: torch.device, trust_remote_code: bool = False
) -> Iterator[Finding]:
    """Load the models, and measure for each batch size from which acceptance on draft and heads pay."""
    assert pair.target is not None
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "device": device}
    name = "costs"
    try:
        target = load_model(pair.target.path, field="target", **options)
        draft = None if pair.draft is None else load_draft(pair.draft.path, **options)
        heads: Any = None
        if pair.heads is not None:
            heads = MedusaHeads.from_pretrained(pair.heads.path, dtype=DTYPES[dtype]).eval()
        eagle: Any = None
        if pair.eagle is not None:
            eagle = EagleHeads.from_pretrained(pair.eagle.path, dtype=DTYPES[dtype]).eval()
        for rows in batch_sizes:
            name = f"costs, B = {rows}"
            if draft is not None:
                yield draft_costs(target, draft, rows)
            if heads is not None:
                yield heads_costs(target, heads.to(device), rows)
            if eagle is not None:
                yield eagle_costs(target, eagle.to(device), rows)
    except InputError as error:
        yield Finding("error", name, str(error), "mend that checkpoint, or give another")
    except torch.OutOfMemoryError:
        yield Finding("warning", name, "out of memory", "free some of it, or give a smaller --batch-size or --dtype")


def draft_costs(target: PreTrainedModel, draft: PreTrainedModel, rows: int) -> Finding:
    """Measure t(1), t(γ + 1) and d(γ), and solve for the α from which γ beats plain decoding.

    γ is 4, or of a parallel draft all that it proposes in one forward.
    """
    name, gamma, remedy = f"costs, B = {rows}", GAMMA, "take a smaller draft"
    if not is_parallel(draft.config):
        return _chain_costs(name, target, DraftModelProposer(draft), rows, remedy, [target, draft])
    parallel = ParallelDraftProposer(draft)
    gamma = parallel.longest or GAMMA
    text, verifying, drafting = _measured(target, parallel, rows, gamma, gamma, [target, draft])
    text += f"drafting {drafting / verifying[1]:.2f} t(1) a round: "
    return _worth(name, text, RoundCosts(verifying, 0.0, draft_start=drafting), gamma, remedy)


def eagle_costs(target: PreTrainedModel, heads: EagleHeads, rows: int) -> Finding:
    """Measure EAGLE-3 heads: chains as `draft_costs` does, a tree as `heads_costs`."""
    name, tree = f"eagle, B = {rows}", searched_tree(heads.config, EAGLE_TREE)
    if tree is not None:
        return _tree_costs(name, target, EagleProposer(heads, tree), tree, rows, f"{SEARCH} --eagle DIR --nodes N")
    return _chain_costs(
        name, target, EagleProposer(heads), rows, "train heads with a smaller --draft_vocabulary", [target, heads]
    )


def heads_costs(target: PreTrainedModel, heads: MedusaHeads, rows: int) -> Finding:
    """Measure what a round of the heads' tree costs; the τ from which it pays is that over t(1)."""
    remedy = f"{SEARCH} --heads DIR --nodes N"
    return _tree_costs(f"heads, B = {rows}", target, MedusaProposer(heads), heads.tree, rows, remedy)


def _chain_costs(
    name: str, target: PreTrainedModel, proposer: Proposer, rows: int, remedy: str, models: Sequence[PreTrainedModel]
) -> Finding:
    text, verifying, drafting = _measured(target, proposer, rows, GAMMA, GAMMA, models)
    costs = RoundCosts(verifying, drafting / GAMMA)
    text += f"drafting c = {costs.draft_step / costs.target[1]:.2f} t(1) a token: "
    return _worth(name, text, costs, GAMMA, remedy)


def _worth(name: str, text: str, costs: RoundCosts, gamma: int, remedy: str) -> Finding:
    """Say from which α on γ pays."""
    text += f"γ = {gamma} pays"
    alpha = costs.break_even_acceptance(gamma)
    if alpha is None:
        best = costs.speedup(gamma + 1, gamma)
        text += f" at no α, for at α = 1 it is {best:.2f}× as fast"
        return Finding("warning", name, text, f"{remedy}, or another --dtype or device")
    text += f" from α = {alpha:.2f} on"
    if alpha > HARD:
        return Finding("warning", name, text, f"few drafts agree that often: {remedy}")
    return Finding("ok", name, text)


def _tree_costs(name: str, target: PreTrainedModel, proposer: Proposer, tree: Tree, rows: int, remedy: str) -> Finding:
    text, verifying, drafting = _measured(target, proposer, rows, tree.depth, len(tree), [target])
    one = verifying[1]
    needed, most = (drafting + verifying[len(tree) + 1]) / one, tree.depth + 1
    text += f"drafting {drafting / one:.2f} t(1): a tree of {len(tree)} pays"
    if needed >= most:
        return Finding("warning", name, f"{text} at no τ: {needed:.2f} is asked, and {most} the most", remedy)
    text += f" from τ = {needed:.2f} on, of {most} at most"
    if needed > acceptance_length([HARD] * tree.depth):
        return Finding("warning", name, text, remedy)
    return Finding("ok", name, text)


def _measured(
    target: PreTrainedModel, proposer: Proposer, rows: int, depth: int, drafted: int, models: Sequence[PreTrainedModel]
) -> tuple[str, dict[int, float], float]:
    """Say what verifying costs; return t(1) and t(1 + drafted), and the seconds of a draft behind the same context."""
    # A few rounds must follow the context.
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    room = [limit - ROUNDS - drafted - 2 for limit in limits if limit is not None]
    context = max(1, min([CONTEXT, *room]))
    verifying, drafting = _measure(target, proposer, rows, depth, drafted, context)
    one, block = verifying[1], verifying[1 + drafted]
    text = f"t(1) = {one * 1000:.2f} ms behind {context} tokens, t({1 + drafted}) = {block / one:.2f} t(1), "
    return text, verifying, drafting


def _measure(
    target: PreTrainedModel, proposer: Proposer, rows: int, depth: int, drafted: int, context: int
) -> tuple[dict[int, float], float]:
    """Return t(1) and t(1 + drafted), and the seconds of a draft, at T=0 behind the same context."""
    verifying = verification_costs(target, rows, context, [1, 1 + drafted])
    texts = torch.ones(rows, context + ROUNDS + 2, dtype=torch.long, device=target.device)
    return verifying, drafting_seconds(target, proposer, texts, context, depth, repeats=ROUNDS)[0]


def _weights_bytes(part: Part, width: int) -> int:
    if getattr(part.model.config, "quantization_config", None) is not None:  # packed numbers stay packed
        return sum(file.stat().st_size for file in Path(part.path).glob("*.safetensors"))
    return part.model.num_parameters() * width
