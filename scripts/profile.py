"""`draftsmith profile`: shares of a round's time, as a table and a trace for chrome://tracing or ui.perfetto.dev."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.decode import Counts, InputError, speculative_generate
from draftsmith.decode.cache import NO_PROGRAMS, runs_in_programs
from draftsmith.decode.clock import turns
from draftsmith.decode.measurement.profiler import Profile, chrome_trace, profile_table
from draftsmith.decode.options import Sampling
from draftsmith.decode.progress import track
from draftsmith.scripts.configs import ProfileConfig
from draftsmith.scripts.kinds import drafter_specs, kind_named
from draftsmith.scripts.pair import load_pair, read_tokens
from draftsmith.train.cli import parse_config
from draftsmith.train.data.decoding import left_padded
from draftsmith.train.files import require_writable
from draftsmith.train.models import default_device
from draftsmith.train.provenance import environment, write_json

REPEATS = 2


def profile(config: ProfileConfig) -> tuple[dict[str, Any], list[Profile]]:
    """Write `trace.json` and `profile.json`, and return the latter and a profile per batch size.

    Raises:
        InputError: models, tokenizers or prompts that do not fit, or fewer prompts than a batch holds.
    """
    output = require_writable(config.output, "trace.json", "profile.json")
    if config.threads:
        torch.set_num_threads(config.threads)
    tokenizer, _, encoded = read_tokens(config.target, config.template, config.prompts, config.limit)
    if max(config.batch_size) > len(encoded):
        raise InputError(f"batch_size: expected at most the {len(encoded)} prompts, found {max(config.batch_size)}")
    specs = drafter_specs(config.drafter, [config.draft_length])
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)
    pair.check_positions(max(map(len, encoded)), config.max_new_tokens)
    target, proposer, (draft_length,) = pair.target, pair.drafter.proposer, pair.drafter.draft_lengths
    compiled = config.compiled and runs_in_programs(target)
    if config.compiled and not compiled:
        print(NO_PROGRAMS, file=sys.stderr)
    options: dict[str, Any] = {
        "draft_length": draft_length,
        "max_new_tokens": config.max_new_tokens,
        "compiled": compiled,
        **Sampling(temperature=config.temperature).generate_kwargs(),
    }
    profiles, batches = [], []
    for size in config.batch_size:
        starts = range(0, len(encoded) - size + 1, size)
        rows = {i: left_padded(encoded[i : i + size], target.device) for i in starts}
        times: dict[int, list[float]] = {i: [] for i in starts}
        fastest: dict[int, tuple[Profile, Counts]] = {}
        for due in turns(times, REPEATS):
            for i in track(due, f"batch size {size}", "batches"):
                if not fastest:  # warm-up: the first calls allocate, and compile
                    speculative_generate(target, proposer, *rows[i], seed=0, **options)
                alone = Profile()
                decoded = alone.generate(target, proposer, *rows[i], seed=i, **options)
                times[i].append(alone.breakdown()["total_seconds"])
                if times[i][-1] == min(times[i]):
                    fastest[i] = alone, decoded.counts
        profiled = Profile.joined(fastest[i][0] for i in starts)
        profiles.append(profiled)
        counts = Counts.total(fastest[i][1] for i in starts)
        batches.append(profiled.breakdown() | {"prompts": len(starts) * size, "counts": counts.to_dict()})
    report = {
        "schema": "draftsmith.profile/1",
        "environment": environment(default_device(), pair.dtype),
        "target": config.target,
        "proposer": {"kind": pair.drafter.kind, "path": pair.drafter.path},
        "draft_length": draft_length,
        "temperature": config.temperature,
        "compiled": compiled,
        "batches": batches,
    }
    write_json(output / "trace.json", chrome_trace(profiles))
    write_json(output / "profile.json", report)
    return report, profiles


def main(argv: Sequence[str] | None = None) -> int:
    """Profile, print the table, and print the trace's path."""
    config = parse_config(ProfileConfig, argv, prog="draftsmith profile")
    report, profiles = profile(config)
    where, kind = report["environment"], kind_named(report["proposer"]["kind"]).title
    console = Console()
    console.print(
        f"{kind}, γ = {report['draft_length']}, T = {config.temperature:g}, {where['dtype']}, {where['device']}, "
        f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(profile_table(profiles))
    print(f"trace, for ui.perfetto.dev: {Path(config.output) / 'trace.json'}")
    return 0
