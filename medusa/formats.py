"""Heads in the formats of other tools: the steps of an export, and its proof by another process.

The proof: a process that knows only the format computes the same numbers from the files.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposer
from draftsmith.medusa.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    check_dtype,
    dtype_name,
    from_tensors,
    load_target,
    round_tensors,
)
from draftsmith.train.kinds.export import (
    ExportOptions,
    Served,
    check_format,
    put_in_place,
)
from draftsmith.train.models import DTYPES, empty_model

TOLERANCE = 1e-5  # relative to the largest logit: float32 sums of a few thousand terms, in another order

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
    own: Callable[[str], Any]  # heads to export
    refusal: Callable[[Any, str, PreTrainedModel | None, bool], str | None]
    """Why a format cannot hold heads, and the way out, or None; the target may have no weights."""
    fields: Callable[[Any, str], dict[str, Any]]  # config.json
    prove: Callable[[Any, Path, Any, str, bool], None]
    """Raise a RuntimeError if readers find other numbers: adapted heads, directory, the heads, format, by_rank."""
    imported: Callable[[Any, str, str], list[str]]  # the lines after an import
    speculative: Callable[[ExportOptions, Any], dict[str, Any]]  # vLLM's; raises InputErrors
    proposer: Callable[[Any, int], Proposer]  # the one that must agree with vLLM
    launch: Callable[[str, dict[str, Any], Any, str, PreTrainedModel | None], list[str]]
    """The lines that launch a server: the target's name, speculative config, heads, format, target."""
    notes: Callable[[Any, str, PreTrainedModel | None], list[str]]
    noun: str = "heads"
    compared: str = "logits"  # the numbers that the proof compares
    check_format: Callable[[str], object] | None = None
    adapted: Callable[[Any, str, torch.dtype, bool], Any] = lambda heads, format, dtype, by_rank: from_tensors(
        type(heads), heads.config, round_tensors(heads.state_dict(), dtype)
    )
    """The heads in a format's terms, rounded, on the CPU."""
    tensors: Callable[[Any, str, PreTrainedModel | None], dict[str, Tensor]] = lambda heads, format, target: dict(
        heads.state_dict()
    )
    pickled: Mapping[str, str] = field(default_factory=dict)  # formats whose tensors torch.save writes, and their files
    reads_target: Callable[[Any, str], bool] = lambda heads, format: False  # files that hold weights of the target
    on_cpu: Callable[[Any], str] = lambda heads: ""  # `Served.on_cpu`
    card: Callable[[Any, str, Path | None], str | None] = lambda heads, format, source: _readme(source)
    announce: Callable[[ExportOptions, Any, PreTrainedModel | None], None] = lambda config, heads, target: None

    def write(
        self,
        heads: Any,
        directory: str | Path,
        format: str,
        dtype: str | None = None,
        readme: str | None = None,
        target: PreTrainedModel | None = None,
        by_rank: bool = False,
    ) -> list[str]:
        """Write heads in a format, prove that another process computes the same numbers, and return notes for the user.

        The directory is new or empty. The target needs weights only where `reads_target`. `by_rank` leaves out what
        changes logits but not their order, because these readers draft only the most likely tokens.

        Raises:
            InputError: a format, dtype, heads or directory that do not allow it.
            RuntimeError: a reader finds other numbers in the files; the directory is removed.
        """
        directory = Path(directory)
        if self.check_format is not None:
            self.check_format(format)
        reason = self.refusal(heads, check_format(format, self.names), target, by_rank)
        if reason is not None:
            raise InputError(f"format: expected {self.noun} that {format} can hold, found {reason}")
        adapted = self.adapted(heads, format, heads.dtype if dtype is None else DTYPES[check_dtype(dtype)], by_rank)
        with put_in_place(directory) as aside:
            if format == "own":
                adapted.save_pretrained(aside)
            else:
                fields = json.dumps(self.fields(adapted, format), indent=2)
                (aside / CONFIG).write_text(fields + "\n", encoding="utf-8")
                tensors = self.tensors(adapted, format, target)
                if format in self.pickled:
                    torch.save(tensors, aside / self.pickled[format])
                else:
                    save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
            if readme is not None:
                (aside / "README.md").write_text(readme, encoding="utf-8")
            self.prove(adapted, aside, heads, format, by_rank)
        return self.notes(heads, format, target)

    def export(self, config: ExportOptions, source: str) -> list[str]:
        """Write heads in a format, and return lines to print, the launch line last; raise an InputError on failure."""
        format, output, code = str(config.format), str(config.output), config.trust_remote_code
        heads, target = self.own(source), None
        if config.target is not None:
            target = empty_model(config.target, field="target", trust_remote_code=code)
            heads.check_fits(target)
            heads.config.base_model_name_or_path = config.target
            if self.reads_target(heads, format):
                target = load_target(config.target, code)
        speculative = self.speculative(config, heads)
        self.announce(config, heads, target)
        readme = self.card(heads, format, Path(source))
        notes = self.write(heads, output, format, config.dtype, readme, target, config.by_rank)
        lines = [f"# {note}" for note in [f"wrote {output}, {self._proved()}", *notes]]
        name = heads.config.base_model_name_or_path or "TARGET"
        return [*lines, *self.launch(name, speculative, heads, format, target)]

    def import_from(self, config: ExportOptions, source: str) -> list[str]:
        """Write another tool's heads in our format, and return lines to print; raise an InputError on failure."""
        target = load_target(config.target, config.trust_remote_code)
        heads = self.read(source, config.format, target)
        heads.config.base_model_name_or_path = config.target or heads.config.base_model_name_or_path
        self.write(heads, str(config.output), "own", config.dtype, self.card(heads, "own", None))
        return [f"# {line}" for line in self.imported(heads, f"wrote {config.output}", self._proved())]

    def served(self, config: ExportOptions, source: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
        """Return vLLM's config for the written heads, and a function from the target to our own proposer."""
        heads = self.own(source)
        speculative = self.speculative(config, heads)

        def drafter(model: PreTrainedModel) -> Proposer:
            rounded = heads if config.dtype is None else heads.to(DTYPES[config.dtype])
            return self.proposer(rounded.to(model.device, model.dtype), speculative["num_speculative_tokens"])

        return [Served(f"the {self.noun.removeprefix('a ')}", speculative, self.on_cpu(heads))], drafter

    def _proved(self) -> str:
        return f"read back by another process with the same {self.compared}"


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


def _readme(source: Path | None) -> str | None:
    file = None if source is None else source / "README.md"
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None


def relative_error(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors over the largest expected number."""
    return float((values - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def run_reader(readers: ModuleType, reader: str, directory: Path, inputs_NF: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that a reader computes in a fresh process, (N, K, V), or raise a RuntimeError if it fails.

    `readers` is a module that runs as a file and imports nothing of this package, and `reader` a name in it. Its inputs
    are the target's states and the embeddings of the next tokens, float32.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": inputs_NF, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the file's folder, whose modules could shadow others, out of the path.
        command = [sys.executable, "-P", str(readers.__file__), reader, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {reader}, found: {messages[-1]}")
        return load_file(output)["logits"]
