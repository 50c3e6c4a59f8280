"""Shared by all benchmarks: options, a pair and its prompts, calls timed in turns, results."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode import (
    Counts,
    DecodeOutput,
    DraftModelProposer,
    Proposer,
    autoregressive_generate,
    speculative_generate,
)
from draftsmith.decode.clock import timed_warm
from draftsmith.decode.errors import at_least, require
from draftsmith.decode.measurement.intervals import Estimate, format_estimate
from draftsmith.scripts.pair import load_pair
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec
from draftsmith.train.models import default_device, load_tokenizer
from draftsmith.train.provenance import environment, write_json

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_PROMPT_TOKENS = 48

T = TypeVar("T")
Method = Callable[[Tensor], DecodeOutput]
"""Decodes a prompt, (1, T)."""


@dataclass(kw_only=True)
class BenchmarkConfig:
    """The options of every benchmark."""

    threads: int | None = None
    """CPU threads in all; torch's default if None."""
    output: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        require(self, at_least(1), *(name for name, value in vars(self).items() if type(value) is int))

    def figures_path(self) -> Path | None:
        """Return where the figures are written, if anywhere."""
        return Path(self.output) if self.output else None


@dataclass(kw_only=True)
class DecodingConfig(BenchmarkConfig):
    """The options of a benchmark that decodes prompts with a target and its draft."""

    target: str = str(ASSETS / "tiny-target")
    """The target: a model directory or hub id."""
    draft: str = str(ASSETS / "tiny-draft")
    """A draft model with the target's tokenizer."""
    prompts: str | None = None
    """A file of prompts; held-out modules of the standard library if None."""
    limit: int = 16
    """Prompts decoded, by every method."""
    max_new_tokens: int = 96
    """Tokens of a completion; end-of-sequence tokens are passed over, so that every method writes as many."""
    max_prompt_tokens: int = MAX_PROMPT_TOKENS
    """Tokens of a prompt at most; longer ones lose their beginning."""
    dtype: str = "float32"
    """Weights and arithmetic of both models."""


Config = TypeVar("Config", bound=BenchmarkConfig)
Figures = dict[str, Any]
"""A benchmark's results by name: numbers, estimates, words, and groups of them."""


Shown = Callable[[Config, Figures], Figures]
"""Returns what is printed of a benchmark's figures."""


def main(config_class: type[Config], bench: Callable[[Config], Figures], shown: Shown[Config] | None = None) -> None:
    """Run a benchmark as its module's command line says, and end the process."""
    sys.exit(run(lambda: run_benchmark(config_class, bench, shown)))


def run_benchmark(
    config_class: type[Config],
    bench: Callable[[Config], Figures],
    shown: Shown[Config] | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the config, run a benchmark, write its figures with environment and config, and print them.

    Args:
        config_class: the benchmark's options.
        bench: returns the figures; its own "environment" goes before that of the default device.
        shown: returns what is printed of the figures; all if None.
        argv: the command line; the process's own if None.
    """
    called = Path(sys.argv[0])
    name = called.parent.name if called.stem == "__main__" else called.stem
    config = parse_config(config_class, argv, prog=f"python -m benchmarks.{name}")
    if config.threads:
        torch.set_num_threads(config.threads)
    results = bench(config)
    where = results.pop("environment", None) or environment(default_device(), getattr(config, "dtype", "float32"))
    path = config.figures_path()
    if path is not None:
        write_json(path, {"environment": where} | results | {"config": vars(config)})
    # Wide tables are to be read in files too, where rich would fold them to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    console.print(f"{where['device']}, {where['threads']} threads, {where['dtype']}")
    results = shown(config, results) if shown else results
    groups = {name: value for name, value in results.items() if isinstance(value, Mapping)}
    single = {name: value for name, value in results.items() if name not in groups}
    for name, value in (groups | ({"figures": single} if single else {})).items():
        console.print(_table(name, value))


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    """Return a table of figures: a row for each group, with its figures side by side, or for each figure."""
    if all(isinstance(value, Mapping) for value in figures.values()):
        rows = {group: _flat(values) for group, values in figures.items()}
    else:
        rows = {figure: {"": text} for figure, text in _flat(figures).items()}
    columns = dict.fromkeys(column for cells in rows.values() for column in cells)
    table = Table(name.replace("_", " "), box=None)
    for column in columns:
        table.add_column(column, justify="right")
    for row, cells in rows.items():
        table.add_row(row, *(cells.get(column, "") for column in columns))
    return table


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Write figures; those in groups under the names of both."""
    if isinstance(value, Mapping):
        return {n: text for key, v in value.items() for n, text in _flat(v, f"{name} {key}".strip()).items()}
    if isinstance(value, Estimate):
        text = format_estimate(value, ".4g", spread="interval")
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return {name.replace("_", " "): text}


@dataclass(frozen=True)
class BenchmarkPair:
    """A target that passes over ends of text, its draft, the prompts, (1, T) each, and how they are decoded."""

    target: PreTrainedModel
    draft: PreTrainedModel
    dtype: str
    prompts: list[Tensor]
    options: dict[str, Any]
    others: Sequence[Drafter]
    """Further drafters."""

    @classmethod
    def load(cls, config: DecodingConfig, others: Sequence[DrafterSpec] = ()) -> "BenchmarkPair":
        """Load a pair, further drafters and the prompts.

        Raises:
            InputError: models that cannot be loaded, or that have different tokenizers; no prompts.
        """
        tokenizer = load_tokenizer(config.target, field="target")
        pair = load_pair(config.target, tokenizer, [DrafterSpec("draft", config.draft), *others], config.dtype)
        pair.target.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
        draft: Any = pair.drafters[0].model
        encoded = encoded_prompts(config.prompts, tokenizer, config.limit, config.max_prompt_tokens)
        prompts = [torch.tensor([ids], device=pair.target.device) for ids in encoded]
        options = {"max_new_tokens": config.max_new_tokens, "do_sample": False}
        return cls(pair.target, draft, pair.dtype, prompts, options, pair.drafters[1:])

    def plain(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> DecodeOutput:
        """Decode one token per forward."""
        return autoregressive_generate(self.target, ids, mask, **{**self.options, **options})

    def speculative(
        self, ids: Tensor, mask: Tensor | None = None, proposer: Proposer | None = None, **options: Any
    ) -> DecodeOutput:
        """Decode with a proposer: the draft if None."""
        proposer = proposer or DraftModelProposer(self.draft)
        return speculative_generate(self.target, proposer, ids, mask, **{**self.options, **options})


def in_turns(calls: Mapping[str, Callable[[], T]], turn: int) -> dict[str, tuple[float, T]]:
    """Time each call once, the first one another each turn; return the seconds and the result of each.

    A call that compiles is made again, so the calls must do the same each time.
    """
    names = list(calls)
    first = turn % len(names)
    return {name: timed_warm(calls[name]) for name in names[first:] + names[:first]}


class Decoded(NamedTuple):
    """One decoded prompt."""

    tokens: int
    seconds: float
    counts: Counts


def decode_in_turns(methods: Mapping[str, Method], prompts: Sequence[Tensor]) -> dict[str, list[Decoded]]:
    """Decode each prompt, (1, T), by every method before the next prompt's turn, in an order that rotates."""
    for decode in tqdm(methods.values(), desc="warm up", unit="method"):
        decode(prompts[0])
    results: dict[str, list[Decoded]] = {name: [] for name in methods}
    for turn, ids in enumerate(tqdm(prompts, desc="decode", unit="prompt")):
        calls = {name: partial(decode, ids) for name, decode in methods.items()}
        for name, (seconds, output) in in_turns(calls, turn).items():
            results[name].append(Decoded(output.sequences.numel() - ids.numel(), seconds, output.counts))
    return results


def tokens_and_seconds(results: Sequence[Decoded]) -> tuple[list[int], list[float]]:
    """Return the columns of a speed."""
    return [result.tokens for result in results], [result.seconds for result in results]
