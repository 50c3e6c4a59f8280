"""`python -m draftsmith.scripts.bench.prepare --target DIR --prompts FILE`: what completions cost in this process.

Our own decoder, whose rows take the next prompt as they end, against the library's `generate` in batches of as many
rows; on the same prompts, sorted by length as `prepare` sorts them, by turns.
"""

from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import at_least, require
from draftsmith.decode.measurement.intervals import rate_ratio, ratio
from draftsmith.decode.options import Sampling
from draftsmith.scripts.bench.common import ASSETS, BenchmarkConfig, in_turns, main
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.data.decoding import by_library, complete, set_generation_config
from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.models import load_model, load_tokenizer


@dataclass
class BenchPrepareConfig(Sampling, BenchmarkConfig):
    """Time completions by rows that are refilled against the library's batches."""

    target: str = str(ASSETS / "tiny-target")
    """The target: a model directory or hub id."""
    prompts: str | None = None
    """A file of prompts; held-out modules of the standard library if None."""
    limit: int = 96
    """Prompts of a round."""
    batch_size: int = 16
    """Rows."""
    max_new_tokens: int = 384
    """Tokens of a completion at most."""
    max_prompt_tokens: int = 512
    """Tokens of a prompt at most."""
    end: str | None = None
    """Tokens with this text end a completion too: for targets that seldom end one, such as the embedded."""
    dtype: str = "float32"
    """Weights and arithmetic."""
    rounds: int = 3
    """Turns of each, with another seed each time."""
    temperature: float = field(default=1.0, kw_only=True)
    """Of the sampling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, at_least(1), "limit", "batch_size", "max_new_tokens", "max_prompt_tokens", "rounds", "threads")


def bench(config: BenchPrepareConfig) -> dict[str, Any]:
    """Time both in turns; return tokens per second of each, and their ratio with its interval over rounds."""
    tokenizer = load_tokenizer(config.target, field="target")
    model = load_model(config.target, field="target", dtype=config.dtype)
    known = token_count(tokenizer, model.config)
    generation = set_generation_config(config, config.max_new_tokens, model, tokenizer, known)
    if config.end is not None:
        ending = [token for token in range(known) if config.end in str(tokenizer.decode([token]))]
        generation.eos_token_id = [*(generation.eos_token_id or []), *ending]  # type: ignore[assignment]
    prompts = encoded_prompts(config.prompts, tokenizer, config.limit, config.max_prompt_tokens)
    prompts.sort(key=len, reverse=True)
    batches = [prompts[at : at + config.batch_size] for at in range(0, len(prompts), config.batch_size)]

    def library(seed: int) -> list[int]:
        seeds = [mixed_seed(seed, number) for number in range(len(batches))]
        calls = zip(batches, seeds, strict=True)
        return [len(ids) for batch, each in calls for ids in by_library(model, generation, batch, each, model.device)]

    def refilled(seed: int) -> list[int]:
        written = complete(model, generation, prompts, mixed_seed(seed), rows=config.batch_size)
        return [len(completion.ids) for completion in written]

    complete(model, generation, prompts[-1:], 0)  # the first forwards allocate
    turns = [
        in_turns({"refilled": partial(refilled, seed), "library": partial(library, seed)}, seed)
        for seed in tqdm(range(1, config.rounds + 1), desc="rounds")
    ]
    tokens, seconds = (
        {name: [float(of(turn[name])) for turn in turns] for name in ("refilled", "library")}
        for of in (lambda result: sum(result[1]), lambda result: result[0])
    )
    lengths = [length for turn in turns for _, written in turn.values() for length in written]
    return {
        "prompt_tokens": f"{len(prompts[-1])} to {len(prompts[0])}",
        "completion_tokens": mean(lengths),
        "ended": mean(length < config.max_new_tokens for length in lengths),
        **{f"{name}_tokens_per_second": ratio(tokens[name], seconds[name]) for name in tokens},
        "refilled_over_library": rate_ratio(
            tokens["refilled"], seconds["refilled"], tokens["library"], seconds["library"]
        ),
    }


if __name__ == "__main__":
    main(BenchPrepareConfig, bench)
