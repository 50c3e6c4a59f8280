"""The fastest settings of a target on this machine: threads, dtype, eager or compiled forwards, by a short timing.

Plain decoding decides, so that a speed-up is over the best that the user has without a drafter. Dtypes that are alike
in that are compared by the time to verify a few tokens, which drafts wait for.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import NO_PROGRAMS, runs_in_programs
from draftsmith.decode.clock import launch_seconds, least_seconds
from draftsmith.decode.errors import first_line
from draftsmith.decode.measurement.costs import forward_after_text
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import read
from draftsmith.scripts.pair import load_pair
from draftsmith.train.files import write_atomically
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Pair
from draftsmith.train.models import DTYPES, default_device, fast_dtype, load_config, load_model

REPEATS = 9
COMPILED_BELOW = 0.1
"""Seconds of a token above which arithmetic and memory dominate, and a compiler gains little."""
WORTH_IT = 0.95
"""The share of the eager seconds below which compiling pays: first tokens take half a minute."""
HOST_BOUND = 0.9
"""The share of a token's GPU seconds from which launching its kernels on the host is the limit."""
ALIKE = 1.1
"""Factor on the least seconds of a token, within which dtypes or thread counts count as equally fast."""
BLOCK = 4
SMALL = 10**9
"""The most parameters of a target that is loaded twice."""


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


Dtype = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True)
class Settings:
    """The way in which models run.

    `draft_dtypes` are those of draft models and heads, by path. `why` lists the timings in words; None if nothing was
    open.
    """

    dtype: Dtype
    threads: Annotated[int, Field(ge=1, le=4096)]
    compiled: bool
    draft_dtypes: dict[str, Dtype]
    why: str | None

    def summary(self) -> str:
        """Return the settings in words."""
        others = {name for name in self.draft_dtypes.values() if name != self.dtype}
        drafts = f", drafts {' and '.join(sorted(set(self.draft_dtypes.values())))}" if others else ""
        how = "compiled" if self.compiled else "eager"
        return f"{self.dtype}, {how}, {self.threads} thread{'s' if self.threads > 1 else ''}{drafts}"

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

    `dtype`, `threads` and `compiled` are those of `fastest_settings`; what they leave open is taken from the file
    `kept`, if it exists. Errors are those of `load_pair`.
    """
    first = dtype
    if dtype == "auto" and default_device().type == "cpu":  # timed below, and printed once
        first = fast_dtype(load_config(path, field="target", trust_remote_code=trust_remote_code), "cpu")
    pair = load_pair(path, tokenizer, drafters, first, trust_remote_code)
    if kept is not None and kept.exists():
        settings, runs = read(Settings, kept), compiled and runs_in_programs(pair.target)
        fixed: dict[str, Any] = {"dtype": None if dtype == "auto" else dtype, "threads": threads, "compiled": runs}
        settings = replace(settings, **{name: value for name, value in fixed.items() if value is not None})
    else:
        weighted = [drafter for drafter in pair.drafters if drafter.model is not None]
        settings = fastest_settings(pair.target, path, weighted, dtype, threads, compiled, trust_remote_code)
    if settings.why:
        print(f"settings: {settings.summary()}; {settings.why}", file=sys.stderr)
    if {settings.dtype, *settings.draft_dtypes.values()} != {pair.dtype}:
        specs = [replace(spec, dtype=settings.draft_dtypes.get(str(spec.path))) for spec in drafters]
        del pair  # before a large target is loaded again
        pair = load_pair(path, tokenizer, specs, settings.dtype, trust_remote_code, again=True)
    torch.set_num_threads(settings.threads)
    return pair, settings


@phase("timing tokens by dtype and threads")
@torch.inference_mode()
def fastest_settings(
    target: PreTrainedModel,
    path: str,
    drafters: Sequence[Drafter],
    dtype: str = "auto",
    threads: int | None = None,
    compiled: bool | None = None,
    trust_remote_code: bool = False,
) -> Settings:
    """Time a token of plain decoding under all open settings, and return the fastest ones.

    "auto" tries the target's own dtype and float32, if the machine has fast arithmetic for both. `threads` None tries
    all of torch's, half of them and one; `compiled` None tries both, for models of less than 0.1 s a token. Drafters
    with weights each get the dtype in which they are faster.

    On a CUDA GPU dtype and threads stay, and the report names the limit, host or GPU. On other devices nothing is
    timed, and forwards are eager unless `compiled`.
    """
    if not runs_in_programs(target) and compiled is not False:
        eager = fastest_settings(target, path, drafters, dtype, threads, False, trust_remote_code)
        return replace(eager, why="; ".join(filter(None, (eager.why, NO_PROGRAMS))))
    stored, most = str(target.dtype).removeprefix("torch."), torch.get_num_threads()
    paths = [str(drafter.path) for drafter in drafters]
    if target.device.type == "cuda":
        compiled, why = choose_compiled_on_gpu(target, compiled)
        return Settings(stored, threads or most, compiled, dict.fromkeys(paths, stored), why)
    if target.device.type != "cpu":
        return Settings(stored, threads or most, bool(compiled), dict.fromkeys(paths, stored), None)
    dtypes = {stored}
    if dtype == "auto":
        dtypes |= {fast_dtype(load_config(path, trust_remote_code=trust_remote_code), "cpu"), "float32"}

    def others(model: PreTrainedModel) -> set[str]:
        """Return the other dtypes to try; none for a large model, which half precision makes faster."""
        return dtypes - {stored} if model.num_parameters() <= SMALL else set()

    copies = {name: load_model(path, dtype=name, trust_remote_code=trust_remote_code) for name in others(target)}
    timed = _Timed({stored: target} | copies, [threads] if threads else sorted({1, max(1, most // 2), most}))
    torch.set_num_threads(timed.threads)
    if compiled is not False and (compiled or timed.tokens[timed.fastest] < COMPILED_BELOW):
        timed.compile(bool(compiled))
        # A compiled forward must be faster by enough to wait for its compilation.
        least = min(timed.compiled.values(), default=float("inf"))
        compiled = compiled or least < WORTH_IT * timed.tokens[timed.fastest]
    chosen = timed.dtype(bool(compiled))
    draft_dtypes = {}
    for drafter, draft in zip(drafters, paths, strict=True):
        assert drafter.model is not None
        forwards = drafter.family.timed_forwards(drafter, others(drafter.model), trust_remote_code)
        draft_dtypes[draft] = _least(least_seconds(forwards, REPEATS)) if forwards else stored
    torch.set_num_threads(most)
    return Settings(chosen, timed.threads, bool(compiled), draft_dtypes, timed.in_words())


def _least(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name])


class _Timed:
    """Seconds of a target's forwards on a CPU, by dtype and number of threads."""

    def __init__(self, models: Mapping[str, PreTrainedModel], counts: Sequence[int]):
        self.models, self.counts = models, counts
        calls = {
            (name, count): partial(_with_threads, count, forward_after_text(model))
            for name, model in models.items()
            for count in counts
        }
        self.by_threads = least_seconds(calls, REPEATS)
        self.fastest, quickest = min(self.by_threads, key=lambda key: self.by_threads[key])
        # The most threads among equally fast counts: eager tokens wait for Python, compiled ones for their kernels.
        most = ALIKE * self.by_threads[self.fastest, quickest]
        self.threads = max(count for count in counts if self.by_threads[self.fastest, count] <= most)
        self.tokens = {name: self.by_threads[name, self.threads] for name in models}
        """Seconds of an eager token, with the fastest threads."""
        self.compiled = dict[str, float]()
        """Seconds of a compiled token; empty if not tried."""
        self.failure: str | None = None
        self.blocks = dict[str, float]()
        """Seconds of `BLOCK` tokens; empty if one dtype is clearly the fastest."""

    def compile(self, required: bool) -> None:
        """Time compiled forwards too; a compiler's failure is only recorded, unless they are `wanted`."""
        try:
            with phase("compiling, and timing tokens"):
                steps = {name: forward_after_text(model, compiled=True) for name, model in self.models.items()}
                self.compiled = least_seconds(steps, REPEATS)
        except Exception as error:
            if required:
                raise
            self.failure = first_line(error)

    def dtype(self, compiled: bool) -> str:
        """Return the fastest dtype; among equally fast ones by the time of a block."""
        seconds = self.compiled if compiled else self.tokens
        chosen = _least(seconds) if compiled else self.fastest
        alike = {name: model for name, model in self.models.items() if seconds[name] <= ALIKE * seconds[chosen]}
        if len(alike) == 1:
            return chosen
        steps = {name: forward_after_text(model, compiled, BLOCK) for name, model in alike.items()}
        self.blocks = least_seconds(steps, REPEATS)
        return _least(self.blocks)

    def in_words(self) -> str | None:
        """Return the timings in words; None if there was nothing to choose."""
        seconds = self.tokens | {f"{name} compiled": of_model for name, of_model in self.compiled.items()}
        if len(seconds) == len(self.counts) == 1 and self.failure is None:
            return None
        parts = [f"milliseconds per token of plain decoding: {_milliseconds(seconds)}"]
        if len(self.counts) > 1:
            by_count = {str(n): min(self.by_threads[name, n] for name in self.models) for n in self.counts}
            parts.append(f"by eager threads: {_milliseconds(by_count)}")
        if self.blocks:
            parts.append(f"{BLOCK} tokens at once: {_milliseconds(self.blocks)}")
        if self.failure is not None:
            parts.append(f"compiling failed: {self.failure}")
        return "; ".join(parts)


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * time:.1f}" for name, time in seconds.items())


def choose_compiled_on_gpu(target: PreTrainedModel, compiled: bool | None) -> tuple[bool, str]:
    """Return whether a GPU decodes the target faster compiled, and the timings in words.

    If `compiled` is None, a compiler's failure is named in them, and forwards stay eager.
    """
    device, seconds, launching, failure = target.device, dict[str, float](), dict[str, float](), ""
    for name in ("eager", "compiled"):
        if compiled is not None and compiled != (name == "compiled"):
            continue
        if name == "compiled" and compiled is None and seconds["eager"] >= COMPILED_BELOW:
            continue
        try:
            with phase(f"timing {name} tokens"):
                step = forward_after_text(target, compiled=name == "compiled")
                timed, launched = least_seconds({name: step}, REPEATS, device), launch_seconds(step, device, REPEATS)
        except Exception as error:
            if name == "eager" or compiled:
                raise
            failure = f"; compiling failed: {first_line(error)}"
            continue
        seconds |= timed
        launching[name] = launched
    chosen = "compiled" if seconds.get("compiled", torch.inf) < WORTH_IT * seconds.get("eager", torch.inf) else "eager"
    host = launching[chosen] >= HOST_BOUND * seconds[chosen]
    bound = f"host is the bound, with {1e3 * launching[chosen]:.1f} to launch a token" if host else "GPU is the bound"
    return (
        chosen == "compiled",
        f"milliseconds per token of plain decoding: {_milliseconds(seconds)}; the {bound}{failure}",
    )


def _with_threads(count: int, call: Callable[[], object]) -> object:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return call()
