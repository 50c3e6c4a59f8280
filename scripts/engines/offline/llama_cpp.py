"""llama.cpp, in a folder of its own: GGUF files by its converter, and decoding jobs in its server.

Proven with the tree of `make llama-cpp`. A draft is what `llama-server --spec-type` calls it; the classes in a
config.json say which.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from pydantic import Field

from draftsmith.decode.errors import InputError
from draftsmith.decode.options import Filters
from draftsmith.decode.validation import ServerMessage, TokenId, parse
from draftsmith.scripts.engines.client import read_metrics
from draftsmith.scripts.engines.offline import gguf_driver
from draftsmith.scripts.engines.offline.jobs import Answer, EngineFailure, EngineRun, Job, last_words
from draftsmith.train.files import is_gguf
from draftsmith.train.job.processes import end_session

VARIABLE = "DRAFTSMITH_LLAMA_CPP"
"""The environment variable that names the folder."""
IN_THIS_FOLDER = Path(".llama.cpp")
CONVERTER = "convert_hf_to_gguf.py"
CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""The types that the converter writes; `llama-quantize` makes the others of f32."""
SPEC_TYPES = {"Eagle3": "draft-eagle3", "DFlash": "draft-dflash", "DSpark": "draft-dspark"}
"""`--spec-type` by a part of the class in a drafter's config.json; other files hold draft models."""
COPIES = "ngram-mod"
"""The type of drafts that are copied from the text, token by token what last followed."""
EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
READY, PATIENCE = 120.0, 600.0


class Completion(ServerMessage):
    """The answer of `/completion`."""

    tokens: list[TokenId] = Field(default_factory=list)
    stop_type: str | None = None


@dataclass(frozen=True)
class LlamaCpp:
    """A folder of llama.cpp: its source tree, built in `build`."""

    folder: Path

    @classmethod
    def found(cls) -> "LlamaCpp":
        """Return the folder that `DRAFTSMITH_LLAMA_CPP` names, or that of `make llama-cpp`."""
        folder = Path(os.environ.get(VARIABLE) or IN_THIS_FOLDER).expanduser()
        if not (folder / CONVERTER).is_file():
            remedy = f"name one by {VARIABLE}, or install it with `make llama-cpp`"
            raise InputError(
                f"engine: expected a folder of llama.cpp with {CONVERTER}, found none at {folder}: {remedy}"
            )
        return cls(folder.absolute())

    def program(self, name: str) -> str:
        """Return the path of a built program."""
        for path in (self.folder / "build" / "bin" / name, self.folder / "bin" / name):
            if path.is_file():
                return str(path)
        raise InputError(
            f"engine: expected {name} in {self.folder / 'build' / 'bin'}, found none: build llama.cpp there"
        )

    def convert(self, source: str, output: Path, quantize: str, target: str | None) -> None:
        """Write a directory as a GGUF file; drafters that read features need the target's directory.

        Raise InputError if the converter refuses.
        """
        plain = quantize if quantize in CONVERTED else "f32"
        written = output if plain == quantize else output.with_suffix(".f32.gguf")
        words = [sys.executable, "-P", gguf_driver.__file__, str(self.folder), str(Path(source).absolute())]
        words += ["--outfile", str(written.absolute()), "--outtype", plain]
        try:
            _done(words + (["--target-model-dir", str(Path(target).absolute())] if target else []), "convert")
            if written != output:
                _done([self.program("llama-quantize"), str(written), str(output), quantize.upper()], "llama-quantize")
        finally:
            if written != output:
                written.unlink(missing_ok=True)

    def target_file(self, target: str, output: Path, quantize: str) -> str:
        """Return the GGUF file of a target: its own, or `output`, into which its directory is converted."""
        if is_gguf(target):
            return str(Path(target).absolute())
        self.convert(target, output, quantize, None)
        return str(output)

    def run_jobs(self, jobs: Sequence[Job]) -> EngineRun:
        """Decode jobs one by one, each by a server of its own: `target` is a GGUF file, and ends of text end texts."""
        answers, version = list[Answer | EngineFailure](), "?"
        for job in jobs:
            try:
                with self.serve(job, more=EXACT) as client:  # attention in float32
                    version = client.get("/props").json().get("build_info", "?")
                    answers.append(decoded(client, job))
            except (EngineFailure, InputError) as error:
                answers.append(EngineFailure(str(error)))
        return EngineRun(version, "cpu", answers)

    @contextmanager
    def serve(self, job: Job, threads: int | None = None, more: Sequence[str] = ()) -> Iterator[httpx2.Client]:
        """Start a server for a job, yield a client of it, and end it; raise EngineFailure if it does not start.

        `threads` are half of the cores if None; `more` are further arguments.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [self.program("llama-server"), *server_words(job.target, job.speculative or {}), "--port", str(port)]
        words += ["--host", "127.0.0.1", "--metrics", "-np", str(job.max_num_seqs), "--no-warmup"]
        count = threads or max((os.cpu_count() or 2) // 2, 1)
        words += ["-c", str(job.max_model_len * job.max_num_seqs), "-t", str(count), *more]
        with tempfile.TemporaryDirectory(prefix="draftsmith-llama-") as scratch:
            log = Path(scratch) / "log"
            with log.open("wb") as output:
                process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                    _wait(client, process, log)
                    yield client
            except httpx2.HTTPError as error:
                found = last_words(type(error).__name__, log, "GGML_ASSERT")
                raise EngineFailure(f"llama-server: expected answers, found {found}") from error
            finally:
                end_session(process)


def server_words(target: str, speculative: Any) -> list[str]:
    """Return the arguments of `llama-server` for a target and a drafter, as in vLLM's speculative config."""
    words = ["-m", target]
    if speculative:
        words += ["-md", speculative["model"]] if speculative["model"] != target else []
        words += ["--spec-type", speculative["method"]]
        length = str(speculative["num_speculative_tokens"])
        if speculative["method"] == COPIES:
            sizes = f"--spec-ngram-mod-n-match 1 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max {length}"
            return words + sizes.split()
        words += ["--spec-draft-n-max", length]
        if speculative["method"] != "draft-simple":  # wrong with several slots
            words += ["--no-spec-draft-backend-sampling"]
    return words


def spec_type(directory: str) -> str:
    """Return what llama.cpp calls the drafter in a directory."""
    names = str(json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")).get("architectures"))
    return next((value for part, value in SPEC_TYPES.items() if part in names), "draft-simple")


def cuts_of(filters: Filters) -> dict[str, float]:
    """Return the cuts of the distribution that llama.cpp has, in the library's order; raise InputError for others."""
    for name, off in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0)):
        if (found := getattr(filters, name)) != off:
            raise InputError(f"{name}: expected {off} for llama.cpp, found {found}")
    return {name: getattr(filters, name) for name in ("top_k", "top_p", "min_p")}


def decoded(client: httpx2.Client, job: Job, **cuts: float) -> Answer:
    """Ask for all texts, as many at once as the server has slots, and read its counts; `cuts` are made in order."""

    def text(index: int) -> list[int]:
        fields = {"prompt": list(job.prompts[index]), "n_predict": job.max_tokens, "seed": job.seed + index} | cuts
        fields |= {"temperature": job.temperature, "samplers": ["temperature", *cuts]}
        fields |= {"return_tokens": True, "cache_prompt": False}
        answer = client.post("/completion", json=fields)
        if answer.status_code != 200:
            raise EngineFailure(f"llama-server: expected a completion, found {answer.status_code}: {answer.text[:200]}")
        read = parse(Completion, answer.content, "llama-server")
        if len(read.tokens) < job.max_tokens and read.stop_type != "eos":
            raise EngineFailure(f"llama-server: expected {job.max_tokens} tokens or an end, found {len(read.tokens)}")
        return read.tokens

    with ThreadPoolExecutor(job.max_num_seqs) as pool:
        texts = list(pool.map(text, range(len(job.prompts))))
    return Answer(texts, read_metrics(client.get("/metrics").text, "llama-server").counters)


def _wait(client: httpx2.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a server is ready; raise EngineFailure with its last line if it ends or takes too long."""
    until = time.monotonic() + READY
    while process.poll() is None and time.monotonic() < until:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.05)
    ended = "no answer" if process.poll() is None else f"exit code {process.returncode}"
    raise EngineFailure(f"llama-server: expected it to start, found {last_words(ended, log, 'error loading')}")


def _done(words: Sequence[str], name: str) -> None:
    """Run a program to its end; raise InputError with its last line if it fails."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-llama-") as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            code = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            raise InputError(f"format: expected llama.cpp to {name} these files, found {last_words('', log)}")
