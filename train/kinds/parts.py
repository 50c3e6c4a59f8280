"""A target and its drafters as `draftsmith doctor` sees them: shapes, and the headers of stored weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.cache import cached_numbers, positions_of
from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import (
    Stored,
    end_of_sequence_ids,
    files_of,
    integer_weight,
    is_mtp,
    of_any_layer,
    stored_tensors,
)
from draftsmith.train.files import is_gguf
from draftsmith.train.kinds.quantities import count, count_of
from draftsmith.train.models import empty_model, load_tokenizer
from draftsmith.train.quantization import is_quantized, quantization_of

UNSEEN = "; the weights, on the hub, were not looked at"


@dataclass(frozen=True)
class Part:
    """A target or a drafter."""

    role: str  # `target`, or the drafter's name
    path: str
    model: Any  # a causal LM is on the meta device
    text: str  # a description
    stored: str | None  # the dtype of most numbers in the files, by safetensors' name; None where they are not local
    cached_numbers: int | None  # the numbers that its cache keeps for a token; None if unknown

    @property
    def positions(self) -> int | None:
        """The longest text in tokens; None without a limit."""
        return positions_of(self.model.config)


@dataclass(frozen=True)
class Side(Part):
    """A causal language model with a tokenizer: a target or a draft."""

    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]  # the ids that end a text (`end_of_sequence_ids`)

    @property
    def config(self) -> Any:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def head(self) -> int:
        """The number of logits."""
        return int(self.config.vocab_size)


def load_side(role: str, path: str, trust_remote_code: bool) -> Side:
    """Load a causal language model without its weights, or raise an InputError: also for weights of another shape."""
    tokenizer = load_tokenizer(path, field=role, trust_remote_code=trust_remote_code)
    # In bfloat16, because the grouped products of experts have no meta kernels in other dtypes.
    model: Any = empty_model(path, field=role, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    ends = end_of_sequence_ids(model.generation_config, tokenizer)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", "?")
    text = f"{type(model).__name__}, {count_of(layers, 'layer')}, {count(model.num_parameters())} parameters"
    if quantization := quantization_of(model.config):
        text += f", quantised ({quantization})"
    tensors, directory = stored_tensors(path, role), files_of(path)
    if tensors:
        _check_stored(model, tensors, role)
        text += f", stored as {widely_stored(tensors)}"
    elif is_gguf(path):
        text += ", in a GGUF file"
    elif not directory.is_dir():
        text += UNSEEN
    elif not any(directory.glob("pytorch_model*.bin")):
        raise InputError(f"{role}: expected weights in {path}, found none")
    return Side(role, path, model, text, widely_stored(tensors), cached_numbers(model), tokenizer, tuple(ends))


def _check_stored(model: Any, tensors: Stored, role: str) -> None:
    """Raise an InputError where tensors differ from the config: other names, layers or shapes, or integers.

    Quantised models are not checked, nor tensors that the library renames while it loads them.
    """
    if is_quantized(model):
        return
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: shape for name, (_, shape) in tensors.items() if not is_mtp(name, model.config)}
    shared = set(map(of_any_layer, expected)) & set(map(of_any_layer, stored))
    differing = [name for name in expected.keys() | stored.keys() if of_any_layer(name) in shared]
    differing = [name for name in differing if expected.get(name) != stored.get(name)]
    if stored.keys() <= expected.keys():  # the library renames nothing
        differing += [name for name in expected.keys() - stored.keys() if name not in model.all_tied_weights_keys]
    if differing:
        name, number = min(differing), len(set(differing))
        raise InputError(
            f"{role}: expected the tensors that its config.json says, found {number} others: {name} of "
            f"{stored.get(name, 'none')} in place of {expected.get(name, 'none')}"
        )
    if name := integer_weight(model, tensors):  # type: ignore[assignment]
        raise InputError(f"{role}: expected weights in a floating-point type, found {name} in {tensors[name][0]}")


def widely_stored(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """Return the dtype of most numbers; None without tensors."""
    counts: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        counts[dtype] += prod(shape)
    return counts.most_common(1)[0][0] if counts else None
