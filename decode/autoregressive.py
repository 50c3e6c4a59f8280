"""Plain decoding of the target: what speculative decoding must equal, and the baseline of every speed-up."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, check_model
from draftsmith.decode.counts import Counts
from draftsmith.decode.generation import (
    DecodeOutput,
    Row,
    TextBatch,
    collect_output,
    decoded,
    generate_arguments,
    prepare_rows,
)
from draftsmith.decode.sampling import argmax, draw_rows, scores_of_rows, uniforms

TOKEN = Counts(num_drafts=1, num_emitted_tokens=1)


def autoregressive_generate(
    target: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode one token per forward; arguments and result are those of `speculative_generate`."""
    arguments = generate_arguments(target, input_ids, attention_mask, **generate_kwargs)
    return decoded(target, autoregressive_decode, arguments | {"seed": seed})


def autoregressive_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    compiled: bool = False,
    seed: int | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """The callable for `target.generate(…, custom_generate=autoregressive_decode)`."""
    check_model(model, "target")
    rows = prepare_rows(model, logits_processor, input_ids, model_kwargs, stopping_criteria, generation_config, seed)
    _write(model, list(rows), compiled)
    return collect_output(rows, input_ids, generation_config)


def _write(model: PreTrainedModel, rows: list[Row], compiled: bool) -> None:
    """Write texts to their ends, a token of each at a time."""
    target = CachedModel(model, len(rows), max(len(row.text) for row in rows), compiled=compiled)
    sampler, texts = rows[0].sampler, TextBatch(rows, 1)
    logits: Tensor | None = None  # after the last tokens, (B, 1, V)
    if len(rows) == 1:
        logits = target.prefill(rows[0].context[None, :])
    else:
        target.prefill_texts([row.context for row in rows])
    while True:
        rows = texts.rows
        if logits is None:
            logits = target.feed(texts.last(), texts.lengths + -1)
        contexts = [] if sampler.context_free else [row.context for row in rows]
        scores = scores_of_rows([row.sampler for row in rows], logits[:, 0], contexts)
        tokens = argmax(scores)
        broken = scores.gather(1, tokens[:, None])[:, 0].isnan()  # the argmax is the first that is not a number
        if sampler.do_sample:
            u = uniforms([row.generator for row in rows], [1] * len(rows), scores.new_empty(0, dtype=torch.float64))
            tokens = draw_rows(scores.softmax(-1), u[:, 0])
        texts.append(tokens)
        for row, token, wrong in zip(rows, *torch.stack([tokens, broken.to(tokens.dtype)]).tolist(), strict=True):
            if wrong:
                raise row.not_finite()
            row.advance([token])
            row.rounds.append(TOKEN)
        left = [i for i, row in enumerate(rows) if not row.done]
        if not left:
            return
        if len(left) < len(rows):
            target.select(left)
            texts.select(left)
        logits = None
