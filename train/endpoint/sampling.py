"""Sampling options under the names of vLLM's and SGLang's API."""

from typing import Any

from draftsmith.decode.options import Filters
from draftsmith.train.data.samples import mixed_seed


def sampling_fields(filters: Filters, temperature: float) -> dict[str, Any]:
    """Return the fields of a request that set the sampling.

    All are written out, since servers take missing ones from the model's generation_config.json, as `generate` does.
    """
    return {
        "temperature": temperature,
        "top_k": filters.top_k or -1,  # 0 means "all" to vLLM alone, −1 to both
        "top_p": filters.top_p,
        "min_p": filters.min_p,
        "repetition_penalty": filters.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def request_seed(*parts: int | str) -> int:
    """Return a seed of 31 bits, as servers take it, that depends on all parts."""
    return mixed_seed(*parts) >> 32
