"""Sampling options in the words of the servers' API: vLLM's and SGLang's."""

from typing import Any

from draftsmith.decode.options import Filters
from draftsmith.train.data.samples import mixed_seed


def sampling_fields(filters: Filters, temperature: float) -> dict[str, Any]:
    """Return the fields of a request that shape a text's distribution.

    All are written out: servers fill what is left open from the model's generation_config.json, as `generate` does.
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
    """Return a seed that depends on all parts: servers take 31 bits."""
    return mixed_seed(*parts) >> 32
