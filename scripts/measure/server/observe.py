"""A run of `measure --server`: servers answer blocks of prompts in turns, and counters are read around each."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import track
from draftsmith.scripts.engines.client import ServerMetrics
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.load import MeasuredServer, RequestRecord, records_of
from draftsmith.scripts.report.entries import Role
from draftsmith.scripts.report.types import Setting
from draftsmith.train.checkpoint import load_generation_config, unapplied_settings
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import encode_prompts
from draftsmith.train.endpoint.client import Client, SentPrompt
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.models import load_config, load_tokenizer

BLOCKS = 10
"""Turns of a setting, enough for an interval over them."""
READ_AGAIN, READ_FOR = 0.1, 5.0
"""Seconds between two readings of counters that must agree, and the longest wait for that."""


@dataclass(frozen=True)
class ServerTurn:
    """One turn of one server: some prompts, with no other request of ours before or after.

    Other clients' requests are in its `counters`; `busy` is true if some were running at its begin or end.
    """

    records: list[RequestRecord]
    seconds: float
    counters: ServerCounts
    generated_tokens: int | None
    busy: bool


@dataclass
class Observed:
    """The answers and counts of one run."""

    config: MeasureServerConfig
    prompts: Sequence[SentPrompt]
    servers: Mapping[Role, MeasuredServer]
    blocks: dict[Setting, dict[Role, list[ServerTurn]]] = field(default_factory=dict)
    """The turns of each finished setting: block i of one server is paired with block i of the other."""
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


async def observe(config: MeasureServerConfig, prompts: Sequence[SentPrompt]) -> Observed:
    """Ask the servers all prompts in each setting, block by block, by turns; a failing server ends the run.

    Raise InputError if a server does not answer at the start, or refuses.
    """
    async with AsyncExitStack() as stack:
        doors: dict[Role, MeasuredServer] = {}
        servers: dict[Role, str | None] = {"server": config.server, "baseline_server": config.baseline_server}
        for role, url in servers.items():
            if url is not None:
                client = await stack.enter_async_context(Client(url, role))
                doors[role] = await MeasuredServer.opened(client, config)
        for question in prompts:
            for door in doors.values():
                door.check(question)
        observed = Observed(config, prompts, doors)
        for setting in config.settings:
            try:
                observed.blocks[setting] = await _setting(setting, observed)
            except ServerFailure as error:
                observed.failure, observed.failed = error, setting
                break
    return observed


async def _setting(setting: Setting, observed: Observed) -> dict[Role, list[ServerTurn]]:
    config, doors, (temperature, concurrency) = observed.config, observed.servers, setting
    # Each turn has at least as many prompts as requests at once, if there are enough.
    count = len(observed.prompts)
    indices = np.array_split(np.arange(count), max(1, min(BLOCKS, count // concurrency)))
    done: dict[Role, list[ServerTurn]] = {role: [] for role in doors}
    if config.warm_up:  # the first requests compile, and fill caches
        last = {i: observed.prompts[-1 - i % count] for i in range(config.warm_up)}
        for door in doors.values():
            await records_of(door, last, *setting)
    for i in track(range(len(indices)), f"T={temperature:g}, {concurrency} at once", "blocks"):
        prompts = {int(index): observed.prompts[index] for index in indices[i]}
        # The order alternates, so that a machine that slows down slows both servers alike.
        for role in list(doors)[:: 1 if i % 2 == 0 else -1]:
            done[role].append(await _block(doors[role], prompts, setting))
    return done


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
