"""The first weights of EAGLE-3 heads: random, or the target's last layer on its deepest features.

Shape suffix: H hidden.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers, decoder_of
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.medusa.base import begin_nearly_uniform
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.target_states import gather_weights
from draftsmith.train.quantization import own_shapes, weight_of

SPREAD = 1.5
"""The standard deviation of a random layer's logits at most. With less it learns slowly: docs/log/eagle-start.md."""
LIKE_OURS = ("llama", "mistral")
"""Families whose decoder layer computes the same as the heads', if it has the same weights and no others."""
MAPS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
WIDE_MAPS = MAPS[:3]
"""The maps that also see an embedding, which comes first."""
NORMS = ("input_layernorm", "post_attention_layernorm")


@phase("making the heads")
def new_heads(config: EagleTrainingConfig, target: PreTrainedModel, token_map: Tensor | None = None) -> EagleHeads:
    """Return float32 heads for a training run, whose seed decides the random weights; see `of_target`."""
    torch.manual_seed(config.training.seed)  # the same weights on all processes
    shape = config.shape | {"sliding_window": config.sliding_window, "base_model_name_or_path": config.target}
    heads = EagleHeads.of_target(target, token_map, config.layer_ids or None, **shape).float()
    if choose_init(config, heads, target)[0] == "last_layer":
        begin_as_last_layer(heads, target)
    else:
        begin_nearly_uniform(heads.norm, heads.lm_head.weight, SPREAD)
    return heads


def choose_init(config: EagleTrainingConfig, heads: EagleHeads, target: PreTrainedModel) -> tuple[str, str]:
    """Return the first weights, "last_layer" or "random", and a clause for users, or raise an InputError."""
    reason = None if config.init == "random" else layer_mismatch(heads, target)
    if config.init == "last_layer" and reason is not None:
        raise InputError(f"init: expected auto or random for a target like this, found last_layer, and {reason}")
    if config.init == "auto" and reason is None:
        # The copy is exact only if its inputs and outputs are those of the target's layer.
        variants = [name for name, given in config.shape.items() if given]
        reason = f"{variants[0]}, which the target's last layer does not have" if variants else None
    if config.init == "random" or reason is not None:
        return "random", "begun at random" + (f", because {reason}" if reason else "")
    return "last_layer", "begun as the target's last layer"


def layer_mismatch(heads: EagleHeads, target: PreTrainedModel) -> str | None:
    """Return why the heads' layer cannot compute the same as the target's last, or None.

    Only shapes and the config decide, so tensors without data will do.
    """
    last, text = decoder_layers(target)[-1], target.config.get_text_config()
    shapes = own_shapes(last)
    expected = {f"{name}.weight" for name in (*MAPS, *NORMS)}
    if others := sorted(shapes.keys() - expected):
        return f"the target's last layer has {others[0]}, which Llama's does not have"
    for name in MAPS:
        ours = cast(nn.Linear, heads.midlayer.get_submodule(name))
        embedding = heads.config.hidden_size if name in WIDE_MAPS else 0
        if shapes.get(f"{name}.weight") != (ours.out_features, ours.in_features - embedding):
            return f"the target's last layer has another {name}"
    if text.model_type not in LIKE_OURS:
        return f"the layers of {text.model_type} are not known to compute what Llama's do"
    if text.hidden_act != heads.config.hidden_act:
        return f"the target's hidden_act is {text.hidden_act}, and Llama's {heads.config.hidden_act}"
    return None


@torch.no_grad()
def begin_as_last_layer(heads: EagleHeads, target: PreTrainedModel) -> None:
    """Copy the target's last layer to heads that can hold it (`layer_mismatch`), on the deepest features only.

    The weights of embeddings begin at zero, and are learned.
    """
    last: Any = decoder_layers(target)[-1]
    decoder = decoder_of(target)
    layer, size = heads.midlayer, heads.config.hidden_size
    with gather_weights(last, decoder):
        for name in MAPS:
            ours = cast(nn.Linear, layer.get_submodule(name))
            theirs = weight_of(last.get_submodule(name), target.dtype)
            # Embeddings come first in the wide maps: pad their columns with zeros.
            ours.weight.copy_(nn.functional.pad(theirs, (ours.in_features - theirs.shape[1], 0)))
        for norm, their_norm in (
            (layer.hidden_norm, last.input_layernorm),
            (layer.post_attention_layernorm, last.post_attention_layernorm),
            (heads.norm, decoder.norm),
        ):
            norm.weight.copy_(their_norm.weight)
    heads.fc.weight.zero_()
    heads.fc.weight[:, -size:].copy_(torch.eye(size))  # the deepest features come last
