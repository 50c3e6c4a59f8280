"""A run of `measure --server`: servers answer blocks of prompts in turns, and counters are read around each."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import ceil
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from draftsmith.decode.measurement.server_counts import Counted, ServerCounts
from draftsmith.decode.progress import track
from draftsmith.decode.validation import Amount, Count
from draftsmith.scripts.engines.client import ServerMetrics
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.load import MeasuredServer, RequestRecord, records_of
from draftsmith.scripts.measure.unfinished import SCHEMA, Kept, identified_prompts
from draftsmith.scripts.report.entries import Role
from draftsmith.scripts.report.types import Setting
from draftsmith.train.checkpoint import load_generation_config, unapplied_settings
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import encode_prompts
from draftsmith.train.endpoint.client import Client, SentPrompt
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import git_sha

BLOCKS = 10
"""Turns of a setting, enough for an interval over them."""
READ_AGAIN, READ_FOR = 0.1, 5.0
"""Seconds between two readings of counters that must agree, and the longest wait for that."""
FREE_TO_CHANGE = (
    *("output", "expect", "expect_verifier", "min_speedup", "min_alpha", "confidence"),
    *("drafter", "draft_length"),
)
UNNAMED = ("server", "baseline_server", "server_key_env", "baseline_server_key_env", "prompts", "target")
"""Settings that name a file or server: the manifest compares its content."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerTurn:
    """One turn of one server: some prompts, with no other request of ours before or after.

    Other clients' requests are in its `counters`; `busy` is true if some were running at its begin or end.
    """

    records: list[RequestRecord]
    seconds: Annotated[Amount, Field(gt=0)]
    counters: Counted
    generated_tokens: Count | None
    busy: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the block as plain JSON types."""
        records = [record.to_dict() for record in self.records]
        return asdict(self) | {"records": records, "counters": self.counters.to_dict()}


@dataclass
class Observed:
    """The answers and counts of one run."""

    config: MeasureServerConfig
    prompts: Sequence[SentPrompt]
    servers: Mapping[Role, MeasuredServer]
    blocks: dict[Setting, dict[Role, list[ServerTurn]]] = field(default_factory=dict)
    """The turns of each finished setting: block i of one server is paired with block i of the other."""
    resumed: bool = False
    """True if some blocks are an earlier run's."""
    failure: ServerFailure | None = None
    """The failure that ended the run, and its setting."""
    failed: Setting | None = None

    def records(self, setting: Setting, role: Role) -> list[RequestRecord]:
        """Return the requests of a setting to one server."""
        return [record for block in self.blocks[setting][role] for record in block.records]


def read_load_prompts(config: MeasureServerConfig) -> list[SentPrompt]:
    """Read the prompts, in the form in which they are sent, or raise InputError."""
    prompts = read_prompts(config.prompts, limit=config.limit, invalid=config.invalid_prompts)
    if config.target is None:  # the server encodes
        template = config.system_prompt, config.chat_template_kwargs
        return [SentPrompt(prompt, fields=prompt.request(*template)) for prompt in prompts]
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    unapplied_settings(load_generation_config(config.target, target_config, field="target"), config.target)
    encoding: dict[str, Any] = {
        "max_tokens": config.max_prompt_tokens,
        "system_prompt": config.system_prompt,
        "variables": config.chat_template_kwargs,
    }
    size, invalid = target_config.get_text_config().vocab_size, config.invalid_prompts
    encoded = zip(*encode_prompts(prompts, tokenizer, size, invalid, **encoding), strict=True)
    return [SentPrompt(prompt, ids=ids) for prompt, ids in encoded]


async def observe(config: MeasureServerConfig, prompts: Sequence[SentPrompt], kept: Kept | None = None) -> Observed:
    """Ask the servers all prompts in each setting, block by block, by turns; a failing server ends the run.

    `kept` holds finished blocks, by default in the output directory. Raise InputError if a server does not answer at
    the start, or refuses, or the earlier run had other settings.
    """
    async with AsyncExitStack() as stack:
        doors: dict[Role, MeasuredServer] = {}
        servers: list[tuple[Role, str | None, str | None]] = [
            ("server", config.server, config.server_key_env),
            ("baseline_server", config.baseline_server, config.baseline_server_key_env),
        ]
        for role, url, key in servers:
            if url is not None:
                client = await stack.enter_async_context(Client(url, role, key))
                doors[role] = await MeasuredServer.opened(client, config)
        for question in prompts:
            for door in doors.values():
                door.check(question)
        observed = Observed(config, prompts, doors)
        kept = kept or Kept(config.output, _manifest(observed))
        for setting in config.settings:
            try:
                observed.blocks[setting] = await _setting(setting, observed, kept)
            except ServerFailure as error:
                observed.failure, observed.failed = error, setting
                break
    return observed


async def _setting(setting: Setting, observed: Observed, kept: Kept) -> dict[Role, list[ServerTurn]]:
    config, doors, (temperature, concurrency) = observed.config, observed.servers, setting
    # Each turn has at least as many prompts as requests at once, if there are enough.
    count = len(observed.prompts)
    indices = np.array_split(np.arange(count), max(1, min(BLOCKS, count // concurrency)))
    done: dict[Role, list[ServerTurn]] = {role: [] for role in doors}
    warm = False
    for i in track(range(len(indices)), f"T={temperature:g}, {concurrency} at once", "blocks"):
        key = "server", temperature, concurrency, i
        before = kept.kept(dict[Role, ServerTurn], *key)
        if before is None or not _is_of(before, doors, indices[i]):
            if not warm and config.warm_up:  # the first requests compile, and fill caches
                last = {i: observed.prompts[-1 - i % count] for i in range(config.warm_up)}
                for door in doors.values():
                    await records_of(door, last, *setting)
            warm = True
            prompts = {int(index): observed.prompts[index] for index in indices[i]}
            blocks: dict[Role, ServerTurn] = {}
            # The order alternates, so that a machine that slows down slows both servers alike.
            for role in list(doors)[:: 1 if i % 2 == 0 else -1]:
                blocks[role] = await _block(doors[role], prompts, setting)
            kept.keep(*key, value={role: blocks[role].to_dict() for role in doors})
        else:
            blocks, observed.resumed = before, True
        for role, block in blocks.items():
            done[role].append(block)
    return done


def _is_of(blocks: Mapping[Role, ServerTurn], roles: Collection[Role], indices: np.ndarray) -> bool:
    return blocks.keys() == set(roles) and all(
        [record.prompt for record in block.records] == indices.tolist() for block in blocks.values()
    )


async def _block(door: MeasuredServer, prompts: Mapping[int, SentPrompt], setting: Setting) -> ServerTurn:
    before = await _settled(door)
    records, seconds = await records_of(door, prompts, *setting)
    after = await _settled(door)
    return ServerTurn(records, seconds, *_counted(before, after, door), bool(before.requests or after.requests))


def _counted(before: ServerMetrics, after: ServerMetrics, door: MeasuredServer) -> tuple[ServerCounts, int | None]:
    """Return counters and written tokens between two readings."""
    counters, generated = after.counters - before.counters, None
    if before.generated_tokens is not None and after.generated_tokens is not None:
        generated = after.generated_tokens - before.generated_tokens
    lower = counters.num_drafts, counters.num_accepted_tokens, *counters.num_accepted_tokens_per_pos
    if min(*lower, generated or 0) < 0:
        raise ServerFailure(
            f"{door.client.name}: expected counters that grow at {door.client.url}/metrics, found lower ones; was it "
            "started anew?"
        )
    return door.client.counted("/metrics", counters), generated


async def _settled(door: MeasuredServer) -> ServerMetrics:
    """Return a server's metrics once two readings agree and nothing is running: servers count after they answer.

    After a few seconds the last reading counts as it is, because others may use the server.
    """
    reading = await door.metrics()
    for _ in range(ceil(READ_FOR / READ_AGAIN)):
        await asyncio.sleep(READ_AGAIN)
        again = await door.metrics()
        if again == reading and not again.requests:
            break
        reading = again
    if door.before is not None:
        _counted(door.before, reading, door)
    door.before = reading
    return reading


def _manifest(observed: Observed) -> dict[str, Any]:
    config, server = observed.config, observed.servers["server"]
    settings = {name: value for name, value in asdict(config).items() if name not in (*FREE_TO_CHANGE, *UNNAMED)}
    sent = [
        (question.prompt, question.ids or question.fields.get("prompt") or question.fields)
        for question in observed.prompts
    ]
    return {
        "schema": SCHEMA,
        "settings": settings | {"baseline": "baseline_server" in observed.servers},
        "target": {"path": config.server, "model": server.model} | asdict(server.engine),
        "prompts": identified_prompts(config.prompts, sent),
        "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
    }
