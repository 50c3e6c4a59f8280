"""Offline jobs for a vLLM in another Python: finding that Python, running `driver` there, and reading its answers."""

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
from draftsmith.decode.validation import Count, ServerMessage, TokenId, parse
from draftsmith.scripts.engines.offline import driver
from draftsmith.train.job.processes import end_session

VARIABLE = "DRAFTSMITH_ENGINE"
"""The environment variable that names the engine's Python."""
IN_THIS_FOLDER = Path(".venv-engine/bin/python")
"""The Python that `make engine` installs."""
ANSWER = 60.0
"""The seconds that a Python may take to answer whether it has vllm."""


class EngineFailure(RuntimeError):
    """A failure of the engine, or a wrong answer, in one line."""


@dataclass(frozen=True)
class Job:
    """A task for vLLM: prompts (token ids) to decode to `max_tokens` each, ignoring ends of text.

    `speculative` is the `speculative_config`, None for plain decoding; `max_model_len` includes drafts past the text's
    end; `max_num_seqs` prompts are decoded together; `overrides` are added to the target's config (`--hf-overrides`).
    """

    target: str
    prompts: Sequence[Sequence[int]]
    speculative: dict[str, Any] | None = None
    max_tokens: int = 64
    max_model_len: int = 512
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "float32"
    max_num_seqs: int = 8
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The texts of a job's prompts, as token ids, and vLLM's counts; zeros without drafts."""

    token_ids: list[list[int]]
    counters: ServerCounts


@dataclass(frozen=True)
class EngineRun:
    """The answers to a list of jobs, vLLM's version, and its kind of device, such as cpu or cuda."""

    version: str
    device: str
    answers: list[Answer | EngineFailure]


class Result(ServerMessage):
    """The driver's result of one job."""

    error: str | None = None
    token_ids: list[list[TokenId]] = Field(default_factory=list)
    num_drafts: list[Count] = Field(default_factory=list)
    num_draft_tokens: list[Count] = Field(default_factory=list)
    num_accepted_tokens: list[Count] = Field(default_factory=list)
    num_accepted_tokens_per_pos: list[Count] = Field(default_factory=list)


class EngineOutput(ServerMessage):
    """The output of the driver."""

    vllm: str
    device: str
    results: list[Result]


def engine_python() -> Path:
    """Return a Python with vllm: `DRAFTSMITH_ENGINE`'s, that of `make engine`, or this one."""
    if name := os.environ.get(VARIABLE):
        # Links are not resolved: a virtual environment's Python is a link.
        python = Path(os.path.abspath(os.path.expanduser(name)))
        if not _has_vllm(python):
            raise InputError(f"{VARIABLE}: expected a Python that has vllm, found none at {name}")
        return python
    if _has_vllm(IN_THIS_FOLDER.absolute()):
        return IN_THIS_FOLDER.absolute()
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    remedy = f"name one by {VARIABLE}, or install one with `make engine`"
    raise InputError(f"verify: expected a Python that has vllm, found none: {remedy}")


def _has_vllm(python: Path) -> bool:
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([str(python), "-P", "-c", question], capture_output=True, timeout=ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def run_jobs(python: Path, jobs: Sequence[Job], timeout: float = 1800.0) -> EngineRun:
    """Decode jobs one by one in a process of the engine's Python, which is ended after `timeout` seconds.

    Raise EngineFailure if it ended before its first answer.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-engine-") as scratch:
        requests, responses, log = (Path(scratch) / name for name in ("jobs.json", "answers.json", "log"))
        requests.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        program = str(Path(driver.__file__).resolve())
        ended = _run([str(python), "-P", program, str(requests), str(responses)], log, timeout)
        if not responses.exists():
            raise EngineFailure(f"engine: expected answers from {python}, found {ended}")
        return run_of(responses.read_bytes(), jobs, ended)


def run_of(answers_json: bytes, jobs: Sequence[Job], ended: str) -> EngineRun:
    """Return the run of jobs from the driver's answers; jobs without one fail with `ended`, the end of the process.

    Raise EngineFailure if the answers are malformed.
    """
    try:
        output = parse(EngineOutput, answers_json, "engine")
    except InputError as error:
        raise EngineFailure(str(error)) from error
    if not output.results or len(output.results) > len(jobs):
        raise EngineFailure(f"engine: expected answers to {len(jobs)} jobs, found {len(output.results)}: {ended}")
    answers = [_answer(result, job) for result, job in zip(output.results, jobs, strict=False)]
    return EngineRun(output.vllm, output.device, [*answers, *[EngineFailure(ended)] * (len(jobs) - len(answers))])


def _run(command: list[str], log: Path, timeout: float) -> str:
    """Run a process in a session of its own, and return how it ended and its last line of output."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"exit code {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            ended = f"no end within {timeout:g} s"
        finally:
            end_session(process)
    return last_words(ended, log)


def last_words(ended: str, log: Path, telling: str = "") -> str:
    """Return how a process ended, and its last line of output, or the first of those with some words."""
    text = without_control_codes(log.read_text(encoding="utf-8", errors="replace"))
    lines = [" ".join(line.split())[:300] for line in text.splitlines() if line.strip()]
    told = [line for line in lines if telling and telling in line]
    return ": ".join(filter(None, [ended, *(told[:1] or lines[-1:])]))


def without_control_codes(text: str) -> str:
    """Return text without terminal codes; carriage returns become line ends."""
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|[\x00-\x08\x0b-\x1f\x7f]", "", text.replace("\r", "\n"))


def _answer(result: Result, job: Job) -> Answer | EngineFailure:
    if result.error is not None:
        return EngineFailure(" ".join(without_control_codes(result.error).split()))
    texts = result.token_ids
    if len(texts) != len(job.prompts) or any(len(text) > job.max_tokens for text in texts):
        expected = f"{len(job.prompts)} texts of at most {job.max_tokens} tokens"
        return EngineFailure(f"engine: token_ids: expected {expected}, found {[len(text) for text in texts][:8]}")
    try:
        drafts, drafted, accepted = map(sum, (result.num_drafts, result.num_draft_tokens, result.num_accepted_tokens))
        counts = ServerCounts(drafts, drafted, accepted, tuple(result.num_accepted_tokens_per_pos))
        return Answer(texts, possible(counts))
    except ValueError as error:
        return EngineFailure(f"engine: {error}")
