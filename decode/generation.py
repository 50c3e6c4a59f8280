"""What both decoders share: the arguments for `generate`, the rows of a batch, where a text ends, and the output."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Sampler


@dataclass(frozen=True)
class DecodeOutput:
    """The decoded sequences and what it took."""

    sequences: Tensor
    """(B, ≤ T + max_new_tokens) int64, prompts included, padded on the right where rows end early."""
    counts: Counts
    """Summed over the rows."""
    row_counts: tuple[Counts, ...]
    """Of each row."""
    departure: "Departure | None" = None
    """How far a lossy rule departed from the target's distribution; None under the exact rule, which does not."""


@dataclass(frozen=True)
class Departure:
    """How far the distributions of emitted tokens lie from the target's, summed over them; it adds up as counts do."""

    total_variation: float = 0.0
    """Σ over tokens of TV(the distribution that the token was emitted with, p); at T=0 equal to `disagreements`."""
    disagreements: int = 0
    """Tokens that are not the target's argmax although one of the exact rule at T=0 would be; 0 under sampling."""
    num_tokens: int = 0
    """Emitted tokens."""

    def __add__(self, other: "Departure") -> "Departure":
        return Departure(
            self.total_variation + other.total_variation,
            self.disagreements + other.disagreements,
            self.num_tokens + other.num_tokens,
        )

    def mean_total_variation(self) -> float | None:
        """Return the mean TV a token; None if none was emitted."""
        return self.total_variation / self.num_tokens if self.num_tokens else None

    def argmax_disagreement(self) -> float | None:
        """Return the share of tokens that differ from the exact rule's at T=0; None if none was emitted."""
        return self.disagreements / self.num_tokens if self.num_tokens else None


@dataclass
class Row:
    """One text being written."""

    index: int
    """Its place in the batch."""
    padding: int
    """Padding tokens that were taken away from its prompt."""
    text: Tensor
    """Room for the whole text, (max_length,), of which the first `length` tokens are written."""
    length: int
    eos: frozenset[int]
    """Tokens that end the text."""
    criteria: StoppingCriteriaList
    """Further criteria that end it."""
    generator: torch.Generator | None
    rounds: list[Counts] = field(default_factory=list)
    departure: Departure = field(default_factory=Departure)
    done: bool = False

    @property
    def context(self) -> Tensor:
        """What was written so far, (length,)."""
        return self.text[: self.length]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return len(self.text) - self.length

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Write tokens up to the end of the text, and return those that were written.

        The text ends with the first new token that meets any criterion.
        """
        start = self.length
        tokens = list(tokens[: self.room])
        self.text[start : start + len(tokens)] = torch.tensor(tokens, device=self.text.device)
        for i, token in enumerate(tokens, start=1):
            self.length = start + i
            self.done = self.room == 0 or token in self.eos
            if not self.done and self.criteria:
                self.done = bool(self.criteria(self.context[None], None).all())  # type: ignore[arg-type]
            if self.done:
                return tokens[:i]
        return tokens


# Where a processor keeps a length that `generate` counted with the padding.
PADDED_LENGTHS: dict[type[LogitsProcessor], str] = {
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
}


def without_padding(processors: LogitsProcessorList, padding: int) -> LogitsProcessorList:
    """Return the processors that `generate` would prepare for rows whose `padding` first tokens were taken away."""
    prepared = LogitsProcessorList()
    counts_new = any(isinstance(processor, MinNewTokensLengthLogitsProcessor) for processor in processors)
    for processor in processors:
        name = PADDED_LENGTHS.get(type(processor))
        if counts_new and isinstance(processor, MinLengthLogitsProcessor):
            name = "min_length"  # `generate` sets it from `min_new_tokens` and the padded length
        if name is not None and padding:
            processor = copy.copy(processor)
            setattr(processor, name, getattr(processor, name) - padding)
        elif isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
            processor.prompt_ignore_length, Tensor
        ):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None  # each row's padding, of which there is none left
        prepared.append(processor)
    return prepared


def prepare_rows(
    processors: LogitsProcessorList,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
) -> list[tuple[Sampler, list[Row]]]:
    """Return the rows of a left-padded batch (B, T), in groups that are decoded together, each with its sampler.

    Padding is taken away: a row's text is what it would be alone. There is one group, but where a processor counts from
    the prompt's end there is one for each amount of padding.
    """
    paddings = [0] * len(input_ids) if attention_mask is None else (attention_mask == 0).sum(1).tolist()
    eos = frozenset(t for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.tolist())
    others = StoppingCriteriaList([c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)])
    counts_from_prompt = any(type(processor) in PADDED_LENGTHS for processor in processors)
    groups: dict[int, list[Row]] = {}
    for i, padding in enumerate(paddings):
        text = input_ids.new_zeros(config.max_length - padding)
        length = input_ids.shape[1] - padding
        text[:length] = input_ids[i, padding:]
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed + i)
        row = Row(i, padding, text, length, eos, others, generator)
        groups.setdefault(padding if counts_from_prompt else 0, []).append(row)
    return [
        (Sampler(without_padding(processors, rows[0].padding), bool(config.do_sample)), rows)
        for _, rows in sorted(groups.items())
    ]


def collect_output(
    groups: Sequence[tuple[Sampler, list[Row]]], input_ids: Tensor, config: GenerationConfig, lossy: bool = False
) -> DecodeOutput | Tensor:
    """Return what `generate` returns for rows that were written: the sequences, with counts if it asks for a dict."""
    rows = sorted((row for _, rows in groups for row in rows), key=lambda row: row.index)
    fill = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    texts = [torch.cat([input_ids[row.index, : row.padding], row.context]) for row in rows]
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=fill)
    if not config.return_dict_in_generate:
        return sequences
    counts = tuple(sum(row.rounds, Counts()) for row in rows)
    departure = sum((row.departure for row in rows), Departure()) if lossy else None
    return DecodeOutput(sequences, sum(counts, Counts()), counts, departure)


def generate_arguments(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the arguments with which `target.generate` calls a decoder of ours as `custom_generate`.

    `generate` would drop the tokenizer, and with it the stop strings, where `custom_generate` is a callable.
    """
    if stop_strings is not None:
        if tokenizer is None:
            raise InputError("tokenizer: expected the target's tokenizer with stop_strings, found none")
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stopping_criteria"] = criteria
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return {"inputs": input_ids, "attention_mask": mask, "return_dict_in_generate": True} | kwargs
