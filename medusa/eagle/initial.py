"""How EAGLE-3 heads begin: at random, or as the target's last layer, on the deepest features.

Shape suffix: H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import decoder_layers
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.medusa.eagle.config import SHAPE, EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads


@phase("making the heads")
def new_heads(config: EagleTrainingConfig, target: PreTrainedModel, token_map: Tensor | None = None) -> EagleHeads:
    """Return heads in float32 as the fields of a training run say; its seed alone decides what is random.

    Args:
        config: of the run.
        target: that they will draft for.
        token_map: as in `EagleHeads.of_target`.

    Raises:
        InputError: as `EagleHeads.of_target` and `begin_as_last_layer`.
    """
    torch.manual_seed(config.training.seed)  # the same weights on all processes
    shape = {name: getattr(config, name) for name in SHAPE}
    heads = EagleHeads.of_target(
        target, token_map, config.layer_ids or None, base_model_name_or_path=config.target, **shape
    ).float()
    if config.init == "last_layer":
        begin_as_last_layer(heads, target)
    return heads


@torch.no_grad()
def begin_as_last_layer(heads: EagleHeads, target: PreTrainedModel) -> None:
    """Make the heads' layer the target's last, which sees the deepest features alone; what embeddings add is learned.

    Of families whose layer has more than ours, such as norms of queries and keys, only our part is taken.

    Raises:
        InputError: a family whose last layer has other maps than Llama's, or other sizes.
    """
    last: Any = decoder_layers(target)[-1]
    decoder: Any = target.get_decoder()
    with whole(last, decoder):
        _copy(heads, last, decoder.norm)


def _copy(heads: EagleHeads, last: Any, final_norm: nn.Module) -> None:
    layer, size = heads.midlayer, heads.config.hidden_size
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    for name in names:
        ours: Any = layer.get_submodule(name)
        try:
            theirs: Tensor = last.get_submodule(name).weight
            if not theirs.is_floating_point():
                raise RuntimeError("codes of quantised weights")
            wide = nn.functional.pad(theirs, (ours.in_features - theirs.shape[1], 0))  # embeddings come first
            ours.weight.copy_(wide)
        except (AttributeError, RuntimeError) as error:
            raise InputError(
                f"init: expected random for a target whose last layer is not of the heads' shape, found last_layer, "
                f"and another {name}"
            ) from error
    # Of four norms a layer, the one before the feed-forward layer has another name.
    before_mlp = getattr(last, "pre_feedforward_layernorm", last.post_attention_layernorm)
    for ours, theirs_of in (
        (layer.hidden_norm, last.input_layernorm),
        (layer.post_attention_layernorm, before_mlp),
        (heads.norm, final_norm),
    ):
        ours.weight.copy_(scale_of(theirs_of, size))
    heads.fc.weight.zero_()
    heads.fc.weight[:, -size:].copy_(torch.eye(size))


def scale_of(norm: nn.Module, size: int) -> Tensor:
    """Return what a root-mean-square norm multiplies by, (H,), however its family stores it."""
    weight = next(norm.parameters())
    return norm(torch.ones(size, device=weight.device, dtype=weight.dtype))  # type: ignore[no-any-return]


@contextmanager
def whole(*modules: nn.Module) -> Iterator[None]:
    """Gather the weights of modules that are sharded over processes, while the block runs."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
