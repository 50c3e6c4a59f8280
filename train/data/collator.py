"""Batches of target completions."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.train.losses.positions import IGNORED, LossPositions


class CompletionCollator:
    """A collator that pads samples, or packed rows of samples, on the right.

    Its batches hold `input_ids` and `labels`, (B, T) int64; the label −100 carries no loss. There is no mask: causal
    attention never reaches the padding after a text. Packed rows have `position_ids`, (B, T), by which attention tells
    samples apart; each padding token is a text of its own there, at position 0. `index`, (B,) int64, holds the rows'
    numbers in their data set, if they have one. `positions[k]` is the `LossPositions.flat_N` of the positions whose
    next 1 + k tokens all have a label.

    Args:
        ahead: the last k of `positions`.
        prompts: add `text_positions`, the same for all tokens of a text except its first.
        bounds: add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, the bounds of texts in the
            flattened batch, for attention kernels without a mask (flash attention); without them, transformers looks
            for packed texts in every layer.
        host: add `host`, the first of `positions` and `text_positions`, `position_ids` and `index` by name, as arrays
            that stay on the host when a batch goes to a device.
        by_text: give rows of one sample `position_ids` too, for rotary frequencies that depend on a text's length.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ahead: int = 0,
        prompts: bool = False,
        bounds: bool = False,
        host: bool = False,
        by_text: bool = False,
    ):
        self.tokenizer, self.ahead, self.prompts, self.bounds, self.host = tokenizer, ahead, prompts, bounds, host
        self.by_text = by_text

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate samples of `input_ids` and `labels`, and of `position_ids` if they are packed."""
        batch = self.tokenizer.pad(
            {"input_ids": [s["input_ids"] for s in samples]}, padding_side="right", return_tensors="pt"
        )
        input_ids = batch["input_ids"]

        def padded(name: str, value: int) -> torch.Tensor:
            out = input_ids.new_full(input_ids.shape, value)
            for row, sample in zip(out, samples, strict=True):
                row[: len(sample[name])] = row.new_tensor(sample[name])
            return out

        out = {"input_ids": input_ids, "labels": padded("labels", IGNORED)}
        inside_BT = batch["attention_mask"].bool()
        inside_BT[:, 0] = False  # no context predicts the first token
        if "position_ids" in samples[0] or self.by_text:
            packed = "position_ids" in samples[0]
            alone_BT = (batch["attention_mask"].cumsum(1) - 1) * batch["attention_mask"]
            out["position_ids"] = padded("position_ids", 0) if packed else alone_BT
            inside_BT = out["position_ids"] > 0
        if self.bounds:
            out |= text_bounds(out.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids)))
        if "index" in samples[0]:
            out["index"] = torch.tensor([sample["index"] for sample in samples])
        out["positions"] = ahead_positions(out["labels"] != IGNORED, self.ahead)
        if self.prompts:
            out["text_positions"] = ahead_positions(inside_BT, self.ahead)
        if self.host:
            out["host"] = {name: out[name].numpy() for name in ("position_ids", "index") if name in out}
            out["host"] |= {name: out[name][0].numpy() for name in ("positions", "text_positions") if name in out}
        return out


def ahead_positions(predicted_BT: Tensor, ahead: int) -> tuple[Tensor, ...]:
    """Return `LossPositions.flat_N` of tokens to predict, then of windows of two such tokens, … up to 1 + `ahead`."""
    padded_BT = torch.nn.functional.pad(predicted_BT, (0, ahead))
    windows = [predicted_BT]
    for offset in range(1, ahead + 1):
        windows.append(windows[-1] & padded_BT[:, offset : offset + predicted_BT.shape[1]])
    return tuple(LossPositions.before(window_BT).flat_N for window_BT in windows)


def text_bounds(position_ids: Tensor) -> dict[str, Any]:
    """Return flash attention's sequence bounds for position ids (B, T), where each text begins at 0."""
    starts = (position_ids.flatten() == 0).nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])]).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
