"""Files of a training run: writing and finding them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from draftsmith.decode.errors import InputError, first_line, lacks_memory
from draftsmith.decode.validation import parse_json
from draftsmith.train.files import atomic_path, disk_full_error, write_atomically


def checkpoints(output_dir: str) -> list[Path]:
    """Return the Trainer's checkpoints in a directory, oldest first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    paths = (path for path in Path(output_dir).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit())
    return sorted((path for path in paths if path.is_dir()), key=lambda path: int(path.name.removeprefix(prefix)))


def last_checkpoint(output_dir: str | None) -> str | None:
    """Return the newest Trainer checkpoint in a directory, or None without one."""
    paths = checkpoints(output_dir) if output_dir else []
    return str(paths[-1]) if paths else None


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write a model (with `state_dict` as its weights) and its tokenizer as a Hugging Face directory, atomically.

    One that sees images keeps the files of its processor, if it was loaded from a directory: servers want them.
    """
    with atomic_path(directory) as aside:
        model.save_pretrained(aside, state_dict=state_dict)
        tokenizer.save_pretrained(aside)
        if model.config.get_text_config() is not model.config:
            for file in Path(model.name_or_path or aside).glob("*process*_config.json"):
                shutil.copy(file, aside)
        if state_dict is not None:
            declare_dtype(aside, next(tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()))


def in_dtype(state_dict: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights in a dtype; tied weights stay tied, and integer tensors stay integers."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state_dict.values():
        if tensor.is_floating_point():
            made.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
    return {name: made.get((tensor.data_ptr(), tensor.shape), tensor) for name, tensor in state_dict.items()}


def declare_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a saved model's config.json: the library writes the one in memory."""
    file = directory / "config.json"
    config = parse_json(file.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    write_atomically(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def argument_errors() -> Iterator[None]:
    """Turn errors about unusable TrainingArguments (a missing tracker, fp16 without a GPU, …) into InputErrors."""
    try:
        yield
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        if isinstance(error, InputError) or lacks_memory(error):
            raise
        raise InputError(f"training: expected what can be had here, found: {first_line(error)}") from error


@contextmanager
def note_on_interrupt(note_of: Callable[[], str | None]) -> Iterator[None]:
    """Add a note from `note_of`, unless it is None, to an interruption of this block."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if (note := note_of()) is not None:
            interruption.add_note(note)
        raise


@contextmanager
def full_disk_reported(directory: Path) -> Iterator[None]:
    """Turn a full disk's errors into an InputError that names the last whole checkpoint."""
    try:
        yield
    except Exception as error:
        if disk_full_error(error) is None:
            raise
        last = last_checkpoint(str(directory))
        last = f"{Path(last).name if last else 'none'}; free some space and run the same command again"
        text = f"training.output_dir: no space left for a checkpoint in {directory}; the last whole one is {last}"
        raise InputError(text) from error


def hub_name(model: str | None) -> str | None:
    """Return a model's name if it may be a hub id, None for a path: the hub refuses cards that link paths."""
    local = model is None or Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") > 1
    return None if local else model
