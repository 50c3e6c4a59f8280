"""Block drafters in the formats that servers and other trainers load.

| format        | config.json                  | loaded by                                                           |
|---------------|------------------------------|---------------------------------------------------------------------|
| `own`         | `Qwen3DSparkModel`           | this project                                                        |
| `vllm`        | DFlash: z-lab's, SpecForge's | vLLM (`dflash`), and SGLang if the draft vocabulary is the whole one |
|               | DFlash 2: z-lab's            | vLLM's runner for GPUs (`dflash`)                                   |
|               | DSpark: DeepSpec's           | vLLM's runner for GPUs (`dspark`)                                   |
| `speculators` | all, its fields              | the speculators library, vLLM                                       |

All count the target's layers from 0, by their outputs, except speculators, which counts the layers before, as vLLM's
`eagle_aux_hidden_state_layer_ids` does (vLLM 0.32, `transformers_utils/configs/speculators/algos.py`). DFlash's blocks
have one slot more than guesses. A DSpark drafter whose anchor guesses nothing has `sample_from_anchor: false` in
speculators, and `dspark_bonus_anchor` in vLLM.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa.base import SLIDING
from draftsmith.medusa.block.formats.importing import import_block
from draftsmith.medusa.block.heads import family, foreign_fields, foreign_names, side_width
from draftsmith.medusa.block.heads.base import BlockHead
from draftsmith.medusa.block.heads.dspark import unserved
from draftsmith.medusa.block.kind import Block
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.block.proposer import BlockProposer
from draftsmith.medusa.checkpoint_files import dtype_name, round_tensors
from draftsmith.medusa.formats import SIZES, HeadsFormats, speculators_fields
from draftsmith.train.kinds.export import ExportOptions, sglang_command, unserved_rotation, vllm_command
from draftsmith.train.losses.output_head import OutputHead


def is_dflash(config: Any) -> bool:
    """Return whether a drafter is DFlash's: no head that adds logits, and an anchor that guesses nothing."""
    return not side_width(config) and not config.anchor_guesses


def _dflash2_refusal(drafter: BlockDrafter, format: str) -> str | None:
    """Return why no file holds a drafter with one of DFlash 2's parts, or None."""
    config = drafter.config
    if not config.conv_kernel_size:
        return "a candidate selector without convolutions, which no file of DFlash 2 says; train with conv_kernel_size"
    if not config.selector_rank:
        return "convolutions without a candidate selector, which no other tool knows; train with a selector_rank"
    if config.anchor_guesses:
        return (
            "a candidate selector, and an anchor that guesses: servers know none such; train with anchor_guesses false"
        )
    if drafter.token_map is not None:
        return "a cut vocabulary, among which other tools' candidate selectors do not choose; take own"
    if drafter.confidence_head is not None:
        return "a confidence head, which DFlash 2 does not have; train without confidence"
    if format == "sglang":
        return "a candidate selector, which SGLang 0.5.23 is not known to load; take vllm"
    return None


def block_refusal(drafter: BlockDrafter, format: str, *_: Any) -> str | None:
    """Return why a format cannot hold a drafter, and the way out, or None."""
    config = drafter.config
    if format == "own":
        return None
    for head in drafter.children():
        if isinstance(head, BlockHead) and head.foreign is None:
            return f"a {head.title}, which no other tool knows; take own"
    name = family(config)
    if config.selector_rank or config.conv_kernel_size:
        if (reason := _dflash2_refusal(drafter, format)) is not None:
            return reason
    elif name == "Domino":
        if format != "sglang":
            return f"Domino's {drafter.side_head.title}, which vLLM 0.32 and speculators 0.9 do not know; take sglang"
        if drafter.confidence_head is not None:
            return "a confidence head, which SpecForge's Domino does not have; train without confidence"
        if config.pure_draft_prefix_len != 1:
            return f"a pure_draft_prefix_len of {config.pure_draft_prefix_len}, where SGLang decodes 1 alone; take own"
    elif (reason := unserved(config)) is not None:
        return reason
    if (reason := unserved_rotation(config.rope_parameters)) is not None:
        return f"{reason}; keep draftsmith's own format"
    if config.is_causal is not None and format == "vllm" and not config.selector_rank and not is_dflash(config):
        return f"is_causal {config.is_causal}, which DeepSpec's files cannot say; take speculators"
    if config.is_causal and format == "speculators":
        return "is_causal in layers of full_attention, which speculators does not have; take vllm"
    other = "own" if name == "Domino" else "vllm"
    if format == "sglang" and (config.sliding_window or config.is_causal):
        return f"causal blocks or layers with a window, which SGLang is not known to keep; take {other}"
    if format == "sglang" and not is_dflash(config) and name != "Domino":
        return "DSpark's heads, which SGLang 0.5.23 does not load; take vllm"
    if format == "sglang" and drafter.token_map is not None:
        return f"a cut vocabulary, where SGLang takes the target's head; take {other}"
    return None


def tensors(drafter: BlockDrafter, format: str, target: PreTrainedModel | None) -> dict[str, Tensor]:
    """Return the drafter's tensors, and with a cut vocabulary the target's rows: servers do not cut its head."""
    names = foreign_names()
    tensors = {names.get(name, name): tensor for name, tensor in drafter.state_dict().items()}
    if (ids := drafter.token_map) is not None:
        tensors |= round_tensors(_rows(None if target is None else drafter.head_for(target)), drafter.dtype)
        if format == "speculators":
            drafted = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
            tensors["t2d"] = drafted.index_fill(0, ids.cpu(), True)
    return tensors


def _rows(head: OutputHead | None) -> dict[str, Tensor]:
    """Return the target's rows of a cut vocabulary, or raise an InputError if its head is more than these rows."""
    if head is None:
        raise InputError(
            "target: expected it with a cut vocabulary, because servers read these rows of its head, found none"
        )
    extras = [name for name, part in (("bias", head.bias), ("soft cap", head.softcap)) if part is not None]
    if head.scale != 1.0:
        extras.append("scale")
    if extras:
        raise InputError(f"target: expected a head without {extras[0]}, which these files cannot hold, found one")
    return {"lm_head.weight": head.weight}


def _layer(drafter: BlockDrafter) -> dict[str, Any]:
    """Return the fields of Qwen3's layers, for transformers 4 and 5."""
    config = drafter.config
    # Version 5 of the library reads rope_parameters, version 4 reads rope_theta and rope_scaling.
    rope = dict(config.rope_parameters)
    turns = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        turns["rope_scaling"] = rope
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SIZES},
        **turns,
        **{name: getattr(config, name) for name in ("layer_types", "sliding_window", "use_sliding_window")},
        "tie_word_embeddings": False,
    }


def config_fields(drafter: BlockDrafter, format: str) -> dict[str, Any]:
    """Return config.json as in speculators, z-lab's DFlash, or DeepSpec's DSpark."""
    if format == "speculators":
        return _speculators(drafter)
    config = drafter.config
    inputs = {"target_layer_ids": config.target_layer_ids, "mask_token_id": config.mask_token_id}
    fields = _layer(drafter) | {
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "base_model_name_or_path": config.base_model_name_or_path,
        "torch_dtype": dtype_name(drafter.dtype),
    }
    name = family(config)
    if name == "Domino":
        # SGLang reads the rank at either place, and requires that they agree.
        fields["emb_dim"] = config.emb_dim
        inputs["shift_label"] = config.anchor_guesses
    if is_dflash(config) or name in ("DFlash2", "Domino"):
        # vLLM takes `causal` for all layers; without it those with a window are causal, and others are not.
        inputs |= {} if config.is_causal is None else {"causal": config.is_causal}
        architecture = "DFlash2DraftModel" if name == "DFlash2" else "DFlashDraftModel"
        return {"architectures": [architecture], **fields, "dflash_config": inputs | _heads(config, name)}
    return {"architectures": ["Qwen3DSparkModel"], **fields, **inputs, **_heads(config, "DSpark")} | {
        "sample_from_anchor": config.anchor_guesses,
        "dspark_bonus_anchor": not config.anchor_guesses,
    }


def _heads(config: Any, name: str) -> dict[str, Any]:
    return {field: getattr(config, field, value) for field, value in foreign_fields(name).items()}


def _speculators(drafter: BlockDrafter) -> dict[str, Any]:
    """Return config.json as in the speculators library."""
    config = drafter.config
    name = family(config)
    return speculators_fields(drafter, name.lower(), f"{name}DraftModel", config.guesses) | {
        "transformer_layer_config": _layer(drafter),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": drafter.layer_ids,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_guesses,
        # vLLM 0.32 takes it for DFlash's layers of full attention too, which the library lets see the whole block.
        "sliding_window_non_causal": config.is_causal is False or SLIDING not in config.layer_types,
        **_heads(config, name),
    }


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
        # SGLang counts the anchor in: as many as the slots of a block.
        return [sglang_command(name, speculative["model"], drafter.config.block_size - 1, "DFLASH")]
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
    names=Block.formats,
    read=import_block,
    refusal=block_refusal,
    fields=config_fields,
    described=_described,
    speculative=_speculative,
    proposer=lambda drafter, draft_length: BlockProposer(drafter),
    launch=_launch,
    notes=_notes,
    noun="a drafter",
    tensors=tensors,
    reads_target=lambda drafter, format: drafter.token_map is not None and format != "own",
)
