"""`draftsmith export` of EAGLE-3 heads: written for servers, or read from other tools."""

from typing import Any

from transformers import PreTrainedModel

from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.eagle.formats.writing import EAGLE_FORMATS, GAMMA, eagle_refusal, notes, server_config, tensors
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.medusa.formats import HeadsFormats
from draftsmith.train.kinds.export import ExportOptions, sglang_command, vllm_command


def _described(heads: EagleHeads) -> str:
    depths = ", ".join(map(str, heads.layer_ids))
    return f"EAGLE-3 heads on the target's features after layers {depths}{heads.config.windows}"


def _speculative(config: ExportOptions, heads: EagleHeads) -> dict[str, Any]:
    length = config.draft_length or GAMMA
    return {"method": "eagle3", "model": str(config.output), "num_speculative_tokens": length}


def _launch(
    name: str, speculative: dict[str, Any], heads: EagleHeads, format: str, target: PreTrainedModel | None
) -> list[str]:
    if format == "sglang":
        return [sglang_command(name, speculative["model"], speculative["num_speculative_tokens"], "EAGLE3")]
    return [vllm_command(name, speculative)] if format in ("vllm", "speculators") else []


FORMATS = HeadsFormats(
    names=EAGLE_FORMATS,
    read=import_eagle,
    refusal=eagle_refusal,
    fields=server_config,
    described=_described,
    speculative=_speculative,
    proposer=lambda heads, draft_length: EagleProposer(heads),
    launch=_launch,
    notes=notes,
    tensors=tensors,
    reads_target=lambda heads, format: format == "speculators",
)
