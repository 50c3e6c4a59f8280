"""`draftsmith measure`: plain and speculative decoding of the same prompts, side by side in one run."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)

from draftsmith.decode import Counts, DraftModelProposer, autoregressive_generate, speculative_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput
from draftsmith.decode.replay import ReplayedText, replay_text
from draftsmith.decode.sampling import Law
from draftsmith.scripts.report import build_report, print_report
from draftsmith.train.cli import parse_config, run
from draftsmith.train.completions import Batch, complete, make_batches
from draftsmith.train.models import check_head, check_same_tokenizer, default_device, load_model, load_tokenizer
from draftsmith.train.prompts import encode_prompt, read_prompts
from draftsmith.train.provenance import write_json

COMPLETED_TOGETHER = 64


@dataclass
class MeasureConfig:
    """Measure how a draft model agrees with a target and how much faster it decodes, on your prompts."""

    target: str
    """The target: a model directory or hub id."""
    draft: str
    """The draft model to measure."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `report.json`."""
    baseline_draft: str | None = None
    """A stock draft to beat: measured beside the draft, and compared prompt by prompt."""
    draft_length: str | int | list[int] = "4"
    """γ, drafted tokens a round; several with commas."""
    temperature: str | float | list[float] = "0"
    """Sampling temperatures, several with commas; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability; 1 for all."""
    max_new_tokens: int = 128
    """Tokens of a completion at most."""
    max_prompt_tokens: int | None = None
    """Keep the last so many tokens of a longer prompt."""
    limit: int | None = None
    """Decode the first so many prompts only."""
    replay_limit: int | None = None
    """Replay acceptance on the first so many prompts: on top of those decoded (`limit`), the target completes further
    ones in batches. Acceptance needs more prompts than speed does, and so gets them at a fraction of the time."""
    repeats: int = 1
    """Decode each prompt so many times with each method; times are medians over them."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of all models. T=0 texts are identical for certain in float32 and float64 only."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""
    draft_lengths: list[int] = field(init=False)
    temperatures: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.draft_lengths = _numbers(self.draft_length, int, "draft_length")
        self.temperatures = _numbers(self.temperature, float, "temperature")
        for name, least in (
            ("max_new_tokens", 1),
            ("repeats", 1),
            ("limit", 1),
            ("replay_limit", self.limit or 1),
            ("max_prompt_tokens", 1),
            ("top_k", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: expected at least {least}, found {value}")
        if min(self.draft_lengths) < 1:
            raise InputError(f"draft_length: expected at least 1, found {min(self.draft_lengths)}")
        if min(self.temperatures) < 0:
            raise InputError(f"temperature: expected 0 or more, found {min(self.temperatures)}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")


@dataclass(frozen=True)
class Method:
    """One way of decoding: plain, or a draft model at one draft length."""

    kind: str
    """"plain", "draft" or "baseline_draft"."""
    draft_length: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "plain" else f"{self.kind} γ={self.draft_length}"


@dataclass
class Observation:
    """One prompt decoded by one method at one temperature."""

    category: str | None
    tokens: list[int]
    """The completion."""
    counts: Counts
    seconds: float
    """Median over the repeats."""


Observations = dict[tuple[float, Method], list[Observation]]
"""By temperature and method, in the order of the prompts."""
Replays = dict[tuple[float, str], list[ReplayedText]]
"""By temperature and the draft's kind: the target's text of each decoded prompt, then of the further ones."""


def measure(config: MeasureConfig, progress: bool = True) -> dict[str, Any]:
    """Measure as the config says, write `report.json` into its output directory and return the report.

    Each prompt is decoded by every method before the next prompt's turn, in an order that rotates from prompt to
    prompt, so that a machine that slows down or speeds up does so for all of them.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    paths = {"draft": config.draft} | ({"baseline_draft": config.baseline_draft} if config.baseline_draft else {})
    for name, path in paths.items():
        own = load_tokenizer(path, field=name, trust_remote_code=config.trust_remote_code)
        check_same_tokenizer(tokenizer, own, config.target, path)
    prompts = read_prompts(config.prompts, limit=config.replay_limit or config.limit)
    encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    decoded = encoded[: config.limit]
    further = make_batches(prompts[len(decoded) :], encoded[len(decoded) :], COMPLETED_TOGETHER)
    models = {
        name: load_model(path, field=name, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
        for name, path in {"target": config.target, **paths}.items()
    }
    for name, model in models.items():
        check_head(model, tokenizer, name)
    # `generate` fills what is left open from here: only where a text ends may come from the target, not how it samples.
    ends = models["target"].generation_config.eos_token_id
    models["target"].generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    methods = [Method("plain")] + [Method(name, k) for k in config.draft_lengths for name in paths]
    observations: Observations = {(t, m): [] for t in config.temperatures for m in methods}
    replays: Replays = {}
    for temperature in config.temperatures:
        law = Law.of(temperature, config.top_k, config.top_p)
        for method in methods:  # warm-up: the first calls allocate, and time nothing that a user would see
            _decode(models, method, _ids(decoded[0]), config, temperature, config.seed)
        texts = []  # what the target wrote, plainly decoded or in a batch, and the length of its prompt
        bar = tqdm(list(enumerate(decoded)), desc=f"T={temperature:g}", unit="prompt", disable=not progress)
        for i, ids in bar:
            input_ids = _ids(ids)
            rotated = methods[i % len(methods) :] + methods[: i % len(methods)]
            runs: dict[Method, list[tuple[DecodeOutput, float]]] = {m: [] for m in methods}
            for _ in range(config.repeats):
                for method in rotated:
                    runs[method].append(_timed(models, method, input_ids, config, temperature, config.seed + i))
            texts.append((runs[methods[0]][0][0].sequences[0], len(ids)))
            for method, results in runs.items():
                output, seconds = results[0][0], sorted(s for _, s in results)[len(results) // 2]
                tokens = output.sequences[0, len(ids) :].tolist()
                observation = Observation(prompts[i].category, tokens, output.counts, seconds)
                observations[temperature, method].append(observation)
        for batch in tqdm(
            further, desc=f"T={temperature:g}, to replay", unit="batch", disable=not progress or not further
        ):
            texts += _complete(models["target"], batch, config, temperature)
        for name in paths:
            replays[temperature, name] = [
                replay_text(models["target"], models[name], text, length, law) for text, length in texts
            ]
    report = build_report(config, models, observations, replays)
    write_json(Path(config.output) / "report.json", report)
    return report


def _timed(*args: Any) -> tuple[DecodeOutput, float]:
    _synchronize()
    start = time.perf_counter()
    output = _decode(*args)
    _synchronize()
    return output, time.perf_counter() - start


def _decode(
    models: dict[str, PreTrainedModel],
    method: Method,
    input_ids: Tensor,
    config: MeasureConfig,
    temperature: float,
    seed: int,
) -> DecodeOutput:
    options = _generation_options(config, temperature) | {"seed": seed}
    if method.kind == "plain":
        return autoregressive_generate(models["target"], input_ids, **options)
    proposer = DraftModelProposer(models[method.kind])
    return speculative_generate(models["target"], proposer, input_ids, draft_length=method.draft_length, **options)


def _complete(
    target: PreTrainedModel, batch: Batch, config: MeasureConfig, temperature: float
) -> list[tuple[Tensor, int]]:
    """Let the target write a batch of texts, to be replayed only; return each with the length of its prompt."""
    own: Any = target.generation_config
    ends = [own.eos_token_id] if isinstance(own.eos_token_id, int) else own.eos_token_id
    options = _generation_options(config, temperature)
    generation = GenerationConfig(eos_token_id=ends, pad_token_id=own.pad_token_id, **options)
    completions = complete(target, generation, batch, config.seed)
    return [
        (_ids(prompt + text)[0], len(prompt)) for prompt, (text, _) in zip(batch.prompt_ids, completions, strict=True)
    ]


def _generation_options(config: MeasureConfig, temperature: float) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": config.top_k, "top_p": config.top_p}
    return options


def _ids(ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=default_device())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _numbers(value: Any, kind: Callable[[Any], Any], name: str) -> list[Any]:
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        return [kind(item) for item in items]
    except ValueError as error:
        raise InputError(f"{name}: expected numbers separated by commas, found {value!r}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and say where the report is."""
    config = parse_config(MeasureConfig, argv, prog="draftsmith measure")
    print_report(measure(config))
    print(f"report: {Path(config.output) / 'report.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
