"""Drafters of a real model, from its text to the tables of docs/real-model.md, in one command that can be stopped.

    python -m draftsmith.scripts.bench.real_model --config configs/bench/smollm2.yaml \
        --target SMOLLM2 --prompts spec_bench.jsonl

A fifth of each category's prompts, two at least, is held out. The target answers the others, and drafters learn from
that. Then half of what was held out finds the switch of a hybrid for each drafter and all draft lengths, at each
temperature, and the other half measures all of them; at last several switches of the best hybrid are decoded there.
Every stage is one of our commands; those that have ended are not run again, and one that was stopped goes on.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError, Range, at_least, require, require_some
from draftsmith.scripts.bench.common import BenchmarkConfig, main
from draftsmith.scripts.kinds import recipes
from draftsmith.scripts.stages import Stages, flags_of
from draftsmith.train.data.corpus import write_prompts
from draftsmith.train.data.prompts import read_prompts
from draftsmith.train.files import require_writable, write_aside
from draftsmith.train.provenance import write_json

COPIES = "copies"
"""What a hybrid of copies alone is called by, where nothing is trained."""
OVER = "over"
"""What tables call how many times as fast a hybrid is as another drafter."""


@dataclass(kw_only=True)
class BenchRealModelConfig(BenchmarkConfig):
    """Text, drafters, switches and measurements of a model, in stages that are kept."""

    target: str
    """The model: a directory or hub id."""
    prompts: str
    """Prompts with categories, such as Spec-Bench's."""
    merged: dict[str, list[str]] = field(default_factory=dict)
    """Categories that are taken as one, by its name."""
    output: str = "runs/real-model"
    """Receives everything: prompts, completions, drafters, reports and tables.md."""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, what is trained: `command`, and fields of that command; `draft` may name one that is trained before."""
    learning: dict[str, Any] = field(default_factory=dict)
    """Fields of every training run."""
    copies: list[str] = field(default_factory=lambda: ["suffix", "prompt_lookup:2-3"])
    """Drafters without training; the first is the first of every hybrid."""
    draft_length: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 8])
    """γ that are tried."""
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Temperatures that are measured."""
    batch_size: list[int] = field(default_factory=lambda: [1, 4])
    """Texts at a time that are measured."""
    endpoint: str | None = None
    """A server of the target that writes the text, as of `prepare`; here if None."""
    endpoint_model: str | None = None
    """Its name there."""
    samples: int = 1
    """Answers to each prompt at temperature 1 that are learned from, beside one at 0."""
    held_out: float = 0.2
    """The share of each category that nothing learns from."""
    text_tokens: int = 320
    """Tokens of an answer that is learned from, at most."""
    text_prompt_tokens: int = 1024
    """Tokens of its prompt, at most."""
    max_new_tokens: int = 128
    """Tokens of a text that is measured."""
    max_prompt_tokens: int = 1024
    """Tokens of a prompt, at most."""
    measured: int = 6
    """Prompts of each category that are measured, and as many that find the switch, at most."""
    switches: int = 5
    """Switches of the hybrid with the best prediction that are decoded, the first temperature's, one text at a time."""
    dtype: str = "auto"
    """Of models that are measured."""
    compiled: bool | None = None
    """For compiled forwards; null: as `measure` chooses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, Range("a share between 0 and 1", lambda share: 0 < share < 1), "held_out")
        require(
            self, at_least(1), "draft_length", "batch_size", "text_tokens", "max_new_tokens", "measured", "switches"
        )
        require_some(self, "copies", "drafter")
        for name, run in self.trained.items():
            if run.get("command") not in recipes():
                raise InputError(
                    f"trained: expected a command out of {', '.join(recipes())} in {name}, found {run.get('command')}"
                )

    def figures_path(self) -> Path:
        """Return where the results are written."""
        return Path(self.output) / "results.json"


def bench(config: BenchRealModelConfig) -> dict[str, Any]:
    """Run the stages that have not ended; return the figures of all methods, and write tables.md."""
    output = require_writable(config.output)
    _deal_out(config, output / "prompts")
    stages = Stages(output / "stages")
    for name, argv in [*_texts(config), *_trainings(config)]:
        stages.run(name, argv)
    figures: dict[str, Any] = {}
    for temperature in config.temperature:
        found = {}
        for name in [*config.trained] or [COPIES]:
            last = str(output / name) if name in config.trained else config.copies[-1]
            stage = f"switch-{name}-{temperature:g}"
            argv = _tuning(config, f"hybrid:{config.copies[0]}+{last}", temperature, output / stage)
            stages.run(stage, argv)
            found[name] = _read(output / stage / "switch.json")
        stage = f"report-{temperature:g}"
        stages.run(stage, _measuring(config, _methods(config, found), temperature, output / stage))
        figures |= _figures(_read(output / stage / "report.json"))
        if temperature == config.temperature[0]:
            best = max(found.values(), key=lambda its: its["chosen"]["predicted_speedup"]["value"])
            tried = _tried(best, config.switches)
            argv = _measuring(replace(config, batch_size=[1]), tried, temperature, output / "switches")
            stages.run("switches", argv)
            switches = {
                "switches, " + setting: rows
                for setting, rows in _figures(_read(output / "switches" / "report.json")).items()
            }
    figures |= switches
    write_aside(output / "tables.md", "\n\n".join(_table(*part) for part in figures.items()) + "\n")
    return figures


def _methods(config: BenchRealModelConfig, found: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return all drafters by name, each with γ: what tuning found for it, alone and in a hybrid."""
    first, any_found = config.copies[0], next(iter(found.values()))
    of_copies = any_found["alone"][_kind(first)]["draft_length"]
    methods = {_kind(copies): (copies, of_copies) for copies in config.copies}
    for name in config.trained:
        entry = list(found[name]["alone"].values())[-1]
        methods[name] = str(Path(config.output) / name), entry["draft_length"]
    for name, its in found.items():
        methods[f"{name}+{_kind(first)}"] = its["chosen"]["argument"], its["chosen"]["draft_length"]
    return methods


def _tried(found: Mapping[str, Any], count: int) -> dict[str, tuple[str, int]]:
    """Return the best switch by prediction of each of several shortest matches, the chosen one first, with γ."""
    by_match: dict[int, Mapping[str, Any]] = {}
    for entry in found["switches"]:  # the best first
        by_match.setdefault(entry["match"], entry)
    return {
        f"match {entry['match']}": (entry["argument"], entry["draft_length"])
        for entry in list(by_match.values())[:count]
    }


def _kind(copies: str) -> str:
    """Return the kind of a drafter without training."""
    return copies.partition(":")[0]


def _deal_out(config: BenchRealModelConfig, folder: Path) -> None:
    """Write prompts to learn from, those that choose, and those that are measured, unless that was done.

    Raises:
        InputError: they were dealt out otherwise.
    """
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "choose": [], "measure": []}
    dealt, how = folder / "dealt.json", [config.prompts, config.merged, config.held_out, config.measured]
    if dealt.is_file():
        if _read(dealt) != how:
            raise InputError(
                f"output: expected prompts dealt out by {how} in {folder}, found {_read(dealt)}: take another"
            )
        return
    named = {part: name for name, its in config.merged.items() for part in its}
    prompts = [
        replace(prompt, category=named.get(str(prompt.category), prompt.category))
        for prompt in read_prompts(config.prompts)
    ]
    rng = random.Random(0)
    for category in sorted({str(prompt.category) for prompt in prompts}):
        mine = [prompt for prompt in prompts if str(prompt.category) == category]
        rng.shuffle(mine)
        apart = max(2, round(config.held_out * len(mine)))
        held, learned = mine[:apart], mine[apart:]
        parts["train"] += (prompt.record() for prompt in learned)
        parts["choose"] += (prompt.record() for prompt in held[::2][: config.measured])
        parts["measure"] += (prompt.record() for prompt in held[1::2][: config.measured])
    for name, records in parts.items():
        rng.shuffle(records)
        write_prompts(folder / f"{name}.jsonl", records)
    write_json(dealt, how)


def _texts(config: BenchRealModelConfig) -> list[tuple[str, list[str]]]:
    """Return the stages that let the target answer; none where nothing learns from it."""
    output, stages = Path(config.output), []
    given = {name: value for name in ("endpoint", "endpoint_model") if (value := getattr(config, name)) is not None}
    for name, part, temperature, samples in (
        ("sampled", "train", 1.0, config.samples),
        ("greedy", "train", 0.0, 1),
        ("heldout", "choose", 1.0, 1),
    ):
        fields = given | {
            "target": config.target, "prompts": output / "prompts" / f"{part}.jsonl", "temperature": temperature,
            "samples": samples, "max_new_tokens": config.text_tokens, "max_prompt_tokens": config.text_prompt_tokens,
            "output": output / "completions" / name,
        }  # fmt: skip
        stages.append((f"text-{name}", ["prepare", *flags_of(fields)]))
    return stages if config.trained else []


def _trainings(config: BenchRealModelConfig) -> list[tuple[str, list[str]]]:
    output, stages = Path(config.output), []
    for name, run in config.trained.items():
        fields: dict[str, Any] = {
            "target": config.target,
            "completions": [str(output / "completions" / side) for side in ("sampled", "greedy")],
            "heldout": [str(output / "completions" / "heldout")],
            **config.learning,
            **{key: value for key, value in run.items() if key != "command"},
            "training.output_dir": output / name,
        }
        if fields.get("draft") in config.trained:
            fields["draft"] = output / fields["draft"]
        stages.append((f"train-{name}", [run["command"], *flags_of(fields)]))
    return stages


def _tuning(config: BenchRealModelConfig, hybrid: str, temperature: float, output: Path) -> list[str]:
    fields = _decoding(config, "choose") | {"drafter": hybrid, "temperature": temperature, "output": output}
    return ["tune", *flags_of(fields | {"draft_length": _joined(config.draft_length)})]


def _measuring(
    config: BenchRealModelConfig, methods: Mapping[str, tuple[str, int]], temperature: float, output: Path
) -> list[str]:
    fields = _decoding(config, "measure") | {
        "draft_length_of": {name: [length] for name, (_, length) in methods.items()},
        "temperature": temperature,
        "batch_size": _joined(config.batch_size),
        "output": output,
    }
    return ["measure", *flags_of(fields), *(f"--drafter={name}={drafter}" for name, (drafter, _) in methods.items())]


def _decoding(config: BenchRealModelConfig, part: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "target": config.target,
        "prompts": Path(config.output) / "prompts" / f"{part}.jsonl",
        "max_new_tokens": config.max_new_tokens,
        "max_prompt_tokens": config.max_prompt_tokens,
        "dtype": config.dtype,
    }
    return fields | {name: value for name in ("threads", "compiled") if (value := getattr(config, name)) is not None}


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tables hold, by setting and method."""
    tables: dict[str, Any] = {}
    for run in sorted(report["runs"], key=lambda run: run["batch_size"]):
        setting = f"T = {run['temperature']:g}, B = {run['batch_size']}"
        tables.setdefault(setting, {})[run["proposer"]["name"]] = _cells(run)
    return tables


def _cells(run: Mapping[str, Any]) -> dict[str, Any]:
    cells = {
        "γ": run["draft_length"],
        "τ": run["mean_acceptance_length"],
        "speed-up": run["speedup"],
        "predicted": run["predicted_speedup"],
        OVER: run["speedup_over"],
    }
    return cells | {category: its["speedup"] for category, its in sorted(run["by_category"].items())}


def _table(setting: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table in markdown."""
    columns = [column for column in next(iter(rows.values())) if column != OVER]
    lines = [f"**{setting}**", "", " | ".join(["| drafter", *columns]) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, cells in rows.items():
        lines.append(" | ".join([f"| {name}", *(_words(cells.get(column)) for column in columns)]) + " |")
    for name, cells in rows.items():
        if others := cells[OVER]:
            lines += ["", f"{name} {OVER} {', '.join(f'{other} {_words(gain)}' for other, gain in others.items())}"]
    return "\n".join(lines)


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return "–" if value is None else str(value)
    if value["value"] is None:
        return "–"
    interval = "" if value["ci95"] is None else f" [{value['ci95'][0]:.2f}, {value['ci95'][1]:.2f}]"
    return f"{value['value']:.2f}{interval}"


def shown(config: BenchRealModelConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the speed-ups, in words."""
    return {
        setting: {
            name: {key: _words(cells[key]) for key in ("γ", "τ", "speed-up", "predicted")}
            for name, cells in rows.items()
        }
        for setting, rows in figures.items()
    }


if __name__ == "__main__":
    main(BenchRealModelConfig, bench, shown)
