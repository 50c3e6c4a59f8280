"""`draftsmith tune` for a hybrid: its switch, found by replay and priced by measured costs.

All drafters are replayed once on the same texts, the only thing that is decoded. Every switch and draft length then
follows by sums.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from draftsmith.decode import HybridProposer, Proposer, Switch, autoregressive_generate
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import BLOCKS, CostTable, measure_costs
from draftsmith.decode.measurement.intervals import Estimate, format_estimate, ratio
from draftsmith.decode.measurement.replay import Replay, replay_drafters
from draftsmith.decode.planning.costs import text_seconds
from draftsmith.decode.progress import track
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import read_tokens
from draftsmith.scripts.summary import figures_table, print_doubts
from draftsmith.scripts.timed_settings import load_fastest
from draftsmith.scripts.tune.config import SwitchConfig
from draftsmith.train.cli import parse_config
from draftsmith.train.data.decoding import left_padded
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.files import require_writable
from draftsmith.train.kinds.drafter import Drafter, Pair
from draftsmith.train.kinds.hybrid import AT
from draftsmith.train.provenance import environment, write_json
from draftsmith.train.quantization import parameter_count

SCHEMA = "draftsmith.switch/1"
FILE = "switch.json"
SHOWN = 10  # switches in the printed table
MATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # shortest matches, in tokens
SCORES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # least scores


@dataclass(frozen=True)
class SwitchSetting:
    """A switch with draft lengths of copies and of the last drafter; or a single drafter without a switch."""

    draft_length: int
    switch: Switch | None = None
    last_length: int | None = None
    drafter: str | None = None

    @property
    def method(self) -> "Method":
        """The key of its replay."""
        return (self.switch, self.last_length) if self.drafter is None else self.drafter


Method = tuple[Switch | None, int | None] | str
"""A switch with the last drafter's longest draft, or the name of a single drafter."""
PLAIN = SwitchSetting(0)  # plain decoding


@dataclass(frozen=True)
class Priced:
    """The replay of each method, and the predicted seconds of each text with each setting, without its prompt."""

    replays: Mapping[Method, Replay]
    seconds: Mapping[SwitchSetting, list[float]]
    costs: CostTable

    def speedup(self, setting: SwitchSetting, indices: Sequence[int], over: SwitchSetting = PLAIN) -> Estimate:
        """Return the ratio of another setting's time to this one's on some texts."""
        return ratio(*([self.seconds[way][i] for i in indices] for way in (over, setting)))

    def best(self, settings: Iterable[SwitchSetting], indices: Sequence[int]) -> SwitchSetting:
        """Return the fastest setting on some texts."""
        return min(settings, key=lambda setting: self.total(setting, indices))

    def total(self, setting: SwitchSetting, indices: Sequence[int]) -> float:
        """Return a setting's seconds on some texts together."""
        return sum(self.seconds[setting][i] for i in indices)


def tune_switch(config: SwitchConfig) -> dict[str, Any]:
    """Find the switch, write `switch.json`, and return its content."""
    output = require_writable(config.output, FILE)
    tokenizer, prompts, ids = read_tokens(config.target, config, config.prompts, config.limit)
    if len(prompts) < 4:  # an interval needs two in each half
        raise InputError(f"prompts: expected at least 4 in {config.prompts}, found {len(prompts)}")
    specs = drafter_specs(config.drafter, config.draft_length)
    pair, settings = load_fastest(
        config.target, tokenizer, specs, config.dtype, config.threads, config.compiled, config.trust_remote_code
    )
    pair.check_positions(max(map(len, ids)), config.max_new_tokens)
    report = _report(config, pair, prompts, ids, settings.compiled)
    write_json(output / FILE, report)
    return report


def _report(
    config: SwitchConfig, pair: Pair, prompts: Sequence[Prompt], ids: Sequence[list[int]], compiled: bool
) -> dict[str, Any]:
    drafter, sources = pair.drafter, pair.drafter.sources
    if not isinstance(drafter.proposer, HybridProposer):
        raise InputError(f"drafter: expected a hybrid, found {config.drafter[0]}")
    lengths = list(drafter.draft_lengths) if _has_tree(drafter) else config.draft_length
    by_switch = [
        [SwitchSetting(k, switch, last) for k in lengths for last in _last_lengths(drafter, config) if (last or 0) <= k]
        for switch in _switches()
    ]
    by_drafter = {  # the last may draft a tree
        name: [SwitchSetting(k, drafter=name) for k in (lengths if name == sources[-1] else config.draft_length)]
        for name in sources
    }
    priced = _priced(config, pair, ids, compiled, chain(*by_switch, *by_drafter.values()))
    choosing, reported = _halves(prompts, config.seed)
    alone = {name: priced.best(settings, choosing) for name, settings in by_drafter.items()}
    best_settings = [priced.best(settings, choosing) for settings in by_switch]
    # One half of the prompts chooses and the other reports, so that the report is free of selection bias.
    best, best_alone = priced.best(best_settings, choosing), priced.best(alone.values(), choosing)
    categories = {prompt.category for prompt in prompts} - {None}
    return {
        "schema": SCHEMA,
        "environment": environment(pair.target.device, pair.dtype) | {"compiled": compiled},
        "target": {"path": config.target, "parameters": parameter_count(pair.target), "dtype": pair.dtype},
        "drafter": config.drafter[0],
        "sources": list(sources),
        "prompts": {"path": config.prompts, "choosing": len(choosing), "reported": len(reported)},
        **asdict(config.at(config.temperature)),
        "batch_size": config.batch_size,
        "costs": asdict(priced.costs),
        "switches": [
            _entry(setting, priced, choosing, config.drafter[0])
            for setting in sorted(best_settings, key=lambda best: priced.total(best, choosing))
        ],
        "alone": {name: _entry(setting, priced, reported) for name, setting in alone.items()},
        "chosen": _entry(best, priced, reported, config.drafter[0])
        | {
            "gain_over_best_alone": priced.speedup(best, reported, over=best_alone),
            "by_category": {
                category: priced.speedup(best, [i for i in reported if prompts[i].category == category])
                for category in sorted(filter(None, categories))
            },
        },
    }


def _priced(
    config: SwitchConfig, pair: Pair, ids: Sequence[list[int]], compiled: bool, settings: Iterable[SwitchSetting]
) -> Priced:
    """Let the target write texts, replay every switch and drafter on them, measure costs, and price the settings."""
    hybrid, sources, rows = cast(HybridProposer, pair.drafter.proposer), pair.drafter.sources, config.batch_size
    texts = _written(config, pair, ids, compiled)
    methods: dict[Method, Proposer] = {
        (switch, last): hybrid.with_switch(switch, last)
        for switch, last in product(_switches(), _last_lengths(pair.drafter, config))
    }
    methods |= dict(zip(sources, hybrid.drafters, strict=True))
    sampler, lengths = config.sampler(), list(config.draft_length)
    if _has_tree(pair.drafter):
        lengths = sorted({*lengths, *pair.drafter.draft_lengths})
    sizes = [len(text) - len(prompt) for text, prompt in zip(texts, ids, strict=True)]
    replays = replay_drafters(
        pair.target, methods, texts, [len(prompt) for prompt in ids], lengths, sampler, config.max_new_tokens,
        stretches=[np.zeros(size, int) for size in sizes],
    )  # fmt: skip
    prompt = max(1, round(sum(map(len, ids)) / len(ids)))
    (costs,) = measure_costs(
        pair.target,
        dict(zip(sources, hybrid.drafters, strict=True)),
        # The middle length, because a round's other costs grow with γ, and mostly short drafts are chosen.
        dict.fromkeys(sources, sorted(lengths)[len(lengths) // 2]),
        torch.cat(texts),
        {config.temperature: sampler},
        [rows],
        max(2, prompt + round(sum(sizes) / len(sizes) / 2)),
        prompt,
        sorted({*BLOCKS, *(1 + drafter.nodes(max(lengths)) for drafter in hybrid.drafters)}),
        compiled=compiled,
    )
    plain = costs.at(sources[-1], rows)
    seconds = {PLAIN: [count * (plain.target[1] + plain.plain_overhead) for count in sizes]}
    for setting in settings:
        names = sources if setting.drafter is None else [setting.drafter]
        longest = [setting.draft_length] * len(names)
        if setting.last_length is not None:
            longest[-1] = setting.last_length
        rounds = [text.sizes[setting.draft_length] for text in replays[setting.method].texts]
        seconds[setting] = text_seconds([costs.at(name, rows) for name in names], rounds, longest, rows)
    return Priced(replays, seconds, costs)


def _written(config: SwitchConfig, pair: Pair, ids: Sequence[list[int]], compiled: bool) -> list[torch.Tensor]:
    """Return prompts with the target's continuations."""
    texts: list[torch.Tensor] = []
    for first in track(range(0, len(ids), config.batch_size), "texts of the target", "batches"):
        batch = ids[first : first + config.batch_size]
        tokens, mask = left_padded(batch, pair.target.device)
        output = autoregressive_generate(
            pair.target, tokens, mask, max_new_tokens=config.max_new_tokens, seed=config.seed + first,
            compiled=compiled, **config.generate_kwargs(),
        )  # fmt: skip
        for row, prompt, counts in zip(output.sequences, batch, output.row_counts, strict=True):
            start = tokens.shape[1]
            texts.append(row[start - len(prompt) : start + counts.num_emitted_tokens])
    return texts


def _switches() -> list[Switch]:
    return [Switch(match, score) for match, score in product(MATCHES, SCORES)]


def _last_lengths(drafter: Drafter, config: SwitchConfig) -> Sequence[int | None]:
    """Return the limits to try for the last drafter's drafts; a tree is not cut."""
    return [None] if _has_tree(drafter) else config.draft_length


def _has_tree(drafter: Drafter) -> bool:
    return getattr(cast(HybridProposer, drafter.proposer).last, "tree", None) is not None


def _halves(prompts: Sequence[Prompt], seed: int) -> tuple[list[int], list[int]]:
    """Split prompts, as evenly as possible in each category, into those that choose and those that are reported on."""
    rng, choosing, reported = random.Random(seed), list[int](), list[int]()
    for category in sorted({str(prompt.category) for prompt in prompts}):
        indices = [i for i, prompt in enumerate(prompts) if str(prompt.category) == category]
        rng.shuffle(indices)
        larger, smaller = sorted((choosing, reported), key=len, reverse=True)
        smaller += indices[::2]
        larger += indices[1::2]
    return choosing, reported


def _entry(setting: SwitchSetting, priced: Priced, indices: Sequence[int], drafter: str = "") -> dict[str, Any]:
    texts = [priced.replays[setting.method].texts[i] for i in indices]
    counts = [text.counts[setting.draft_length] for text in texts]
    entry: dict[str, Any] = {}
    if setting.switch is not None:
        argument = _argument(drafter, setting.switch, setting.last_length)
        entry = asdict(setting.switch) | {"last": setting.last_length, "argument": argument}
    sizes = [text.sizes[setting.draft_length] for text in texts]
    members = range(max(map(len, sizes)))
    by_source = [sum(float(text_sizes[i].sum()) for text_sizes in sizes if i < len(text_sizes)) for i in members]
    return entry | {
        "draft_length": setting.draft_length,
        "mean_acceptance_length": ratio([c.num_emitted_tokens for c in counts], [c.num_drafts for c in counts]),
        "predicted_speedup": priced.speedup(setting, indices),
        "rounds": by_source,
    }


def _argument(drafter: str, switch: Switch, last_length: int | None) -> str:
    """Return the `--drafter` argument for the hybrid with a switch and a longest draft of the last drafter."""
    members, at, _ = drafter.rpartition(AT)
    last = "" if last_length is None else f",last={last_length}"
    return f"{members if at else drafter}{AT}match={switch.match},score={switch.score!r}{last}"


def _named(entry: dict[str, Any]) -> str:
    """Return the name of a switch in the table."""
    last = "" if entry["last"] is None else f", last {entry['last']}"
    return f"match {entry['match']}, score {entry['score']:g}{last}"


def print_switch(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the best switches, each drafter alone, and the choice, within 80 columns."""
    console = console or Console()
    count = report["prompts"]
    table = figures_table(
        ("switch", "γ", "τ", "predicted"),
        "switch",
        f"T={report['temperature']:g}, {report['batch_size']} at a time; switches on the {count['choosing']} prompts "
        f"that choose,\nthe rest on the {count['reported']} others; ±: half of the 95 % interval",
    )

    def add(name: str, entry: dict[str, Any], style: str = "") -> None:
        tau, speedup = entry["mean_acceptance_length"], entry["predicted_speedup"]
        gamma = str(entry["draft_length"])
        table.add_row(name, gamma, format_estimate(tau), format_estimate(speedup, unit="×"), style=style)

    for entry in report["switches"][:SHOWN]:
        add(_named(entry), entry)
    table.add_section()
    for name, entry in report["alone"].items():
        add(f"{name} alone", entry)
    chosen = report["chosen"]
    add(_named(chosen), chosen, "bold")
    console.print(table)
    gain = format_estimate(chosen["gain_over_best_alone"], unit="×", spread="interval")
    flags = f"--drafter {chosen['argument']} --draft_length {chosen['draft_length']}"
    console.print(f"{flags}: by prediction {gain} the best drafter alone", highlight=False, soft_wrap=True)
    print_doubts(console, report["costs"]["doubts"])


def main(argv: Sequence[str] | None = None) -> int:
    """Find a switch, and print the table, the choice and the path of the figures."""
    config = parse_config(SwitchConfig, argv, prog="draftsmith tune")
    print_switch(tune_switch(config))
    print(f"figures: {Path(config.output) / FILE}")
    return 0
