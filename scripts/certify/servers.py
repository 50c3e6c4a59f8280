"""The servers under comparison; their texts are stored until a certificate is written."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.progress import phase
from draftsmith.scripts.certify.collect import SentPrompt, TextRequest, TextStore, ask, further
from draftsmith.scripts.certify.config import CertifyConfig
from draftsmith.scripts.serving.client import Client
from draftsmith.train.data.shards import settle_manifest
from draftsmith.train.files import remove
from draftsmith.train.models import identity
from draftsmith.train.provenance import git_sha

SCHEMA = "draftsmith.certify/1"
SERVERS = ("server", "plain_server")
"""Fields that name a server."""
ELSEWHERE = ("output", "target", "drafter", "prompts", "timeout", "threads", "trust_remote_code", "false_alarm")
"""Settings that shape no text, or say where something lies that is compared itself."""


@dataclass
class Servers:
    """The server under test and maybe a plain one, by the names of their fields."""

    config: CertifyConfig
    questions: Sequence[SentPrompt]
    ends: Sequence[int]
    """Ids that end a text; none where they are not known here."""
    vocab_size: int | None
    """Ids must be below it; None without the target."""
    directory: Path
    """Where texts are kept."""
    models: dict[str, str] = field(default_factory=dict)
    """The model's name on each."""
    counters: dict[str, ServerCounts | None] = field(default_factory=dict)
    """Counts of this run's texts; None if the server shows no counters, or was not asked."""

    def begin(self) -> None:
        """Ask each server for its model, and go on with the texts that an earlier run of the same settings left.

        Raises:
            InputError: a server that cannot be asked, or texts of other settings.
            ServerFailure: one that does not answer.
        """
        self.models = asyncio.run(self._models())
        if not any(path.stat().st_size for path in self.directory.glob("*.jsonl")):
            remove(self.directory)  # nothing is kept of a run that failed at once: it may be begun otherwise
        settle_manifest(self.directory, self._manifest())

    def texts(self, name: str, stages: Sequence[Sequence[TextRequest]]) -> TextStore:
        """Ask a server for all texts that it has not written yet, stage after stage; for more where they end early."""
        kept = self._asked(name, stages)
        for temperature in sorted({request.temperature for stage in stages for request in stage}):
            while more := further(self.config, len(self.questions), temperature, kept.of(temperature)):
                before = self.counters[name]
                kept = self._asked(name, [more])
                after = self.counters[name]
                self.counters[name] = None if before is None or after is None else before + after
        return kept

    def _asked(self, name: str, stages: Sequence[Sequence[TextRequest]]) -> TextStore:
        kept = self._store(name)
        if all((request.temperature, request.place) in kept.texts for stage in stages for request in stage):
            self.counters[name] = None
            return kept

        async def work() -> None:
            async with self._client(name) as client:
                before = await _counters(client)
                most = self.config.max_new_tokens * sum(map(len, stages))
                there = sum(len(tokens) for tokens, _ in kept.texts.values())
                with phase(f"{name} writes", most, "tokens", there) as bar:
                    for stage in stages:
                        await ask(
                            self.config,
                            client,
                            self.models[name],
                            self.questions,
                            stage,
                            self.ends,
                            self.vocab_size,
                            kept,
                            bar.advance,
                        )
                after = await _counters(client)
                self.counters[name] = None if before is None or after is None else after - before

        asyncio.run(work())
        return kept

    def kept(self) -> str | None:
        """Say what is kept of a run that is interrupted."""
        there = {name: len(self._store(name).texts) for name in SERVERS}
        texts = " and ".join(f"{count} texts of {name}" for name, count in there.items() if count)
        return f"{texts} are kept in {self.directory}" if texts else None

    def _store(self, name: str) -> TextStore:
        return TextStore(self.directory / f"{name}.jsonl", self.config.max_new_tokens, self.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """Return what is known of them, as plain JSON types."""
        return {
            name: {
                "url": getattr(self.config, name),
                "model": model,
                "counters": None if (counters := self.counters[name]) is None else counters.to_dict(),
            }
            for name, model in self.models.items()
        }

    async def _models(self) -> dict[str, str]:
        models = {}
        for name in SERVERS:
            if getattr(self.config, name) is not None:
                async with self._client(name) as client:
                    models[name] = await client.model(getattr(self.config, f"{name}_model"))
        return models

    def _client(self, name: str) -> Client:
        config = self.config
        return Client(getattr(config, name), name, getattr(config, f"{name}_key_env"), config.timeout)

    def _manifest(self) -> dict[str, Any]:
        """Say what shapes the texts, for a run that goes on."""
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
    """Return where the target lies, and what tells it from another; None without one."""
    if config.target is None:
        return None
    return {"path": config.target} | identity(config.target, trust_remote_code=config.trust_remote_code)


async def _counters(client: Client) -> ServerCounts | None:
    """Return vLLM's counters; None of a server that shows none."""
    try:
        return await client.counters()
    except InputError:
        return None
