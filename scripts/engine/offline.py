"""Jobs for a vLLM in another Python: which Python, the process, its answers. `driver` is what runs there."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts, possible
from draftsmith.decode.validation import Count, Said, TokenId, parsed
from draftsmith.scripts.engine import driver
from draftsmith.train.job.processes import end_session

VARIABLE = "DRAFTSMITH_ENGINE"
"""The environment variable that names the engine's Python."""
BESIDE = Path(".venv-engine/bin/python")
"""Where `make engine` installs one."""
ANSWER = 60.0
"""Seconds that a Python may take to say whether it has vllm."""


class EngineFailure(RuntimeError):
    """An engine that failed, or that did what it must not: one line."""


@dataclass(frozen=True)
class Job:
    """A task for vLLM: prompts to decode; ends of text are ignored."""

    target: str
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    speculative: dict[str, Any] | None = None
    """Its `speculative_config`; plain decoding if None."""
    max_tokens: int = 64
    """Of each text."""
    max_model_len: int = 512
    """Tokens of a prompt and its text, and of the drafts beyond."""
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    max_num_seqs: int = 8
    """Prompts decoded together."""
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to the target's config, as `--hf-overrides` does."""


@dataclass(frozen=True)
class Answer:
    """What vLLM made of a job."""

    token_ids: list[list[int]]
    """Of each prompt's text."""
    counters: ServerCounts
    """What it counted; zeros without drafts."""


@dataclass(frozen=True)
class EngineRun:
    """What became of some jobs."""

    version: str
    """vLLM's."""
    device: str
    """The kind that it ran on, such as cpu or cuda."""
    answers: list[Answer | EngineFailure]
    """One a job: what was decoded, or what failed."""


class Result(Said):
    """What the engine's process says of one job."""

    error: str | None = None
    token_ids: list[list[TokenId]] = Field(default_factory=list)
    num_drafts: list[Count] = Field(default_factory=list)
    num_draft_tokens: list[Count] = Field(default_factory=list)
    num_accepted_tokens: list[Count] = Field(default_factory=list)
    num_accepted_tokens_per_pos: list[Count] = Field(default_factory=list)


class EngineOutput(Said):
    """The output of the engine's process."""

    vllm: str
    device: str
    results: list[Result]


def engine_python(given: str | None = None) -> Path:
    """Return the absolute path of a Python that has vllm: the one given, `DRAFTSMITH_ENGINE`'s, ours beside, or this.

    Args:
        given: a path.

    Raises:
        InputError: it, or what the variable names, is none; or none is found.
    """
    named = ("engine", given) if given else (VARIABLE, os.environ.get(VARIABLE))
    if named[1]:
        # Not resolved: the link of a virtual environment is what makes it one.
        python = Path(os.path.abspath(os.path.expanduser(named[1])))
        if not _has_vllm(python):
            raise InputError(f"{named[0]}: expected a Python that has vllm, found none at {named[1]}")
        return python
    if _has_vllm(BESIDE.absolute()):
        return BESIDE.absolute()
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise InputError(
        f"engine: expected a Python that has vllm, found none: name one by --engine or {VARIABLE}, or install one with "
        f"`make engine`"
    )


def _has_vllm(python: Path) -> bool:
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([str(python), "-P", "-c", question], capture_output=True, timeout=ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def run_jobs(python: Path, jobs: Sequence[Job], timeout: float = 1800.0) -> EngineRun:
    """Decode jobs in one process of the engine's Python, one after the other.

    Args:
        python: as `engine_python` returns it.
        jobs: what to decode.
        timeout: seconds for all of them, after which the process is ended.

    Raises:
        EngineFailure: the process ended before its first answer.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-engine-") as scratch:
        requests, responses, log = (Path(scratch) / name for name in ("jobs.json", "answers.json", "log"))
        requests.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        ended = _run(
            [str(python), "-P", str(Path(driver.__file__).resolve()), str(requests), str(responses)], log, timeout
        )
        if not responses.exists():
            raise EngineFailure(f"engine: expected answers from {python}, found {ended}")
        return run_of(responses.read_bytes(), jobs, ended)


def run_of(said: bytes, jobs: Sequence[Job], ended: str) -> EngineRun:
    """Return what became of jobs, as the engine's process says.

    Args:
        said: its answers, JSON.
        jobs: what it was to decode.
        ended: how it ended, of the jobs that it did not come to.

    Raises:
        EngineFailure: it says nothing that can be an answer.
    """
    try:
        output = parsed(EngineOutput, said, "engine")
    except InputError as error:
        raise EngineFailure(str(error)) from error
    if not output.results or len(output.results) > len(jobs):
        raise EngineFailure(f"engine: expected answers to {len(jobs)} jobs, found {len(output.results)}: {ended}")
    answers = [_answer(result, job) for result, job in zip(output.results, jobs, strict=False)]
    return EngineRun(output.vllm, output.device, [*answers, *[EngineFailure(ended)] * (len(jobs) - len(answers))])


def _run(command: list[str], log: Path, timeout: float) -> str:
    """EngineRun a process with all that it starts, and return how it ended, with the last line that it wrote."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"exit code {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            ended = f"no end within {timeout:g} s"
        finally:
            end_session(process)
    lines = [line for line in plain(log.read_text(encoding="utf-8", errors="replace")).splitlines() if line.strip()]
    return f"{ended}: {' '.join(lines[-1].split())[:300]}" if lines else ended


def plain(text: str) -> str:
    """Return text without the codes by which a terminal colours it or goes to its line's start."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|[\x00-\x08\x0b-\x1f\x7f]", "", text.replace("\r", "\n"))


def _answer(result: Result, job: Job) -> Answer | EngineFailure:
    if result.error is not None:
        return EngineFailure(" ".join(plain(result.error).split()))
    texts = result.token_ids
    if len(texts) != len(job.prompts) or any(len(text) > job.max_tokens for text in texts):
        return EngineFailure(
            f"engine: token_ids: expected {len(job.prompts)} texts of at most {job.max_tokens} tokens, found "
            f"{[len(text) for text in texts][:8]}"
        )
    try:
        counts = ServerCounts(
            sum(result.num_drafts),
            sum(result.num_draft_tokens),
            sum(result.num_accepted_tokens),
            tuple(result.num_accepted_tokens_per_pos),
        )
        return Answer(texts, possible(counts))
    except ValueError as error:
        return EngineFailure(f"engine: {error}")
