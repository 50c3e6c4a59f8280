"""Heads in the formats of other tools: the steps of an export, of an import, and of a look for `draftsmith doctor`."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.tree import searched_tree
from draftsmith.medusa.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    dtype_name,
    from_tensors,
    load_target,
    match_tensors,
    read_safetensors,
    round_tensors,
    shards,
)
from draftsmith.train.checkpoint import check_finite, files_of
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.export import ExportOptions, Served, check_format, put_in_place
from draftsmith.train.kinds.parts import UNSEEN, Part, Side
from draftsmith.train.kinds.quantities import count
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES, empty_model

STORED = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # safetensors' names of dtypes
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
TRAINING_ALONE = re.compile(r"(^|\.)verifier_(lm_head|norm)\.weight$|rotary_emb\.inv_freq$")
"""Tensors in checkpoints that no draft needs: copies of the target's, and computed ones."""
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
"""The fields of a decoder layer in config.json."""


@dataclass(frozen=True, kw_only=True)
class HeadsFormats:
    """The formats of one kind of heads: their names, fields and refusals."""

    names: tuple[str, ...]
    read: Callable[[str, str | None, PreTrainedModel | None], Any]  # heads of a directory, in a format, for a target
    refusal: Callable[[Any, str, PreTrainedModel | None], str | None]
    """Why a format cannot hold heads, and the way out, or None; the target may have no weights."""
    fields: Callable[[Any, str], dict[str, Any]]  # config.json
    described: Callable[[Any], str]  # heads in a few words
    speculative: Callable[[ExportOptions, Any], dict[str, Any]]  # vLLM's; raises InputErrors
    proposer: Callable[[Any, int], Proposer]  # the one that must agree with vLLM
    launch: Callable[[str, dict[str, Any], Any, str, PreTrainedModel | None], list[str]]
    """The lines that launch a server: the target's name, speculative config, heads, format, target."""
    notes: Callable[[Any, str, PreTrainedModel | None], list[str]]
    noun: str = "heads"
    adapted: Callable[[Any, str, torch.dtype], Any] = lambda heads, format, dtype: from_tensors(
        type(heads), heads.config, round_tensors(heads.state_dict(), dtype)
    )
    """The heads in a format's terms, rounded, on the CPU."""
    tensors: Callable[[Any, str, PreTrainedModel | None], dict[str, Tensor]] = lambda heads, format, target: dict(
        heads.state_dict()
    )
    reads_target: Callable[[Any, str], bool] = lambda heads, format: False  # files that hold weights of the target

    def write(
        self,
        heads: Any,
        directory: str | Path,
        format: str,
        dtype: str | None = None,
        readme: str | None = None,
        target: PreTrainedModel | None = None,
    ) -> list[str]:
        """Write heads in a format, and return notes for the user.

        The directory is new or empty. The target needs weights only where `reads_target`.

        Raises:
            InputError: a format, heads or directory that do not allow it.
        """
        directory = Path(directory)
        reason = self.refusal(heads, check_format(format, self.names), target)
        if reason is not None:
            raise InputError(f"format: expected {self.noun} that {format} can hold, found {reason}")
        adapted = self.adapted(heads, format, heads.dtype if dtype is None else DTYPES[dtype])
        with put_in_place(directory) as aside:
            if format == "own":
                adapted.save_pretrained(aside)
            else:
                fields = json.dumps(self.fields(adapted, format), indent=2)
                (aside / CONFIG).write_text(fields + "\n", encoding="utf-8")
                save_file(self.tensors(adapted, format, target), aside / WEIGHTS, metadata={"format": "pt"})
            if readme is not None:
                (aside / "README.md").write_text(readme, encoding="utf-8")
        return self.notes(heads, format, target)

    def export(self, config: ExportOptions, source: str) -> list[str]:
        """Write heads in a format, and return lines to print, the launch line last; raise an InputError on failure."""
        format, output, code = str(config.format), str(config.output), config.trust_remote_code
        heads, target = self.read(source, "own", None), None
        if config.target is not None:
            target = empty_model(config.target, field="target", trust_remote_code=code)
            heads.check_fits(target)
            heads.config.base_model_name_or_path = config.target
            if self.reads_target(heads, format):
                target = load_target(config.target, code)
        speculative = self.speculative(config, heads)
        card = Path(source) / "README.md"
        readme = card.read_text(encoding="utf-8") if card.is_file() else None
        notes = self.write(heads, output, format, config.dtype, readme, target)
        lines = [f"# {note}" for note in [f"wrote {output}", *notes]]
        name = heads.config.base_model_name_or_path or "TARGET"
        return [*lines, *self.launch(name, speculative, heads, format, target)]

    def import_from(self, config: ExportOptions, source: str) -> list[str]:
        """Write another tool's heads in our format, and return lines to print; raise an InputError on failure."""
        target = load_target(config.target, config.trust_remote_code)
        heads = self.read(source, config.format, target)
        heads.config.base_model_name_or_path = config.target or heads.config.base_model_name_or_path
        self.write(heads, str(config.output), "own", config.dtype)
        return [f"# wrote {config.output}", f"# {self.described(heads)}"]

    def served(self, config: ExportOptions, source: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
        """Return vLLM's config for the written heads, and a function from the target to our own proposer."""
        heads = self.read(source, "own", None)
        speculative = self.speculative(config, heads)

        def drafter(model: PreTrainedModel) -> Proposer:
            rounded = heads if config.dtype is None else heads.to(DTYPES[config.dtype])
            return self.proposer(rounded.to(model.device, model.dtype), speculative["num_speculative_tokens"])

        return [Served(f"the {self.noun.removeprefix('a ')}", speculative)], drafter

    def inspect(self, heads_class: Any, tree_key: str, spec: DrafterSpec, target: Side | None) -> Part:
        """Read and describe heads, or raise an InputError: also if they do not fit the target, or the tree not them.

        Heads on the hub whose weights are not here have their shape alone.
        """
        path, stored = str(spec.path), None
        if (directory := files_of(path)).is_dir():
            heads = self.read(str(directory), None, None if target is None else _with_ends(target))
            stored = STORED[dtype_name(heads.dtype)]
        else:
            heads = heads_class.without_weights(path)
            if target is not None:
                heads.check_fits(target.model)
        text = f"{self.described(heads)}, {count(heads.num_parameters())} parameters"
        text += UNSEEN if stored is None else f", stored as {stored}"
        if (tree := searched_tree(heads.config, tree_key)) is not None:
            drafted = heads.config.vocab_size if heads.token_map is None else len(heads.token_map)
            if (widest := max(map(len, tree.children))) > drafted:
                raise InputError(f"tree: expected at most {drafted} siblings, which heads can draft, found {widest}")
            text += f"; draft a tree of {len(tree)}, {tree.depth} deep"
        return Part(spec.name or spec.kind, path, heads, text, stored, getattr(heads, "cached_numbers", 0))


def _with_ends(target: Side) -> Any:
    """Return the target with the weights of its embedding and head, with which files' copies are compared."""
    model: Any = deepcopy(target.model)
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = {f"{prefix}.weight": module for prefix, module in model.named_modules() if module in ends}
    if (directory := files_of(target.path)).is_dir():
        for key, tensor in read_safetensors(shards(directory), modules.__contains__).items():
            modules[key].weight = nn.Parameter(tensor, requires_grad=False)
        model.tie_weights()
    return model


def read_heads(
    heads_class: Any,
    directory: Path,
    config: PretrainedConfig,
    stored: Mapping[str, Tensor],
    target: PreTrainedModel | None,
    what: str = "",
    names: Mapping[str, str] | None = None,
    dropped: Collection[str] = (),
) -> Any:
    """Return heads of the tensors in a file, on the CPU, in their widest dtype, in eval mode, or raise an InputError.

    `names` holds the file's names of tensors by ours, where they differ; `dropped` names copies of the target's
    tensors, which must equal them, as the heads use the target's own.
    """
    title = heads_class.title
    try:
        with torch.device("meta"):
            empty = heads_class(config).state_dict()
    except Exception as error:  # an unknown activation or rotation
        reason = f"expected a config of {title}, found: {type(error).__name__}: {first_line(error)}"
        reason = str(error) if isinstance(error, InputError) else reason
        raise InputError(f"{directory / CONFIG}: {reason}") from error
    copies = {name: stored[name] for name in dropped if name in stored}
    unread = {name for name in stored if TRAINING_ALONE.search(name)} | copies.keys() | ({"t2d"} - empty.keys())
    tensors = {name: tensor for name, tensor in stored.items() if name not in unread}
    heads = from_tensors(heads_class, config, match_tensors(directory, what or title, empty, tensors, names or {}))
    heads.check_tokens(f"{directory}: {heads_class.tokens}", stored)
    check_finite(heads, directory, title)
    if target is not None:
        heads.check_fits(target)
    for name, copy in copies.items():
        if target is None:
            raise InputError(f"target: expected it for a file that holds {name}, as in {directory}, found none")
        # The head in a file of a cut vocabulary has only its rows.
        embeddings: Any = target.get_input_embeddings()
        rows = slice(None) if heads.token_map is None else heads.token_map
        expected = embeddings.weight if name == EMBEDDINGS else head_of(target).weight[rows]
        wanted = expected.detach().to(copy.dtype)  # 16-bit copies of the target's are equal too
        if not wanted.is_meta and (copy.shape != wanted.shape or not torch.equal(copy, wanted.cpu())):
            raise InputError(f"{directory}: expected the target's {name}, which is used here, found another")
    return heads


def checked_config(config_class: Any, fields: Mapping[str, Any], path: Path, what: str) -> Any:
    """Return a config of these fields, or raise an InputError that names the file."""
    try:
        return config_class.from_dict(dict(fields)).check()
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # the library may fail on any field
        raise InputError(f"{path}: expected a config of {what}, found: {first_line(error)}") from error


def speculators_fields(heads: Any, kind: str, architecture: str, drafted: int) -> dict[str, Any]:
    """Return the fields that the speculators library has in the config.json of all kinds, for rounds of some tokens."""
    return {
        "speculators_model_type": kind,
        "architectures": [architecture],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafted}],
            "verifier": {"name_or_path": heads.config.base_model_name_or_path or "", "architectures": []},
        },
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(heads.dtype),
    }
