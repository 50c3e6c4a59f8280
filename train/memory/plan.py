"""A plan of a training run's memory."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from draftsmith.decode.errors import InputError, first_line

DROPOUT = ("attention_dropout", "attn_pdrop")


def read_config(path: str, file: str | None, field: str, trust_remote_code: bool = False) -> Any:
    """Read a model's config, from a config.json if one is given.

    Raises:
        InputError: it cannot be read; says how to go on without a network.
    """
    if file is not None and not Path(file).is_file():
        raise InputError(f"{field}_config: expected a config.json, found nothing at {file}")
    try:
        return AutoConfig.from_pretrained(file or path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        wrong = f"{field}_config: expected a model's config in {file}, found: {first_line(error)}"
        if file is None:
            wrong = f"{field}: expected a model directory or a hub id that can be reached, found {path}: "
            wrong += f"{first_line(error)} (without a network, give its config.json as --{field}_config)"
        raise InputError(wrong) from error
