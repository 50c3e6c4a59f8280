"""Seeded random faults in every file and every server's answer that is read: one line, in time, and nothing impossible.

A reader is a line of `READERS`. `FAULTS=20000 pytest tests/integration/test_faults.py` throws more.
"""

import asyncio
import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from faults import damaged, misvalued, misworded
from unit.scripts.engines.test_client import SGLANG, VLLM
from unit.scripts.report.test_rounds import SETTINGS, TEXT
from unit.scripts.services.coordinate.test_relay import REPORT, TABLE

from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.costs import ValidTable
from draftsmith.decode.measurement.server_counts import possible
from draftsmith.decode.validation import read
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.eagle.formats.importing import import_eagle
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.scripts.engines.certify.config import CertifyConfig
from draftsmith.scripts.engines.client import identify_engine, metrics_of
from draftsmith.scripts.engines.offline.jobs import Answer as EngineAnswer
from draftsmith.scripts.engines.offline.jobs import EngineFailure, Job, run_of
from draftsmith.scripts.measure.state import Group, Row
from draftsmith.scripts.report.rounds import read_rounds
from draftsmith.scripts.services.coordinate.config import ServedPair
from draftsmith.scripts.services.coordinate.predictions import predicted_rates
from draftsmith.scripts.services.draft_protocol import DraftRequest, ProtocolError, Service, decode
from draftsmith.train.checkpoint import WEIGHTS, stored_tensors
from draftsmith.train.cli import check_fields, fields_of
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.shards import completion_files, read_completions, read_manifest, settle_manifest
from draftsmith.train.endpoint.client import NATIVE, Client
from draftsmith.train.endpoint.client import TEXT as COMPLETIONS
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.job.resume import JobRecord
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.cache_reader import CachedCollator, find_distributions
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.teacher.feature_reader import find_features

FAULTS = int(os.environ.get("FAULTS", "500"))
WITHOUT_END = 60
"""Seconds, of which a case needs a hundredth."""
MOST = 4
"""Tokens that servers are asked for."""
EXPECTED = (InputError, ServerFailure, EngineFailure, ProtocolError)


def anything(taken: Any) -> None:
    """Require nothing."""


@dataclass(frozen=True)
class Reader:
    """Something that is read, and what is required of whatever was taken."""

    content: bytes | Path
    """What is right: itself, or the file that has it."""
    take: Callable[[Path], Any]
    """Read a file with a faulty content, at the place of the right one."""
    require: Callable[[Any], object] = anything
    faults: tuple[Callable[[bytes, random.Random], bytes], ...] = (damaged, misvalued, misvalued, misvalued)


def ids_below(size: int, *of: Any) -> None:
    assert all(type(token) is int and 0 <= token < size for ids in of for token in ids or [])


class Sent(Client):
    """A client of a server whose answer is a file."""

    def __init__(self, path: Path):
        super().__init__("http://127.0.0.1:9")
        self.file = path

    async def events(self, path, body, marked=True):
        for line in self.file.read_bytes().decode("utf-8", "replace").split("\n"):
            if line.strip():
                yield line

    async def get_text(self, path):
        return self.file.read_bytes().decode("utf-8", "replace")

    async def fetch(self, kind, path, body=None, what=None, timeout=None):
        return self.read(kind, self.file.read_bytes(), path, names=True)


def answered(answer: Any) -> None:
    ids_below(2**31, answer.token_ids, answer.prompt_ids)
    assert len(answer.token_ids or []) <= MOST and (answer.completion_tokens or 0) <= MOST
    assert answer.counts is None or possible(answer.counts)
    assert all(0 <= count <= MOST for _, count in answer.arrivals)


def counters(read: Any) -> None:
    counts = read.counters
    numbers = [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens, read.requests]
    numbers += [*counts.num_accepted_tokens_per_pos, read.generated_tokens or 0]
    assert all(type(number) is int and number >= 0 for number in numbers)
    assert len(counts.num_accepted_tokens_per_pos) <= 4096


def engine(said: Any) -> None:
    assert said.draft_tokens is None or said.draft_tokens >= 0


def speeds(rates: Any) -> None:
    for by_category in rates.by_temperature.values():
        assert all(0 < rate < math.inf for column in by_category.values() for rate in column)


def rounds(taken: Any) -> None:
    settings, texts = taken
    for text in texts:
        ids_below(2**31, text.tokens, text.prompt_ids)
        for drafter in text.accepted:
            found = text.acceptance(drafter, "probabilistic", settings.draft_length)
            assert found is None or ((found >= 0) & (found <= 1)).all()


def run_is_possible(run: Any) -> None:
    for answer in run.answers:
        assert isinstance(answer, EngineFailure | EngineAnswer)
        if isinstance(answer, EngineAnswer):
            possible(answer.counters)
            ids_below(2**31, *answer.token_ids)


def finite_model(model: Any) -> None:
    assert all(tensor.isfinite().all() for tensor in model.parameters())
    assert all(parameter.is_floating_point() for parameter in model.parameters())


def finite_batch(batch: dict[str, torch.Tensor]) -> None:
    assert all(not values.is_floating_point() or values.isfinite().all() for values in batch["teacher"].values())


GROUP = Group([Row(0, [1, 2], Counts(2, 2, 0, (0,), (2,), (2,), 2))], 0.5)
PART = [
    {"choices": [{"text": "a", "token_ids": [1, 2], "prompt_token_ids": [3], "finish_reason": None}]},
    {"choices": [{"delta": {"content": "b"}, "token_ids": [4], "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3},
        "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 1], "num_draft_tokens": 4}},
    },
]
META = {"completion_tokens": 2, "prompt_tokens": 1, "finish_reason": {"type": "stop"}, "spec_verify_ct": 2}
META |= {"spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [1, 1]}
SERVER_INFO = {"internal_states": [{}], "version": "0.5", "speculative_num_draft_tokens": 4}
SERVER_INFO |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_algorithm": "EAGLE3"}
COMPLETED = {"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [1], "prompt_token_ids": [1]}]}
ENGINE = {"vllm": "1", "device": "cpu", "results": [{"token_ids": [[7, 8]], "num_drafts": [2], "num_draft_tokens": [6],
    "num_accepted_tokens": [3], "num_accepted_tokens_per_pos": [2, 1, 0]}]}  # fmt: skip
JOB = {"samples": 9, "data": "d", "seed": 0, "sampling": "random", "processes": 1, "batch": 2, "accumulation": 1,
    "strategy": "DDP", "settings": {"alpha": 0.1, "layers": [1, 2], "draft": None}}  # fmt: skip
PROMPTS = [
    {"id": "a", "prompt": "x", "category": "c"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    {"request": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "response": {"choices": [
        {"message": {"content": "yes"}, "finish_reason": "stop"}]}},
]  # fmt: skip
DRAFTS = {"version": 2, "client": "c", "rows": [{"id": 1, "start": 0, "tokens": [5], "want": 2}], "ended": [3]}
SERVICE = {"version": 2, "model": "m", "vocab_size": 9, "max_length": 9, "max_rows": 9, "max_draft_length": 4}
YAML = b"server: &a http://127.0.0.1:8000\nprompts: [x, {y: *a}]\ntemperature: 0,1\nsampled_tokens: 2000\nlimit: 3\n"


def lines(*records: Any) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


def run(work: Callable[[Sent], Any]) -> Callable[[Path], Any]:
    async def within(path: Path) -> Any:
        async with Sent(path) as client:
            return await work(client)

    return lambda path: asyncio.run(within(path))


def rates_of(path: Path) -> Any:
    return predicted_rates(ServedPair("p", ["m"], ["http://127.0.0.1:1"], report=str(path)))


def config_of(path: Path) -> None:
    fields_of(str(path))
    check_fields(CertifyConfig, ["--config", str(path)])


def manifest_of(path: Path) -> None:
    good = json.loads((path.parent / "good").read_text()) if (path.parent / "good").is_file() else None
    found = read_manifest(path.parent)
    if found is not None:
        settle_manifest(path.parent, good or found)


READERS: dict[str, Reader] = {
    "vLLM's stream": Reader(
        lines(*PART), run(lambda c: c.complete({"prompt": "p", "max_tokens": MOST})), answered
    ),
    "SGLang's stream": Reader(
        lines({"text": "a", "meta_info": META, "output_ids": [1, 2], "prompt_token_ids": [3]}),
        run(lambda c: c.complete({"input_ids": [3], "sampling_params": {"max_new_tokens": MOST}}, NATIVE)),
        answered,
    ),
    "SGLang's server_info": Reader(lines(SERVER_INFO), run(identify_engine), engine),
    "vLLM's version": Reader(lines({"version": "0.32"}), run(identify_engine)),
    "models": Reader(lines({"data": [{"id": "m", "max_model_len": 9}]}), run(lambda c: c.models())),
    "vLLM's metrics": Reader(VLLM.encode(), run(metrics_of), counters, (damaged, misworded, misworded)),
    "SGLang's metrics": Reader(SGLANG.encode(), run(metrics_of), counters, (damaged, misworded, misworded)),
    "an endpoint's completion": Reader(
        lines(COMPLETED),
        run(lambda c: c.complete_whole({}, COMPLETIONS, "it")),
        lambda answer: ids_below(2**31, answer.token_ids, answer.prompt_ids),
    ),
    "an engine's answers": Reader(
        lines(ENGINE), lambda path: run_of(path.read_bytes(), [Job("t", [[1]])], "ended"), run_is_possible
    ),
    "a request for drafts": Reader(lines(DRAFTS), lambda path: decode(DraftRequest, path.read_bytes())),
    "a draft service": Reader(lines(SERVICE), lambda path: decode(Service, path.read_bytes())),
    "a kept batch": Reader(lines([asdict(GROUP)]), lambda path: read(list[Group], path)),
    "kept costs": Reader(lines([TABLE]), lambda path: read(list[ValidTable], path)),
    "a kept certificate": Reader(lines(asdict(Certificate(p_value=0.5))), lambda path: read(Certificate, path)),
    "report.json": Reader(lines(REPORT), rates_of, speeds),
    "rounds.jsonl": Reader(lines(*map(asdict, [SETTINGS, TEXT, TEXT])), lambda path: read_rounds(str(path)), rounds),
    "a checkpoint's job": Reader(lines(JOB), lambda path: JobRecord.left_in(path.parent)),
    "prompts.jsonl": Reader(lines(*PROMPTS), lambda path: read_prompts(str(path), answers="kept")),
    "a config": Reader(YAML, config_of, faults=(damaged, misworded, misworded)),
}  # fmt: skip
NAMES = {
    "a checkpoint's job": "job.json",
    "rounds.jsonl": "rounds.jsonl",
    "prompts.jsonl": "prompts.jsonl",
    "a config": "config.yaml",
}
"""What a file must be called, where that matters."""


@pytest.fixture(scope="module")
def directories(pipeline, tokenizer, tmp_path_factory) -> dict[str, Reader]:
    """The readers of files that lie in directories, each with all that lies beside it."""
    root = tmp_path_factory.mktemp("faults")
    target = tiny_llama(0, 300)
    MedusaHeads.of_target(target, 2).save_pretrained(root / "medusa")
    EagleHeads.of_target(target, token_map=torch.arange(0, 300, 7)).save_pretrained(root / "eagle")
    completions = shutil.copytree(pipeline / "short", root / "short")
    made = {"completions": [str(completions)], "batch_size": 3, "dtype": "float32"}
    make_cache(CacheConfig(str(pipeline / "target"), output=str(root / "laws"), k=8, **made))
    features = {"features": True, "layer_ids": [1, 2], "feature_dtype": "float32"}
    make_cache(CacheConfig(str(pipeline / "target"), output=str(root / "features"), **made, **features))
    recipe = RecipeConfig(target=str(pipeline / "target"), completions=[str(completions)])
    mapped = map_completions(str(completions))
    copy = Path(shutil.copy(mapped, root / "mapped.arrow"))
    whole = Texts({"": mapped})
    ids, labels = (part.tolist() for part in whole.read(0))
    row = {"texts": [int(whole.column("text")[0])], "input_ids": ids, "labels": labels, "position_ids": [0]}
    width = torch.zeros(1, len(row["labels"]), dtype=torch.long)

    def batch(rows: Any) -> dict[str, Any]:
        return {"input_ids": width}

    def laws(path: Path) -> Any:
        return CachedCollator(batch, find_distributions([str(root / "laws")], recipe, 300))([row])

    def states(path: Path) -> Any:
        return CachedCollator(batch, find_features([str(root / "features")], recipe, 300).of_layers([1, 2]))([row])

    def texts(path: Path) -> Any:
        found = Texts({"": path})
        return [found.read(sample) for sample in range(len(found))], found.ids(range(len(found)))

    def shard(directory: Path) -> Path:
        return next(directory.glob("*shard-*.parquet"))

    def flips(content: Path, take: Callable[[Path], Any], require: Callable[[Any], object] = anything) -> Reader:
        return Reader(content, take, require, (damaged,))

    readers = {
        "completions' manifest": Reader(completions / "manifest.json", manifest_of),
        "completions' files": Reader(completions / "manifest.json", lambda path: completion_files(str(completions))),
        "a shard of completions": flips(shard(pipeline / "long"), lambda path: read_completions(path, 300)),
        "mapped samples": flips(copy, texts),
        "a distribution cache's manifest": Reader(root / "laws" / "manifest.json", laws, finite_batch),
        "a distribution cache's shard": flips(shard(root / "laws"), laws, finite_batch),
        "a feature cache's manifest": Reader(root / "features" / "manifest.json", states, finite_batch),
        "a feature cache's shard": flips(shard(root / "features"), states, finite_batch),
        "a model's headers": flips(root / "medusa" / WEIGHTS, lambda path: stored_tensors(path.parent, "target")),
    }
    for kind, loads in {"medusa": (MedusaHeads.from_pretrained, import_heads),
                        "eagle": (EagleHeads.from_pretrained, import_eagle)}.items():  # fmt: skip
        for load in loads:
            take = partial(lambda load, path: load(path.parent), load)
            name = f"{kind} by {load.__name__}"
            readers[f"{name}, config"] = Reader(root / kind / "config.json", take, finite_model)
            readers[f"{name}, weights"] = flips(root / kind / WEIGHTS, take, finite_model)
    return readers


@contextmanager
def ending() -> Iterator[None]:
    """Interrupt what takes too long."""

    def stop(*_: object) -> None:
        raise AssertionError(f"no end within {WITHOUT_END} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, WITHOUT_END)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def put(path: Path, content: bytes) -> None:
    """Write a file anew: what has mapped the one before still has it."""
    aside = path.with_name("aside")
    aside.write_bytes(content)
    aside.replace(path)


def thrown(name: str, reader: Reader, seed: int, directory: Path) -> bool:
    """Throw one fault at a reader; return whether what it read was taken all the same."""
    rng = random.Random(f"{name} {seed}")
    if isinstance(reader.content, Path):
        path, good = reader.content, reader.content.read_bytes()
    else:
        path, good = directory / NAMES.get(name, "it.json"), reader.content
    put(path, rng.choice(reader.faults)(good, rng))
    try:
        with ending():
            reader.require(reader.take(path))
    except EXPECTED as error:
        assert str(error) and "\n" not in str(error), f"{name}, seed {seed}: not one line: {error}"
        return False
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}: {path.read_bytes()[:2000]!r}")
        raise
    finally:
        put(path, good)
    return True


def test_what_is_right_is_taken(directories, tmp_path):
    for name, reader in (READERS | directories).items():
        path = reader.content
        if isinstance(reader.content, bytes):
            path = tmp_path / NAMES.get(name, "it.json")
            path.write_bytes(reader.content)
        if name not in ("vLLM's version", "a config", "a request for drafts"):
            reader.require(reader.take(path))


def test_faults_end_in_one_line(directories, tmp_path):
    readers, taken, failures = READERS | directories, list[bool](), list[Exception]()
    for seed in range(-(-FAULTS // len(readers))):
        for name, reader in readers.items():
            try:
                taken.append(thrown(name, reader, seed, tmp_path))
            except Exception as error:
                failures.append(error)
    if failures:
        raise ExceptionGroup("what was read is neither possible nor refused", failures)
    # Some change nothing that is read, such as a text; most are seen.
    assert len(taken) >= FAULTS and sum(taken) < len(taken) / 2
