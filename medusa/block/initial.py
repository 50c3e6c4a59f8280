"""The first weights of a block drafter: random, or the target's last layers on its deepest features.

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
from draftsmith.medusa.block import heads
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.heads.dflash2 import Convolution
from draftsmith.medusa.block.model import BlockConfig, BlockDrafter, BlockLayer
from draftsmith.medusa.target_states import gather_weights
from draftsmith.train.quantization import own_shapes, weight_of

LIKE_OURS = ("llama", "mistral", "qwen3")
"""Families whose decoder layers match ours, apart from norms of queries and keys that some do not have."""
MAPS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ("input_layernorm", "post_attention_layernorm")
CONVOLVED = 2
"""The slots that each slot of a new DFlash 2 drafter sees in its convolutions, its own included."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@phase("making the drafter")
def new_drafter(
    config: BlockTrainingConfig, target: PreTrainedModel, mask_token: int, token_map: Tensor | None
) -> BlockDrafter:
    """Return a float32 drafter for a training run, whose seed decides the random weights; see `of_target`."""
    torch.manual_seed(config.training.seed)  # the same weights on all processes
    width = target.config.get_text_config().hidden_size
    drafter = BlockDrafter.of_target(
        target,
        mask_token,
        config.layers,
        token_map,
        config.layer_ids or None,
        block_size=config.block_size,
        anchor_guesses=config.anchor_guesses,
        sliding_window=config.sliding_window,
        conv_kernel_size=CONVOLVED if config.selector_rank else 0,
        is_causal=config.causal,
        base_model_name_or_path=config.target,
        **{name: value for head in heads.HEADS for name, value in head.new_fields(config, width).items()},
    ).float()
    begin_changing_nothing(drafter)
    if choose_init(config, drafter, target)[0] != "random":
        begin_as_last_layers(drafter, target)
    # The norm's scale alone makes the first guesses nearly uniform.
    begin_nearly_uniform(drafter.norm, drafter.head_for(target).weight)
    return drafter


def begin_changing_nothing(drafter: BlockDrafter) -> None:
    """Let the head that adds logits, if there is one, add nothing at first, and convolutions be the identity."""
    if drafter.side_head is not None:
        nn.init.zeros_(drafter.side_head.out.weight)
    for module in drafter.modules():
        if isinstance(module, Convolution):
            nn.init.zeros_(module.kernel_projection.weight)


def with_further_heads(drafter: BlockDrafter, config: BlockTrainingConfig) -> tuple[BlockDrafter, list[str]]:
    """Return an earlier drafter with the heads that a run asks for and it lacks, and their titles.

    Its guesses stay the same at first, so that a DFlash drafter becomes DSpark's without a loss.
    """
    shape, fields, titles = drafter.config, dict[str, Any](), list[str]()
    for head in heads.HEADS:
        asked, own = head.added_fields(config, shape.hidden_size), head.setting(shape)
        name, value = next(iter(asked.items()), ("", own))
        if own and value not in (own, 0):
            raise InputError(f"{name}: expected {own}, as the heads have, or none, found {value}")
        if value and not own:
            fields, titles = fields | asked, [*titles, head.title]
    if not titles:
        return drafter, []
    torch.manual_seed(config.training.seed)
    larger = nn.Module.to(BlockDrafter(BlockConfig.from_dict(shape.to_dict() | fields)), drafter.device, drafter.dtype)
    begin_changing_nothing(larger)
    shapes = {name: tensor.shape for name, tensor in larger.state_dict().items()}
    fitting = {name: tensor for name, tensor in drafter.state_dict().items() if tensor.shape == shapes[name]}
    larger.load_state_dict(fitting, strict=False)
    return larger, titles


def mask_token(tokenizer: Any, rows: int) -> int:
    """Return a token that texts do not hold: one of the embedding's `rows` after the tokenizer's, or for padding."""
    if len(tokenizer) < rows:
        return len(tokenizer)
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id}  # the ends of texts are in texts
    for token in (tokenizer.pad_token_id, tokenizer.unk_token_id):
        if token is not None and token not in ends:
            return int(token)
    others = sorted(set(tokenizer.all_special_ids) - ends)
    if not others:
        raise InputError("mask_token: expected one, because the tokenizer has none that texts do not hold, found none")
    return int(others[-1])


def choose_init(config: BlockTrainingConfig, drafter: BlockDrafter, target: PreTrainedModel) -> tuple[str, str]:
    """Return the first weights, one of `INITS` but not "auto", and a clause for users, or raise an InputError."""
    reason = None if config.init == "random" else layers_mismatch(drafter, target)
    if config.init in ("look_back", "last_layers") and reason is not None:
        raise InputError(f"init: expected auto or random for a target like this, found {config.init}, and {reason}")
    if config.init == "auto" and drafter.side_head is None:
        reason = reason or "no head corrects its guesses"  # which look_back slows down: docs/log/peer.md
    if config.init == "random" or reason is not None:
        return "random", "begun at random" + (f", because {reason}" if reason else "")
    layers = len(drafter.layers)
    clause = "begun as the target's last layer" + (f"s, {layers} of them" if layers > 1 else "")
    if config.init == "look_back" and config.target_sharded:
        raise InputError("init: expected auto, last_layers or random with a target on several devices, found look_back")
    if config.init == "last_layers" or config.target_sharded:
        return "last_layers", clause
    return "look_back", f"{clause}, except that the first one looks back at the token before the block"


def layers_mismatch(drafter: BlockDrafter, target: PreTrainedModel) -> str | None:
    """Return why the drafter's layers cannot have the weights of the target's last, or None.

    Only shapes and the config decide, so tensors without data will do.
    """
    text, layers = target.config.get_text_config(), list(decoder_layers(target))
    if text.model_type not in LIKE_OURS:
        return f"the layers of {text.model_type} are not known to compute what ours do"
    if text.hidden_act != drafter.config.hidden_act:
        return f"the target's hidden_act is {text.hidden_act}, and ours {drafter.config.hidden_act}"
    if len(layers) < len(drafter.layers):
        return f"the target has {len(layers)} layers"
    last = layers[-len(drafter.layers) :]
    if not drafter.norm.weight.is_meta and any(weight.is_meta for layer in last for weight in layer.parameters()):
        return "the cache has only the last of the target's layers"
    expected = {f"{name}.weight" for name in (*MAPS, *NORMS)}
    for theirs, ours in zip(last, drafter.layers, strict=True):
        shapes, our_shapes = own_shapes(theirs), own_shapes(ours)
        if others := sorted(shapes.keys() - expected - {f"{name}.weight" for name in HEAD_NORMS}):
            return f"the target's last layers have {others[0]}, which ours do not have"
        for name in sorted(expected):
            if shapes.get(name) != our_shapes[name]:
                return f"the target's last layers have another {name.removesuffix('.weight')}"
    return None


@torch.no_grad()
def begin_as_last_layers(drafter: BlockDrafter, target: PreTrainedModel) -> None:
    """Copy the target's last layers to a drafter that can hold them, on the deepest features: see `layers_mismatch`."""
    last = list(decoder_layers(target))[-len(drafter.layers) :]
    size = drafter.config.hidden_size
    with gather_weights(*last, decoder_of(target)):
        for ours, theirs in zip(cast(Any, drafter.layers), last, strict=True):
            for name in MAPS:
                ours.get_submodule(name).weight.copy_(weight_of(theirs.get_submodule(name), target.dtype))
            for name in NORMS:
                ours.get_submodule(name).weight.copy_(theirs.get_submodule(name).weight)
            copy_head_norms(ours, theirs)
        drafter.hidden_norm.weight.copy_(cast(Any, last[-1]).input_layernorm.weight)
    # Keys and values of the text see the deepest features through the last layer's own input norm.
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:].copy_(torch.eye(size))


def copy_head_norms(ours: BlockLayer, theirs: nn.Module) -> None:
    """Copy the norms of queries and keys; without such norms, match the scale of the target's queries and keys."""
    state_weight = cast(Any, theirs).input_layernorm.weight
    for name in HEAD_NORMS:
        norm = cast(Any, ours.get_submodule(name))
        try:
            norm.weight.copy_(cast(Any, theirs.get_submodule(name)).weight)
        except AttributeError:
            # Before the norm's weight, the entries of a normed state have a mean square of 1.
            weight = weight_of(theirs.get_submodule(name.replace("norm", "proj")), state_weight.dtype)
            norm.weight.fill_((weight * state_weight).float().pow(2).sum(1).mean().sqrt())
