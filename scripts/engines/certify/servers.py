"""The requests to the servers under comparison, and their texts, which are stored until a certificate is written."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import LEAST_TOKENS
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import phase
from draftsmith.decode.validation import Amount, Count, TokenId, file_bytes, parse, require_tokens
from draftsmith.scripts.engines.certify.config import CertifyConfig
from draftsmith.scripts.engines.client import metrics_of
from draftsmith.train.data.shards import settle_manifest
from draftsmith.train.endpoint.client import Client, SentPrompt, ServedCompletion, completion_request
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.endpoint.retries import Window, ask_all
from draftsmith.train.files import identity, remove
from draftsmith.train.provenance import git_sha

SCHEMA = "draftsmith.certify/1"
SERVERS = ("server", "plain_server")
ELSEWHERE = ("output", "target", "drafter", "prompts", "threads", "trust_remote_code", "false_alarm")
"""Settings that do not shape the texts, or that name a file or server whose content is compared."""
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


def extra_requests(
    config: CertifyConfig, prompts: int, temperature: float, texts: Sequence[tuple[list[int], str]]
) -> list[TextRequest]:
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


LINE: Any = tuple[Amount, Count, list[TokenId], Literal["stop", "length"]]
"""A text's temperature and index, its tokens, and why it ended."""


class TextStore:
    """The texts that a server has written, a line each in a file: token ids, and why each ended."""

    def __init__(self, path: Path, most: int, vocab_size: int | None):
        """Read an earlier run's texts; lines that a kill cut off or that are malformed are requested again.

        `most` is the tokens of a text; ids must be below `vocab_size`, if it is known here.
        """
        self._path = path
        self.texts: dict[tuple[float, int], tuple[list[int], str]] = {}
        for line in file_bytes(path).split(b"\n") if path.exists() else []:
            try:
                temperature, index, tokens, reason = parse(LINE, line, str(path))
            except InputError:
                continue
            if len(tokens) <= most and (vocab_size is None or max(tokens, default=0) < vocab_size):
                self.texts[temperature, index] = tokens, reason

    def add(self, request: TextRequest, tokens: list[int], reason: str) -> None:
        """Store one text."""
        self.texts[request.temperature, request.index] = tokens, reason
        with self._path.open("a", encoding="utf-8") as file:
            # A newline first ends a line that a kill cut off.
            file.write("\n" + json.dumps([request.temperature, request.index, tokens, reason]))

    def of(self, temperature: float) -> list[tuple[list[int], str]]:
        """Return the texts of a temperature, in the order of their indices."""
        return [self.texts[key] for key in sorted(key for key in self.texts if key[0] == temperature)]


@dataclass
class Servers:
    """The server under test and maybe a plain one, by the names of their fields."""

    config: CertifyConfig
    questions: Sequence[SentPrompt]
    ends: Sequence[int]
    """Ids that end a text; empty if not known here."""
    vocab_size: int | None
    """Upper limit of ids; None without the target."""
    directory: Path
    models: dict[str, str] = field(default_factory=dict)
    counters: dict[str, ServerCounts] = field(default_factory=dict)
    """Counts of this run's texts, of servers that were asked and show counters."""

    def begin(self) -> None:
        """Ask each server for its model, and continue from the texts of an earlier run with the same settings."""
        self.models = asyncio.run(self._models())
        if not any(path.stat().st_size for path in self.directory.glob("*.jsonl")):
            remove(self.directory)  # a run that failed at once has no texts, and its settings may change
        settle_manifest(self.directory, self._manifest())

    def texts(self, name: str, requests: Sequence[TextRequest]) -> TextStore:
        """Request all missing texts of a server, and more if texts end early."""
        kept = self._request(name, requests)
        for temperature in sorted({request.temperature for request in requests}):
            while more := extra_requests(self.config, len(self.questions), temperature, kept.of(temperature)):
                kept = self._request(name, more)
        return kept

    def _request(self, name: str, requests: Sequence[TextRequest]) -> TextStore:
        kept = self._store(name)
        missing = [request for request in requests if (request.temperature, request.index) not in kept.texts]

        async def work() -> None:
            async with self._client(name) as client:
                before = await _counters(client)
                most = self.config.max_new_tokens * len(requests)
                num_tokens = sum(len(tokens) for tokens, _ in kept.texts.values())
                with phase(f"{name} writes", most, "tokens", num_tokens) as bar:
                    await self.ask(client, missing, kept, bar.advance)
                after = await _counters(client)
                if before is not None and after is not None:
                    self.counters[name] = after - before + self.counters.get(name, ServerCounts())

        if missing:
            asyncio.run(work())
        return kept

    async def ask(
        self, client: Client, requests: Sequence[TextRequest], kept: TextStore, finished: Callable[[int], None]
    ) -> None:
        """Request texts in order, `concurrency` at once, and store each as it comes.

        `finished` receives each text's number of tokens. An InputError (a refused request, an answer without ids) or a
        ServerFailure cancels all other requests.
        """
        config = self.config
        options: dict[str, Any] = {"stop_token_ids": list(self.ends)} if self.ends else {}

        async def answer_to(request: TextRequest) -> None:
            question, most = self.questions[request.prompt], config.max_new_tokens
            sent = question, self.models[client.name], config, request.temperature, most, None
            body, path = completion_request(*sent, skip_special_tokens=False, **options)
            answer = await client.complete(body, path)
            tokens = self._tokens(client, question, answer)
            if self.vocab_size is not None:
                require_tokens(tokens, self.vocab_size, f"{client.name}: {client.url}")
            kept.add(request, tokens, answer.finish_reason or "")
            finished(len(tokens))

        await ask_all(requests, answer_to, Window(config.concurrency))

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

    def kept(self) -> str | None:
        """Return what an interrupted run has kept, in words."""
        num_texts = {name: len(self._store(name).texts) for name in SERVERS}
        texts = " and ".join(f"{count} texts of {name}" for name, count in num_texts.items() if count)
        return f"{texts} are kept in {self.directory}" if texts else None

    def _store(self, name: str) -> TextStore:
        return TextStore(self.directory / f"{name}.jsonl", self.config.max_new_tokens, self.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the servers' URLs, models and counters, as plain JSON types."""
        return {
            name: {
                "url": getattr(self.config, name),
                "model": model,
                "counters": None if (counters := self.counters.get(name)) is None else counters.to_dict(),
            }
            for name, model in self.models.items()
        }

    async def _models(self) -> dict[str, str]:
        models = {}
        for name in SERVERS:
            if getattr(self.config, name) is not None:
                async with self._client(name) as client:
                    models[name] = await client.model(self.config.model)
        return models

    def _client(self, name: str) -> Client:
        config = self.config
        return Client(getattr(config, name), name, getattr(config, f"{name}_key_env"))

    def _manifest(self) -> dict[str, Any]:
        config = self.config
        settings = {name: value for name, value in asdict(config).items() if name not in ELSEWHERE}
        sent = [[question.ids, question.prompt.record()] for question in self.questions]
        return {
            "schema": SCHEMA,
            "settings": settings | {f"{name}_model": model for name, model in self.models.items()},
            "target": target_identity(config) or {},
            "prompts": {"path": config.prompts, "sha256": hashlib.sha256(json.dumps(sent).encode()).hexdigest()},
            "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
        }


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
