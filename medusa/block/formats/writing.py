"""Block drafters in the formats that servers and other trainers load.

| format        | config.json                       | loads it                                              |
|---------------|-----------------------------------|-------------------------------------------------------|
| `own`         | `Qwen3DSparkModel`                | this project                                          |
| `vllm`        | DFlash: z-lab's, SpecForge's      | vLLM (`dflash`), where the draft vocabulary is whole SGLang too |
|               | DSpark: DeepSpec's                | vLLM's runner for GPUs (`dspark`)                     |
| `speculators` | both, in its own fields           | the speculators library, vLLM                         |

All count the target's layers from 0, by their outputs, but speculators: it says after how many layers features are
taken, as vLLM's `eagle_aux_hidden_state_layer_ids` does (vLLM 0.32, `transformers_utils/configs/speculators/algos.py`).
DFlash's blocks have one slot more than they guess tokens. A drafter with a Markov head whose anchor guesses nothing is
what speculators calls `sample_from_anchor: false`, and vLLM `dspark_bonus_anchor`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.decode.errors import InputError
from draftsmith.medusa.block.formats.proof import prove_block
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.checkpoint_files import CONFIG, WEIGHTS, check_dtype, dtype_name, rounded
from draftsmith.train.kinds.export import check_format, put_in_place
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.models import DTYPES

BLOCK_FORMATS = ("own", "vllm", "sglang", "speculators")
SIZES = [
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
]
MARKOV = "vanilla"
"""The Markov head that we have, by DeepSpec's name."""


def is_dflash(config: Any) -> bool:
    """Say whether a drafter is DFlash's: no Markov head, and an anchor that guesses nothing."""
    return not config.markov_rank and not config.anchor_guesses


def block_refusal(drafter: BlockDrafter, format: str) -> str | None:
    """Return what of a drafter a format cannot say, and the way out; None where it can say all.

    Args:
        drafter: any.
        format: one of `BLOCK_FORMATS`.
    """
    config = drafter.config
    if format == "own":
        return None
    if not config.markov_rank and config.anchor_guesses:
        return "an anchor that guesses, and no Markov head: servers know none such; train with a markov_rank"
    if is_dflash(config) and config.enable_confidence_head:
        return "a confidence head, and no Markov head; train without confidence"
    if format == "sglang" and not is_dflash(config):
        return "DSpark's heads, which SGLang 0.5.23 does not load; take vllm"
    if format == "sglang" and drafter.token_map is not None:
        return "a cut vocabulary, where SGLang takes the target's head; take vllm"
    return None


def export_block(
    drafter: BlockDrafter,
    directory: str | Path,
    format: str,
    dtype: str | None = None,
    readme: str | None = None,
    head: OutputHead | None = None,
) -> None:
    """Write a drafter in a format, and prove that another process computes the same from it.

    Args:
        drafter: of any device; it stays as it is.
        directory: new, or empty.
        format: one of `BLOCK_FORMATS`.
        dtype: of the written weights; the drafter's if None.
        readme: a model card, written as README.md.
        head: the target's, of the tokens that are drafted; needed where these are not all, for servers then read it
            from the file.

    Raises:
        InputError: an unknown format or dtype, a drafter that the format cannot hold or the dtype overflows, weights
            that are not finite, or a directory that holds something or cannot be written in.
        RuntimeError: a reader finds something else in what was written; the directory is removed.
    """
    directory = Path(directory)
    reason = block_refusal(drafter, check_format(format, BLOCK_FORMATS))
    if reason is not None:
        raise InputError(f"format: expected a drafter that {format} can hold, found {reason}")
    kind = drafter.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    adapted = assembled_block(drafter.config, rounded(drafter.state_dict(), kind))
    with put_in_place(directory) as aside:
        if format == "own":
            adapted.save_pretrained(aside)
        else:
            tensors = dict(adapted.state_dict())
            if (ids := adapted.token_map) is not None:
                tensors |= rounded(_rows(head), kind)
                if format == "speculators":
                    known = torch.zeros(adapted.config.vocab_size, dtype=torch.bool)
                    tensors["t2d"] = known.index_fill(0, ids.cpu(), True)
            config = (_speculators if format == "speculators" else _server)(adapted)
            (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        if readme is not None:
            (aside / "README.md").write_text(readme, encoding="utf-8")
        prove_block(adapted, aside)


def _rows(head: OutputHead | None) -> dict[str, Tensor]:
    """Return the target's rows of a cut vocabulary, as the file has them.

    Raises:
        InputError: no head, or one that does more than a matrix product.
    """
    if head is None:
        raise InputError("target: expected it beside a cut vocabulary, whose rows of its head servers read, found none")
    more = [name for name, found in (("bias", head.bias), ("soft cap", head.softcap)) if found is not None]
    if head.scale != 1.0:
        more.append("scale")
    if more:
        raise InputError(
            f"target: expected a head without {more[0]} beside a cut vocabulary, as these files say it, found one"
        )
    return {"lm_head.weight": head.weight}


def _layer(drafter: BlockDrafter) -> dict[str, Any]:
    """Return the fields of Qwen3's layers, with transformers 4 and 5."""
    config = drafter.config
    rope = dict(config.rope_parameters)
    turns = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        turns["rope_scaling"] = rope
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SIZES},
        **turns,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def _server(drafter: BlockDrafter) -> dict[str, Any]:
    """Return config.json as z-lab's DFlash has it, or DeepSpec's DSpark."""
    config = drafter.config
    seen = {"target_layer_ids": config.target_layer_ids, "mask_token_id": config.mask_token_id}
    fields = _layer(drafter) | {
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "base_model_name_or_path": config.base_model_name_or_path,
        "torch_dtype": dtype_name(drafter.dtype),
    }
    if is_dflash(config):
        return {"architectures": ["DFlashDraftModel"], **fields, "dflash_config": seen}
    return {"architectures": ["Qwen3DSparkModel"], **fields, **seen, **_heads(config)} | {
        "sample_from_anchor": config.anchor_guesses,
        "dspark_bonus_anchor": not config.anchor_guesses,
    }


def _heads(config: Any) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": MARKOV,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def _speculators(drafter: BlockDrafter) -> dict[str, Any]:
    """Return config.json as the speculators library has it."""
    config = drafter.config
    name = "dflash" if is_dflash(config) else "dspark"
    return {
        "speculators_model_type": name,
        "architectures": ["DFlashDraftModel" if is_dflash(config) else "DSparkDraftModel"],
        "transformer_layer_config": _layer(drafter),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": drafter.layer_ids,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_guesses,
        **({} if is_dflash(config) else _heads(config)),
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.guesses}],
            "verifier": {"name_or_path": config.base_model_name_or_path or "", "architectures": []},
        },
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(drafter.dtype),
    }


def assembled_block(config: Any, tensors: dict[str, Tensor]) -> BlockDrafter:
    """Return a drafter of these tensors, under our names, in eval mode; nothing is copied."""
    with torch.device("meta"):
        drafter = BlockDrafter(config)
    drafter.load_state_dict(tensors, assign=True)
    drafter.rotary_emb = Qwen3RotaryEmbedding(config)  # its frequencies are computed, and stored nowhere
    return drafter.eval()
