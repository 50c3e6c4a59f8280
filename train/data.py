"""Batches of target completions."""

from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from draftsmith.train.completions import load_completions, split_empty

IGNORED = -100
logger = logging.get_logger(__name__)


def training_examples(paths: list[str], max_length: int | None = None) -> Dataset:
    """Read completions that `draftsmith prepare` wrote, as `input_ids` and `labels`.

    Labels are the tokens themselves where the loss mask is 1, and −100 on the prompt. Samples without a single loss
    token are left out, counted and named.

    Args:
        paths: completion directories.
        max_length: cut longer samples at the end.

    Raises:
        InputError: a directory is missing or malformed, or no sample has a loss token.
    """

    def cut(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": sample["input_ids"][:max_length], "loss_mask": sample["loss_mask"][:max_length]}

    def label(sample: dict[str, Any]) -> dict[str, Any]:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        return {"input_ids": ids, "labels": [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]}

    parts = []
    for path in paths:
        dataset = load_completions(path)
        if max_length is not None:  # before empty samples are sought: a long prompt may leave no completion
            dataset = dataset.map(cut)
        dataset, empty = split_empty(dataset)
        if empty:
            logger.warning(
                f"{path}: {len(empty)} of {len(empty) + len(dataset)} samples have no token to learn from and are "
                f"left out: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
            )
        parts.append(dataset.map(label, remove_columns=dataset.column_names))
    return concatenate_datasets(parts)


class CompletionCollator:
    """Pads samples on the right and masks the padding.

    Returns batches of `input_ids`, `attention_mask` and `labels`, each (B, T) int64; −100 labels carry no loss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __call__(self, samples: list[dict[str, list[int]]]) -> dict[str, Any]:
        """Collate samples of `input_ids` and `labels`."""
        batch = self.tokenizer.pad(
            {"input_ids": [s["input_ids"] for s in samples]}, padding_side="right", return_tensors="pt"
        )
        labels = batch["input_ids"].new_full(batch["input_ids"].shape, IGNORED)
        for row, sample in zip(labels, samples, strict=True):
            row[: len(sample["labels"])] = row.new_tensor(sample["labels"])
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
