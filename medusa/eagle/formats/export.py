"""`draftsmith export` of EAGLE-3 heads: written for servers, or read from other tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.decode import Proposer
from draftsmith.decode.cache.features import decoder_layers
from draftsmith.medusa.checkpoint_files import load_target
from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.eagle.formats.writing import export_eagle
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.train.kinds.export import ExportOptions, Served
from draftsmith.train.models import DTYPES, empty_model
from draftsmith.train.runs import sglang_command, vllm_command

GAMMA = 4
WRITTEN = "read back by another process with the same logits"


def export(config: ExportOptions, source: str) -> list[str]:
    """Write heads for a server, and return lines to print, the launch line last; raise an InputError on failure."""
    format, output = str(config.format), str(config.output)
    layers = None
    heads = import_eagle(source)
    if config.target is not None:
        model = empty_model(config.target, field="target", trust_remote_code=config.trust_remote_code)
        heads.check_fits(model)
        # SGLang does not capture the last layer's output: `eagle_refusal` needs the number of layers.
        layers = len(decoder_layers(model))
        heads.config.base_model_name_or_path = config.target
    card = Path(source) / "README.md"
    readme = card.read_text(encoding="utf-8") if card.is_file() else None
    notes = export_eagle(heads, output, format, config.dtype, readme, layers)
    target = heads.config.base_model_name_or_path or "TARGET"
    lines = [f"# {note}" for note in [f"wrote {output}, {WRITTEN}", *notes]]
    if format == "vllm":
        return [*lines, vllm_command(target, speculative_config(config))]
    if format == "sglang":
        return [*lines, sglang_command(target, output, config.draft_length or GAMMA, "EAGLE3")]
    return lines


def import_from(config: ExportOptions, source: str) -> list[str]:
    """Write another tool's heads in our format, and return lines to print; raise an InputError on failure."""
    output, target = str(config.output), load_target(config.target, config.trust_remote_code)
    heads = import_eagle(source, config.format, target)
    heads.config.base_model_name_or_path = config.target or heads.config.base_model_name_or_path
    export_eagle(heads, output, "own", config.dtype)
    depths = ", ".join(map(str, heads.layer_ids))
    return [f"# wrote {output}, {WRITTEN}", f"# EAGLE-3 heads on the target's features after layers {depths}"]


def served(config: ExportOptions, source: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    """Return vLLM's config for the written heads, and a function from the target to the proposer that must agree."""
    heads: Any = import_eagle(source)

    def drafter(model: PreTrainedModel) -> Proposer:
        rounded = heads if config.dtype is None else heads.to(DTYPES[config.dtype])
        return EagleProposer(rounded.to(model.device, model.dtype))

    return [Served("the heads", speculative_config(config))], drafter


def speculative_config(config: ExportOptions) -> dict[str, str | int]:
    """Return vLLM's speculative config for the written heads."""
    length = config.draft_length or GAMMA
    return {"method": "eagle3", "model": str(config.output), "num_speculative_tokens": length}
