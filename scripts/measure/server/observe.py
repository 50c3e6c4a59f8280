"""A run of `measure --server`: servers answer blocks of prompts in turns; their counters are read around each."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from draftsmith.decode.measurement.server_counts import Counted, ServerCounts
from draftsmith.decode.progress import each
from draftsmith.decode.validation import Amount, Count
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.load import AskedServer, LoadPrompt, RequestRecord, ask_all
from draftsmith.scripts.measure.unfinished import DIRECTORY, SCHEMA, Kept, identified_prompts
from draftsmith.scripts.serving.client import Client
from draftsmith.scripts.serving.counters import ServerMetrics
from draftsmith.scripts.serving.sglang import Engine
from draftsmith.train.checkpoint import left_out, load_generation_config
from draftsmith.train.data.prompts import Prompt, encode_prompt, read_prompts
from draftsmith.train.data.samples import mixed_seed
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import remove
from draftsmith.train.models import load_config, load_tokenizer
from draftsmith.train.provenance import git_sha

Role = Literal["server", "baseline_server"]
Setting = tuple[float, int]
"""Temperature and concurrency."""
BLOCKS, BLOCKS_WITH_RATE = 10, 2
"""Turns of a setting: enough for an interval over them, and with a rate few, for each begins with an idle server."""
READ_AGAIN, READ_FOR = 0.1, 5.0
"""Seconds between two readings of counters that must agree, and how long that is waited for."""
FREE_TO_CHANGE = (
    *("output", "expect", "expect_verifier", "min_speedup", "min_alpha", "confidence"),
    *("drafter", "draft_length", "timeout", "gate_temperature", "gate_batch_size"),
)
UNNAMED = ("server", "baseline_server", "server_key_env", "baseline_server_key_env", "prompts", "target")
"""Settings that say where something lies: what lies there is compared."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerTurn:
    """One turn of one server: some prompts, with no other request of ours under way before and after."""

    records: list[RequestRecord]
    seconds: Annotated[Amount, Field(gt=0)]
    counters: Counted
    """Counted by its `/metrics` meanwhile, other clients' requests included."""
    generated_tokens: Count | None
    verify_calls: Count | None
    mean_acceptance_length: Amount | None
    """SGLang's, as its `/metrics` say; the last is a gauge."""
    busy: bool
    """Whether others' requests were under way when it began or ended."""

    def to_dict(self) -> dict[str, Any]:
        """Return the block as plain JSON types."""
        records = [record.to_dict() for record in self.records]
        return asdict(self) | {"records": records, "counters": self.counters.to_dict()}


@dataclass
class Observed:
    """The answers and counts of one run."""

    config: MeasureServerConfig
    prompts: Sequence[LoadPrompt]
    engines: dict[Role, Engine]
    models: dict[Role, str]
    urls: dict[Role, str]
    lengths: dict[Role, int | None]
    """Tokens that a text may have there, its prompt included; None where the server does not say."""
    blocks: dict[Setting, dict[Role, list[ServerTurn]]] = field(default_factory=dict)
    """Of the settings that are finished: each server's turns, block i of one beside block i of the other."""
    resumed: bool = False
    """Whether some blocks are of an earlier run."""
    failure: ServerFailure | None = None
    """The failure that ended the run."""
    failed: Setting | None = None

    def records(self, setting: Setting, role: Role) -> list[RequestRecord]:
        """Return the requests of a setting to one server, all repeats."""
        return [record for block in self.blocks[setting][role] for record in block.records]


def read_asked(config: MeasureServerConfig) -> list[LoadPrompt]:
    """Read the prompts, and bring them into the form in which they are sent.

    Raises:
        InputError: prompts or a tokenizer that cannot be read; a prompt that has no tokens.
    """
    prompts = read_prompts(config.prompts, limit=config.limit)
    if config.target is None:
        return [_as_it_is(prompt, config) for prompt in prompts]
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
    left_out(load_generation_config(config.target, target_config, field="target"), config.target)
    size = target_config.get_text_config().vocab_size
    asked = []
    for prompt in prompts:
        ids = encode_prompt(
            prompt,
            tokenizer,
            vocab_size=size,
            max_tokens=config.max_prompt_tokens,
            system_prompt=config.system_prompt,
            variables=config.chat_template_kwargs,
        )
        asked.append(LoadPrompt(prompt, ids=ids))
    return asked


def _as_it_is(prompt: Prompt, config: MeasureServerConfig) -> LoadPrompt:
    """Return a prompt that the server encodes."""
    request = prompt.request(config.system_prompt, config.chat_template_kwargs)
    return LoadPrompt(prompt, text=prompt.text, chat=None if prompt.messages is None else request)


async def observe(config: MeasureServerConfig, prompts: Sequence[LoadPrompt], kept: Kept | None = None) -> Observed:
    """Ask the servers all prompts in each setting, block by block, the two by turns.

    A server that fails ends it: what is finished is returned, with the failure.

    Args:
        config: what is to be done.
        prompts: what is sent.
        kept: blocks that an earlier run has finished are there, and so go those of this one; None begins such files in
            the config's output directory.

    Raises:
        InputError: a server that does not answer at the start, or refuses; other settings than those of the earlier
            run.
    """
    async with AsyncExitStack() as stack:
        doors: dict[Role, AskedServer] = {}
        given: list[tuple[Role, str | None, str | None]] = [
            ("server", config.server, config.server_key_env),
            ("baseline_server", config.baseline_server, config.baseline_server_key_env),
        ]
        for role, url, key in given:
            if url is not None:
                client = await stack.enter_async_context(Client(url, role, key, config.timeout))
                doors[role] = await AskedServer.opened(client, config)
        for asked in prompts:
            for door in doors.values():
                door.check(asked)
        observed = Observed(
            config,
            prompts,
            {role: door.engine for role, door in doors.items()},
            {role: door.model for role, door in doors.items()},
            {role: door.client.url for role, door in doors.items()},
            {role: door.length for role, door in doors.items()},
        )
        kept = kept or Kept(config.output, _manifest(observed))
        for setting in config.settings:
            try:
                observed.blocks[setting] = await _setting(setting, doors, observed, kept)
            except ServerFailure as error:
                observed.failure, observed.failed = error, setting
                break
    return observed


def forget(config: MeasureServerConfig) -> None:
    """Remove what a run has kept."""
    remove(Path(config.output) / DIRECTORY)


async def _setting(
    setting: Setting, doors: Mapping[Role, AskedServer], observed: Observed, kept: Kept
) -> dict[Role, list[ServerTurn]]:
    """Return the blocks of one setting, in order, all repeats."""
    config, (temperature, concurrency) = observed.config, setting
    places = np.array_split(np.arange(len(observed.prompts)), _blocks(config, len(observed.prompts), concurrency))
    done: dict[Role, list[ServerTurn]] = {role: [] for role in doors}
    warm = False
    turns = [(repeat, i) for repeat in range(config.repeats) for i in range(len(places))]
    title = f"T={temperature:g}, {concurrency} at once"
    for repeat, i in each(turns, title, "blocks"):
        key = "server", temperature, concurrency, repeat, i
        before = kept.kept(dict[Role, ServerTurn], *key)
        if before is None or not _is_of(before, doors, places[i]):
            if not warm:
                for door in doors.values():
                    await _warm_up(door, observed.prompts, setting)
                warm = True
            prompts = {int(place): observed.prompts[place] for place in places[i]}
            blocks: dict[Role, ServerTurn] = {}
            # Each is first in every other turn, so that a machine that slows down slows both alike.
            for role in list(doors)[:: 1 if i % 2 == 0 else -1]:
                blocks[role] = await _block(doors[role], prompts, setting, repeat, i)
            kept.keep(*key, value={role: blocks[role].to_dict() for role in doors})
        else:
            blocks, observed.resumed = before, True
        for role, block in blocks.items():
            done[role].append(block)
    return done


def _is_of(blocks: Mapping[Role, ServerTurn], roles: Collection[Role], places: np.ndarray) -> bool:
    """Say whether kept blocks are of these servers and prompts."""
    return blocks.keys() == set(roles) and all(
        [record.prompt for record in block.records] == places.tolist() for block in blocks.values()
    )


def _blocks(config: MeasureServerConfig, prompts: int, concurrency: int) -> int:
    """Return the number of turns; each has at least as many prompts as go at once, if there are enough."""
    most = BLOCKS if config.rate is None else BLOCKS_WITH_RATE
    return max(1, min(most, prompts // concurrency))


async def _warm_up(door: AskedServer, prompts: Sequence[LoadPrompt], setting: Setting) -> None:
    """Send requests that are not measured: the first ones compile, and fill what a server keeps."""
    count = door.config.warm_up
    if count:
        last = [prompts[-1 - i % len(prompts)] for i in range(count)]
        await ask_all(door, dict(enumerate(last)), *setting)


async def _block(
    door: AskedServer, prompts: Mapping[int, LoadPrompt], setting: Setting, repeat: int, i: int
) -> ServerTurn:
    config, arrivals = door.config, None
    if config.rate is not None:  # the same for both servers
        gaps = np.random.default_rng(mixed_seed(config.seed, "arrivals", repeat, i))
        arrivals = gaps.exponential(1 / config.rate, len(prompts)).cumsum().tolist()
    before = await _settled(door)
    records, seconds = await ask_all(door, prompts, *setting, arrivals, repeat)
    after = await _settled(door)
    busy = bool(before.requests or after.requests)
    return ServerTurn(records, seconds, *_counted(before, after, door), after.mean_acceptance_length, busy)


def _counted(
    before: ServerMetrics, after: ServerMetrics, door: AskedServer
) -> tuple[ServerCounts, int | None, int | None]:
    """Return counters, written tokens and verified steps between two readings.

    Raises:
        ServerFailure: something was counted down.
    """
    counters = after.counters - before.counters
    generated = _between(before.generated_tokens, after.generated_tokens)
    calls = _between(before.verify_calls, after.verify_calls)
    lower = counters.num_drafts, counters.num_accepted_tokens, *counters.num_accepted_tokens_per_pos
    if min(*lower, generated or 0, calls or 0) < 0:
        raise ServerFailure(
            f"{door.client.name}: expected counters that grow at {door.client.url}/metrics, found lower ones; was it "
            "started anew?"
        )
    return door.client.counted("/metrics", counters), generated, calls


def _between(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


async def _settled(door: AskedServer) -> ServerMetrics:
    """Return a server's metrics once two readings agree and nothing is under way: it counts after it has answered.

    After a few seconds they are taken as they are, for others may use the server.

    Raises:
        ServerFailure: something was counted down since they were read before.
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
    """Say what determines every figure of a run, as far as it can be seen from outside."""
    config = observed.config
    settings = {name: value for name, value in asdict(config).items() if name not in (*FREE_TO_CHANGE, *UNNAMED)}
    sent = [(asked.prompt, asked.ids or asked.text or asked.chat) for asked in observed.prompts]
    return {
        "schema": SCHEMA,
        "settings": settings | {"baseline": "baseline_server" in observed.engines},
        "target": {"path": config.server, "model": observed.models["server"]} | asdict(observed.engines["server"]),
        "prompts": identified_prompts(config.prompts, sent),
        "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
    }
