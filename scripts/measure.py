"""`draftsmith measure`: plain and speculative decoding of the same prompts, side by side in one run."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from draftsmith.decode.proposers.protocol import Proposer
from draftsmith.decode.replay import ReplayedText, replay_text
from draftsmith.decode.sampling import Law
from draftsmith.decode.tree import ROOT, Tree
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.replay import replay_heads, replay_ranks
from draftsmith.scripts.report import build_report, print_report
from draftsmith.train.cli import parse_config, run
from draftsmith.train.completions import Batch, complete, make_batches
from draftsmith.train.models import check_head, check_same_tokenizer, default_device, load_model, load_tokenizer
from draftsmith.train.prompts import encode_prompt, read_prompts
from draftsmith.train.provenance import write_json

COMPLETED_TOGETHER = 64


@dataclass
class MeasureConfig:
    """Measure how a draft model or Medusa heads agree with a target and how much faster it decodes, on your prompts."""

    target: str
    """The target: a model directory or hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `report.json`."""
    draft: str | None = None
    """The draft model to measure."""
    medusa: str | None = None
    """Medusa or Hydra heads to measure, beside the draft model or without one; they draft the tree of their config."""
    baseline_draft: str | None = None
    """A stock draft to beat: measured beside the others, and compared prompt by prompt."""
    draft_length: str | int | list[int] = "4"
    """γ, drafted tokens a round, of draft models; several with commas. Medusa heads draft their tree."""
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
        if self.draft is None and self.medusa is None:
            raise InputError("draft: expected a draft model or, as `medusa`, heads to measure, found neither")
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
    """One way of decoding: plain, or a draft model or heads at one draft length."""

    kind: str
    """"plain", "draft", "baseline_draft" or "medusa"."""
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


@dataclass(frozen=True)
class ReplayedTree:
    """One text's acceptance by Medusa heads, in the words of `ReplayedText`."""

    tokens: int
    overlap: Tensor
    """Σ_v min(p, q) of the first head's contexts."""
    rounds_of_tree: float | None
    """None under sampling with siblings, which replay does not apply to."""

    def __len__(self) -> int:
        return self.tokens

    def rounds(self, draft_length: int) -> float | None:
        """Return the expected rounds of the heads' tree; it has one draft length."""
        return self.rounds_of_tree


Replays = Mapping[tuple[float, str], Sequence[ReplayedText | ReplayedTree]]
"""By temperature and the drafter's kind: the target's text of each decoded prompt, then of the further ones."""


def measure(config: MeasureConfig, progress: bool = True) -> dict[str, Any]:
    """Measure as the config says, write `report.json` into its output directory and return the report.

    Each prompt is decoded by every method before the next prompt's turn, in an order that rotates from prompt to
    prompt, so that a machine that slows down or speeds up does so for all of them.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    given = {"draft": config.draft, "baseline_draft": config.baseline_draft}
    paths = {name: path for name, path in given.items() if path is not None}
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
    proposers: dict[str, Proposer] = {name: DraftModelProposer(models[name]) for name in paths}
    methods = [Method("plain")] + [Method(name, k) for k in config.draft_lengths for name in paths]
    if config.medusa is not None:
        heads = MedusaHeads.from_pretrained(config.medusa, dtype=models["target"].dtype)
        heads.to(default_device())  # type: ignore[arg-type]
        heads.check_fits(models["target"])
        drafter = MedusaProposer(heads)
        models["medusa"], proposers["medusa"] = heads, drafter
        methods.append(Method("medusa", drafter.tree.depth))
    observations: Observations = {(t, m): [] for t in config.temperatures for m in methods}
    replays: dict[tuple[float, str], list[ReplayedText | ReplayedTree]] = {}
    for temperature in config.temperatures:
        law = Law.of(temperature, config.top_k, config.top_p)
        for method in methods:  # warm-up: the first calls allocate, and time nothing that a user would see
            _decode(models["target"], proposers, method, _ids(decoded[0]), config, temperature, config.seed)
        texts = []  # what the target wrote, plainly decoded or in a batch, and the length of its prompt
        bar = tqdm(list(enumerate(decoded)), desc=f"T={temperature:g}", unit="prompt", disable=not progress)
        for i, ids in bar:
            input_ids = _ids(ids)
            rotated = methods[i % len(methods) :] + methods[: i % len(methods)]
            runs: dict[Method, list[tuple[DecodeOutput, float]]] = {m: [] for m in methods}
            for _ in range(config.repeats):
                for method in rotated:
                    arguments = method, input_ids, config, temperature, config.seed + i
                    runs[method].append(_timed(models["target"], proposers, *arguments))
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
        if config.medusa is not None:
            replays[temperature, "medusa"] = [
                _replay_heads(config, models["target"], heads, text, length, law) for text, length in texts
            ]
    report = build_report(config, models, observations, replays)
    write_json(Path(config.output) / "report.json", report)
    return report


def _replay_heads(
    config: MeasureConfig, target: PreTrainedModel, heads: MedusaHeads, text: Tensor, length: int, law: Law
) -> ReplayedTree:
    limit = config.max_new_tokens
    replayed = replay_heads(target, heads, text, length, law, limit)
    rounds: float | None = None
    if not law.do_sample:
        widths = _widths(heads.tree, heads.config.num_heads)
        rounds = replay_ranks(target, heads, text, length, most=widths, limit=limit).rounds(heads.tree)
    elif heads.tree.is_chain:
        rounds = replayed.rounds(heads.tree.depth)
    return ReplayedTree(len(text) - length, replayed.overlap[:, 0][replayed.drafted[:, 0]], rounds)


def _widths(tree: Tree, heads: int) -> list[int]:
    """Return how many ranks of each head are looked at; of heads below the tree one."""
    widths = [1] * heads
    for parent, children in enumerate(tree.children, ROOT):
        depth = 0 if parent == ROOT else tree.depths[parent]
        if children:
            widths[depth] = max(widths[depth], len(children))
    return widths


def _timed(*args: Any) -> tuple[DecodeOutput, float]:
    _synchronize()
    start = time.perf_counter()
    output = _decode(*args)
    _synchronize()
    return output, time.perf_counter() - start


def _decode(
    target: PreTrainedModel,
    proposers: dict[str, Proposer],
    method: Method,
    input_ids: Tensor,
    config: MeasureConfig,
    temperature: float,
    seed: int,
) -> DecodeOutput:
    options = _generation_options(config, temperature) | {"seed": seed}
    if method.kind == "plain":
        return autoregressive_generate(target, input_ids, **options)
    return speculative_generate(target, proposers[method.kind], input_ids, draft_length=method.draft_length, **options)


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
