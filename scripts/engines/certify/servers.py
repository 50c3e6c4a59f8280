"""The requests to the servers under comparison, and their texts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import require_tokens
from draftsmith.scripts.engines.certify.config import CertifyConfig, Texts
from draftsmith.scripts.engines.client import identify_engine, metrics_of
from draftsmith.train.endpoint.client import Client, SentPrompt, ServedCompletion, completion_request
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.endpoint.retries import Window, ask_all
from draftsmith.train.files import identity

SERVERS = ("server", "plain_server")
FURTHER = 16
"""The most requested texts, as a multiple of the number that would do if none ended early."""


@dataclass(frozen=True)
class TextRequest:
    """One text to request: `index` is its own among its temperature's texts, `prompt` that of its prompt."""

    temperature: float
    index: int
    prompt: int


def requests_of(config: CertifyConfig, prompts: int) -> list[TextRequest]:
    """Return the requests in order: at T=0 each prompt once, under sampling round and round."""
    return [
        TextRequest(temperature, i, i % prompts)
        for temperature in config.temperature
        for i in range(config.texts if temperature > 0 else prompts)
    ]


def extra_requests(config: CertifyConfig, prompts: int, temperature: float, texts: Texts) -> list[TextRequest]:
    """Return extra requests, if the sampled texts ended before the test has enough tokens.

    `texts` are those received. No requests if they suffice, or are so short that more would not help.
    """
    received = sum(len(tokens) for tokens, _ in texts)
    most = FURTHER * config.texts
    missing = LEAST_TOKENS - received
    if temperature == 0 or missing <= 0 or len(texts) >= most:
        return []
    needed = len(texts) + -(-missing * len(texts) // max(received, len(texts)))
    return [TextRequest(temperature, i, i % prompts) for i in range(len(texts), min(needed, most))]


@dataclass
class Servers:
    """The server under test and maybe a plain one, by the names of their fields."""

    config: CertifyConfig
    questions: Sequence[SentPrompt]
    ends: Sequence[int]
    """Ids that end a text; empty if not known here."""
    vocab_size: int | None
    """Upper limit of ids; None without the target."""
    models: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """`llama.cpp` for a server that gives ids on its own path alone; empty for others."""
    counters: dict[str, ServerCounts] = field(default_factory=dict)
    """Counts of this run's texts, of servers that were asked and show counters."""

    def begin(self) -> None:
        """Ask each server which model it has, and whether it is llama.cpp's."""
        asyncio.run(self._look())

    def texts(self, name: str, requests: Sequence[TextRequest], concurrency: int | None = None) -> dict[float, Texts]:
        """Return a server's texts by temperature, more than were requested if they end early."""
        return asyncio.run(self._texts(name, requests, concurrency or self.config.concurrency))

    async def _texts(self, name: str, requests: Sequence[TextRequest], concurrency: int) -> dict[float, Texts]:
        texts: dict[float, Texts] = {}
        async with self._client(name) as client:
            before = await _counters(client)
            for temperature in sorted({request.temperature for request in requests}):
                more = [request for request in requests if request.temperature == temperature]
                received = dict[int, tuple[list[int], str]]()
                while more:
                    with phase(f"{name} writes", self.config.max_new_tokens * len(more), "tokens") as bar:
                        received |= await self.ask(client, more, concurrency, bar.advance)
                    texts[temperature] = [received[index] for index in sorted(received)]
                    more = extra_requests(self.config, len(self.questions), temperature, texts[temperature])
            after = await _counters(client)
            if before is not None and after is not None:
                self.counters[name] = after - before + self.counters.get(name, ServerCounts())
        return texts

    async def ask(
        self, client: Client, requests: Sequence[TextRequest], concurrency: int, finished: Callable[[int], None]
    ) -> dict[int, tuple[list[int], str]]:
        """Request texts in order, `concurrency` at once; return them by index.

        `finished` receives each text's number of tokens. An InputError (a refused request, an answer without ids) or a
        ServerFailure cancels all other requests.
        """
        config = self.config
        texts = dict[int, tuple[list[int], str]]()
        options: dict[str, Any] = {"stop_token_ids": list(self.ends)} if self.ends else {}

        async def answer_to(request: TextRequest) -> None:
            question, most = self.questions[request.prompt], config.max_new_tokens
            sent = question, self.models[client.name], config, request.temperature, most, None
            body, path = completion_request(
                *sent, self.kinds.get(client.name, ""), skip_special_tokens=False, **options
            )
            answer = await client.complete(body, path)
            tokens = self._tokens(client, question, answer)
            if self.vocab_size is not None:
                require_tokens(tokens, self.vocab_size, f"{client.name}: {client.url}")
            texts[request.index] = tokens, answer.finish_reason or ""
            finished(len(tokens))

        await ask_all(requests, answer_to, Window(concurrency))
        return texts

    def _tokens(self, client: Client, question: SentPrompt, answer: ServedCompletion) -> list[int]:
        """Return a text's tokens, if the answer can be judged."""
        where = f"{client.name}: expected"
        if answer.token_ids is None:
            raise InputError(
                f"{where} token ids (return_token_ids, as vLLM and SGLang have it) from {client.url}, as many as its "
                "usage counts, found none or fewer"
            )
        if question.ids is not None and answer.prompt_ids not in (None, question.ids):
            raise InputError(
                f"{where} a text after the prompt's {len(question.ids)} tokens as sent, found that the server changed "
                "them"
            )
        if answer.finish_reason not in ("stop", "length"):
            raise ServerFailure(f"{where} a text that ends with stop or length, found {answer.finish_reason!r}")
        if answer.finish_reason == "length" and len(answer.token_ids) < self.config.max_new_tokens:
            raise InputError(
                f"{where} room for {self.config.max_new_tokens} tokens after each prompt, found that prompt "
                f"{question.prompt.id!r} ends after {len(answer.token_ids)}"
            )
        return answer.token_ids

    def to_dict(self) -> dict[str, Any]:
        """Return the servers' URLs, models and counters, as plain JSON types."""
        return {
            name: {
                "url": getattr(self.config, name),
                "model": model,
                "counters": None if (counters := self.counters.get(name)) is None else asdict(counters),
            }
            for name, model in self.models.items()
        }

    async def _look(self) -> None:
        for name in SERVERS:
            if getattr(self.config, name) is not None:
                async with self._client(name) as client:
                    self.models[name] = await client.model(self.config.model)
                    if (await identify_engine(client)).kind == "llama.cpp":
                        self.kinds[name] = "llama.cpp"

    def _client(self, name: str) -> Client:
        return Client(getattr(self.config, name), name)


def target_identity(config: CertifyConfig) -> dict[str, Any] | None:
    """Return the target's path and what tells it from another; None without a target."""
    if config.target is None:
        return None
    return {"path": config.target} | identity(config.target)


async def _counters(client: Client) -> ServerCounts | None:
    """Return vLLM's counters; None if the server shows none."""
    try:
        return (await metrics_of(client)).counters
    except InputError:
        return None
