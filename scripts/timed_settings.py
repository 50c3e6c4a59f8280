"""How a target decodes fastest on this machine, by a short timing: its dtype, and whether to compile its forwards.

Plain decoding decides, so that a speed-up is over the best that the user has without a drafter.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import NO_PROGRAMS, runs_in_programs
from draftsmith.decode.clock import least_seconds
from draftsmith.decode.errors import first_line
from draftsmith.decode.measurement.costs import forward_after_text
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import read
from draftsmith.scripts.pair import load_pair
from draftsmith.train.files import write_atomically
from draftsmith.train.kinds.drafter import DrafterSpec, Pair
from draftsmith.train.models import DTYPES, default_device, fast_dtype, load_config, load_model

REPEATS = 9
COMPILED_BELOW = 0.1
"""Seconds of a token above which arithmetic and memory dominate, and a compiler gains little."""
WORTH_IT = 0.95
"""The share of the eager seconds below which compiling pays: first tokens take half a minute."""
SMALL = 10**9
"""The most parameters of a target that is loaded twice."""


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


@dataclass(frozen=True)
class Settings:
    """The way in which models run; `why` lists the timings in words, None if nothing was timed."""

    dtype: Annotated[str, AfterValidator(_known)]
    threads: Annotated[int, Field(ge=1, le=4096)]
    compiled: bool
    why: str | None

    def to_file(self, path: Path) -> None:
        """Write the settings: a continued run keeps those that it began with."""
        write_atomically(path, json.dumps(asdict(self)))


def load_fastest(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[DrafterSpec],
    dtype: str = "auto",
    threads: int | None = None,
    compiled: bool | None = None,
    trust_remote_code: bool = False,
    kept: Path | None = None,
) -> tuple[Pair, Settings]:
    """Load a pair as it decodes fastest here, print the choice, and set torch's threads.

    `dtype` and `compiled` are those of `fastest_settings`; what they leave open is taken from the file `kept`, if it
    exists. Errors are those of `load_pair`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    first = dtype
    if dtype == "auto" and default_device().type == "cpu":  # timed below, and printed once
        first = fast_dtype(load_config(path, field="target", trust_remote_code=trust_remote_code), "cpu")
    pair = load_pair(path, tokenizer, drafters, first, trust_remote_code)
    if kept is not None and kept.exists():
        settings, runs = read(Settings, kept), compiled and runs_in_programs(pair.target)
        fixed: dict[str, Any] = {"dtype": None if dtype == "auto" else dtype, "threads": threads, "compiled": runs}
        settings = replace(settings, **{name: value for name, value in fixed.items() if value is not None})
    else:
        settings = fastest_settings(pair.target, path, dtype, compiled, trust_remote_code)
    if settings.why:
        how = "compiled" if settings.compiled else "eager"
        print(f"settings: {settings.dtype}, {how}; {settings.why}", file=sys.stderr)
    if settings.dtype != pair.dtype:
        del pair  # before a large target is loaded again
        pair = load_pair(path, tokenizer, drafters, settings.dtype, trust_remote_code, again=True)
    torch.set_num_threads(settings.threads)
    return pair, settings


@phase("timing tokens by dtype")
@torch.inference_mode()
def fastest_settings(
    target: PreTrainedModel,
    path: str,
    dtype: str = "auto",
    compiled: bool | None = None,
    trust_remote_code: bool = False,
) -> Settings:
    """Time a token of plain decoding under all open settings, and return the fastest ones.

    "auto" tries the target's own dtype and float32 on a CPU, if it has fast arithmetic for both and the target is small
    enough to be loaded twice. `compiled` None tries both, for models of less than 0.1 s a token; if a compiler fails,
    that is named, and forwards stay eager. On devices other than a CPU or a CUDA GPU nothing is timed.
    """
    device, stored = target.device, str(target.dtype).removeprefix("torch.")
    if not runs_in_programs(target) and compiled is not False:
        eager = fastest_settings(target, path, dtype, False, trust_remote_code)
        return replace(eager, why="; ".join(filter(None, (eager.why, NO_PROGRAMS))))
    if device.type not in ("cpu", "cuda"):
        return Settings(stored, torch.get_num_threads(), bool(compiled), None)
    models = {stored: target}
    if device.type == "cpu" and dtype == "auto" and target.num_parameters() <= SMALL:
        fast = fast_dtype(load_config(path, trust_remote_code=trust_remote_code), "cpu")
        models |= {
            name: load_model(path, dtype=name, trust_remote_code=trust_remote_code)
            for name in {fast, "float32"} - {stored}
        }
    if len(models) == 1 and compiled is not None and device.type == "cpu":
        return Settings(stored, torch.get_num_threads(), compiled, None)

    def timed(compiled: bool) -> dict[str, float]:
        steps = {name: forward_after_text(model, compiled) for name, model in models.items()}
        return least_seconds(steps, REPEATS, device)

    seconds = {} if compiled else timed(False)
    in_programs, failure = dict[str, float](), ""
    if compiled or (compiled is None and min(seconds.values()) < COMPILED_BELOW):
        try:
            with phase("compiling, and timing tokens"):
                in_programs = timed(True)
        except Exception as error:
            if compiled:
                raise
            failure = f"; compiling failed: {first_line(error)}"
    compiled = not seconds or min(in_programs.values(), default=torch.inf) < WORTH_IT * min(seconds.values())
    chosen = in_programs if compiled else seconds
    fastest = min(chosen, key=lambda name: chosen[name])
    times = seconds | {f"{name} compiled": spent for name, spent in in_programs.items()}
    words = ", ".join(f"{name} {1e3 * time:.1f}" for name, time in times.items())
    why = f"milliseconds per token of plain decoding: {words}{failure}"
    return Settings(fastest, torch.get_num_threads(), compiled, why)
