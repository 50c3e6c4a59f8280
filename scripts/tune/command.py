"""`draftsmith tune`: lossy rules at many levels, their gain in speed and their departure from the target."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.clock import Compared, timed
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import confidence_of_each
from draftsmith.decode.progress import phase, track
from draftsmith.decode.repetition import count_repeated_ngrams
from draftsmith.decode.rows import Departure
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair, read_tokens
from draftsmith.scripts.tune.config import LoadConfig, TuneConfig, tune_config
from draftsmith.scripts.tune.load import main as load_main
from draftsmith.scripts.tune.tradeoff import (
    EXACT,
    PLAIN,
    RULES,
    Batch,
    DecodedPrompt,
    RuleSetting,
    choose,
    figures,
    print_tradeoff,
)
from draftsmith.train.cli import parse_config
from draftsmith.train.data.decoding import left_padded
from draftsmith.train.files import require_writable
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.provenance import environment, write_json
from draftsmith.train.quantization import parameter_count

SCHEMA = "draftsmith.tune/1"
REPEATS = 2


@dataclass(frozen=True)
class Task:
    """Prompts to decode, and the models and options to decode them with."""

    config: TuneConfig
    pair: Pair
    prompts: list[list[int]]  # token ids

    @property
    def draft_length(self) -> int:
        """γ, or the depth of the heads' tree."""
        return self.pair.drafter.draft_lengths[0]

    def setting(self, rule: str, level: float) -> RuleSetting:
        """Return a lossy rule at a level, with typical acceptance's δ at that level."""
        return RuleSetting(rule, level, math.sqrt(level) if rule == "typical" else None)

    @property
    def settings(self) -> list[RuleSetting]:
        """All lossy rules at all levels of the config."""
        return [self.setting(rule, level) for rule in RULES for level in sorted(self.config.levels.get(rule, []))]


def tune(config: TuneConfig) -> dict[str, Any]:
    """Decode in every setting, write `tune.json`, and return its content.

    Each batch is decoded in all settings before the next one, in a rotating order, so that drift of the machine's speed
    affects all settings alike, and in two of the clock's turns or more; the median ratio to plain decoding counts.
    Prompt i draws with the config's seed + i.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    output = require_writable(config.output, "tune.json")
    report = _report(_load(config))
    write_json(output / "tune.json", report)
    return report


def _report(task: Task) -> dict[str, Any]:
    config, pair, settings = task.config, task.pair, task.settings
    decoded = _decode_all(task, [PLAIN, EXACT, *settings])
    plain, exact, greedy = decoded[PLAIN], decoded[EXACT], config.temperature == 0
    # Each rule is a sequence of tests of its own; the rules share the error.
    confidence = confidence_of_each(0.95, len({setting.rule for setting in settings}))
    levels = [figures(setting, decoded[setting], plain, exact, greedy, confidence) for setting in settings]
    levels.sort(key=lambda row: (RULES.index(row["rule"]), row["level"]))
    chosen, reason = choose(levels, config.max_departure)
    return {
        "schema": SCHEMA,
        "environment": environment(pair.target.device, pair.dtype),
        "target": {"path": config.target, "parameters": parameter_count(pair.target), "dtype": pair.dtype},
        "proposer": {name: pair.drafter.to_dict()[name] for name in ("kind", "path", "parameters")},
        "prompts": {"path": config.prompts, "count": len(task.prompts)},
        **asdict(config.at(config.temperature)),
        "draft_length": task.draft_length,
        "batch_size": config.batch_size,
        "departure": "argmax_disagreement" if greedy else "mean_total_variation",
        "max_departure": config.max_departure,
        "plain": figures(PLAIN, plain, plain, exact, greedy),
        "exact": figures(EXACT, exact, plain, exact, greedy),
        "levels": levels,
        "chosen": chosen,
        "reason": reason,
    }


def _load(config: TuneConfig) -> Task:
    tokenizer, prompts, ids = read_tokens(config.target, config, config.prompts, config.limit)
    if len(prompts) < 2:  # an interval needs two
        raise InputError(f"prompts: expected at least 2 in {config.prompts}, found {len(prompts)}")
    specs = drafter_specs(config.drafter, [config.draft_length])
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)
    pair.check_positions(max(map(len, ids)), config.max_new_tokens)
    return Task(config, pair, ids)


def _decode_all(task: Task, settings: list[RuleSetting]) -> dict[RuleSetting, list[Batch]]:
    """Decode every prompt in every setting, the plain one first, after a warm-up of each rule."""
    for setting in track({setting.rule: setting for setting in settings}.values(), "warm-up", "rules"):
        _decode(task, setting, 0)  # first calls allocate memory
    firsts, batches = range(0, len(task.prompts), task.config.batch_size), dict[tuple[int, RuleSetting], Batch]()
    compared = Compared(firsts, settings)
    with phase("tune", REPEATS * len(settings) * len(task.prompts), "texts") as bar:
        for turn, due in enumerate(compared.turns(REPEATS)):
            for first, setting in ((first, setting) for first, settings_due in due for setting in settings_due):
                batch = _decode(task, setting, first)
                batches.setdefault((first, setting), batch)
                compared.times[first, setting][turn] = batch.seconds
                bar.advance(len(batch.rows))
    return {
        setting: [replace(batches[first, setting], seconds=compared.seconds(first, setting)) for first in firsts]
        for setting in settings
    }


def _decode(task: Task, setting: RuleSetting, first: int) -> Batch:
    """Decode the batch that starts at prompt number `first`."""
    config, pair = task.config, task.pair
    ids, mask = left_padded(task.prompts[first : first + config.batch_size], pair.target.device)
    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "seed": config.seed + first}
    options |= config.generate_kwargs()
    if setting == PLAIN:
        seconds, output = timed(partial(autoregressive_generate, pair.target, ids, mask, **options))
    else:
        options |= {"draft_length": task.draft_length, "rule": setting.build()}
        decode = partial(speculative_generate, pair.target, pair.drafter.proposer, ids, mask, **options)
        seconds, output = timed(decode)
    departures = output.row_departures or [Departure()] * len(ids)
    rows = []
    for text, counts, departure in zip(output.sequences, output.row_counts, departures, strict=True):
        written = text[ids.shape[1] : ids.shape[1] + counts.num_emitted_tokens].tolist()
        rows.append(DecodedPrompt(counts, departure.total_variation, *count_repeated_ngrams(written)))
    return Batch(rows, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune a rule or draft lengths, and print the table, the choice and the paths of the files."""
    if tune_config(sys.argv[1:] if argv is None else argv) is LoadConfig:
        return load_main(argv)
    config = parse_config(TuneConfig, argv, prog="draftsmith tune")
    print_tradeoff(tune(config))
    print(f"figures: {Path(config.output) / 'tune.json'}")
    return 0
