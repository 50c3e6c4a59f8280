"""Loading models and tokenizers safely, and checking that a drafter and a target speak the same tokens."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def default_device() -> torch.device:
    """Return the first CUDA device where there is one, the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    path: str | Path,
    *,
    field: str = "model",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference: eval mode, no gradients, on `device` (the default device if None).

    Pickled weights are read with `weights_only=True`, code from the model's repository only with `trust_remote_code`.

    Args:
        path: a local directory or a hub id.
        field: the config field or flag that named it, for the error message.
        dtype: one of `float32`, `bfloat16`, `float16`, `float64`.
        trust_remote_code: run model code that the repository ships.
        device: where to put it.

    Raises:
        InputError: no model there, or not a causal LM, or an unknown dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    _require_config(path, field)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code, weights_only=True
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: expected a causal LM in {path}, found: {_first_line(error)}") from error
    return model.to(device or default_device()).eval().requires_grad_(False)


def load_tokenizer(
    path: str | Path, *, field: str = "model", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model, padding on the left; end-of-sequence stands in for a missing pad token.

    Raises:
        InputError: no tokenizer there, or one without a pad and an end-of-sequence token.
    """
    _require_config(path, field)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"{field}: expected a tokenizer in {path}, found: {_first_line(error)}") from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"{field}: expected a pad or an end-of-sequence token in {path}'s tokenizer, found neither"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_path: str | Path, draft_path: str | Path
) -> None:
    """Require that two tokenizers agree by content: every token has the same id in both.

    Equal length proves nothing (two 4,096-entry vocabularies can differ in every entry), so the mappings are compared.
    The models' embedding sizes may differ by padding; logits are cut to the tokenizer's size when they are compared.

    Raises:
        InputError: names the first difference.
    """
    p, q = target.get_vocab(), draft.get_vocab()
    if p == q:
        return
    differing = sorted(
        (token for token in p.keys() | q.keys() if p.get(token) != q.get(token)),
        key=lambda t: (min(p.get(t, len(p)), q.get(t, len(q))), t),
    )
    token = differing[0]
    raise InputError(
        f"draft {draft_path}: expected the tokenizer of target {target_path}, found {len(differing)} tokens that "
        f"differ, the first {token!r}: id {q.get(token)} in the draft, {p.get(token)} in the target"
    )


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of logits that are tokens: the largest id plus one, whatever padding a head has."""
    return max(tokenizer.get_vocab().values()) + 1


def check_head(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, field: str) -> None:
    """Require a logit for every token of the tokenizer; more of them are padding and do no harm.

    Raises:
        InputError: the head is narrower than the tokenizer.
    """
    found, expected = model.config.get_text_config().vocab_size, tokenizer_size(tokenizer)
    if found < expected:
        raise InputError(f"{field}: expected a vocabulary of at least {expected} for its tokenizer, found {found}")


def _require_config(path: str | Path, field: str) -> None:
    # A path that looks local but is missing would otherwise be looked up on the hub: a slow and confusing failure.
    local = Path(path)
    looks_local = local.exists() or local.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1
    if local.is_dir() and not (local / "config.json").is_file():
        raise InputError(f"{field}: expected a model directory with config.json, found none in {path}")
    if looks_local and not local.is_dir():
        raise InputError(f"{field}: expected a model directory or a hub id, found nothing at {path}")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
