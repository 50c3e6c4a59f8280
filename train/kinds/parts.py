"""A target and its drafters for `draftsmith doctor`: shapes, and the headers of stored weights."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

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
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.quantities import count, count_of
from draftsmith.train.models import empty_model, load_tokenizer
from draftsmith.train.quantization import is_quantized, quantization_of

if TYPE_CHECKING:
    from draftsmith.train.kinds.kind import DrafterKind

# The names that safetensors has for dtypes of arithmetic; all others are quantised.
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

REMEDY = "copy config.json and weights of one model there"
UNSEEN = "; the weights, on the hub, were not looked at"
SEARCH = "search one that they can draft: draftsmith tree --drafter DIR"  # the advice where a tree cannot be drafted


@dataclass(frozen=True)
class Part:
    """A target or a drafter, without its weights."""

    role: str  # `target`, or the drafter's name
    path: str
    model: Any  # on the meta device
    stored: Counter[str]  # the numbers in the checkpoint by safetensors' dtype; empty where its files are not local
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


@dataclass(frozen=True)
class Setup:
    """A target, None where it does not load, and the drafters that load, with their kinds."""

    target: Side | None
    drafters: Sequence[tuple["DrafterKind", Part]]

    @property
    def drafts(self) -> list[Side]:
        """The drafters with a tokenizer of their own."""
        return [part for _, part in self.drafters if isinstance(part, Side)]

    @property
    def sides(self) -> list[Side]:
        """The target, and the drafters with a tokenizer of their own."""
        return ([] if self.target is None else [self.target]) + self.drafts

    @property
    def parts(self) -> list[Part]:
        """The target and its drafters."""
        return ([] if self.target is None else [self.target]) + [part for _, part in self.drafters]

    @property
    def positions(self) -> dict[str, int]:
        """The longest text in tokens of each part that has a limit, by role."""
        return {part.role: part.positions for part in self.parts if part.positions is not None}


def load_side(role: str, path: str, trust_remote_code: bool) -> tuple[Side | None, Finding]:
    """Load a causal language model without its weights, None where it does not load, and describe it."""
    try:
        tokenizer = load_tokenizer(path, field=role, trust_remote_code=trust_remote_code)
        # In bfloat16, because the grouped products of experts have no meta kernels in other dtypes.
        model = empty_model(path, field=role, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
        ends = end_of_sequence_ids(model.generation_config, tokenizer)
    except InputError as error:
        text = str(error).removeprefix(f"{role}: ")
        return None, Finding("error", role, text, "give the directory of a causal LM and its tokenizer")
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", "?")
    text = f"{type(model).__name__}, {count_of(layers, 'layer')}, {count(model.num_parameters())} parameters"
    if quantization := quantization_of(model.config):
        text += f", quantised ({quantization})"
    tensors, finding = checkpoint(role, path, text)
    if finding.state != "error":
        finding = _as_described(model, tensors, role, text) or finding
    return Side(role, path, model, by_dtype(tensors), cached_numbers(model), tokenizer, tuple(ends)), finding


def load_part(
    spec: DrafterSpec,
    empty: Callable[[str], Any],
    described: Callable[[Any], str],
    remedy: str,
    cached: Callable[[Any], int] = lambda model: 0,
    ours: Callable[[str], str | None] = lambda name: name,
    optional: Collection[str] = (),
) -> tuple[Part | None, Finding]:
    """Load a drafter without its weights, None where it does not load, and describe it.

    Args:
        spec: its directory and name.
        empty: returns its model on the meta device; its `InputError` becomes the finding.
        described: describes the model in a few words.
        remedy: the advice where it does not load, or its files belong to another model.
        cached: returns the numbers that its cache keeps for a token.
        ours: maps a tensor's name in the files to our name, or to None to ignore it.
        optional: our names of tensors that may be missing.
    """
    role, path = spec.name or spec.kind, str(spec.path)
    try:
        model = empty(path)
    except InputError as error:
        text = str(error).removeprefix(f"{spec.kind}: ")
        return None, Finding("error", role, text, SEARCH if text.startswith("tree: ") else remedy)
    text = f"{described(model)}, {count(model.num_parameters())} parameters"
    tensors, finding = checkpoint(role, path, text)
    if finding.state != "error" and tensors:
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = {name: shape for theirs, (_, shape) in tensors.items() if (name := ours(theirs)) is not None}
        names = (expected.keys() | stored.keys()) - (set(optional) - stored.keys())
        differing = sorted(name for name in names if expected.get(name) != stored.get(name))
        if differing:  # loaders skip unknown names, and fill missing tensors with random numbers
            finding = other_tensors(role, text, expected, stored, differing, remedy)
    return Part(role, path, model, by_dtype(tensors), cached(model)), finding


def _as_described(model: Any, tensors: Stored, role: str, text: str) -> Finding | None:
    """Return an error where tensors differ from the config: other names, layers or shapes, or integers.

    Quantised models are not checked, nor tensors that the library renames while it loads them.
    """
    if is_quantized(model) or not tensors:
        return None
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: shape for name, (_, shape) in tensors.items() if not is_mtp(name, model.config)}
    shared = set(map(of_any_layer, expected)) & set(map(of_any_layer, stored))
    differing = [name for name in expected.keys() | stored.keys() if of_any_layer(name) in shared]
    differing = [name for name in differing if expected.get(name) != stored.get(name)]
    if stored.keys() <= expected.keys():  # the library renames nothing
        differing += [name for name in expected.keys() - stored.keys() if name not in model.all_tied_weights_keys]
    if differing:
        return other_tensors(role, text, expected, stored, sorted(set(differing)), REMEDY)
    if name := integer_weight(model, tensors):
        text += f", but {name} in {tensors[name][0]}, and nothing says how it was quantised"
        return Finding("error", role, text, "save it in a floating-point type")
    return None


def other_tensors(
    role: str, text: str, expected: Mapping[str, Any], stored: Mapping[str, Any], differing: list[str], remedy: str
) -> Finding:
    """Return the error of tensors whose shapes differ from those expected by a config."""
    name = differing[0]
    return Finding(
        "error",
        role,
        f"{text}, but {len(differing)} tensors are not what its config.json says, the first {name}: expected "
        f"{expected.get(name, 'none')}, found {stored.get(name, 'none')}",
        remedy,
    )


def checkpoint(role: str, path: str, text: str) -> tuple[Stored, Finding]:
    """Read the headers of a model's safetensors, and report faults of the files."""
    directory = files_of(path)
    if not directory.is_dir():
        return {}, Finding("ok", role, text + UNSEEN)
    try:
        tensors = stored_tensors(path, role)
    except InputError as error:
        return {}, Finding("error", role, f"{text}; {str(error).removeprefix(f'{role}: ')}", "copy it there again")
    if not tensors and any(directory.glob("pytorch_model*.bin")):
        remedy = "save it again with save_pretrained: safetensors"
        return tensors, Finding("warning", role, f"{text}, in pickled weights", remedy)
    if not tensors:
        return tensors, Finding("error", role, f"{text}, but no weights in {path}", "copy its *.safetensors there")
    stored = by_dtype(tensors)
    (dtype, most), whole = stored.most_common(1)[0], stored.total()
    mixed = "" if most == whole else f" ({most / whole:.0%} of it)"
    return tensors, Finding("ok", role, f"{text}, stored as {dtype}{mixed}")


def by_dtype(tensors: Stored) -> Counter[str]:
    """Count stored numbers by dtype."""
    counts: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        counts[dtype] += prod(shape)
    return counts
