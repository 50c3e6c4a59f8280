"""The drafters that both sides have, and what the speculators library computes with them, in `.venv-oracle`.

    python theirs.py make TARGET FOLDER
    python theirs.py read TARGET FOLDER ...

`make` saves each twin with random weights in a folder of its name in FOLDER, and `read` loads those of each FOLDER.
Both write next to them what the library computes with them on one text, NAME.safetensors, and its config, NAME.json.
"""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import exp
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

DEPTHS = [2, 6, 9]
PROMPT, LENGTH, MASK_TOKEN = 8, 50, 1
LOSS_MASK = torch.zeros(1, LENGTH).index_fill(1, torch.arange(PROMPT, LENGTH - 1), 1.0)
"""All written tokens but the last one: EAGLE-3's loss there is on a token after the text."""
WIDE, NARROW = 2048, 30


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A drafter: the library's type, arguments of its `from_training_args` and of its loss, and the same of ours."""

    type: str
    options: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    """Fields of our config, next to those that all twins have."""
    training: dict[str, Any]
    """Fields of our training config with the same loss."""
    logits: str = "logits"
    """The name of the logits of guesses in the library's `compute_metrics`."""
    window: int | None = WIDE
    """The window of the layers; None for full attention. By default the library has 2,048 in all layers."""
    cut: bool = False

    @property
    def narrow(self) -> bool:
        """Whether the window is shorter than the text: the library's training counts it otherwise than servers."""
        return self.window is not None and self.window < LENGTH

    @property
    def is_block(self) -> bool:
        """Whether it is a block drafter."""
        return self.type != "eagle3"

    @property
    def layers(self) -> int:
        """The number of layers."""
        return 2 if self.is_block else 1


BLOCK = {"block_size": 5, "anchor_guesses": False}
EAGLE = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
FADING = {"decay": exp(-0.25)}
KL = {"divergence": "forward_kl"} | FADING
MIXED = {"divergence": {"cross_entropy": 0.1, "tvd": 0.9}} | FADING
MIXED_LOSS = {"loss_fn": '{"ce": 0.1, "tv": 0.9}'}
SELECTOR = {"selector_rank": 16}
TAPS = {"conv_kernel_size": 3, "conv_group_size": 8}

TWINS = {
    "DFlash": Twin(
        type="dflash",
        loss={"loss_fn": "ce", "per_position_loss_weight": "dpace"},
        shape=BLOCK,
        training={"divergence": "cross_entropy", "dpace": 0.5},
    ),
    "DFlash, both ways": Twin(
        type="dflash",
        options={"sliding_window_non_causal": True},
        loss={"loss_fn": "kl_div"},
        shape=BLOCK | {"is_causal": False},
        training=KL,
    ),
    "DFlash, cut": Twin(type="dflash", loss={"loss_fn": "kl_div"}, shape=BLOCK, training=KL, window=None, cut=True),
    "DFlash, narrow": Twin(type="dflash", loss={"loss_fn": "kl_div"}, shape=BLOCK, training=KL, window=NARROW),
    "DSpark": Twin(
        type="dspark",
        options={"markov_rank": 16},
        loss={"loss_fn": "kl_div"},
        shape={"block_size": 5, "markov_rank": 16, "enable_confidence_head": True},
        training=KL | {"confidence": 1.0},
    ),
    "DSpark, its anchor guesses nothing": Twin(
        type="dspark",
        options={"markov_rank": 16, "sample_from_anchor": False, "confidence_head_with_markov": False},
        loss=MIXED_LOSS | {"confidence_head_alpha": 0.5},
        shape=BLOCK | {"markov_rank": 16, "enable_confidence_head": True, "confidence_head_with_markov": False},
        training=MIXED | {"confidence": 0.5},
    ),
    "DFlash 2": Twin(
        type="dflash2",
        options=SELECTOR,
        loss={"loss_fn": "kl_div"},
        shape=BLOCK | SELECTOR | {"conv_kernel_size": 2, "is_causal": False},
        training=KL,
        logits="unary_logits",
    ),
    "DFlash 2, three taps": Twin(
        type="dflash2",
        options=SELECTOR | TAPS | {"selector_top_k": 5, "sliding_window_non_causal": False},
        loss=MIXED_LOSS,
        shape=BLOCK | SELECTOR | TAPS | {"selector_top_k": 5},
        training=MIXED,
        logits="unary_logits",
        window=None,
    ),
    "EAGLE-3": Twin(
        type="eagle3",
        options=EAGLE,
        loss={"loss_fn": "kl_div", "ttt_steps": 3, "ttt_step_loss_decay": 1.0},
        shape=EAGLE,
        training={"divergence": "forward_kl", "decay": 1.0, "num_steps": 3},
    ),
    "EAGLE-3, cut": Twin(
        type="eagle3",
        options={"fc_norm": True},
        loss={"loss_fn": "kl_div", "ttt_steps": 4, "ttt_step_loss_decay": 0.8},
        shape={"norm_before_residual": True, "fc_norm": True},
        training={"divergence": "forward_kl", "decay": 0.8, "num_steps": 4},
        window=None,
        cut=True,
    ),
    "EAGLE-3, as its authors have it": Twin(
        type="eagle3",
        options={"norm_before_residual": False},
        loss={"loss_fn": "lk_hybrid", "ttt_steps": 4, "ttt_step_loss_decay": 0.8},
        training={"divergence": "lk_hybrid", "decay": 0.8, "num_steps": 4},
        window=None,
    ),
    "EAGLE-3, narrow": Twin(
        type="eagle3",
        options=EAGLE,
        loss={"loss_fn": "kl_div", "ttt_steps": 3, "ttt_step_loss_decay": 1.0},
        shape=EAGLE,
        training={"num_steps": 3},
        window=NARROW,
    ),
}


def text_of(target: Any) -> Tensor:
    """Return a random prompt and what the target writes after it at temperature 0, (1, T): its labels are argmaxes."""
    ids = torch.randint(2, target.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def vocabulary_of(twin: Twin, ids: Tensor, size: int) -> dict[str, Tensor]:
    """Return `t2d` and `d2t` of a cut vocabulary that has the text's tokens; nothing for a whole one."""
    if not twin.cut:
        return {}
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[::2] = t2d[ids.flatten()] = True
    drafted = t2d.nonzero()[:, 0]
    return {"t2d": t2d, "d2t": drafted - torch.arange(len(drafted))}


def made(twin: Twin, target: str, ids: Tensor) -> Any:
    """Return a drafter of the library with random weights."""
    from speculators.model import SpeculatorModel
    from speculators.train.cli import create_transformer_layer_config

    arch = "llama" if twin.type in ("eagle3", "peagle") else "qwen3"
    whole = [] if twin.window else list(range(twin.layers))
    layer = create_transformer_layer_config(target, twin.layers, arch, None, twin.window or WIDE, whole)
    tokens = vocabulary_of(twin, ids, layer.vocab_size)
    options = {"block_size": 5, "mask_token_id": MASK_TOKEN, "norm_before_residual": True} | twin.loss | twin.options
    torch.manual_seed(0)
    model: Any = (
        SpeculatorModel.registry[twin.type]
        .from_training_args(
            layer,
            **tokens,
            draft_vocab_size=len(tokens["d2t"]) if tokens else layer.vocab_size,
            verifier_name_or_path=target,
            target_layer_ids=DEPTHS,
            draft_attn_impl="sdpa",
            **options,
        )
        .float()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def outputs(twin: Twin, model: Any, target: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the drafter's logits of a text, by the name that its `compute_metrics` has for them, loss and gradients.

    `count` is the number of guesses that the loss averages, and `anchors` where blocks begin.
    """
    from speculators.models.dflash import core as blocks
    from speculators.models.eagle3.data import shift_batch

    last: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    hook.remove()
    batch = {
        "input_ids": ids,
        "hidden_states": torch.cat([states[depth] for depth in DEPTHS], dim=-1),
        "verifier_last_hidden_states": last[0],
        "loss_mask": LOSS_MASK,
        "position_ids": torch.arange(LENGTH)[None],
        "document_ids": torch.zeros(1, LENGTH, dtype=torch.long),
    }
    if twin.type == "eagle3":
        flat = {name: tensor[0] for name, tensor in batch.items()} | {"lengths": torch.tensor([LENGTH])}
        shifted = shift_batch(flat)
        batch = {name: shifted[name][None] for name in batch if name in shifted}
        batch["document_ids"] = torch.zeros(1, LENGTH - 1, dtype=torch.long)
    # All anchors that the library can draw: it leaves out those whose block ends after the text.
    options = {"loss_implementation": "eager", "max_anchors": LENGTH - PROMPT - 5} | twin.loss
    arguments, _ = type(model).get_trainer_kwargs(**options)
    found: dict[str, Tensor] = {}

    def seen(function: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            keep(result, **inspect.signature(function).bind(*args, **kwargs).arguments)
            return result

        return call

    def keep_logits(result: Any, **given: Any) -> None:
        for name, value in given.items():
            parts = value if isinstance(value, list) else [value]
            for part in parts if "logits" in name or name == "training_candidate_ids" else []:
                if part is not None:
                    order = sum(key.startswith(f"{name}.") for key in found)
                    found[f"{name}.{order}"] = part[0].detach().clone()
        found["count"] = given["loss_mask"].sum()[None]

    def keep_anchors(result: Any, **given: Any) -> None:
        found["anchors"] = result[0]

    home = sys.modules[type(model).__module__]
    with (
        mock.patch.object(home, "compute_metrics", seen(home.compute_metrics, keep_logits)),
        mock.patch.object(blocks, "select_anchors", seen(blocks.select_anchors, keep_anchors)),
    ):
        _, loss, _ = model(**batch, **arguments)
    loss.backward()
    gradients = {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | gradients | {"loss": loss.detach()[None], "ids": ids}


def main(argv: Sequence[str]) -> None:
    """Make all twins, or read those in some folders."""
    command, target_path, *folders = argv
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    ids = text_of(target)
    from speculators.config import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    for folder, (name, twin) in product(map(Path, folders), TWINS.items()):
        path = folder / name
        if command == "make":
            model = made(twin, target_path, ids)
            model.save_pretrained(path)
        else:
            config = SpeculatorModelConfig.from_pretrained(path)
            config.transformer_layer_config._attn_implementation = "sdpa"
            model = SpeculatorModel.from_pretrained(path, config=config).float()
        tensors = outputs(twin, model, target, ids)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(model.config.to_dict(), default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
