"""The fastest settings of a target on this machine: threads, dtype, eager or compiled forwards, by a short timing.

Judged by plain decoding, so that a speed-up is one over the best that the user has without a drafter. Dtypes that are
alike there are judged by the time of verifying some tokens, which drafts wait for.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache.program import NotCompiled
from draftsmith.decode.clock import launch_seconds, median_seconds
from draftsmith.decode.errors import first_line
from draftsmith.decode.measurement.costs import forward_behind_text
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import read
from draftsmith.scripts.pair import load_pair
from draftsmith.scripts.programs import SMALL, Order, compiling, needs_compiling
from draftsmith.train.files import write_aside
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Pair
from draftsmith.train.models import DTYPES, default_device, fast_dtype, load_config, load_model

REPEATS = 9
COMPILED_BELOW = 0.1
"""Seconds of a token: beyond, arithmetic and memory are all of it, and a compiler has little to win."""
WORTH_IT = 0.95
"""Of the eager seconds: a compiled model's first tokens take half a minute."""
HOST_BOUND = 0.9
"""Of a token's seconds on a GPU: where the host takes as long to launch its kernels, the GPU waits for it."""
ALIKE = 1.1
"""Times the least seconds of a token, up to which dtypes are judged by a block, and numbers of threads are alike."""
BLOCK = 4
"""Tokens of a block."""


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


Dtype = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True)
class Settings:
    """How models are run."""

    dtype: Dtype
    """Of the target."""
    threads: Annotated[int, Field(ge=1, le=4096)]
    compiled: bool
    draft_dtypes: dict[str, Dtype]
    """Of each draft model, and of heads, by the path."""
    why: str | None
    """What was timed, in words; None where nothing was open."""

    def summary(self) -> str:
        """Say in words what they are."""
        others = {name for name in self.draft_dtypes.values() if name != self.dtype}
        drafts = f", drafts {' and '.join(sorted(set(self.draft_dtypes.values())))}" if others else ""
        how = "compiled" if self.compiled else "eager"
        return f"{self.dtype}, {how}, {self.threads} thread{'s' if self.threads > 1 else ''}{drafts}"

    def to_file(self, path: Path) -> None:
        """Write them down: a run that goes on has the settings that it began with."""
        write_aside(path, json.dumps(asdict(self)))


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
    """Load a pair as it decodes fastest here, say so, and set the threads of torch.

    Args:
        path: the target.
        tokenizer: its tokenizer.
        drafters: what to load beside it.
        dtype: see `fastest_settings`, as for `threads` and `compiled`.
        threads: of the CPU.
        compiled: whether forwards are compiled.
        trust_remote_code: as for `load_pair`.
        kept: a file of settings that were found before: if it is there, what is open is taken from it.

    Raises:
        InputError: as `load_pair`.
    """
    first = dtype
    if dtype == "auto" and default_device().type == "cpu":  # it is timed, and said once
        first = fast_dtype(load_config(path, field="target", trust_remote_code=trust_remote_code), "cpu")
    pair = load_pair(path, tokenizer, drafters, first, trust_remote_code)
    if kept is not None and kept.exists():
        settings = read(Settings, kept)
        given: dict[str, Any] = {"dtype": None if dtype == "auto" else dtype, "threads": threads, "compiled": compiled}
        settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    else:
        settings = fastest_settings(
            pair.target,
            path,
            [drafter for drafter in pair.drafters if drafter.model is not None],
            dtype,
            threads,
            compiled,
            trust_remote_code,
        )
    if settings.why:
        print(f"settings: {settings.summary()}; {settings.why}", file=sys.stderr)
    if {settings.dtype, *settings.draft_dtypes.values()} != {pair.dtype}:
        specs = [replace(spec, dtype=settings.draft_dtypes.get(str(spec.path))) for spec in drafters]
        del pair  # or there would be two of a large target
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
    """Time a token of plain decoding under what is left open, and return what is fastest.

    On a CUDA GPU dtype and threads are as they are, and it is said whether the host is the bound; on other devices
    nothing is timed, and forwards are eager unless they are to be compiled.

    Args:
        target: the target, as it was loaded.
        path: where it lies, to be loaded in another dtype too.
        drafters: those with weights; each gets the dtype in which it is faster.
        dtype: "auto" tries the target's own and float32, where the machine has fast arithmetic for both.
        threads: None tries all that torch has, half of them and one.
        compiled: None tries both, for models of less than 0.1 s a token.
        trust_remote_code: as for `load_model`.
    """
    own, most = str(target.dtype).removeprefix("torch."), torch.get_num_threads()
    paths = [str(drafter.path) for drafter in drafters]
    if target.device.type == "cuda":
        compiled, why = compiled_on_gpu(target, compiled)
        return Settings(own, threads or most, compiled, dict.fromkeys(paths, own), why)
    if target.device.type != "cpu":
        return Settings(own, threads or most, bool(compiled), dict.fromkeys(paths, own), None)
    dtypes = {own}
    if dtype == "auto":
        dtypes |= {fast_dtype(load_config(path, trust_remote_code=trust_remote_code), "cpu"), "float32"}

    def others(model: PreTrainedModel) -> set[str]:
        """Return the dtypes that a model is tried in too: none of a large one, which half precision makes faster."""
        return dtypes - {own} if model.num_parameters() <= SMALL else set()

    copies = {name: load_model(path, dtype=name, trust_remote_code=trust_remote_code) for name in others(target)}
    timed = _Timed({own: target} | copies, [threads] if threads else sorted({1, max(1, most // 2), most}))
    torch.set_num_threads(timed.threads)
    if compiled is not False and (compiled or timed.tokens[timed.fastest] < COMPILED_BELOW):
        with _compiled_aside(timed, path, trust_remote_code):
            timed.compile(bool(compiled))
        compiled = compiled or timed.compiling_pays
    chosen = timed.dtype(bool(compiled))
    draft_dtypes = {}
    for drafter, draft in zip(drafters, paths, strict=True):
        assert drafter.model is not None
        forwards = drafter.family.timed_forwards(drafter, others(drafter.model), trust_remote_code)
        draft_dtypes[draft] = _least(median_seconds(forwards, REPEATS)) if forwards else own
    torch.set_num_threads(most)
    return Settings(chosen, timed.threads, bool(compiled), draft_dtypes, timed.in_words())


def _compiled_aside(timed: "_Timed", path: str, trust_remote_code: bool) -> AbstractContextManager[None]:
    """Let another process compile the target in its second dtype, where both have to be compiled."""
    _, *others = timed.models
    if len(others) != 1 or not all(needs_compiling(model) for model in timed.models.values()):
        return nullcontext()
    return compiling(Order(path, others[0], timed.threads, trust_remote_code))


def _least(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name])


class _Timed:
    """Seconds of forwards of a target on a CPU.

    Args:
        models: the target by dtype.
        counts: numbers of threads.
    """

    def __init__(self, models: Mapping[str, PreTrainedModel], counts: Sequence[int]):
        self.models, self.counts = models, counts
        calls = {
            (name, count): partial(_with_threads, count, forward_behind_text(model))
            for name, model in models.items()
            for count in counts
        }
        self.by_threads = median_seconds(calls, REPEATS)
        self.fastest, quickest = min(self.by_threads, key=lambda key: self.by_threads[key])
        # Of counts that are alike the greatest: an eager token waits for Python, a compiled one for its kernels.
        most = ALIKE * self.by_threads[self.fastest, quickest]
        self.threads = max(count for count in counts if self.by_threads[self.fastest, count] <= most)
        self.tokens = {name: self.by_threads[name, self.threads] for name in models}
        """Of a token, eager, with the threads that are fastest."""
        self.compiled = dict[str, float]()
        """Of a token, compiled; nothing where it was not tried."""
        self.failure: str | None = None
        """Why nothing could be compiled."""
        self.blocks = dict[str, float]()
        """Of `BLOCK` tokens; nothing where one dtype is clearly the fastest."""

    def compile(self, wanted: bool) -> None:
        """Time compiled forwards too; a compiler that fails is named and done without, unless they are `wanted`."""
        try:
            with phase("compiling, and timing tokens"):
                steps = {name: forward_behind_text(model, compiled=True) for name, model in self.models.items()}
                self.compiled = median_seconds(steps, REPEATS)
        except Exception as error:
            if wanted:
                raise
            if not isinstance(error, NotCompiled):  # where nothing may be compiled, that is no failure
                self.failure = first_line(error)

    @property
    def compiling_pays(self) -> bool:
        """Whether a compiled forward is faster by enough to wait for it."""
        return bool(self.compiled) and min(self.compiled.values()) < WORTH_IT * self.tokens[self.fastest]

    def dtype(self, compiled: bool) -> str:
        """Return the fastest dtype; of dtypes that are alike the one whose blocks are."""
        seconds = self.compiled if compiled else self.tokens
        chosen = _least(seconds) if compiled else self.fastest
        alike = {name: model for name, model in self.models.items() if seconds[name] <= ALIKE * seconds[chosen]}
        if len(alike) == 1:
            return chosen
        steps = {name: forward_behind_text(model, compiled, BLOCK) for name, model in alike.items()}
        self.blocks = median_seconds(steps, REPEATS)
        return _least(self.blocks)

    def in_words(self) -> str | None:
        """Say what was timed; None where there was nothing to choose."""
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
    return ", ".join(f"{name} {1e3 * each:.1f}" for name, each in seconds.items())


def compiled_on_gpu(target: PreTrainedModel, compiled: bool | None) -> tuple[bool, str]:
    """Return whether a GPU decodes the target by compiled forwards, and what was timed, in words.

    Where `compiled` is None, a compiler that fails is named, and done without.
    """
    device, seconds, launching, failure = target.device, dict[str, float](), dict[str, float](), ""
    for name in ("eager", "compiled"):
        if compiled is not None and compiled != (name == "compiled"):
            continue
        if name == "compiled" and compiled is None and seconds["eager"] >= COMPILED_BELOW:
            continue
        try:
            with phase(f"timing {name} tokens"):
                step = forward_behind_text(target, compiled=name == "compiled")
                timed, launched = median_seconds({name: step}, REPEATS, device), launch_seconds(step, device, REPEATS)
        except Exception as error:
            if name == "eager" or compiled:
                raise
            failure = f"; compiling failed: {first_line(error)}"
            continue
        seconds |= timed
        launching[name] = launched
    chosen = "compiled" if seconds.get("compiled", torch.inf) < WORTH_IT * seconds.get("eager", torch.inf) else "eager"
    host = launching[chosen] >= HOST_BOUND * seconds[chosen]
    bound = (
        f"the host is the bound, with {1e3 * launching[chosen]:.1f} to launch a token"
        if host
        else "the GPU is the bound"
    )
    return chosen == "compiled", f"milliseconds per token of plain decoding: {_milliseconds(seconds)}; {bound}{failure}"


def _with_threads(count: int, call: Callable[[], object]) -> object:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return call()
