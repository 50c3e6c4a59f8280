"""`draftsmith serve-draft`: load a draft model or a hybrid, listen, and draft until a signal ends it."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache import cached_numbers, check_rollback, positions_of, state_bytes
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.hybrid import HybridProposer
from draftsmith.distill.kind import DraftModel
from draftsmith.scripts.kinds import drafter_specs, kind_named
from draftsmith.scripts.services.draft_protocol import VERSION, DraftRow, Service
from draftsmith.scripts.services.serve_draft.config import ServeDraftConfig
from draftsmith.scripts.services.serve_draft.texts import Copies, DraftTexts
from draftsmith.scripts.services.serve_draft.worker import ServiceMetrics, Worker
from draftsmith.train.cli import parse_config
from draftsmith.train.endpoint.http import api_key
from draftsmith.train.kinds.drafter import DrafterSpec, Loading
from draftsmith.train.kinds.hybrid import Hybrid
from draftsmith.train.kinds.kind import DrafterKind
from draftsmith.train.models import load_draft, load_tokenizer

SECONDS = 2.0  # between two checks of the link


class Follower(threading.Thread):
    """Loads the draft that a link points to, while the old one serves, and gives it to the worker.

    A draft that cannot be loaded, or does not fit what clients were told at the start, is skipped with a log line, and
    the old one stays until the link moves again. `directory` is where `texts` was loaded from, with links resolved.
    `load` returns a drafter without copies; those of `texts` stay. The link is checked every `seconds`.
    """

    def __init__(
        self, link: str, texts: DraftTexts, directory: str, load: Callable[[str], DraftTexts], worker: Worker,
        metrics: ServiceMetrics, seconds: float = SECONDS,
    ):  # fmt: skip
        super().__init__(name="follow", daemon=True)
        self._link, self._directory, self._load, self._worker = link, directory, load, worker
        self._vocab_size, self._max_length, self._copies = texts.vocab_size, texts.max_length, texts.copies
        self._metrics, self._seconds, self._ended = metrics, seconds, threading.Event()

    def stop(self) -> None:
        """Stop to follow, without waiting for a draft that is being loaded."""
        self._ended.set()

    def run(self) -> None:
        """Check the link until stopped."""
        while not self._ended.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Replace the draft if the link has moved since the last check."""
        directory = os.path.realpath(self._link)
        if directory == self._directory or not os.path.isdir(directory):  # the link may be missing for a moment
            return
        self._directory = directory
        try:
            texts = self._load(directory)
            if (texts.vocab_size, texts.max_length) != (self._vocab_size, self._max_length):
                raise InputError(
                    f"expected a vocabulary of {self._vocab_size} and texts of {self._max_length} tokens, which "
                    f"clients were told, found {texts.vocab_size} and {texts.max_length}"
                )
            warm_up(texts)
        except Exception as error:  # after any error the old draft still serves
            logging.getLogger(__name__).error("%s: not served, the draft before stays: %s", directory, error)
            return
        texts.copies = self._copies  # used by the worker's thread only, as before
        self._worker.replace(texts)
        self._metrics.replaced.inc()
        print(f"serving {directory} now", flush=True)


def warm_up(texts: DraftTexts) -> None:
    """Draft once, which allocates memory and shows that the model can draft; no repetition in the text, so no copy."""
    texts.draft(["warm-up"], [DraftRow(0, 0, [0, 1], 2)])
    texts.clear()


KEEP_ALIVE = 120  # seconds that an idle connection stays open: a decoder without requests sends nothing
MAX_DRAFT_LENGTH = 16  # γ; a request for more gets this many
GRACE = 5  # seconds for requests in flight when the service ends


@dataclass(frozen=True)
class _Served:
    """The drafter that `--drafter` names."""

    spec: DrafterSpec
    copies: list[DrafterKind]  # kinds that draft before the draft model
    path: str  # of the draft model

    @property
    def name(self) -> str:
        """The name that clients read."""
        return "+".join([*(kind.name for kind in self.copies), Path(self.path).name])


def _served(config: ServeDraftConfig) -> _Served:
    """Return the drafter to serve; InputError if it needs the target's states or drafts trees."""
    (spec,) = drafter_specs(config.drafter)
    kind = kind_named(spec.kind)
    members = [(kind, spec)]
    if isinstance(kind, Hybrid):
        members = kind.members(spec)
    *first, (last, last_spec) = members
    if last.name != DraftModel.name:
        raise InputError(f"drafter: expected a draft model, which drafts without the target, found {last.title}")
    copies = [member for member, _ in first]
    if other := next((member for member in copies if not member.copies), None):
        raise InputError(f"drafter: expected drafters that copy before the draft model, found {other.title}")
    return _Served(spec, copies, str(last_spec.path))


def _copies_of(served: _Served, config: ServeDraftConfig, model: PreTrainedModel) -> Copies | None:
    """Load the drafters that copy. The draft model takes the target's place: it has the same tokenizer."""
    if not served.copies:
        return None
    code = config.trust_remote_code
    tokenizer = load_tokenizer(served.path, field="drafter", trust_remote_code=code)
    loading = Loading(served.path, tokenizer, code, model=model)
    loading.models[served.path], loading.tokenizers[served.path] = model, tokenizer
    hybrid = kind_named(served.spec.kind).load(served.spec, loading).proposer
    assert isinstance(hybrid, HybridProposer)
    return Copies(hybrid.first, hybrid.switch, hybrid.last_length)


def load_texts(config: ServeDraftConfig, directory: str | None = None, copying: bool = True) -> DraftTexts:
    """Load the draft model, and unless `copying` is false the drafters that copy before it.

    `directory` replaces the draft model's path in the config.

    Raises:
        InputError: a model that cannot draft, lengths that do not fit it, or no store in a suffix drafter's file.
    """
    served = _served(config)
    path = directory or served.path
    code = config.trust_remote_code
    model = load_draft(path, dtype=config.dtype, device=config.device, trust_remote_code=code)
    check_rollback(model, "draft")
    positions = positions_of(model.config)
    longest = config.max_length or positions
    if longest is None:
        raise InputError(f"max_length: expected one for {path}, whose config names no limit, found none")
    if positions is not None and longest > positions:
        raise InputError(f"max_length: expected at most the draft's {positions} positions, found {longest}")
    if config.cache_tokens < longest:
        raise InputError(
            f"cache_tokens: expected room for a text of {longest} tokens, found {config.cache_tokens}; max_length may "
            "be less"
        )
    copies = _copies_of(served, config, model) if copying else None
    return DraftTexts(model, longest, MAX_DRAFT_LENGTH, config.cache_tokens, copies)


def serve(config: ServeDraftConfig) -> int:
    """Load the drafter, listen, and draft until SIGTERM or SIGINT."""
    try:
        from draftsmith.scripts.services.http_server import asgi_server, ended_by_signals, open_socket
        from draftsmith.scripts.services.serve_draft.app import DraftApp
    except ModuleNotFoundError as error:
        raise InputError(f"serve-draft: expected `pip install -e '.[serve]'`, found no {error.name}") from error
    key = api_key(config.key_env, "key_env") or ""
    if config.threads:
        torch.set_num_threads(config.threads)
    listener = open_socket(config.host, config.port)
    served, metrics = _served(config), ServiceMetrics()
    directory = os.path.realpath(served.path) if os.path.isdir(served.path) else None  # None for a hub id
    texts = load_texts(config, directory)
    warm_up(texts)
    worker = Worker(texts, config.max_batch, metrics)
    name, follower = served.name, None
    if directory is not None:
        load = partial(load_texts, config, copying=False)
        follower = Follower(served.path, texts, directory, load, worker, metrics)
    service = Service(VERSION, name, texts.vocab_size, texts.max_length, config.max_batch, texts.max_draft_length)
    app = DraftApp(worker, service, metrics, key).app
    server = asgi_server(app, KEEP_ALIVE, GRACE)

    ended_by_signals(server)
    worker.start()
    if follower is not None:
        follower.start()
    bytes_ = (cached_numbers(texts.model) or 0) * texts.model.dtype.itemsize * config.cache_tokens
    address = "[{}]:{}" if listener.family == socket.AF_INET6 else "{}:{}"
    address = address.format(*listener.getsockname()[:2])
    held = state_bytes(texts.model)
    states = f", and states of {held / 2**20:.1f} MiB after each of a text's last tokens" if held else ""
    print(
        f"serving {name} on http://{address}: texts of up to {texts.max_length} tokens, a cache of "
        f"{config.cache_tokens} tokens ({bytes_ / 2**20:.0f} MiB{states})",
        flush=True,
    )
    del texts  # the worker owns it, and must be able to free it for another
    server.run(sockets=[listener])
    if follower is not None:
        follower.stop()
    worker.stop()
    print("ended", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, and return 0."""
    config = parse_config(ServeDraftConfig, argv, prog="draftsmith serve-draft")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return serve(config)
