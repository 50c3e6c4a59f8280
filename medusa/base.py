"""The base of all drafting heads: how they are loaded, which tokens they may draft, and whether they fit a target.

Shape suffixes: V the target's vocabulary, D the tokens that heads may draft.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import check_rope, check_rope_keys, load_heads, reading, require_config
from draftsmith.train.losses.output_head import head_of


class LMHead(nn.Linear):
    """A linear map to logits, under a name by which sharded training wraps it."""


class Norm(LlamaRMSNorm):
    """Llama's norm, whose output has the dtype that what follows computes in.

    Under autocast the library's has its weight's, float32, of which the backward would keep a copy beside one for each
    map that follows.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states, normed, (…, H)."""
        return super().forward(hidden_states).to(computing_dtype(self.weight))


SPREAD = 0.5
"""The most that logits of a random beginning stray by: a standard deviation of σ costs σ²/2 more than none."""


@torch.no_grad()
def begin_nearly_uniform(norm: nn.Module, rows: Tensor) -> None:
    """Let the logits of random layers begin near each other: what is drafted is nearly uniform.

    The head's rows are the target's, made for states that mean something. Of states that mean nothing their logits
    would be as far apart, and the first loss far above that of a uniform distribution.

    Args:
        norm: before the head, which is scaled.
        rows: of the head, (D, H).
    """
    spread = rows.float().square().sum(-1).mean().sqrt()
    cast(Tensor, norm.weight).div_((spread / SPREAD).clamp(min=1.0))


class NamedConfig(PretrainedConfig):
    """A config that is saved under the name that servers look for, in place of our class's."""

    architecture: ClassVar[str]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as the library does."""
        self.architectures = [self.architecture]
        super().save_pretrained(*args, **kwargs)


FEW = 8
"""Ids from which on a vocabulary without two neighbours is none."""
WINDOWS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def check_windows(raw: Mapping[str, Any], positions: int) -> None:
    """Raise an InputError where layers are to see a window of a text alone; one of all positions is none.

    Qwen's configs have a window that `use_sliding_window` turns off, or that begins after the last layer; Mistral's
    have one where they name its size; all newer ones name the kind of each layer.

    Args:
        raw: a config as its file has it.
        positions: how many it reads.
    """
    size, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if type(size) is int and size >= positions:
        return
    other = [kind for kind in kinds or [] if kind != "full_attention"] if isinstance(kinds, list | None) else [kinds]
    if other:
        raise InputError(
            f"layer_types: expected layers of full_attention, as our heads have, found {other[0]} in a window of {size}"
        )
    used, first = raw.get("use_sliding_window"), raw.get("max_window_layers")
    if "sliding_window" in raw and size is None:
        return
    after_all = type(first) is int and first >= raw.get("num_hidden_layers", 1)
    if used and not after_all:
        raise InputError(f"use_sliding_window: expected false, as our heads see the whole text, found {used}")
    if used is None and kinds is None and size is not None:
        raise InputError(f"sliding_window: expected none, or the {positions} positions, found {size}")


class LayersConfig(NamedConfig):
    """A config of decoder layers, whose rotation and attention a file may describe in several fields."""

    if TYPE_CHECKING:
        max_position_embeddings: int

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of fields as a file has them.

        Raises:
            InputError: they contradict each other, or ask for attention in a window, which no heads of ours have.
        """
        check_rope_keys(config_dict)
        check_rope(config_dict)
        check_windows(config_dict, config_dict.get("max_position_embeddings") or cls.max_position_embeddings)
        return super().from_dict({k: v for k, v in config_dict.items() if k not in WINDOWS}, **kwargs)


class DraftingHeads(PreTrainedModel):
    """Heads that draft for a target, which stays an ordinary model and is no part of them.

    `save_pretrained`, `from_pretrained` and `push_to_hub` are the library's, in safetensors.
    """

    base_model_prefix = ""
    title: ClassVar[str]
    """What messages call them."""
    field: ClassVar[str]
    """The option that names them."""
    width: ClassVar[str]
    """The field of their config that is the target's hidden size."""
    tokens: ClassVar[str]
    """The tensor that says which tokens they may draft."""

    if TYPE_CHECKING:

        @property
        def token_map(self) -> Tensor | None:
            """The target's ids that they may draft, (D,) int64; None where they may draft all."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load heads that `save_pretrained` wrote, or others under the same names.

        Raises:
            InputError: no such directory, a file that is damaged or no safetensors, another format, a config that
                cannot be, or tensors that are missing, not expected, of another shape or type, or not finite.
        """
        heads: Self = load_heads(cls, super().from_pretrained, path, cls.title, *args, **kwargs)
        heads.check_tokens(f"{path}: {cls.tokens}")
        return heads

    @classmethod
    def without_weights(cls, path: str | Path) -> Self:
        """Return heads of the shape that a directory's config.json says, on the meta device.

        Raises:
            InputError: no such directory, or a config that cannot be.
        """
        require_config(path, cls.title)
        with reading(str(path), f"{cls.title} (config.json)"):
            config = cls.config_class.from_pretrained(path)  # type: ignore[union-attr]
        with reading(str(path), f"a config of {cls.title}"), torch.device("meta"):
            return cls(config)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return None: the embeddings that heads see are the target's."""
        return None

    def check_tokens(self, field: str) -> None:
        """Raise an InputError that names the field where the ids that they may draft are not different ones of V."""
        ids = self.token_map
        if ids is not None and ids.device.type != "meta":
            check_ids(ids, self.config.vocab_size, field)

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise an InputError where a target has another hidden size or vocabulary than they were made for."""
        vocab_size, hidden_size = head_of(target).weight.shape
        for name, found, expected in (
            ("hidden_size", getattr(self.config, self.width), hidden_size),
            ("vocab_size", self.config.vocab_size, vocab_size),
        ):
            if found != expected:
                raise InputError(f"{self.field}: expected heads with the target's {name} {expected}, found {found}")

    def widened(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, (…, V), of those over the heads' vocabulary, (…, D)."""
        ids = self.token_map
        if ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        wide[..., ids] = logits
        return wide


def check_ids(ids: Tensor, vocab_size: int, field: str) -> None:
    """Raise an InputError where ids of a cut vocabulary name a token twice, or one out of range."""
    if bool(((ids < 0) | (ids >= vocab_size)).any()) or len(ids.unique()) != len(ids):
        raise InputError(f"{field}: expected different ids below {vocab_size}, found others")


def check_named(ids: Tensor, t2d: Tensor, field: str) -> None:
    """Raise an InputError where `t2d`, (V,) bool, names other tokens than the ids of a cut vocabulary."""
    if not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        raise InputError(f"{field}: expected the tokens that t2d names, found others")


def check_distances(d2t: Tensor, field: str) -> None:
    """Raise an InputError where `d2t`, (D,), of which no `t2d` tells, holds ids in place of distances to places.

    Distances stay the same from one id to the next one of the target's, and so do those of any vocabulary of use.
    """
    if len(d2t) >= FEW and bool((d2t.diff() > 0).all()):
        raise InputError(
            f"{field}: expected each id's distance to its place, found numbers that always grow, as ids do"
        )
