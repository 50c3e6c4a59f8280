"""Request checks, row setup and output, shared by both decoders."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.rows import Departure, TextRow
from draftsmith.decode.sampling import Sampler, is_users


@dataclass(frozen=True)
class DecodeOutput:
    """The decoded sequences and their counts."""

    sequences: Tensor
    """(B, ≤ T + max_new_tokens) int64, prompts included, padded on the right where rows end early."""
    counts: Counts
    """The sum over the rows."""
    row_counts: tuple[Counts, ...]
    """The counts of each row."""
    row_departures: tuple[Departure, ...] = ()
    """Each row's departure from the target's distribution under a lossy rule; empty under the exact rule."""
    row_sources: tuple[tuple[Counts, ...], ...] = ()
    """For drafters that take turns: each row's counts by drafter, without trailing drafters that never drafted."""
    finish_reasons: tuple[str, ...] = ()
    """Why each row ended: `stop` (an end-of-sequence token or another criterion) or `length` (the limit)."""
    num_undrafted_tokens: int = 0
    """Tokens beyond the drafter's last position, where it drafts nothing, summed over the rows."""

    @property
    def departure(self) -> Departure | None:
        """The sum of the rows' departures; None under the exact rule."""
        return sum(self.row_departures, Departure()) if self.row_departures else None


# The attribute of each processor that holds a length counted with the padding.
PADDED_LENGTHS: dict[type[LogitsProcessor], str] = {
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
}


# Processors that one forward over K + 1 positions cannot serve: they keep a state, or call a model.
STATEFUL = (
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)
STATEFUL_PACKAGES = ("outlines", "xgrammar")
# Inputs that `generate` passes with the tokens. Any other would change the model's output, and is refused.
SERVED_INPUTS = {
    "attention_mask",
    "cache_params",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
}
SERVED_INPUTS |= {"use_cache"}
# Options of `generate` that our decoders do not serve, with their unset values.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


def check_request(config: GenerationConfig, processors: LogitsProcessorList, rows: int) -> None:
    """Raise an `InputError` for options and processors of `generate` that our decoders would silently ignore."""
    for name, unused in UNSERVED.items():
        if (value := getattr(config, name, None)) not in unused:
            raise InputError(f"{name}: expected it to be left out, for it is not supported here, found {value}")
    for processor in processors:
        name, package = type(processor).__name__, type(processor).__module__.split(".")[0]
        if name in STATEFUL or package in STATEFUL_PACKAGES:
            raise _keeps_state(processor)
        if rows > 1 and isinstance(
            processor, EncoderNoRepeatNGramLogitsProcessor | EncoderRepetitionPenaltyLogitsProcessor
        ):
            raise InputError(f"logits_processor: expected one prompt with {name}, found {rows}")


def check_functions(processors: LogitsProcessorList, row: TextRow, vocab_size: int) -> None:
    """Refuse the user's processors that keep a state: drafts ask them about texts that are never written.

    Each is called about the row's prompt again, and after a longer text. A memo or a cache changes nothing then.
    """
    text = row.context

    def ask(processor: Any, text: Tensor) -> Tensor:
        scores: Tensor = processor(text[None], torch.linspace(-1, 1, vocab_size, device=text.device)[None])
        return scores

    for processor in filter(is_users, processors):
        first, state = ask(processor, text), _state(processor)
        results, changes = [ask(processor, text)], _state(processor) != state
        longer = row.sampler.after(text, first.argmax(-1), first.amax())
        if row.room > 1 and len(longer):
            ask(processor, longer)
            results.append(ask(processor, text))
        if changes or not all(torch.equal(first, scores) for scores in results):
            raise _keeps_state(processor)


def _state(processor: Any) -> list[str]:
    """Return the attributes of a processor, and those of the objects among them, as text."""
    held = [processor, *getattr(processor, "__dict__", {}).values()]
    return [repr(vars(v)) for v in held if hasattr(v, "__dict__") and not isinstance(v, nn.Module | ModuleType | type)]


def _keeps_state(processor: Any) -> InputError:
    return InputError(
        "logits_processor: expected processors that are functions of the tokens and logits, found "
        f"{type(processor).__name__}, which keeps a state from call to call"
    )


def count_paddings(input_ids: Tensor, model_inputs: Mapping[str, Any]) -> list[int]:
    """Return the number of padding tokens before each row of (B, T) tokens, and check all inputs of `generate`."""
    unserved = sorted(
        name
        for name, value in model_inputs.items()  # `generate` adds an empty dict for the images of multimodal classes
        if name not in SERVED_INPUTS and not (value is None or value is False or value == {})
    )
    if unserved:
        raise InputError(f"inputs: expected input_ids and attention_mask alone, found {', '.join(unserved)}")
    cache = model_inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InputError(f"past_key_values: expected an empty cache, found {cache.get_seq_length()} tokens in it")
    mask, positions = model_inputs.get("attention_mask"), model_inputs.get("position_ids")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask: expected the shape {tuple(input_ids.shape)} of input_ids, found {tuple(mask.shape)}"
        )
    ones = (mask != 0).long()
    # One transfer for three facts of each row: its padding, whether a zero follows a one, and whether its positions
    # differ from the tokens' positions in the text.
    falls = (ones.diff(dim=1) < 0).any(1)
    shifted = torch.zeros_like(falls)
    if positions is not None and positions.shape == input_ids.shape:
        shifted = ((positions != ones.cumsum(1) - 1) & (ones > 0)).any(1)
    facts = torch.stack([(ones == 0).sum(1), falls.long(), shifted.to(falls).long()]).tolist()
    for row, (padding, fall, shift) in enumerate(zip(*facts, strict=True)):
        if fall or padding == input_ids.shape[1]:
            fault = "a row of zeros" if padding == input_ids.shape[1] else "a zero after a one"
            raise InputError(f"attention_mask: expected left padding, zeros and then ones, found {fault} in row {row}")
        if shift:
            raise InputError(f"position_ids: expected each token's place in the text, found others in row {row}")
    return facts[0]


def row_processors(processors: LogitsProcessorList, row: int, padding: int) -> LogitsProcessorList:
    """Return the processors that `generate` would prepare for one row without its first `padding` tokens."""
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
            processor.prompt_ignore_length = None  # the row's padding, which is removed
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            processor = PrefixConstrainedLogitsProcessor(partial(_allowed_in_row, allowed, row), num_beams=1)
        prepared.append(processor)
    return prepared


def _allowed_in_row(allowed: Any, row: int, _: int, tokens: Tensor) -> list[int]:
    """Call the user's function with the row's index in the batch, since processors see one row at a time."""
    return allowed(row, tokens)


def prepare_rows(
    model: PreTrainedModel,
    processors: LogitsProcessorList,
    input_ids: Tensor,
    model_inputs: Mapping[str, Any],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
) -> list[TextRow]:
    """Return the rows of a left-padded batch (B, T), on the model's device, after checking the request.

    A row's text is the text that it would be alone, without padding. All rows share one sampler, unless a processor
    counts from the prompt's end or asks for the row.
    """
    check_request(config, processors, len(input_ids))
    paddings = count_paddings(input_ids, model_inputs)
    input_ids = input_ids.to(model.device)
    eos = frozenset(t for c in criteria if isinstance(c, EosTokenCriteria) for t in c.eos_token_id.tolist())
    ends = StoppingCriteriaList([c for c in criteria if isinstance(c, EosTokenCriteria | StopStringCriteria)])
    further = StoppingCriteriaList([c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)])
    by_row = any(type(p) in PADDED_LENGTHS or isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors)
    rows: list[TextRow] = []
    for i, padding in enumerate(paddings):
        text = input_ids.new_zeros(config.max_length - padding)
        length = input_ids.shape[1] - padding
        text[:length] = input_ids[i, padding:]
        generator = None if seed is None else torch.Generator(model.device).manual_seed(seed + i)
        if by_row or not rows:
            sampler = Sampler(row_processors(processors, i, padding), bool(config.do_sample), ends)
        rows.append(TextRow(i, padding, text, length, sampler, eos, further, generator))
    check_functions(processors, rows[0], model.config.get_text_config().vocab_size)
    return rows


def collect_output(
    rows: Sequence[TextRow],
    input_ids: Tensor,
    config: GenerationConfig,
    lossy: bool = False,
    positions: int | None = None,
) -> DecodeOutput | Tensor:
    """Return the output of `generate`: sequences alone, or with counts if the config asks for a dict."""
    fill = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    texts = [torch.cat([input_ids[row.index, : row.padding], row.context.to(input_ids.device)]) for row in rows]
    sequences = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=fill)
    if not config.return_dict_in_generate:
        return sequences
    counts = tuple(Counts.total(row.rounds) for row in rows)
    departures = tuple(row.departure for row in rows) if lossy else ()
    reasons = tuple(row.finish_reason for row in rows)
    prompts = [row.length - count.num_emitted_tokens for row, count in zip(rows, counts, strict=True)]
    beyond = count_undrafted([row.length for row in rows], prompts, positions)
    return DecodeOutput(sequences, Counts.total(counts), counts, departures, _by_source(rows), reasons, beyond)


def count_undrafted(lengths: Sequence[int], prompts: Sequence[int], positions: int | None) -> int:
    """Return the number of tokens beyond the drafter's positions (None: no limit), for which no draft is made."""
    if positions is None:
        return 0
    return sum(max(0, length - max(prompt, positions + 1)) for length, prompt in zip(lengths, prompts, strict=True))


def _by_source(rows: Sequence[TextRow]) -> tuple[tuple[Counts, ...], ...]:
    """Return each row's counts by drafter; empty where one drafter wrote all."""
    last = max((source for row in rows for source in row.sources), default=0)
    if not last:
        return ()
    return tuple(
        tuple(
            Counts.total(round for round, drafter in zip(row.rounds, row.sources, strict=True) if drafter == source)
            for source in range(last + 1)
        )
        for row in rows
    )


def generate_arguments(
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, tokenizer: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Return the arguments with which `target.generate` calls one of our decoders as `custom_generate`."""
    # Given a callable, `generate` drops the tokenizer, and with it the stop strings: here they become a criterion.
    if kwargs.get("assistant_model") is not None:
        raise InputError("assistant_model: expected it to be left out, for the proposer drafts, found one")
    config, default = kwargs.get("generation_config"), target.generation_config
    stop_strings = default.stop_strings if config is None or config.stop_strings is None else config.stop_strings
    stop_strings = kwargs.pop("stop_strings", stop_strings)
    if stop_strings is not None:
        if tokenizer is None:
            raise InputError("tokenizer: expected the target's tokenizer with stop_strings, found none")
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stopping_criteria"] = criteria
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    kwargs |= {"inputs": input_ids, "attention_mask": mask}
    if config is None:
        return kwargs | {"return_dict_in_generate": True}
    config = copy.deepcopy(config)  # the library warns of arguments next to a config
    config.return_dict_in_generate, config.stop_strings = True, None
    return kwargs | {"generation_config": config}


def run_decoder(target: PreTrainedModel, decoder: Any, arguments: Mapping[str, Any]) -> DecodeOutput:
    """Run one of our decoders in `target.generate`; return an ordinary tensor, not one of inference mode."""
    generate: Any = target.generate
    config: Any = target.generation_config
    # The criteria have the stop strings already; in the target's own config they would require a tokenizer.
    target.generation_config = copy.copy(config)
    target.generation_config.stop_strings = None
    try:
        with torch.inference_mode():
            output = generate(custom_generate=decoder, **arguments)
    finally:
        target.generation_config = config
    return replace(output, sequences=output.sequences.clone())
