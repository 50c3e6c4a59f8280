"""`draftsmith measure`: does a drafter pay? Acceptance by replay, speed by the clock, and costs, which join the two."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import Proposer, Replay
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.scripts.measure.build import build_report
from draftsmith.scripts.measure.certificate import LEAST_TOKENS, certify_runs
from draftsmith.scripts.measure.cost_file import load_costs, measured_costs
from draftsmith.scripts.measure.drafters import Drafter, load_drafters
from draftsmith.scripts.measure.estimates import rows_of
from draftsmith.scripts.measure.side_by_side import Group, Method, decode_side_by_side
from draftsmith.scripts.measure.state import GREEDY, PROBABILISTIC, Measured
from draftsmith.scripts.measure.verdict import markdown
from draftsmith.scripts.medusa_tree import picture
from draftsmith.scripts.report.page import write_page
from draftsmith.scripts.report.table import print_report
from draftsmith.train.cli import numbers, parse_config, run
from draftsmith.train.data.generate import complete, make_batches
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.models import check_head, default_device, load_model, load_tokenizer
from draftsmith.train.provenance import write_json

COMPLETED_TOGETHER = 64
REPLAYED_LENGTHS = 16
"""γ up to this is replayed: it costs next to nothing."""


@dataclass
class MeasureConfig:
    """Measure on your prompts how drafters agree with a target, how much faster it decodes, and whether that pays."""

    target: str
    """The target: a model directory or hub id."""
    prompts: str
    """A .jsonl, .json, .parquet or text file of prompts, a directory, or a hub id."""
    output: str
    """The directory that receives `report.json`, `report.html`, `summary.md` and `costs.json`."""
    draft: str | list[str] | None = None
    """The draft model to measure, or several, as a list: '["a", "b"]'."""
    medusa: str | None = None
    """Medusa or Hydra heads to measure; they draft the tree of their config."""
    prompt_lookup: bool = False
    """Measure prompt lookup too: n-grams of the text, without a model."""
    baseline_draft: str | None = None
    """A stock draft to beat: measured beside the others, and compared prompt by prompt."""
    draft_length: str | int | list[int] = "4"
    """γ, drafted tokens a round, of draft models and prompt lookup; several with commas. Replay adds 1 to 16."""
    temperature: str | float | list[float] = "0"
    """Sampling temperatures, several with commas; 0 is greedy."""
    batch_size: str | int | list[int] = "1"
    """Prompts that are decoded together, several numbers with commas."""
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
    min_speedup: float | None = None
    """A gate: what the speed-up over plain decoding must exceed, by its interval's lower end."""
    min_gain: float | None = None
    """A gate: what τ must gain over the stock draft, by its interval's lower end."""
    confidence: float = 0.95
    """Level of the gates' intervals."""
    measure_costs: bool = True
    """Measure what forwards and drafting cost, which the planner needs."""
    costs: str | None = None
    """Costs that an earlier run left here as costs.json, in place of measuring them."""
    context: str | int | list[int] | None = None
    """Tokens of text that costs are measured behind, several with commas; the texts' mean length if None."""
    lossless_tokens: int = 0
    """Sample so many tokens for a test of each drafter's law under sampling, 2000 at least; 0 for no test."""
    seed: int = 0
    """Seeds the sampling: prompt i draws with seed + i."""
    dtype: str = "bfloat16"
    """Weights and arithmetic of all models. T=0 texts are identical for certain in float32 and float64 only."""
    threads: int | None = None
    """CPU threads; torch's default if None."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""
    drafts: list[str] = field(init=False)
    draft_lengths: list[int] = field(init=False)
    temperatures: list[float] = field(init=False)
    batch_sizes: list[int] = field(init=False)
    contexts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = [self.draft] if isinstance(self.draft, str) else list(self.draft or [])
        if not self.drafts and self.medusa is None and not self.prompt_lookup:
            raise InputError(
                "draft: expected a draft model or, as `medusa`, heads to measure, or `prompt_lookup`, found none"
            )
        self.draft_lengths = numbers(self.draft_length, int, "draft_length")
        self.temperatures = numbers(self.temperature, float, "temperature")
        self.batch_sizes = numbers(self.batch_size, int, "batch_size")
        self.contexts = [] if self.context is None else numbers(self.context, int, "context")
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
        for name in ("draft_length", "batch_size", "context"):
            least = min(getattr(self, f"{name}s"), default=1)
            if least < 1:
                raise InputError(f"{name}: expected at least 1, found {least}")
        if min(self.temperatures) < 0:
            raise InputError(f"temperature: expected 0 or more, found {min(self.temperatures)}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence: expected a value between 0 and 1, found {self.confidence}")
        if self.min_gain is not None and self.baseline_draft is None:
            raise InputError("min_gain: expected a `baseline_draft` to gain over, found none")
        if self.lossless_tokens and self.lossless_tokens < LEAST_TOKENS:
            raise InputError(f"lossless_tokens: expected 0 or at least {LEAST_TOKENS}, found {self.lossless_tokens}")

    def sampler(self, temperature: float) -> Sampler:
        """Return how the target's logits become its distribution at one of the temperatures."""
        return Sampler.of(temperature, self.top_k, self.top_p)

    def options(self, temperature: float) -> dict[str, Any]:
        """Return how texts are written, as `generate` takes it."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}
        return options


def measure(config: MeasureConfig, progress: bool = True) -> dict[str, Any]:
    """Measure as the config says, write the report into its output directory, and return it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    remote = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=remote)
    prompts = read_prompts(config.prompts, limit=config.replay_limit or config.limit)
    encoded = [encode_prompt(prompt, tokenizer, max_tokens=config.max_prompt_tokens) for prompt in prompts]
    decoded = encoded[: config.limit]
    if max(config.batch_sizes) > len(decoded):
        raise InputError(
            f"batch_size: expected at most the {len(decoded)} prompts that are decoded, found {max(config.batch_sizes)}"
        )
    target = load_model(config.target, field="target", dtype=config.dtype, trust_remote_code=remote)
    check_head(target, tokenizer, "target")
    # `generate` fills what is left open from here: only where a text ends may come from the target, not how it samples.
    ends = target.generation_config.eos_token_id
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    drafters = load_drafters(
        target,
        config.target,
        tokenizer,
        config.drafts,
        config.baseline_draft,
        config.medusa,
        config.prompt_lookup,
        config.draft_lengths,
        config.dtype,
        remote,
    )
    tables: list[CostTable] | None = None if config.measure_costs else []
    if config.costs is not None:  # others' are refused before a text is decoded
        path, sizes = Path(config.costs), config.batch_sizes
        tables = load_costs(path, target, config.target, config.dtype, drafters, config.temperatures, sizes)
    methods = [Method(), *(Method(d.name, k) for d in drafters for k in d.draft_lengths)]
    output, samplers = Path(config.output), {t: config.sampler(t) for t in config.temperatures}
    observations: dict[tuple[float, int, Method], Sequence[Group]] = {}
    texts: dict[float, list[list[int]]] = {}
    replays: dict[tuple[float, str, str], Replay] = {}
    first_heads: dict[tuple[float, str], Replay] = {}
    for temperature, sampler in samplers.items():
        for rows in config.batch_sizes:
            found = decode_side_by_side(
                target,
                {drafter.name: drafter.proposer for drafter in drafters},
                methods,
                decoded,
                rows,
                config.options(temperature),
                config.seed,
                config.repeats,
                f"T={temperature:g}, B={rows}" if progress else None,
            )
            observations |= {(temperature, rows, method): own for method, own in found.items()}
        plain = rows_of(observations[temperature, config.batch_sizes[0], Method()])
        texts[temperature] = [row.tokens for row in plain]
        missing = slice(len(plain), len(prompts))
        texts[temperature] += _completed(config, target, prompts[missing], encoded[missing], temperature, progress)
        _replay(config, target, drafters, sampler, temperature, encoded, texts[temperature], replays, first_heads)
    if tables is None:
        tables = _costs(config, target, drafters, samplers, encoded, texts, output)
    measured = Measured(
        target=target,
        target_path=config.target,
        dtype=config.dtype,
        tokenizer=tokenizer,
        prompts_path=config.prompts,
        prompts=prompts,
        prompt_ids=encoded,
        texts=texts,
        drafters=drafters,
        observations=observations,
        replays=replays,
        first_heads=first_heads,
        tables=tables,
        lossless=certify_runs(
            target,
            {drafter.name: drafter.proposer for drafter in drafters},
            observations,
            [_ids(prompt) for prompt in decoded],
            config.lossless_tokens,
            config.top_k,
            config.top_p,
            config.max_new_tokens,
        ),
        trees=_trees(target, drafters, encoded, texts),
    )
    report = build_report(measured, config.min_speedup, config.min_gain, config.confidence)
    write_json(output / "report.json", report)
    write_page(report, output / "report.html")
    (output / "summary.md").write_text(markdown(report), encoding="utf-8")
    return report


def _completed(
    config: MeasureConfig,
    target: PreTrainedModel,
    prompts: Sequence[Any],
    encoded: Sequence[list[int]],
    temperature: float,
    progress: bool,
) -> list[list[int]]:
    """Let the target write further texts, in batches, to be replayed only."""
    own: Any = target.generation_config
    ends = [own.eos_token_id] if isinstance(own.eos_token_id, int) else own.eos_token_id
    generation = GenerationConfig(eos_token_id=ends, pad_token_id=own.pad_token_id, **config.options(temperature))
    written: dict[str, list[int]] = {}
    batches = make_batches(list(prompts), list(encoded), COMPLETED_TOGETHER)
    for batch in tqdm(batches, desc=f"T={temperature:g}, to replay", unit="batch", disable=not progress or not batches):
        completions = complete(target, generation, batch, config.seed)
        written |= {prompt.id: list(text) for prompt, (text, _) in zip(batch.prompts, completions, strict=True)}
    return [written[prompt.id] for prompt in prompts]


def _replay(
    config: MeasureConfig,
    target: PreTrainedModel,
    drafters: Sequence[Drafter],
    sampler: Sampler,
    temperature: float,
    encoded: Sequence[list[int]],
    texts: Sequence[list[int]],
    replays: dict[tuple[float, str, str], Replay],
    first_heads: dict[tuple[float, str], Replay],
) -> None:
    """Replay every drafter that replay applies to, and both verifiers of draft models under sampling."""
    proposers: dict[tuple[str, str], Proposer] = {}
    for drafter in drafters:
        if isinstance(drafter.proposer, MedusaProposer) and sampler.do_sample and not drafter.proposer.tree.is_chain:
            proposers[drafter.name, ""] = MedusaProposer(drafter.proposer.heads, Tree.chain(1))
            continue
        proposers[drafter.name, PROBABILISTIC] = drafter.proposer
        if drafter.greedy is not None and sampler.do_sample:
            proposers[drafter.name, GREEDY] = drafter.greedy
    found = replay_drafters(
        target,
        {"\n".join(key): proposer for key, proposer in proposers.items()},
        [_ids(prompt + text) for prompt, text in zip(encoded, texts, strict=True)],
        [len(prompt) for prompt in encoded],
        range(1, max(REPLAYED_LENGTHS, *config.draft_lengths) + 1),
        sampler,
        config.max_new_tokens,
    )
    for name, verifier in proposers:
        replay = found[f"{name}\n{verifier}"]
        if verifier:
            replays[temperature, name, verifier] = replay
        else:
            first_heads[temperature, name] = replay


def _costs(
    config: MeasureConfig,
    target: PreTrainedModel,
    drafters: Sequence[Drafter],
    samplers: Mapping[float, Sampler],
    encoded: Sequence[list[int]],
    texts: Mapping[float, Sequence[list[int]]],
    output: Path,
) -> list[CostTable]:
    own = next(iter(texts.values()))
    prompt = max(1, round(sum(map(len, encoded)) / len(encoded)))
    mean = max(2, round(prompt + sum(map(len, own)) / len(own) / 2))
    samples = [_ids(ids + text) for ids, text in zip(encoded, own, strict=True)]
    return measured_costs(
        output / "costs.json",
        target,
        config.target,
        config.dtype,
        drafters,
        max(config.draft_lengths),
        samples,
        samplers,
        config.batch_sizes,
        config.contexts or [mean],
        prompt,
    )


def _trees(
    target: PreTrainedModel,
    drafters: Sequence[Drafter],
    encoded: Sequence[list[int]],
    texts: Mapping[float, Sequence[list[int]]],
) -> list[dict[str, str]]:
    """Draw the trees of heads, as far as there are greedy texts to say how often each node is accepted."""
    if 0.0 not in texts:
        return []
    sequences = [(_ids(p + t), len(p)) for p, t in zip(encoded, texts[0.0], strict=True)]
    return [
        {"proposer": d.name, "svg": picture(target, d.model, sequences)}
        for d in drafters
        if isinstance(d.model, MedusaHeads) and not d.model.tree.is_chain
    ]


def _ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, device=default_device())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print table and verdict, and say where the report is; exit code 3 where a gate did not pass."""
    config = parse_config(MeasureConfig, argv, prog="draftsmith measure")
    report = measure(config)
    print_report(report)
    print(f"report: {Path(config.output) / 'report.html'}, and report.json and summary.md beside it")
    steps = os.environ.get("GITHUB_STEP_SUMMARY")
    if steps:
        with open(steps, "a", encoding="utf-8") as file:
            file.write(markdown(report))
    return 3 if report["gate"] is not None and not report["gate"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(run(main))
