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
    collect_output,
    decoded,
    generate_arguments,
    prepare_rows,
)

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
    sampler = rows[0].sampler
    logits: Tensor | None = None  # after the last tokens, (B, 1, V)
    if len(rows) == 1:
        logits = target.prefill(rows[0].context[None, :])
    else:
        target.prefill_texts([row.context for row in rows])
    while rows:
        if logits is None:
            last = torch.stack([row.context[-1:] for row in rows])
            logits = target.feed(last, [row.length - 1 for row in rows])
        if sampler.do_sample or not sampler.context_free:
            tokens = [int(row.sampler.next_token(logits[i], row.context, row.generator)) for i, row in enumerate(rows)]
        else:
            tokens = sampler.choose(logits[:, 0], []).tolist()
        for row, broken in zip(rows, logits[:, 0, :].isnan().any(-1).tolist(), strict=True):
            if broken:
                raise row.not_finite()
        for row, token in zip(rows, tokens, strict=True):
            row.emit([token])
            row.rounds.append(TOKEN)
        left = [i for i, row in enumerate(rows) if not row.done]
        if 0 < len(left) < len(rows):
            target.select(left)
        rows, logits = [rows[i] for i in left], None
