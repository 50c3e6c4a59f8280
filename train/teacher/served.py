"""A target on running vLLM servers: its hidden states, and whether it is the target that a run was told of.

vLLM extracts the states (`extract_hidden_states`), and `scripts/services/target_states.py` gives them to clients. The
numbers of layers are vLLM's: state i is that after i layers, before any norm, so that the last norm is applied here.

Shape suffixes: T tokens, n layers, H hidden, V vocabulary.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import load
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import Count, ServerMessage
from draftsmith.train.checkpoint import is_finite
from draftsmith.train.data.first_look import print_once
from draftsmith.train.endpoint.client import TEXT, Client
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.models import DTYPES
from draftsmith.train.options import checked_url
from draftsmith.train.teacher.feature_shards import STATES, Layout, States

"""The environment variable of the servers' API key, which they read, too."""
TARGET, STATES_OF = "/draftsmith/target", "/draftsmith/states/"
REQUESTS, TOKENS = 64, 2**16
"""The most requests to a server at once, and their most tokens: what a server keeps in its folder of states."""
AHEAD = 2**30
"""The most bytes of states, for each server, that are asked for before those of earlier texts are written."""
RESTART = 5.0
"""The seconds that a server takes at least to start: one that has answered within them has not been started again."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0
"""Seconds after which a server that failed is asked again; doubled with each failure."""
POLL = 0.01
"""The seconds between two looks for a server with room."""
HEADER = 2**20
"""The most bytes of a safetensors header."""


class ServedModel(ServerMessage):
    """A server's description of its target. `layer_ids` are those of the states that it gives."""

    model: str
    revision: str | None = None
    dtype: str
    quantization: str | None = None
    layer_ids: Annotated[list[Count], Field(min_length=1)]
    num_hidden_layers: Count
    hidden_size: Count
    max_model_len: Count
    files: dict[str, Any] | None = None
    commit: str | None = None
    vllm: str = ""

    @property
    def feature_dtype(self) -> str:
        """The dtype that keeps these states without loss, of those that shards may have."""
        return "bfloat16" if self.dtype == "bfloat16" else "float32"


class Transfer(ServerMessage):
    """The place of a request's states, a file of the server's machine."""

    hidden_states_path: Annotated[str, Field(pattern=r"^([^\x00]*/)?[A-Za-z0-9_.-]+\.safetensors$")]


class Logprob(ServerMessage):
    """The log probability of a token."""

    logprob: float


class ScoredPrompt(ServerMessage):
    """The log probabilities of a prompt's tokens, None for the first."""

    prompt_logprobs: list[dict[str, Logprob] | None] | None = None


class StatesAnswer(ServerMessage):
    """vLLM's answer to a request for states."""

    choices: Annotated[list[ScoredPrompt], Field(min_length=1)]
    kv_transfer_params: Transfer | None = None


@dataclass
class Server:
    """One server, and what is under way with it. After a failure, at `failed`, it is not asked until `resting`.

    `name` is that of its model there, and `answered` the time of its last answer.
    """

    client: Client
    name: str = ""
    requests: int = 0
    tokens: int = 0
    resting: float = 0.0
    failures: int = 0
    failed: float = 0.0
    answered: float = float("-inf")

    def has_room(self, tokens: int) -> bool:
        """Return whether a text of this many tokens may be asked for now."""
        return not self.requests or (self.requests < REQUESTS and self.tokens + tokens <= TOKENS)


@dataclass
class ServedTarget:
    """A target on servers that all serve the same one.

    Args:
        norm: the target's last norm, on the CPU, in the dtype that the states come in; None if it has none.
        deadline: the seconds without an answer from any server after which the run ends.
        served: what the servers must say of their target when they are asked for states. If None, they are asked what
            it is now, and all must answer.
    """

    urls: Sequence[str]
    norm: nn.Module | None = None
    timeout: float = 600.0
    deadline: float = 1800.0
    served: ServedModel | None = None
    _parent: int = field(default_factory=lambda: os.getppid() if get_worker_info() else 0)
    """The process that loads with this one; 0 if this one loads for itself."""
    _error: InputError | None = None
    _answered: float = 0.0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _servers: list[Server] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __enter__(self) -> "ServedTarget":
        """Start the thread of the requests, and ask the servers what they serve, unless that is known."""
        threading.Thread(target=self._run, name="teacher", daemon=True).start()
        try:
            self._wait(self._open())
            self.served = self.served or self._wait(self._ask_all())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what is under way, and close the connections."""
        self._wait(self._cancel())
        self._wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _cancel(self) -> None:
        self._error = self._error or InputError("teacher: expected states, found that the run ends")
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        for url in self.urls:
            client = Client(url, "teacher", self.timeout)
            self._servers.append(Server(await self._stack.enter_async_context(client)))

    async def _ask_all(self) -> ServedModel:
        """Return what all servers serve; `max_model_len` is their least."""
        try:
            found = await asyncio.gather(*(self._what(server.client) for server in self._servers))
            for server in self._servers:
                server.name, server.answered = await server.client.model(), time.monotonic()
        except (ServerFailure, InputError) as error:
            raise InputError(f"{error}; docs/teachers.md says how to start it") from error
        for url, other in zip(self.urls, found, strict=True):
            _require_same(found[0], other, self.urls[0], url)
        return found[0].model_copy(update={"max_model_len": min(each.max_model_len for each in found)})

    async def _what(self, client: Client) -> ServedModel:
        return await client.fetch(ServedModel, TARGET, what="what it serves")

    def states(self, layout: Layout, texts: Iterable[list[int]]) -> States:
        """Yield the `STATES` of texts in order, as `live_states` does: the number of a text, and its states.

        Texts are asked for `AHEAD` of those that are read, and the servers' limits divide them over time.
        """
        if not any(server.requests for server in self._servers):
            self._answered = time.monotonic()
        waiting, ahead, most = deque[tuple[int, Any]](), 0, AHEAD * len(self.urls) // layout.position_bytes
        upcoming, number = iter(texts), 0
        ids = next(upcoming, None)
        try:
            while waiting or ids is not None:
                while ids is not None and (not waiting or ahead + len(ids) <= most):
                    row = asyncio.run_coroutine_threadsafe(self._row(layout, ids), self._loop)
                    waiting.append((len(ids), row))
                    ahead, ids = ahead + len(ids), next(upcoming, None)
                size, row = waiting.popleft()
                yield [number], [row.result()]
                ahead, number = ahead - size, number + 1
        finally:
            for _, row in waiting:
                row.cancel()

    def ask(self, texts: Sequence[list[int]], url: str) -> list[tuple[Tensor, Tensor]]:
        """Return texts' states, (T, n, H), and log probabilities, (T − 1,), from one server, asked at once."""
        (server,) = (server for server, own in zip(self._servers, self.urls, strict=True) if own == url)

        async def all_of() -> list[tuple[Tensor, Tensor]]:
            return await asyncio.gather(*(self._ask(server, ids, scored=True) for ids in texts))

        try:
            return self._wait(all_of())  # type: ignore[no-any-return]
        except ServerFailure as error:
            raise InputError(str(error)) from error

    async def _row(self, layout: Layout, ids: list[int]) -> dict[str, Tensor]:
        """Return the states of a text; an error that no other server would mend ends the other requests, too."""
        if len(ids) < 2:
            return {name: torch.empty(0, width, dtype=layout.dtype) for name, width in layout.widths.items()}
        try:
            return await self._row_of_any(layout, ids)
        except InputError as error:
            self._error = self._error or error
            raise

    async def _row_of_any(self, layout: Layout, ids: list[int]) -> dict[str, Tensor]:
        """Return the states of a text from any server; one that fails rests, and its work goes to others."""
        failure = ""
        while True:
            try:
                server = await self._enter(len(ids))
            except ServerFailure as error:
                raise InputError(f"{error}{failure}; run the same command again") from error
            entered = time.monotonic()
            try:
                if server.failures or entered - server.answered > RESTART:
                    await self._require_known(server)
                states, _ = await self._ask(server, ids[:-1])
                if server.failed > entered:
                    await self._require_known(server)
                if server.failures and entered > server.failed:
                    print_once(f"teacher: {server.client.url} answers again")
                server.failures, self._answered = 0, time.monotonic()
                server.answered = self._answered
            except ServerFailure as error:
                if not error.temporary:
                    raise InputError(str(error)) from error
                failure = f": {error}"
                if not server.failures and entered >= server.failed:
                    print_once(f"{error}; it is asked again until it answers")
                server.failures += entered >= server.failed  # requests that fail together count once
                server.failed = time.monotonic()
                server.resting = server.failed + min(FIRST_WAIT * 2 ** (server.failures - 1), LONGEST_WAIT)
                continue
            finally:
                self._leave(server, len(ids))
            return await asyncio.to_thread(self._columns, layout, states)

    async def _require_known(self, server: Server) -> None:
        """Require that a server that may have been started again has the same target; its name may be another."""
        assert self.served is not None
        _require_same(self.served, await self._what(server.client), self.urls[0], server.client.url)
        server.name, server.answered = await server.client.model(), time.monotonic()

    async def _enter(self, tokens: int) -> Server:
        """Wait for the server with the least work under way; ServerFailure if none has answered for too long."""
        async with self._turn:  # one text at a time looks for a server: the others keep their order
            while True:
                if self._error is not None:
                    raise self._error
                if self._parent and os.getppid() != self._parent:
                    raise ServerFailure("teacher: expected the process that trains, found that it was killed")
                now = time.monotonic()
                free = [server for server in self._servers if server.has_room(tokens) and server.resting <= now]
                if now - self._answered > self.deadline and all(server.failures for server in free):
                    break
                if free:
                    # Least work in tokens. A server that fails fast has none, and rests for that reason.
                    server = min(free, key=lambda server: server.tokens)
                    # After a failure one request at a time finds out whether the server is back.
                    server.resting = now + LONGEST_WAIT if server.failures else 0.0
                    server.requests, server.tokens = server.requests + 1, server.tokens + tokens
                    return server
                await asyncio.sleep(POLL)
        raise ServerFailure(f"teacher: expected an answer of any server within {self.deadline:.0f} s, found none")

    def _leave(self, server: Server, tokens: int) -> None:
        server.requests, server.tokens = server.requests - 1, server.tokens - tokens
        if not server.failures:
            server.resting = 0.0

    async def _ask(self, server: Server, ids: list[int], scored: bool = False) -> tuple[Tensor, Tensor]:
        """Return a text's states, checked, and its log probabilities, empty unless `scored`."""
        served, client = self.served, server.client
        assert served is not None
        body: dict[str, Any] = {"model": server.name, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body |= {"prompt_logprobs": 0} if scored else {}
        answer = await client.fetch(StatesAnswer, TEXT, body, "states")
        if answer.kv_transfer_params is None:
            # A server that ends answers so, too, for the requests that it aborts.
            what = "an answer with kv_transfer_params (is it started with --kv-transfer-config?)"
            raise client.failure(what, client.url, "none")
        name = answer.kv_transfer_params.hidden_states_path.rpartition("/")[2]
        content = await self._sent(client, name, len(ids))
        states = await asyncio.to_thread(checked_states, content, ids, served, client.url)
        scores = (
            []
            if not scored
            else [
                position.get(str(token)) if position else None
                for token, position in zip(ids, answer.choices[0].prompt_logprobs or (), strict=False)
            ][1:]
        )
        return states, torch.tensor([float("nan") if score is None else score.logprob for score in scores])

    async def _sent(self, client: Client, name: str, tokens: int) -> bytes:
        """Return a file of states over HTTP; the server removes it."""
        served = self.served
        assert served is not None
        position = len(served.layer_ids) * served.hidden_size * DTYPES[served.dtype].itemsize + 8
        parts, room = list[bytes](), tokens * position + HEADER
        async with client.accepted(f"{STATES_OF}{name}", what="states") as response:
            async for part in response.aiter_raw(2**20):
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise client.failure(f"states of {tokens} tokens", client.url, "more", temporary=False)
        return b"".join(parts)

    @torch.inference_mode()
    def _columns(self, layout: Layout, states_TnH: Tensor) -> dict[str, Tensor]:
        """Return the `STATES` of a text: the features of the layout's layers, and what the head reads."""
        assert self.served is not None
        places = [self.served.layer_ids.index(layer) for layer in layout.layer_ids]
        last_TH = states_TnH[:, -1]
        hidden_TH = last_TH if self.norm is None else self.norm(last_TH)
        columns = {"hidden": hidden_TH, "features": states_TnH[:, places].flatten(1)}
        return {name: columns[name].to(layout.dtype).contiguous() for name in STATES if name in layout.widths}


def checked_states(content: bytes, ids: Sequence[int], served: ServedModel, url: str) -> Tensor:
    """Return the states in a file, (T, n, H), which must be finite, whole and those of the tokens `ids`.

    Raise InputError, naming the server, for states that are wrong, and ServerFailure for a file that breaks off.
    """
    expected = f"teacher: expected states of the {len(ids)} tokens that were sent to {url}"
    try:
        tensors = load(content)
        states, tokens = tensors["hidden_states"], tensors["token_ids"]
    except Exception as error:  # safetensors' own class, KeyError, or torch's
        raise ServerFailure(f"{expected}, found a broken file: {type(error).__name__} {error}") from error
    if tokens.tolist() != list(ids):
        raise InputError(f"{expected}, found those of {len(tokens)} other tokens")
    shape = (len(ids), len(served.layer_ids), served.hidden_size)
    if tuple(states.shape) != shape or states.dtype != DTYPES[served.dtype]:
        dtype = str(states.dtype).removeprefix("torch.")
        raise InputError(f"{expected}, {shape} in {served.dtype}, found {tuple(states.shape)} in {dtype}")
    if not is_finite(states):
        raise InputError(f"{expected}, all finite, found NaN or infinity; try another --dtype of the server")
    return states


def _require_same(one: ServedModel, other: ServedModel, url: str, other_url: str) -> None:
    """Require that two servers serve the same target in the same way."""
    for name in type(one).model_fields:
        a, b = getattr(one, name), getattr(other, name)
        if a != b and name not in ("model", "max_model_len"):  # a folder may have another path on another machine
            a, b = (f"{value}" if name != "files" else "others" for value in (a, b))
            raise InputError(
                f"teacher: expected one target on all servers, found {name} {a} at {url}, {b} at {other_url}"
            )


def urls_of(teacher: Sequence[str]) -> list[str]:
    """Return the URLs in `vllm:URL[,URL…]`, each once; raise InputError for another form."""
    urls = list[str]()
    for value in teacher:
        kind, _, rest = value.partition(":")
        if kind != "vllm" or not rest:
            raise InputError(f"teacher: expected vllm:URL, or several URLs divided by commas, found {value!r}")
        urls += [checked_url(url.strip(), "teacher") for url in rest.split(",")]
    for number, url in enumerate(urls):
        if url in urls[:number]:
            raise InputError(f"teacher: expected each server once, found {url} again")
    return urls
