"""Plain decoding of the target: what speculative decoding must equal, and the baseline of every speed-up."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import CachedModel, check_model
from draftsmith.decode.counts import Counts
from draftsmith.decode.generation import DecodeOutput, Row, decode_rows, padded, run_generate
from draftsmith.decode.sampling import Sampler

TOKEN = Counts(num_drafts=1, num_emitted_tokens=1)


def autoregressive_generate(
    target: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    **generate_kwargs: Any,
) -> DecodeOutput:
    """Decode one token per forward; arguments and result are those of `speculative_generate`."""
    return run_generate(target, autoregressive_decode, input_ids, attention_mask, seed=seed, **generate_kwargs)


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

    def decode(rows: list[Row], sampler: Sampler) -> None:
        _decode(model, rows, sampler, compiled)

    mask = model_kwargs.get("attention_mask")  # named in the signature, `generate` would pass it twice
    return decode_rows(decode, logits_processor, input_ids, mask, stopping_criteria, generation_config, seed)


def _decode(model: PreTrainedModel, rows: list[Row], sampler: Sampler, compiled: bool) -> None:
    target = CachedModel(model, len(rows), max(row.limits.max_length for row in rows), compiled=compiled)
    longest = max(row.length for row in rows)
    if len(rows) == 1:
        logits = target.prefill(rows[0].context[None, :])
    elif longest > 1:
        target.prefill(padded([row.context for row in rows], longest)[:, :-1])
        logits = None
    else:
        logits = None
    while rows:
        if logits is None:
            last = torch.stack([row.text[row.length - 1 : row.length] for row in rows])
            logits = target.feed(last, [row.length - 1 for row in rows])
        left = []
        if sampler.do_sample or not sampler.context_free:
            tokens = [int(sampler.next_token(logits[i], row.context, row.generator)) for i, row in enumerate(rows)]
        else:
            tokens = sampler.choose(logits[:, 0], []).tolist()
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            row.rounds.append(TOKEN)
            if not row.emit([token])[1]:
                left.append(i)
        if 0 < len(left) < len(rows):
            target.select(left)
        rows, logits = [rows[i] for i in left], None
