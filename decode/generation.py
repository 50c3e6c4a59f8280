"""What both decoders share: the way through `generate`, the rows of a batch, and where a text ends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from draftsmith.decode.counts import Counts


@dataclass(frozen=True)
class DecodeOutput:
    """The decoded sequences and what it took."""

    sequences: Tensor
    """(B, ≤ T + max_new_tokens) int64, prompts included, padded on the right where rows end early."""
    counts: Counts
    """Summed over the rows."""


@dataclass(frozen=True)
class Limits:
    """Where a text ends: the length limit, end-of-sequence tokens, and any other stopping criterion."""

    max_length: int
    eos: frozenset[int]
    others: StoppingCriteriaList

    @classmethod
    def prepared(cls, criteria: StoppingCriteriaList, max_length: int) -> "Limits":
        """Sort the criteria that `generate` prepared."""
        eos = [c.eos_token_id.tolist() for c in criteria if isinstance(c, EosTokenCriteria)]
        others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
        return cls(max_length, frozenset(token for ids in eos for token in ids), StoppingCriteriaList(others))

    def buffer(self, prompt: Tensor) -> Tensor:
        """Return room for the whole text, (1, max_length), that begins with the prompt (1, T)."""
        sequence = prompt.new_zeros(1, self.max_length)
        sequence[:, : prompt.shape[1]] = prompt
        return sequence

    def cut(self, sequence: Tensor, length: int, new: int) -> tuple[int, bool]:
        """Say how many of the `new` tokens written after the first `length` ones stand, and whether the text ends.

        The text ends with the first new token that completes any criterion: what a block holds after it was never said.
        """
        tokens = sequence[0, length : length + new].tolist()
        for i, token in enumerate(tokens, start=1):
            end = length + i
            if end >= self.max_length or token in self.eos:
                return i, True
            if self.others and bool(self.others(sequence[:, :end], None).all()):  # type: ignore[arg-type]
                return i, True
        return new, False


DecodeRow = Callable[[Tensor, Limits, torch.Generator | None], tuple[Tensor, Counts]]


def decode_rows(
    decode_row: DecodeRow,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
) -> DecodeOutput | Tensor:
    """Decode the rows of a left-padded batch (B, T) one after another, each as it would be alone."""
    padding = [0] * len(input_ids) if attention_mask is None else (attention_mask == 0).sum(1).tolist()
    rows, counts = [], Counts()
    for i, pad in enumerate(padding):
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed + i)
        limits = Limits.prepared(criteria, config.max_length - pad)
        sequence, row_counts = decode_row(input_ids[i : i + 1, pad:], limits, generator)
        rows.append(torch.cat([input_ids[i, :pad], sequence[0]]))
        counts += row_counts
    fill = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    return DecodeOutput(sequences=sequences, counts=counts) if config.return_dict_in_generate else sequences


def run_generate(
    target: PreTrainedModel,
    decode: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> DecodeOutput:
    """Call `target.generate` with one of the decoders."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    generate: Any = target.generate
    with torch.inference_mode():
        return generate(input_ids, attention_mask=mask, custom_generate=decode, return_dict_in_generate=True, **kwargs)
