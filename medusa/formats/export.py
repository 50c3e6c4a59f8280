"""Medusa heads in the formats that others load: what each can say, its names, and a proof of what was written.

| format           | weights             | block l of head h               | language-model head of h                 |
|------------------|---------------------|---------------------------------|------------------------------------------|
| `own`            | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | `lm_heads.{h}.*`, or `lm_head.*` for all |
| `vllm`           | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | the same, `.weight` alone                |
| `fasterdecoding` | `medusa_lm_head.pt` | `{h}.{l}.linear.*`              | `{h}.{L}.weight`                         |
| `modelopt`       | `model.safetensors` | `medusa_heads.{h}.{l}.linear.*` | `medusa_heads.{h}.{L}.weight`            |

FasterDecoding's older trainer writes another file under that name, `medusa_lm_head.safetensors`, without language-model
heads: there all heads go through the target's. It is read, not written (`draftsmith.medusa.formats.importing`).
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from draftsmith.decode.errors import InputError
from draftsmith.medusa.formats import readers
from draftsmith.medusa.heads import MedusaConfig, MedusaHeads
from draftsmith.train.files import require_writable, written_aside
from draftsmith.train.losses.output_head import OutputHead
from draftsmith.train.models import DTYPES

FORMATS = ("own", "vllm", "fasterdecoding", "modelopt")
CONFIG, WEIGHTS, PICKLED, LEGACY = "config.json", "model.safetensors", "medusa_lm_head.pt", "medusa_lm_head.safetensors"
PREFIXES = {"fasterdecoding": "", "modelopt": "medusa_heads."}
TOLERANCE = 1e-5  # of the largest logit: float32 sums of a few thousand terms, in another order


def check_format(format: str, expected: tuple[str, ...] = FORMATS) -> str:
    """Return the name of a format, or raise an InputError that names those there are."""
    if format not in expected:
        loads_none = "; SGLang loads no Medusa heads, only draft models" if format == "sglang" else ""
        raise InputError(f"format: expected one of {', '.join(expected)}, found {format!r}{loads_none}")
    return format


def refusal(heads: MedusaHeads, format: str, by_rank: bool = False) -> str | None:
    """Return what of the heads a format cannot say, and the way out; None where it can say all.

    Args:
        heads: any.
        format: one of `FORMATS`.
        by_rank: as in `export_heads`.
    """
    config = heads.config
    if format == "own":
        return None
    stay = "keep draftsmith's own format and decode with MedusaProposer"
    if config.hydra:
        return f"Hydra heads, which see the tokens drafted before; {stay}"
    if config.lm_head_bias:
        return f"language-model heads with a bias; {stay}"
    finish = {"final_logit_softcapping": config.final_logit_softcapping}
    if format != "vllm":
        finish["logit_scale"] = None if config.logit_scale == 1 else config.logit_scale
    for name, value in finish.items():
        if value is not None and not (by_rank and value > 0):
            return f"{name} {value}; by_rank leaves out what changes logits but not their order"
    if format != "vllm" and config.truncated_vocab_size < config.vocab_size:
        return f"a truncated vocabulary of {config.truncated_vocab_size} tokens; take vllm"
    if format == "fasterdecoding" and not all(map(_equal_layers, heads.blocks)):
        # Its `[ResBlock(hidden_size)] * layers` is one block, which the last of them would overwrite.
        return (
            f"{config.num_hidden_layers} different blocks a head, of which its reader uses one; take vllm or modelopt"
        )
    return None


def export_heads(
    heads: MedusaHeads,
    directory: str | Path,
    format: str,
    dtype: str | None = None,
    by_rank: bool = False,
    readme: str | None = None,
) -> list[str]:
    """Write heads in a format, and prove that another process reads the same logits from it.

    A language-model head that all heads share becomes one each where the format has no other way, and a block without
    biases gets zeros where it always has them: both exact. All is written aside and renamed when it is proven.

    Args:
        heads: of any device; they stay as they are.
        directory: new, or empty.
        format: one of `FORMATS`.
        dtype: of the weights there; that of the heads if None.
        by_rank: leave softcapping out, and outside of vLLM a positive `logit_scale`. Neither changes which tokens are
            the most likely, and these readers draft by that alone.
        readme: a model card, written as README.md.

    Returns:
        What a reader should know, a line each, such as a tree that vLLM does not draft.

    Raises:
        InputError: an unknown format or dtype, heads that the format cannot hold or the dtype overflows, weights that
            are not finite, or a directory that holds something or cannot be written in.
        RuntimeError: what was written reads otherwise. Nothing is left of it.
    """
    directory = Path(directory)
    reason = refusal(heads, check_format(format), by_rank)
    if reason is not None:
        raise InputError(f"format: expected heads that {format} can hold, found {reason}")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    kind = heads.dtype if dtype is None else DTYPES[dtype]
    adapted = _adapted(heads, format, kind, by_rank)
    if format == "fasterdecoding" and not adapted.config.base_model_name_or_path:
        raise InputError("target: expected its name or path, which fasterdecoding loads it by, found none")
    with _aside(directory) as aside:
        _write(adapted, aside, format)
        if readme is not None:
            (aside / "README.md").write_text(readme, encoding="utf-8")
        _prove(heads, aside, format, kind, by_rank)
    return _notes(adapted, format)


def _adapted(heads: MedusaHeads, format: str, dtype: torch.dtype, by_rank: bool) -> MedusaHeads:
    """Return heads as the format says them, on the CPU: rounded, with a head and biases each where it wants them."""
    config: Any = copy.deepcopy(heads.config)
    tensors = heads.state_dict()
    if by_rank and format != "own":
        config.final_logit_softcapping = None
        config.logit_scale = config.logit_scale if format == "vllm" else 1.0
    if format in PREFIXES:
        config.medusa_fc_bias, config.original_lm_head = True, False
        for h in range(config.num_heads):
            tensors[f"lm_heads.{h}.weight"] = heads.lm_head_of(h).weight
            for layer in range(config.num_hidden_layers):
                tensors.setdefault(f"blocks.{h}.layers.{layer}.bias", torch.zeros(config.hidden_size))
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            tensors[name] = tensor.cpu()
            continue
        # A copy each: safetensors takes no two names for one memory, and converters drop such names.
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not tensors[name].isfinite().all():
            raise InputError(f"heads: expected weights that are finite in {dtype_name(dtype)}, found others in {name}")
    return assembled(config, tensors)


def _write(heads: MedusaHeads, directory: Path, format: str) -> None:
    if format == "own":
        heads.save_pretrained(directory)
        return
    (directory / CONFIG).write_text(json.dumps(_config(heads, format), indent=2) + "\n", encoding="utf-8")
    names = tensor_names(heads.config, format)
    tensors = {names.get(name, name): tensor for name, tensor in heads.state_dict().items()}
    if format == "fasterdecoding":
        torch.save(tensors, directory / PICKLED)
    else:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def _config(heads: MedusaHeads, format: str) -> dict[str, Any]:
    """Return config.json. vLLM renames any key that holds "num" and "heads" or "layers": no others may be there."""
    config = heads.config
    # The older name of the dtype is the one that all versions of the library read.
    common = {"base_model_name_or_path": config.base_model_name_or_path, "torch_dtype": dtype_name(heads.dtype)}
    if format == "vllm":
        names = "hidden_size vocab_size num_heads num_hidden_layers truncated_vocab_size medusa_fc_bias"
        fields = {name: getattr(config, name) for name in [*names.split(), "original_lm_head", "logit_scale"]}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", **fields, **common}
    if format == "modelopt":
        medusa = {"num_medusa_heads": config.num_heads, "num_medusa_layers": config.num_hidden_layers}
        return {"medusa": medusa, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, **common}
    fields = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_hidden_layers, **common}
    return fields if config.medusa_choices is None else {**fields, "medusa_choices": config.medusa_choices}


def _notes(heads: MedusaHeads, format: str) -> list[str]:
    config = heads.config
    if config.medusa_choices is None or format in ("own", "fasterdecoding"):
        return []
    nodes = len(config.medusa_choices)
    if format == "vllm":
        return [f"vLLM drafts the chain of each head's most likely token: the tree of {nodes} tokens is not written"]
    return [f"the tree of {nodes} tokens has no place in this format: give its reader medusa_choices"]


def check_output(directory: Path) -> None:
    """Require that a directory is new or empty, and that one can be written beside it.

    Raises:
        InputError: it holds something, is no directory but a file or a link, or the disk does not take it.
    """
    if os.path.lexists(directory) and (directory.is_symlink() or not directory.is_dir() or any(directory.iterdir())):
        found = "is a link" if directory.is_symlink() else "holds something"
        raise InputError(f"output: expected a new or empty directory, found {directory}, which {found}")
    require_writable(directory)


@contextmanager
def _aside(directory: Path) -> Iterator[Path]:
    """Give a directory to write in that takes the place of another when all went well, and is removed otherwise."""
    check_output(directory)
    try:
        with written_aside(directory.absolute()) as aside:
            aside.mkdir()
            yield aside
    except (OSError, SafetensorError) as error:
        raise InputError(f"output: expected to write in {directory}, found: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error):
            raise
        raise InputError(f"output: expected to write in {directory}, found no space left") from error


@torch.no_grad()
def _prove(heads: MedusaHeads, directory: Path, format: str, dtype: torch.dtype, by_rank: bool) -> None:
    """Raise a RuntimeError unless another process, which knows the format alone, computes the same logits."""
    config, generator = heads.config, torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(4, config.hidden_size, generator=generator)
    embeddings_NKH = torch.randn(4, config.num_heads, config.hidden_size, generator=generator)
    logits_NKV = read_apart(format, directory, hidden_NH, embeddings_NKH)
    shape = (4, config.num_heads, config.vocab_size)
    for k in range(config.num_heads):
        expected = _rounded_logits(heads, k, format, dtype, by_rank, hidden_NH, embeddings_NKH)
        there = expected.isfinite()
        if logits_NKV.shape != shape or not (logits_NKV[:, k].isfinite() == there).all():
            raise RuntimeError(f"export: expected {format} to read logits of shape {shape} for head {k}")
        error = float((logits_NKV[:, k] - expected)[there].abs().max() / expected[there].abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise RuntimeError(f"export: expected {format} to read the same logits, found head {k} off by {error:.1e}")


def read_apart(format: str, directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that `readers` compute in a fresh process, (N, K, V).

    Raises:
        RuntimeError: it could not read them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": hidden_NH, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the folder of the file, which has other modules, out of the path.
        command = [sys.executable, "-P", str(Path(readers.__file__)), format, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {format}, found: {messages[-1]}")
        return load_file(output)["logits"]


def _rounded_logits(
    heads: MedusaHeads,
    k: int,
    format: str,
    dtype: torch.dtype,
    by_rank: bool,
    hidden_NH: Tensor,
    embeddings_NKH: Tensor,
) -> Tensor:
    """Return the float32 logits of head k, (N, V), as it is here but for its weights, which are rounded."""
    block = copy.deepcopy(heads.blocks[k]).to("cpu", dtype).float()
    lm_head = copy.deepcopy(heads.lm_head_of(k)).to("cpu", dtype).float()
    head, dropped = heads.head(k), by_rank and format != "own"
    scale = 1.0 if dropped and format != "vllm" else head.scale
    finished = OutputHead(lm_head.weight, lm_head.bias, scale, None if dropped else head.softcap)
    logits = finished(block(hidden_NH, heads.seen(k, embeddings_NKH)))
    return heads.widened(logits.to(heads.device)).cpu()


def _equal_layers(block: torch.nn.Module) -> bool:
    first, *others = block.layers  # type: ignore[misc, union-attr]
    return all(
        torch.equal(a, b) for layer in others for a, b in zip(first.parameters(), layer.parameters(), strict=True)
    )


def assembled(config: MedusaConfig, tensors: dict[str, Tensor]) -> MedusaHeads:
    """Return heads of these tensors, under our names, in eval mode; nothing is copied."""
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(tensors, assign=True)
    return heads.eval()


def tensor_names(config: PretrainedConfig, format: str) -> dict[str, str]:
    """Return the names of tensors in a format by ours, where they differ."""
    if format not in PREFIXES:
        return {}
    prefix, layers = PREFIXES[format], config.num_hidden_layers
    names = {f"lm_heads.{h}.weight": f"{prefix}{h}.{layers}.weight" for h in range(config.num_heads)}
    for h in range(config.num_heads):
        for layer in range(layers):
            for part in ("weight", "bias"):
                names[f"blocks.{h}.layers.{layer}.{part}"] = f"{prefix}{h}.{layer}.linear.{part}"
    return names


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
