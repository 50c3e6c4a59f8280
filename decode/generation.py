"""What both decoders share: the way through `generate`, the rows of a batch, and where a text ends."""

import copy
from collections.abc import Callable, Iterable, Sequence
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
    PreTrainedModel,
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
    """Each row's own."""
    departure: "Departure | None" = None
    """How far a lossy rule went from the target's law; None under the exact rule, which does not."""


@dataclass(frozen=True)
class Departure:
    """How far the law of emitted tokens lies from the target's, over the emitted tokens; it adds up as counts do."""

    total_variation: float = 0.0
    """Σ over tokens of TV(law that the token was emitted with, p); at T=0 equal to `disagreements`."""
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


@dataclass
class Row:
    """One text being written."""

    index: int
    """Its place in the batch."""
    text: Tensor
    """Room for the whole text, (max_length,), of which the first `length` tokens stand."""
    length: int
    limits: Limits
    generator: torch.Generator | None
    rounds: list[Counts] = field(default_factory=list)
    departure: Departure = field(default_factory=Departure)

    @property
    def context(self) -> Tensor:
        """What was written so far, (length,)."""
        return self.text[: self.length]

    @property
    def room(self) -> int:
        """Tokens that may still be written."""
        return self.limits.max_length - self.length

    def emit(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Write tokens, and say how many of them stand and whether the text ends.

        The text ends with the first new token that completes any criterion: what a block holds after it was never said.
        """
        start = self.length
        tokens = tokens[: self.room]
        self.text[start : start + len(tokens)] = torch.tensor(tokens, device=self.text.device)
        for i, token in enumerate(tokens, start=1):
            end = start + i
            stops = end >= self.limits.max_length or token in self.limits.eos
            if not stops and self.limits.others:
                stops = bool(self.limits.others(self.text[None, :end], None).all())  # type: ignore[arg-type]
            if stops:
                self.length = end
                return i, True
        self.length = start + len(tokens)
        return len(tokens), False


Decode = Callable[[list[Row], Sampler], None]
# Where a processor keeps a length that `generate` counted with the padding.
PADDED_LENGTHS: dict[type[LogitsProcessor], str] = {
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
}


def without_padding(processors: LogitsProcessorList, padding: int) -> LogitsProcessorList:
    """Return the processors that `generate` would prepare for rows whose `padding` first tokens were taken away."""
    own = LogitsProcessorList()
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
        own.append(processor)
    return own


def decode_rows(
    decode: Decode,
    processors: LogitsProcessorList,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
    lossy: bool = False,
) -> DecodeOutput | Tensor:
    """Hand the rows of a left-padded batch (B, T) to a decoder, and collect their texts.

    Padding is taken away first: a row's text is what it would be alone. Where a processor counts from the prompt's end,
    rows of one length are decoded at a time.
    """
    padding = [0] * len(input_ids) if attention_mask is None else (attention_mask == 0).sum(1).tolist()
    rows = []
    for i, pad in enumerate(padding):
        limits = Limits.prepared(criteria, config.max_length - pad)
        length = input_ids.shape[1] - pad
        text = input_ids.new_zeros(limits.max_length)
        text[:length] = input_ids[i, pad:]
        generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed + i)
        rows.append(Row(i, text, length, limits, generator))
    if any(type(processor) in PADDED_LENGTHS for processor in processors):
        groups = [[row for row, own in zip(rows, padding, strict=True) if own == pad] for pad in sorted(set(padding))]
    else:
        groups = [rows]
    for group in groups:
        sampler = Sampler(without_padding(processors, padding[group[0].index]), bool(config.do_sample))
        decode(list(group), sampler)
    fill = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    texts = [torch.cat([input_ids[i, : padding[i]], row.context]) for i, row in enumerate(rows)]
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=fill)
    if not config.return_dict_in_generate:
        return sequences
    counts = tuple(sum(row.rounds, Counts()) for row in rows)
    departure = sum((row.departure for row in rows), Departure()) if lossy else None
    return DecodeOutput(sequences, sum(counts, Counts()), counts, departure)


def padded(texts: Iterable[Tensor], width: int) -> Tensor:
    """Put token sequences of at most `width` tokens into one tensor, (B, width), zeros behind them."""
    return torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) if len(t) < width else t for t in texts])


def run_generate(
    target: PreTrainedModel,
    decode: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    **kwargs: Any,
) -> DecodeOutput:
    """Call `target.generate` with one of the decoders.

    `generate` would drop the tokenizer, and with it the stop strings, where `custom_generate` is a callable.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if stop_strings is not None:
        if tokenizer is None:
            raise InputError("tokenizer: expected the target's tokenizer with stop_strings, found none")
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stopping_criteria"] = criteria
    generate: Any = target.generate
    with torch.inference_mode():
        return generate(input_ids, attention_mask=mask, custom_generate=decode, return_dict_in_generate=True, **kwargs)
