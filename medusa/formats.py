"""Medusa heads in the formats that others load, both ways: what each can say, its names, a proof of what was written.

| format           | weights             | block l of head h               | language-model head of h                 |
|------------------|---------------------|---------------------------------|------------------------------------------|
| `own`            | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | `lm_heads.{h}.*`, or `lm_head.*` for all |
| `vllm`           | `model.safetensors` | `blocks.{h}.layers.{l}.*`       | the same, `.weight` alone                |
| `fasterdecoding` | `medusa_lm_head.pt` | `{h}.{l}.linear.*`              | `{h}.{L}.weight`                         |
| `modelopt`       | `model.safetensors` | `medusa_heads.{h}.{l}.linear.*` | `medusa_heads.{h}.{L}.weight`            |

FasterDecoding's older trainer writes another file under that name, `medusa_lm_head.safetensors`, without language-model
heads: there all heads go through the target's. It is read, not written.
"""

import copy
import json
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.medusa import prove
from draftsmith.medusa.heads import MedusaConfig, MedusaHeads
from draftsmith.train.heads import Head, head_of
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
    base: str | None = None,
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
        base: the target's name or path, in place of the one that the heads remember.
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
    adapted = _adapted(heads, format, kind, base, by_rank)
    if format == "fasterdecoding" and not adapted.config.base_model_name_or_path:
        raise InputError("target: expected its name or path, which fasterdecoding loads it by, found none")
    with _aside(directory) as aside:
        _write(adapted, aside, format)
        if readme is not None:
            (aside / "README.md").write_text(readme, encoding="utf-8")
        _prove(heads, aside, format, kind, by_rank)
    return _notes(adapted, format)


def import_heads(
    directory: str | Path, format: str | None = None, target: PreTrainedModel | None = None
) -> MedusaHeads:
    """Read heads from any format.

    Args:
        directory: a local one.
        format: one of `FORMATS`; recognised by its files if None.
        target: whose language-model head they use, where the file has none of its own; else they must fit it.

    Returns:
        Heads in the widest dtype of their tensors, on the CPU, in eval mode.

    Raises:
        InputError: no such format, a file that is missing, damaged or holds pickled code, a config that cannot be, or
            tensors that are missing, not expected or of another shape.
    """
    directory = Path(directory)
    format = detect(directory) if format is None else check_format(format)
    if format == "own":
        heads = _read_own(directory)
    elif format == "vllm":
        heads = _read_vllm(directory)
    else:
        heads = _read_sequential(directory, format, target)
    if target is not None:
        heads.check_fits(target)
    return heads.eval()


def detect(directory: str | Path) -> str:
    """Return the one format that a directory is in.

    Raises:
        InputError: no config.json, none of the formats, or more than one of them.
    """
    directory = Path(directory)
    config = _read_config(directory)
    marks = {
        "own": config.get("model_type") == "medusa" and "hydra" in config,
        "vllm": config.get("model_type") == "medusa" and "hydra" not in config,
        "fasterdecoding": (directory / PICKLED).is_file() or (directory / LEGACY).is_file(),
        "modelopt": isinstance(config.get("medusa"), dict),
    }
    found = [format for format, marked in marks.items() if marked]
    if len(found) != 1:
        raise InputError(
            f"{directory}: expected Medusa heads in one of {', '.join(FORMATS)}, found "
            + (f"marks of {' and '.join(found)}; name the format" if found else "no mark of any")
        )
    return found[0]


def vllm_command(target: str, speculative: dict[str, Any]) -> str:
    """Return the shell command that serves a target with a speculative config."""
    config = json.dumps(speculative, separators=(",", ":"))
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"


# --- writing ---


def _adapted(heads: MedusaHeads, format: str, dtype: torch.dtype, base: str | None, by_rank: bool) -> MedusaHeads:
    """Return heads as the format says them, on the CPU: rounded, with a head and biases each where it wants them."""
    config: Any = copy.deepcopy(heads.config)
    config.base_model_name_or_path = base or config.base_model_name_or_path
    own = heads.state_dict()
    if by_rank and format != "own":
        config.final_logit_softcapping = None
        config.logit_scale = config.logit_scale if format == "vllm" else 1.0
    if format in PREFIXES:
        config.medusa_fc_bias, config.original_lm_head = True, False
        for h in range(config.num_heads):
            own[f"lm_heads.{h}.weight"] = heads.lm_head_of(h).weight
            for layer in range(config.num_hidden_layers):
                own.setdefault(f"blocks.{h}.layers.{layer}.bias", torch.zeros(config.hidden_size))
        own.pop("lm_head.weight", None)
    for name, tensor in own.items():
        if not tensor.is_floating_point():
            own[name] = tensor.cpu()
            continue
        # A copy each: safetensors takes no two names for one memory, and converters drop such names.
        own[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not own[name].isfinite().all():
            raise InputError(f"heads: expected weights that are finite in {_name(dtype)}, found others in {name}")
    return _assigned(config, own)


def _write(heads: MedusaHeads, directory: Path, format: str) -> None:
    if format == "own":
        heads.save_pretrained(directory)
        return
    (directory / CONFIG).write_text(json.dumps(_config(heads, format), indent=2) + "\n", encoding="utf-8")
    names = _names(heads.config, format)
    tensors = {names.get(name, name): tensor for name, tensor in heads.state_dict().items()}
    if format == "fasterdecoding":
        torch.save(tensors, directory / PICKLED)
    else:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def _config(heads: MedusaHeads, format: str) -> dict[str, Any]:
    """Return config.json. vLLM renames any key that holds "num" and "heads" or "layers": no others may be there."""
    config = heads.config
    # The older name of the dtype is the one that all versions of the library read.
    common = {"base_model_name_or_path": config.base_model_name_or_path, "torch_dtype": _name(heads.dtype)}
    if format == "vllm":
        names = "hidden_size vocab_size num_heads num_hidden_layers truncated_vocab_size medusa_fc_bias"
        said = {name: getattr(config, name) for name in [*names.split(), "original_lm_head", "logit_scale"]}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", **said, **common}
    if format == "modelopt":
        medusa = {"num_medusa_heads": config.num_heads, "num_medusa_layers": config.num_hidden_layers}
        return {"medusa": medusa, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, **common}
    said = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_hidden_layers, **common}
    return said if config.medusa_choices is None else {**said, "medusa_choices": config.medusa_choices}


def _notes(heads: MedusaHeads, format: str) -> list[str]:
    config = heads.config
    if config.medusa_choices is None or format in ("own", "fasterdecoding"):
        return []
    nodes = len(config.medusa_choices)
    if format == "vllm":
        return [f"vLLM drafts the chain of each head's most likely token: the tree of {nodes} tokens is not written"]
    return [f"the tree of {nodes} tokens has no place in this format: give its reader medusa_choices"]


@contextmanager
def _aside(directory: Path) -> Iterator[Path]:
    """Give a directory to write in that takes the place of another when all went well, and is removed otherwise."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"output: expected a new or empty directory, found {directory}, which holds something")
    aside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.replace(directory)
    except (OSError, SafetensorError) as error:
        raise InputError(f"output: expected to write in {directory}, found: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error):
            raise
        raise InputError(f"output: expected to write in {directory}, found no space left") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@torch.no_grad()
def _prove(heads: MedusaHeads, directory: Path, format: str, dtype: torch.dtype, by_rank: bool) -> None:
    """Raise a RuntimeError unless another process, which knows the format alone, computes the same logits."""
    config, generator = heads.config, torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(4, config.hidden_size, generator=generator)
    embeddings_NKH = torch.randn(4, config.num_heads, config.hidden_size, generator=generator)
    found = read_apart(format, directory, hidden_NH, embeddings_NKH)
    for k in range(config.num_heads):
        expected = _rounded_logits(heads, k, format, dtype, by_rank, hidden_NH, embeddings_NKH)
        there = expected.isfinite()
        if found.shape != (4, config.num_heads, config.vocab_size) or not (found[:, k].isfinite() == there).all():
            raise RuntimeError(
                f"export: expected {format} to read logits of shape {tuple(expected.shape)} for head {k}"
            )
        error = float((found[:, k] - expected)[there].abs().max() / expected[there].abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise RuntimeError(f"export: expected {format} to read the same logits, found head {k} off by {error:.1e}")


def read_apart(format: str, directory: Path, hidden_NH: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that `prove` reads in a fresh process, (N, K, V).

    Raises:
        RuntimeError: it could not read them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": hidden_NH, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the folder of the file, which has modules of its own, out of the path.
        command = [sys.executable, "-P", str(Path(prove.__file__)), format, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {format}, found: {said[-1]}")
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

    def rounded(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().to("cpu", dtype).float()

    block, head = copy.deepcopy(heads.blocks[k]).to("cpu", dtype).float(), heads.head(k)
    dropped = by_rank and format != "own"
    here = Head(
        rounded(head.weight),
        rounded(head.bias),
        1.0 if dropped and format != "vllm" else head.scale,
        None if dropped else head.softcap,
    )
    logits = here(block(hidden_NH, heads.seen(k, embeddings_NKH)))
    return heads.widened(logits.to(heads.device)).cpu()


def _equal_layers(block: torch.nn.Module) -> bool:
    first, *others = block.layers  # type: ignore[misc, union-attr]
    return all(
        torch.equal(a, b) for layer in others for a, b in zip(first.parameters(), layer.parameters(), strict=True)
    )


# --- reading ---


def _read_own(directory: Path) -> MedusaHeads:
    raw, path = _read_config(directory), directory / CONFIG
    for name in ("logit_scale", "final_logit_softcapping"):
        _field(raw, path, name, float, None)
    for name in ("medusa_fc_bias", "original_lm_head", "lm_head_bias", "hydra"):
        _field(raw, path, name, bool, None)
    try:
        config = MedusaConfig.from_dict(raw)
    except Exception as error:  # the library stumbles over whatever it finds
        raise InputError(f"{path}: expected a config of heads, found: {_first_line(error)}") from error
    return _built(directory, config, _read_safetensors(_shards(directory)), {})


def _read_vllm(directory: Path) -> MedusaHeads:
    path = directory / CONFIG
    raw = _read_config(directory)
    for kind, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        # vLLM takes any such key for it, the last one if there are several.
        keys = [key for key in raw if "num" in key and kind in key and not ("heads" in key and kind == "layers")]
        if len({json.dumps(raw[key]) for key in keys}) > 1:
            raise InputError(f"{path}: expected one {name}, found {', '.join(f'{key} {raw[key]}' for key in keys)}")
        for key in keys:
            raw[name] = raw.pop(key)
    shape = {name: _field(raw, path, name, int) for name in ("hidden_size", "vocab_size", "num_heads")}
    config = MedusaConfig(
        **shape,
        num_hidden_layers=_field(raw, path, "num_hidden_layers", int),
        truncated_vocab_size=_field(raw, path, "truncated_vocab_size", int, shape["vocab_size"]),
        medusa_fc_bias=_field(raw, path, "medusa_fc_bias", bool, False),
        original_lm_head=_field(raw, path, "original_lm_head", bool, False),
        logit_scale=_field(raw, path, "logit_scale", float, 1.0),
        base_model_name_or_path=raw.get("base_model_name_or_path"),
    )
    found = {name.replace("medusa_heads.", ""): t for name, t in _read_safetensors(_shards(directory)).items()}
    if config.original_lm_head and "lm_head.weight" not in found and "lm_heads.0.weight" in found:
        found["lm_head.weight"] = found.pop("lm_heads.0.weight")
    token_map = found.get("token_map")
    if token_map is not None and token_map.ndim == 1 and bool((token_map < config.vocab_size).all()):
        for name, tensor in found.items():
            # vLLM cuts heads of the whole vocabulary to the tokens of the map.
            if name.startswith("lm_head") and tensor.ndim == 2 and len(tensor) == config.vocab_size > len(token_map):
                found[name] = tensor[token_map.long()]
    if not config.medusa_fc_bias and any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in found):
        raise InputError(f"{path}: expected medusa_fc_bias true beside biases, which vLLM skips without, found false")
    return _built(directory, config, found, {})


def _read_sequential(directory: Path, format: str, target: PreTrainedModel | None) -> MedusaHeads:
    """Read formats whose heads are sequences: blocks, then a linear map."""
    path = directory / CONFIG
    raw = _read_config(directory)
    prefix = PREFIXES[format]
    if format == "modelopt":
        said = _field(raw, path, "medusa", dict)
        heads, layers = (_field(said, path, f"num_medusa_{part}", int) for part in ("heads", "layers"))
        # ModelOpt keeps the heads inside of a checkpoint of the whole model, of which they are all that is read.
        found = _read_safetensors(_shards(directory), lambda name: name.startswith(prefix))
    else:
        heads, layers = (_field(raw, path, f"medusa_num_{part}", int) for part in ("heads", "layers"))
        found = _read_fasterdecoding(directory)
    first, last = f"{prefix}0.0.linear.weight", f"{prefix}0.{layers}.weight"
    shared = not any(re.fullmatch(rf"{re.escape(prefix)}\d+\.{layers}\.weight", name) for name in found)
    if shared and target is None:
        raise InputError(f"target: expected it for heads without language-model heads, as in {directory}, found none")
    for name in (first,) if shared else (first, last):
        if name not in found or found[name].ndim != 2:
            raise InputError(f"{directory}: expected the tensors of {heads} heads, found no matrix {name}")
    config = MedusaConfig(
        hidden_size=found[first].shape[1],
        vocab_size=1 if shared else found[last].shape[0],
        num_heads=heads,
        num_hidden_layers=layers,
        medusa_fc_bias=True,
        medusa_choices=_field(raw, path, "medusa_choices", list, None),
        base_model_name_or_path=raw.get("base_model_name_or_path"),
    )
    names = _names(config, format)
    if shared and target is not None:
        head = head_of(target)
        config.vocab_size = config.truncated_vocab_size = len(head.weight)
        config.original_lm_head, config.lm_head_bias = True, head.bias is not None
        config.logit_scale, config.final_logit_softcapping = head.scale, head.softcap
        found["lm_head.weight"] = head.weight.detach().cpu().clone()
        if head.bias is not None:
            found["lm_head.bias"] = head.bias.detach().cpu().clone()
    return _built(directory, config, found, names)


def _read_fasterdecoding(directory: Path) -> dict[str, Tensor]:
    pickled, legacy = directory / PICKLED, directory / LEGACY
    if pickled.is_file() == legacy.is_file():
        what = "both, which can differ: remove one" if legacy.is_file() else "neither"
        raise InputError(f"{directory}: expected {PICKLED} or {LEGACY}, found {what}")
    if legacy.is_file():
        return _read_safetensors([legacy])
    try:
        found = torch.load(pickled, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{pickled}: expected pickled tensors alone, found other objects or damage") from error
    except Exception as error:  # a damaged archive raises whatever its reader stumbles over
        raise InputError(f"{pickled}: expected a whole file of tensors, found: {_first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise InputError(f"{pickled}: expected a state dict, found {type(found).__name__} of other things")
    return {str(name): tensor for name, tensor in found.items()}


def _built(directory: Path, config: MedusaConfig, found: dict[str, Tensor], names: dict[str, str]) -> MedusaHeads:
    """Return heads with the tensors found, which must be those of the config, under the names of their format."""
    try:
        with torch.device("meta"):
            empty = MedusaHeads(config).state_dict()
    except (InputError, TypeError) as error:  # the latter from choices that are no lists of ranks
        raise InputError(f"{directory / CONFIG}: {error}") from error
    expected = {names.get(name, name): (name, tensor) for name, tensor in empty.items()}
    for kind, odd in (("missing", expected.keys() - found), ("not expected", found.keys() - expected)):
        if odd:
            listed = f"{', '.join(sorted(odd)[:5])}{', …' if len(odd) > 5 else ''}"
            raise InputError(
                f"{directory}: expected the tensors of {config.num_heads} heads with {config.num_hidden_layers} "
                f"blocks each, found {len(odd)} {kind}: {listed}"
            )
    for name, (_, tensor) in expected.items():
        if found[name].shape != tensor.shape:
            shape = tuple(found[name].shape)
            raise InputError(f"{directory}: expected {name} of shape {tuple(tensor.shape)}, found {shape}")
        if (found[name].dtype in DTYPES.values()) != tensor.is_floating_point():
            wanted = "a floating-point type" if tensor.is_floating_point() else "integers"
            raise InputError(f"{directory}: expected {name} in {wanted}, found {_name(found[name].dtype)}")
    ours = {name: found[theirs] for theirs, (name, _) in expected.items()}
    # One dtype for all, which must lose nothing: float16 blocks before a bfloat16 head become float32.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in ours.values() if tensor.is_floating_point()))
    ours = {k: tensor.to(dtype if tensor.is_floating_point() else torch.int64) for k, tensor in ours.items()}
    return _assigned(config, ours).check_map()


def _assigned(config: MedusaConfig, tensors: dict[str, Tensor]) -> MedusaHeads:
    with torch.device("meta"):
        heads = MedusaHeads(config)
    heads.load_state_dict(tensors, assign=True)
    return heads.eval()


def _names(config: PretrainedConfig, format: str) -> dict[str, str]:
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


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise InputError(f"{directory}: expected a directory of Medusa heads, found none")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{directory}: expected Medusa heads with {CONFIG}, found: {error}") from error
    except ValueError as error:
        raise InputError(f"{path}: expected JSON, found: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected an object, found {type(config).__name__}")
    return config


def _field(config: dict[str, Any], path: Path, name: str, kind: type, default: Any = ...) -> Any:
    value = config.get(name)
    value = default if value is None else value
    if value is ...:
        raise InputError(f"{path}: expected {name}, found none")
    accepted = (int, float) if kind is float else kind
    if value is not default and (not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool))):
        raise InputError(f"{path}: expected {name} as {kind.__name__}, found {value!r}")
    return value


def _shards(directory: Path) -> list[Path]:
    index = directory / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return [directory / WEIGHTS]
    try:
        return [
            directory / name
            for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: expected an index of safetensors, found: {_first_line(error)}") from error


def _read_safetensors(paths: list[Path], keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if keep(name)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: expected safetensors, found: {_first_line(error)}") from error
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
