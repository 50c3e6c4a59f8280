"""What answers OpenAI's API: it reads requests, has a server chosen, and passes the answer back."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from draftsmith.scripts.coordinate.asked import Asked, Keywords, Refused, read_request
from draftsmith.scripts.coordinate.config import CoordinatorConfig
from draftsmith.scripts.coordinate.relay import Kept, Outcome, Relay
from draftsmith.scripts.coordinate.request_log import assembled
from draftsmith.scripts.coordinate.routing import Facts, Lease, Refusal
from draftsmith.scripts.serving.client import Client
from draftsmith.train.endpoint.server import api_key

WORD = 2.0
"""Seconds between two words of a holder of leases, where nothing ends in between."""

Entry = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Of the log: request, answer, what else is known."""


class Reporter:
    """Tells the dispatcher what has ended: in the background, in order, and again until it has been heard.

    Not in the requests' own tasks: Serve cancels what a request has begun when its client leaves, and a load that is
    never taken back would stay.

    Args:
        heard: is told holder, outcomes and leases that are held.
    """

    def __init__(self, heard: Callable[[str, list[Outcome], list[Lease]], Awaitable[None]]):
        self.holder, self.held = uuid4().hex, dict[str, Lease]()
        self._heard, self._outcomes, self._news = heard, list[Outcome](), asyncio.Event()
        self._telling = asyncio.create_task(self._tell_on())

    def ended(self, outcome: Outcome) -> None:
        """Note what became of a request."""
        self.held.pop(outcome.lease.id, None)
        self._outcomes.append(outcome)
        self._news.set()

    async def _tell_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(WORD):
                    await self._news.wait()
            except TimeoutError:
                if not self.held:
                    continue
            self._news.clear()
            outcomes = self._outcomes[:]
            try:
                await self._heard(self.holder, outcomes, list(self.held.values()))
            except Exception:  # the dispatcher starts anew: it is told again
                self._news.set()
                await asyncio.sleep(0.2)
            else:
                del self._outcomes[: len(outcomes)]


class Ingress:
    """Answers requests.

    Args:
        config: pairs, limits, the key.
        choose: has a server chosen for facts, a holder and servers that have failed.
        heard: see `Reporter`.
        write: writes an entry of the log; None where there is none.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        choose: Callable[[Facts, str, list[str]], Awaitable[Lease | Refusal]],
        heard: Callable[[str, list[Outcome], list[Lease]], Awaitable[None]],
        write: Callable[[Entry], Awaitable[None]] | None,
    ):
        self.config, self._choose, self._write = config, choose, write
        self.reporter, self.keywords = Reporter(heard), Keywords(config.rules)
        self.key = api_key(config.key_env, "key_env")
        self.clients = {
            url: Client(url, f"pairs.{pair.name}", pair.key_env, config.timeout)
            for pair in config.pairs
            for url in pair.endpoints
        }
        self.server_models = {pair.name: pair.server_model for pair in config.pairs}
        self._writing: set[asyncio.Task[None]] = set()

    async def acquire(self, facts: Facts, tried: list[str]) -> Lease | Refusal:
        """Have a server chosen; what is chosen is held from now on."""
        chosen = await self._choose(facts, self.reporter.holder, tried)
        if isinstance(chosen, Lease):
            self.reporter.held[chosen.id] = chosen
        return chosen

    def ended(self, outcome: Outcome) -> None:
        """Take a lease back."""
        self.reporter.ended(outcome)

    async def complete(self, request: Request, path: str) -> Response:
        """Answer a request for a completion."""
        self.require_key(request.headers)
        content = await read_body(request, self.config.max_body_bytes, self.config.timeout)
        asked = read_request(path, content, request.headers, self.keywords)
        # Ids cannot be redacted, nor learned from without the tokenizer that made them.
        logged = None if self._write is None or not _is_text(asked) else self._logged(asked)
        return Relay(asked, self, self.clients, self.server_models, logged)

    def models(self) -> dict[str, Any]:
        """Return the list of models, in OpenAI's shape."""
        entries = [{"id": name, "object": "model", "owned_by": "draftsmith"} for name in self.config.models]
        return {"object": "list", "data": entries}

    def require_key(self, headers: Mapping[str, str]) -> None:
        """Require the key of a client, where one is asked for.

        Raises:
            Refused: it is another, or none.
        """
        if self.key is not None:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                raise Refused(401, "authorization: expected the API key, found another or none", "authentication_error")

    def _logged(self, asked: Asked) -> Callable[[Kept], Awaitable[None]]:
        """Return what writes a request and its answer once that has gone out."""
        begun = datetime.now(UTC).isoformat(timespec="milliseconds")

        async def logged(kept: Kept) -> None:
            # In a task of its own, which the client's leaving does not cancel; waited for, so that a server that is
            # stopped writes it before it ends.
            writing = asyncio.create_task(self._log(asked, kept, begun))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
            await asyncio.shield(writing)

        return logged

    async def _log(self, asked: Asked, kept: Kept, begun: str) -> None:
        if kept.status != 200 or self._write is None:
            return
        answer = await asyncio.to_thread(assembled, bytes(kept.content), asked.streams)
        if answer is not None:
            about: dict[str, Any] = {"id": uuid4().hex, "time": begun, "path": asked.path, "pair": kept.pair}
            about |= {"category": asked.facts.category} if asked.facts.category is not None else {}
            about |= {"seconds": round(kept.seconds, 6), "first_byte_seconds": round(kept.first_byte or 0.0, 6)}
            await self._write((dict(asked.body), answer, about))


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return a request's body.

    Raises:
        Refused: it is larger than that, or does not come whole or in time.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                content += part
                if len(content) > most:
                    raise Refused(413, f"body: expected at most {most} bytes, found more")
    except TimeoutError:
        raise Refused(408, f"body: expected all of it within {seconds:g} s, found less") from None
    except ClientDisconnect:
        raise Refused(400, "body: expected all of it, found a closed connection") from None
    return bytes(content)


def refused_response(refused: Refused) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(refused.body(), refused.status)


def _is_text(asked: Asked) -> bool:
    return isinstance(asked.body.get("messages", asked.body.get("prompt")), list if "messages" in asked.body else str)
