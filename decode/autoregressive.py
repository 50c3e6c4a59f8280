"""Plain decoding of the target: what speculative decoding must equal, and the baseline of every speed-up."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from draftsmith.decode.cache import forward, new_cache
from draftsmith.decode.counts import Counts
from draftsmith.decode.generation import DecodeOutput, Limits, decode_rows, run_generate
from draftsmith.decode.sampling import Law


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
    seed: int | None = None,
    **model_kwargs: Any,
) -> DecodeOutput | Tensor:
    """The callable for `target.generate(…, custom_generate=autoregressive_decode)`."""
    law = Law(logits_processor, bool(generation_config.do_sample))

    def decode_row(prompt: Tensor, limits: Limits, generator: torch.Generator | None) -> tuple[Tensor, Counts]:
        sequence, length, done = limits.buffer(prompt), prompt.shape[1], False
        cache, cached = new_cache(), 0
        while not done:
            logits = forward(model, sequence[:, cached:length], cache, keep=1)
            sequence[0, length] = law.next_token(logits, sequence[0, :length], generator)
            cached = length
            _, done = limits.cut(sequence, length, 1)
            length += 1
        emitted = length - prompt.shape[1]
        return sequence[:, :length], Counts(num_drafts=emitted, num_emitted_tokens=emitted)

    mask = model_kwargs.get("attention_mask")  # named in the signature, `generate` would pass it twice
    return decode_rows(decode_row, input_ids, mask, stopping_criteria, generation_config, seed)
