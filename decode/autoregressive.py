"""Plain decoding of the target: the reference of speculative decoding and the baseline of every speed-up.

At most `rows` prompts are decoded at a time. When a text ends, the next prompt takes its row, so that no row idles
until the longest text ends (Yu et al. 2022, "Orca", section 3.1, iteration-level scheduling).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, check_rollback
from draftsmith.decode.cache.forward import NO_TOKEN
from draftsmith.decode.counts import Counts
from draftsmith.decode.generation import DecodeOutput, collect_output, generate_arguments, prepare_rows, run_decoder
from draftsmith.decode.rows import TextBatch, TextRow
from draftsmith.decode.rules.verification import next_tokens

TOKEN = Counts(num_drafts=1, num_emitted_tokens=1)
Observer = Callable[[TextRow, int], None]  # called with a row and the token that was just written to it


def autoregressive_generate(
    target: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode one token per forward; arguments and result are those of `speculative_generate`.

    Further arguments are `rows`, the number of prompts decoded at a time (all if None), and `observer`, an `Observer`.
    """
    arguments = generate_arguments(target, input_ids, attention_mask, **generate_kwargs)
    return run_decoder(target, autoregressive_decode, arguments | {"seed": seed})


def autoregressive_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    compiled: bool = False,
    seed: int | None = None,
    rows: int | None = None,
    observer: Observer | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """Decode as the callable for `target.generate(…, custom_generate=autoregressive_decode)`."""
    check_rollback(model, "target")
    queue = prepare_rows(model, logits_processor, input_ids, model_kwargs, stopping_criteria, generation_config, seed)
    if unfinished := [row for row in queue if not row.done]:
        _decode(model, unfinished, rows or len(unfinished), compiled, observer)
    return collect_output(queue, input_ids, generation_config)


def _decode(model: PreTrainedModel, queue: list[TextRow], rows: int, compiled: bool, observer: Observer | None) -> None:
    """Write all texts to their ends, one token per row at a time."""
    waiting, longest = deque(queue[rows:]), max(len(row.text) for row in queue)
    texts = TextBatch(queue[:rows], 1, longest)
    # A row that begins another text goes back to slot 0: layers with a window must then forget nothing.
    target = CachedModel(model, len(texts.rows), longest, compiled=compiled, rollback=longest if waiting else None)
    logits: Tensor | None = None  # after the last tokens, (B, 1, V)
    if len(texts.rows) == 1:
        logits = target.prefill(texts.rows[0].context[None, :])
    else:
        target.prefill_texts([row.context for row in texts.rows])
    while True:
        batch = texts.rows
        if logits is None:
            logits = target.feed(texts.last(), texts.lengths + -1)
        samplers, generators = [row.sampler for row in batch], [row.generator for row in batch]
        tokens = next_tokens(samplers, logits[:, 0], [row.context for row in batch], generators, target.likeliest)
        texts.append(tokens)
        for row, token in zip(batch, tokens.tolist(), strict=True):
            if token == NO_TOKEN:
                raise row.not_finite()
            row.advance([token])
            row.rounds.append(TOKEN)
            if observer is not None:
                observer(row, token)
        free = [index for index, row in enumerate(batch) if row.done]
        if free and waiting:
            # The next texts take the rows of those that have ended.
            indices = free[: len(waiting)]
            next_rows = [waiting.popleft() for _ in indices]
            target.refill(indices, [row.context for row in next_rows])
            texts.refill(indices, next_rows)
        unfinished = [index for index, row in enumerate(texts.rows) if not row.done]
        if not unfinished:
            return
        if len(unfinished) < len(texts.rows):
            target.select(unfinished)
            texts.select(unfinished)
        logits = None
