"""EAGLE-3 heads in the formats that servers load.

`own`, `vllm` and `sglang` hold `model.safetensors` with the names of the EAGLE authors; `speculators` has names and a
config.json of its own, with the target's embeddings, which the library takes from there. The features after n
of the target's layers are n in vLLM 0.32 (`eagle_aux_hidden_state_layer_ids`, first looked up at the top), as in ours.
SGLang 0.5.23 reads only `eagle_config`, and adds one to it for Llama, Qwen, Mistral and Gemma
(`set_eagle3_layers_to_capture`): there they are n − 1. So a config with both is right for both.
"""

import re
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.errors import InputError
from draftsmith.medusa.checkpoint_files import dtype_name, round_tensors
from draftsmith.medusa.eagle.config import SHAPE
from draftsmith.medusa.eagle.formats.importing import DEPTHS, import_eagle
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.kind import Eagle
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.medusa.formats import EMBEDDINGS, SIZES, HeadsFormats, speculators_fields
from draftsmith.train.kinds.export import ExportOptions, sglang_command, unserved_rotation, vllm_command

GAMMA = 4
"""The tokens that a server drafts in a round if nothing is said."""


def eagle_refusal(heads: EagleHeads, format: str, target: PreTrainedModel | None = None) -> str | None:
    """Return why a server's format cannot hold the heads, and the way out, or None."""
    config = heads.config
    if format == "own":
        return None
    if config.hidden_size != config.target_hidden_size:
        return f"hidden_size {config.hidden_size} with a target_hidden_size of {config.target_hidden_size}"
    if config.attention_bias:
        return "attention_bias, which vLLM takes for one after attention too; keep draftsmith's own format"
    if (reason := unserved_rotation(config.rope_parameters)) is not None:
        return f"{reason}; keep draftsmith's own format"
    if format == "speculators" and config.norm_before_fc and config.fc_norm:
        return "norm_before_fc with fc_norm, where speculators takes one; take vllm"
    if format != "sglang":
        return None
    if config.window_of(0) is not None:
        return "a window in its layer, which SGLang is not known to keep; take vllm"
    # SGLang 0.5.23, `models/llama_eagle3.py`, has only one residual path, and skips `fc` if the features are as wide as
    # the state; its `models/llama.py` does not capture the output of the last layer.
    if config.norm_before_residual:
        return "norm_before_residual; take vllm, or train with --norm_before_residual false"
    if len(heads.layer_ids) == 1:
        return "features of one depth, which SGLang does not fuse; take vllm"
    layers = None if target is None else len(decoder_layers(target))
    if heads.layer_ids[-1] == layers:
        return f"features after the last of {layers} layers, which SGLang does not take; take vllm"
    return None


def server_config(heads: EagleHeads, format: str) -> dict[str, Any]:
    """Return config.json as in the speculators library, or with all fields that vLLM and SGLang look up.

    It suits transformers 4 and 5.
    """
    config = heads.config
    rope = dict(config.rope_parameters)
    # Version 5 of the library reads rope_parameters, version 4 reads rope_theta and rope_scaling.
    turns = {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        turns["rope_scaling"] = rope
    depths = heads.layer_ids
    layer = {
        "model_type": "llama",
        **{name: getattr(config, name) for name in (*SIZES, "mlp_bias")},
        **turns,
        "tie_word_embeddings": False,
    }
    windowed = config.window_of(0) is not None
    if windowed or format == "speculators":  # vLLM looks up a layer's window by its kind
        layer |= {name: getattr(config, name) for name in ("layer_types", "sliding_window")}
    if len(depths) != 3 or format != "speculators":
        # Without it vLLM takes the number of depths only from eagle_config, or assumes three.
        layer["num_aux_hidden_states"] = len(depths)
    outer = {name: getattr(config, name) for name in ("draft_vocab_size", *SHAPE)} | {DEPTHS: depths}
    if format == "speculators":
        fields = speculators_fields(heads, "eagle3", "Eagle3DraftModel", GAMMA)
        return fields | outer | {"transformer_layer_config": layer | {"use_sliding_window": windowed}}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        **outer,
        **{name: getattr(config, name) for name in ("target_hidden_size", "base_model_name_or_path")},
        "eagle_config": {"use_aux_hidden_state": True, DEPTHS: [depth - 1 for depth in depths]},
        "torch_dtype": dtype_name(heads.dtype),
    }


def tensors(heads: EagleHeads, format: str, target: PreTrainedModel | None) -> dict[str, Tensor]:
    """Return the tensors by a format's names, for speculators with the target's embeddings."""
    tensors = dict(heads.state_dict())
    if format != "speculators":
        return tensors
    if target is None:
        raise InputError("target: expected it for speculators' files, which hold its embeddings, found none")
    embed: Any = target.get_input_embeddings()
    embeddings = round_tensors({EMBEDDINGS: embed.weight}, heads.dtype)
    return embeddings | {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items()}


def notes(heads: EagleHeads, format: str, target: PreTrainedModel | None) -> list[str]:
    """Return what is not obvious of the files."""
    config = heads.config
    if format in ("own", "speculators") or config.draft_vocab_size == config.vocab_size:
        return []
    return [f"it drafts {config.draft_vocab_size} of {config.vocab_size} tokens, cut there too (d2t)"]


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
    names=Eagle.formats,
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
