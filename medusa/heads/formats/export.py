"""`draftsmith export` of Medusa heads: written for other tools, or read from them."""

from typing import Any

from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree
from draftsmith.medusa.formats import HeadsFormats
from draftsmith.medusa.heads.formats import writing
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.medusa.heads.formats.writing import refusal
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.proposer import MedusaProposer
from draftsmith.train.kinds.export import ExportOptions, vllm_command, vocabulary_override
from draftsmith.train.kinds.quantities import count_of


def _described(heads: MedusaHeads) -> str:
    return f"{count_of(heads.config.num_heads, 'head')}, {count_of(heads.config.num_hidden_layers, 'block')} each"


def _speculative(config: ExportOptions, heads: MedusaHeads) -> dict[str, Any]:
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    if count > heads.config.num_heads:
        raise InputError(f"draft_length: expected at most the {heads.config.num_heads} heads, found {count}")
    return {"method": "medusa", "model": str(config.output), "num_speculative_tokens": count}


def _launch(
    name: str, speculative: dict[str, Any], heads: MedusaHeads, format: str, target: PreTrainedModel | None
) -> list[str]:
    override = None if target is None else vocabulary_override(target.config)
    return [vllm_command(name, speculative, override)] if format == "vllm" else []


FORMATS = HeadsFormats(
    names=writing.FORMATS,
    read=import_heads,
    refusal=refusal,
    adapted=writing.adapt_heads,
    fields=writing.config_fields,
    notes=writing.notes,
    described=_described,
    speculative=_speculative,
    proposer=lambda heads, draft_length: MedusaProposer(heads, Tree.chain(draft_length)),
    launch=_launch,
)
