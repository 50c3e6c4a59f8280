"""What a training run leaves on disk, and how the next run finds it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from draftsmith.decode.errors import InputError
from draftsmith.train.files import written_aside


def last_checkpoint(output_dir: str | None) -> str | None:
    """Return the newest Trainer checkpoint in a directory, or None where there is none."""
    return get_last_checkpoint(output_dir) if output_dir and Path(output_dir).is_dir() else None


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write a model, or other weights of its, and its tokenizer as a Hugging Face directory, in place of one there.

    A save that is interrupted leaves the old one whole: `written_aside`.
    """
    with written_aside(directory) as aside:
        model.save_pretrained(aside, state_dict=state_dict)
        tokenizer.save_pretrained(aside)


@contextmanager
def full_disk_reported(directory: Path) -> Iterator[None]:
    """Turn what libraries raise when the disk is full into one line that says what is still there.

    Raises:
        InputError: names the last whole checkpoint.
    """
    try:
        yield
    except Exception as error:
        # safetensors and torch.save have further exceptions, with the system's text or without it.
        full = isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        text = str(error)
        if not (full or "No space left" in text or "File too large" in text or "PytorchStreamWriter failed" in text):
            raise
        kept = last_checkpoint(str(directory))
        raise InputError(
            f"training.output_dir: no space left for a checkpoint in {directory}; the last whole one is "
            f"{Path(kept).name if kept else 'none'}; free some space and run the same command again"
        ) from error
