"""What a training run leaves on disk, and how it is found again."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint


def last_checkpoint(output_dir: str | None) -> str | None:
    """Return the newest Trainer checkpoint in a directory, or None where there is none."""
    return get_last_checkpoint(output_dir) if output_dir and Path(output_dir).is_dir() else None


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a model and its tokenizer as an ordinary Hugging Face directory: aside first, then renamed.

    A directory of that name is replaced; a save that is interrupted leaves the old one whole, in its place or, between
    the two renames, as `.NAME.old`.
    """
    aside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        aside.rename(directory)
        shutil.rmtree(old)
    else:
        aside.rename(directory)
