"""`draftsmith export` of Medusa heads: written for other tools, or read from them."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.tree import Tree
from draftsmith.medusa.checkpoint_files import load_target
from draftsmith.medusa.heads.card import card
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.medusa.heads.formats.writing import VLLM_READS, check_format, export_heads, refusal, written_bytes
from draftsmith.medusa.heads.proposer import MedusaProposer
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.kinds.export import ExportOptions, Served, vocabulary_override
from draftsmith.train.kinds.quantities import size
from draftsmith.train.models import DTYPES, empty_model
from draftsmith.train.runs import vllm_command


def export(config: ExportOptions, source: str) -> list[str]:
    """Write heads in a format, and return lines to print; the last one without a # launches the server."""
    format, output = str(config.format), str(config.output)
    heads = import_heads(source, "own")
    overrides: dict[str, int] = {}
    model = None
    if config.target is not None:
        model = empty_model(config.target, field="target", trust_remote_code=config.trust_remote_code)
        heads.check_fits(model)
        overrides = vocabulary_override(model.config)
        heads.config.base_model_name_or_path = config.target
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    if count > heads.config.num_heads:
        raise InputError(f"draft_length: expected at most the {heads.config.num_heads} heads, found {count}")
    if refusal(heads, check_format(format), config.by_rank) is None:
        written = f"# writes {size(written_bytes(heads, format, config.dtype))} of weights to {output}"
        if model is not None:
            written += f"; the target's own take {size(sum(p.numel() * p.element_size() for p in model.parameters()))}"
        print(written, flush=True)  # at once: a disk may be too small for it
    readme = str(card(heads, format, KeptStep.left_in(Path(source))))
    notes = export_heads(heads, output, format, config.dtype, by_rank=config.by_rank, readme=readme)
    target = heads.config.base_model_name_or_path or "TARGET"
    lines = [f"# {note}" for note in [f"wrote {output}, read back by another process with the same logits", *notes]]
    if overrides and format in VLLM_READS:
        lines.append(
            "# vLLM 0.32 looks for vocab_size at the top of the target's config, which has it only in its text_config: "
            "hence the override"
        )
    speculative = {"method": "medusa", "model": output, "num_speculative_tokens": count}
    vllm = vllm_command(target, speculative, overrides)
    if format == "vllm":
        return [*lines, "# SGLang loads no Medusa heads", vllm]
    if format == "fasterdecoding":
        return [*lines, f"# {vllm}", f"python -m medusa.inference.cli --model {shlex.quote(output)}"]
    if format == "modelopt":
        return [*lines, "# load the target, convert it with ModelOpt's medusa mode, then load these tensors into it"]
    return lines


def import_from(config: ExportOptions, source: str) -> list[str]:
    """Write another tool's heads in our format, and return lines to print; raise an InputError on failure."""
    output, target = str(config.output), load_target(config.target, config.trust_remote_code)
    heads = import_heads(source, config.format, target)
    heads.config.base_model_name_or_path = config.target or heads.config.base_model_name_or_path
    notes = export_heads(heads, output, "own", config.dtype, readme=str(card(heads)))
    written = f"wrote {output}: {heads.config.num_heads} heads, read back by another process with the same logits"
    return [f"# {note}" for note in [written, *notes]]


def served(config: ExportOptions, source: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    """Return vLLM's config for the written heads, and a function from the target to the proposer that must agree."""
    heads: Any = import_heads(source, "own")
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    speculative = {"method": "medusa", "model": str(config.output), "num_speculative_tokens": count}

    def drafter(model: PreTrainedModel) -> Proposer:
        rounded = heads if config.dtype is None else heads.to(DTYPES[config.dtype])
        return MedusaProposer(rounded.to(model.device, model.dtype), Tree.chain(count))

    return [Served("the heads", speculative)], drafter
