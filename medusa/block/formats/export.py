"""`draftsmith export` of block drafters: written for servers, or read from other tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposer
from draftsmith.medusa.block.formats.importing import import_block
from draftsmith.medusa.block.formats.writing import export_block, is_dflash
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.proposer import BlockProposer
from draftsmith.medusa.checkpoint_files import load_target
from draftsmith.train.kinds.export import ExportOptions, Served
from draftsmith.train.models import DTYPES, empty_model
from draftsmith.train.runs import sglang_command, vllm_command

FIRST_KEY_NORM = (
    "vLLM 0.32 on CPU drafts otherwise with several layers "
    "(it norms every layer's keys of the text by the weights of the first one's norm)"
)
"""Observed in vLLM: for the weights of several layers its `rms_norm` for CPUs uses the first layer's."""
WRITTEN = "read back by another process with the same numbers"


def export(config: ExportOptions, source: str) -> list[str]:
    """Write a drafter for a server, and return lines to print, the launch line last; raise an InputError on failure."""
    format, output, head = str(config.format), str(config.output), None
    drafter = BlockDrafter.from_pretrained(source)
    if config.target is not None:
        drafter.check_fits(empty_model(config.target, field="target", trust_remote_code=config.trust_remote_code))
        drafter.config.base_model_name_or_path = config.target
        if drafter.token_map is not None and format != "own":
            # Servers read the rows of a cut vocabulary from the file, so the target's weights are needed.
            head = drafter.head_for(cast(PreTrainedModel, load_target(config.target, config.trust_remote_code)))
    _check_length(config, drafter)
    card = Path(source) / "README.md"
    readme = card.read_text(encoding="utf-8") if card.is_file() else None
    export_block(drafter, output, format, config.dtype, readme, head)
    target = drafter.config.base_model_name_or_path or "TARGET"
    lines = [f"# wrote {output}, {WRITTEN}"]
    if format != "own" and not is_dflash(drafter.config):
        lines.append("# vLLM 0.32 decodes with DSpark's heads only on GPUs")
    if drafter.token_map is not None:
        lines.append(f"# it drafts {drafter.config.draft_vocab_size} of {drafter.config.vocab_size} tokens (d2t)")
    if format in ("vllm", "speculators"):
        return [*lines, vllm_command(target, speculative_config(config, drafter))]
    if format == "sglang":
        return [*lines, sglang_command(target, output, drafter.config.block_size, "DFLASH")]
    return lines


def import_from(config: ExportOptions, source: str) -> list[str]:
    """Write another tool's drafter in our format, and return lines to print; raise an InputError on failure."""
    target = load_target(config.target, config.trust_remote_code)
    drafter = import_block(source, config.format, target)
    drafter.config.base_model_name_or_path = config.target or drafter.config.base_model_name_or_path
    export_block(drafter, str(config.output), "own", config.dtype)
    layers = ", ".join(map(str, drafter.config.target_layer_ids))
    what = f"a {'DFlash' if is_dflash(drafter.config) else 'DSpark'} drafter of {drafter.config.guesses} tokens"
    return [
        f"# wrote {config.output}, {WRITTEN}",
        f"# {what}, on the outputs of the target's layers {layers}, counted from 0",
    ]


def served(config: ExportOptions, source: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    """Return vLLM's config for the written drafter, and a function from the target to the proposer that must agree."""
    drafter: Any = BlockDrafter.from_pretrained(source)

    def proposer(model: PreTrainedModel) -> Proposer:
        rounded = drafter if config.dtype is None else drafter.to(DTYPES[config.dtype])
        return BlockProposer(rounded.to(model.device, model.dtype))

    layers: Any = drafter.layers
    # The engine's fault shows only if the layers' norms differ.
    norms = [layer.self_attn.k_norm.weight for layer in layers]
    differ = any(not torch.equal(norm, norms[0]) for norm in norms)
    return [Served("the drafter", speculative_config(config, drafter), FIRST_KEY_NORM if differ else "")], proposer


def speculative_config(config: ExportOptions, drafter: BlockDrafter) -> dict[str, str | int]:
    """Return vLLM's speculative config for the written drafter."""
    method = "dflash" if is_dflash(drafter.config) else "dspark"
    return {"method": method, "model": str(config.output), "num_speculative_tokens": drafter.config.guesses}


def _check_length(config: ExportOptions, drafter: BlockDrafter) -> None:
    """Require whole blocks: servers feed one slot for each drafted token, and all slots see each other."""
    most = drafter.config.guesses
    if config.draft_length not in (None, most):
        raise InputError(
            f"draft_length: expected the {most} tokens of a block, whose slots all see each other, found "
            f"{config.draft_length}"
        )
