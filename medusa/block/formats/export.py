"""`draftsmith export` of block drafters: written for servers, or read from other tools."""

from typing import Any

from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa.block.formats import writing
from draftsmith.medusa.block.formats.importing import import_block
from draftsmith.medusa.block.heads import family
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.proposer import BlockProposer
from draftsmith.medusa.formats import HeadsFormats
from draftsmith.train.kinds.export import ExportOptions, sglang_command, vllm_command


def _notes(drafter: BlockDrafter, format: str, target: PreTrainedModel | None) -> list[str]:
    config, notes = drafter.config, []
    if format == "sglang" and config.anchor_guesses:
        notes.append(f"SGLang drafts {config.block_size - 1} of its {config.guesses} tokens")
    if format != "own" and len(set(config.layer_types)) > 1:
        notes.append("vLLM 0.32 decodes with layers of both kinds only with VLLM_USE_V2_MODEL_RUNNER=1")
        if format == "speculators" and config.is_causal is None and "DFlash" in family(config):
            notes.append("no slot sees those after it in layers of full_attention either; take vllm to serve it")
    if drafter.token_map is not None:
        notes.append(f"it drafts {config.draft_vocab_size} of {config.vocab_size} tokens (d2t)")
    return notes


def _described(drafter: BlockDrafter) -> str:
    config = drafter.config
    layers = ", ".join(map(str, config.target_layer_ids))
    what = f"{family(config)} drafter of {config.guesses} tokens, token {config.mask_token_id} for a mask"
    return f"{what}, on the outputs of the target's layers {layers}, counted from 0{config.windows}"


def _launch(
    name: str, speculative: dict[str, Any], drafter: BlockDrafter, format: str, target: PreTrainedModel | None
) -> list[str]:
    if format == "sglang":
        return [sglang_command(name, speculative["model"], drafter.config.block_size, "DFLASH")]
    return [vllm_command(name, speculative)] if format in ("vllm", "speculators") else []


def _speculative(config: ExportOptions, drafter: BlockDrafter) -> dict[str, Any]:
    """Require whole blocks: servers feed one slot for each drafted token, and all slots see each other."""
    most = drafter.config.guesses
    if config.draft_length not in (None, most):
        raise InputError(
            f"draft_length: expected the {most} tokens of a block, whose slots all see each other, found "
            f"{config.draft_length}"
        )
    method = (drafter.side_head and drafter.side_head.method) or family(drafter.config).lower()
    return {"method": method, "model": str(config.output), "num_speculative_tokens": most}


FORMATS = HeadsFormats(
    names=writing.BLOCK_FORMATS,
    read=import_block,
    refusal=writing.block_refusal,
    fields=writing.config_fields,
    described=_described,
    speculative=_speculative,
    proposer=lambda drafter, draft_length: BlockProposer(drafter),
    launch=_launch,
    notes=_notes,
    noun="a drafter",
    tensors=writing.tensors,
    reads_target=lambda drafter, format: drafter.token_map is not None and format != "own",
)
