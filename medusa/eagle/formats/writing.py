"""EAGLE-3 heads in the formats that servers load.

All formats hold `model.safetensors` under the names of the EAGLE authors; their config.json differ. Where a target has
passed n of its layers, vLLM 0.32 calls it n (`eagle_aux_hidden_state_layer_ids`, first looked for at the top), as we
do. SGLang's Llama, Qwen, Mistral and Gemma call it n − 1: they add one to what `eagle_config` says
(0.5.23, `set_eagle3_layers_to_capture`), and look nowhere else. So a config that says both is right in both.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, device
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import CONFIG, WEIGHTS, check_dtype, dtype_name, rounded
from draftsmith.medusa.eagle.formats.proof import prove_eagle
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.train.kinds.export import check_format, put_in_place
from draftsmith.train.models import DTYPES

EAGLE_FORMATS = ("own", "vllm", "sglang")


def eagle_refusal(heads: EagleHeads, format: str, layers: int | None = None) -> str | None:
    """Return what of the heads a server's format cannot say, and the way out; None where it can say all.

    Args:
        heads: any.
        format: one of `EAGLE_FORMATS`.
        layers: how many the target has, where that is known.
    """
    config = heads.config
    if format == "own":
        return None
    if config.hidden_size != config.target_hidden_size:
        return f"hidden_size {config.hidden_size} beside a target_hidden_size of {config.target_hidden_size}"
    if config.attention_bias:
        return "attention_bias, which vLLM takes for one behind attention too; keep draftsmith's own format"
    if format == "vllm":
        return None
    # SGLang 0.5.23, `models/llama_eagle3.py`: no other residual path; `fc` is left out where the features are as wide
    # as the state. `models/llama.py`: what leaves the last layer is not captured.
    if config.norm_before_residual:
        return "norm_before_residual; take vllm"
    if len(heads.layer_ids) == 1:
        return "features of one depth, which SGLang does not fuse; take vllm"
    if heads.layer_ids[-1] == layers:
        return f"features behind the last of {layers} layers, which SGLang does not take; take vllm"
    return None


def export_eagle(
    heads: EagleHeads,
    directory: str | Path,
    format: str,
    dtype: str | None = None,
    readme: str | None = None,
    layers: int | None = None,
) -> list[str]:
    """Write heads in a format, and prove that another process computes the same logits from it.

    Args:
        heads: of any device; they stay as they are.
        directory: new, or empty.
        format: one of `EAGLE_FORMATS`.
        dtype: of the written weights; that of the heads if None.
        readme: a model card, written as README.md.
        layers: how many the target has, where that is known.

    Returns:
        Notes for the reader, a line each.

    Raises:
        InputError: an unknown format or dtype, heads that the format cannot hold or the dtype overflows, weights that
            are not finite, or a directory that holds something or cannot be written in.
        RuntimeError: a reader finds other logits in what was written; the directory is removed.
    """
    directory = Path(directory)
    reason = eagle_refusal(heads, check_format(format, EAGLE_FORMATS), layers)
    if reason is not None:
        raise InputError(f"format: expected heads that {format} can hold, found {reason}")
    kind = heads.dtype if dtype is None else DTYPES[check_dtype(dtype)]
    adapted = assembled_eagle(heads.config, rounded(heads.state_dict(), kind))
    with put_in_place(directory) as aside:
        if format == "own":
            adapted.save_pretrained(aside)
        else:
            (aside / CONFIG).write_text(json.dumps(_config(adapted), indent=2) + "\n", encoding="utf-8")
            save_file(adapted.state_dict(), aside / WEIGHTS, metadata={"format": "pt"})
        if readme is not None:
            (aside / "README.md").write_text(readme, encoding="utf-8")
        prove_eagle(adapted, aside)
    return _notes(heads, format, layers)


def _config(heads: EagleHeads) -> dict[str, Any]:
    """Return config.json, in which vLLM and SGLang find all that they look for, with transformers 4 and 5."""
    config = heads.config
    sizes = (
        "hidden_size target_hidden_size intermediate_size vocab_size draft_vocab_size num_hidden_layers "
        "num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps hidden_act "
        "attention_bias mlp_bias norm_before_residual norm_before_fc fc_norm norm_output base_model_name_or_path"
    )
    rope = dict(config.rope_parameters)
    # The fifth version of the library reads rope_parameters, the fourth rope_theta beside rope_scaling.
    turns = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        turns["rope_scaling"] = rope
    depths = heads.layer_ids
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in sizes.split()},
        **turns,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": depths,
        # Without it vLLM takes the number of depths from eagle_config alone, or for three.
        "num_aux_hidden_states": len(depths),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in depths],
        },
        "torch_dtype": dtype_name(heads.dtype),
    }


def _notes(heads: EagleHeads, format: str, layers: int | None) -> list[str]:
    if format == "own":
        return []
    config, notes = heads.config, []
    other = {"vllm": "sglang", "sglang": "vllm"}[format]
    reason, server = eagle_refusal(heads, other, layers), {"vllm": "vLLM 0.32", "sglang": "SGLang 0.5.23"}[other]
    read = f"{server} loads the same directory"
    notes.append(read if reason is None else f"{server} does not load it: {reason.partition(';')[0]}")
    if config.draft_vocab_size < config.vocab_size:
        notes.append(f"it drafts {config.draft_vocab_size} of {config.vocab_size} tokens, cut there too (d2t)")
    return notes


def assembled_eagle(config: Any, tensors: dict[str, Tensor]) -> EagleHeads:
    """Return heads of these tensors, under our names, in eval mode; nothing is copied."""
    with device("meta"):
        heads = EagleHeads(config)
    heads.load_state_dict(tensors, assign=True)
    heads.rotary = LlamaRotaryEmbedding(config)  # its frequencies are computed, and stored nowhere
    return heads.eval()
