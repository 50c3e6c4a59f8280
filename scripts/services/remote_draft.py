"""A draft service inside vLLM: the class that its `custom_class` method loads.

    DRAFT_ENDPOINT=http://127.0.0.1:8100 vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "draftsmith.scripts.services.remote_draft.RemoteDraft", "num_speculative_tokens": 4}'

vLLM 0.32 calls `propose` after each step, in the process that runs the target, with the tokens of its batch. No error
leaves `propose`: a step without drafts is plain decoding. draftsmith may be installed here without its dependencies, so
this imports only the standard library, and prometheus_client and pydantic, which vLLM brings.

Environment:
    DRAFT_ENDPOINT: the service's URL.
    MAX_DRAFT_TOKENS: the most drafted tokens a round; default and limit `num_speculative_tokens`.
    DRAFT_TIMEOUT_MS: milliseconds that a round waits for drafts; default 1000.
    DRAFT_API_KEY: the service's key, if it requires one.
"""

import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter

from draftsmith.scripts.services.draft_line import DraftLine, LineDown, ThrottledLog, checked_url
from draftsmith.scripts.services.draft_protocol import (
    MOST_TOKENS,
    VERSION,
    DraftRequest,
    DraftRow,
    ProtocolError,
    decode_drafts,
    encode,
)

LOGGER = logging.getLogger("vllm.draftsmith")  # a child of vLLM's logger, the only one with a handler there
TIMEOUT_MS = 1000
NAME = "draftsmith_remote_draft_{}".format
ROUNDS = Counter(NAME("rounds"), "Rounds that a draft service answered.")
PLAIN_ROUNDS = Counter(NAME("plain_rounds"), "Rounds decoded plainly, because the draft service was away.")
FAILURES = Counter(NAME("failures"), "Calls of a draft service without an answer.")
TOKENS = Counter(NAME("tokens"), "Tokens that a draft service drafted.")
SECONDS = Counter(NAME("seconds"), "Time of the rounds that a draft service answered.")
SENT = Counter(NAME("sent_bytes"), "Bodies of requests that were answered.")
RECEIVED = Counter(NAME("received_bytes"), "Bodies of their answers.")
Tokens = Any  # a numpy array of a row's tokens, (T,); numpy itself is not imported here
# vLLM's /metrics shows the counters only if PROMETHEUS_MULTIPROC_DIR is set, because they count in its worker process.


class KnownText:
    """A text as it was sent to the service."""

    def __init__(self, id_: int):
        self.id = id_
        self.sent = 0  # tokens that the service certainly has
        self._tokens: Tokens = ()

    def __len__(self) -> int:
        return len(self._tokens)

    def begins(self, tokens: Tokens) -> bool:
        """Return whether these tokens begin with this text."""
        length = len(self)
        if not 0 < length <= len(tokens) or self._tokens[-1] != tokens[length - 1]:
            return False
        return bool((self._tokens == tokens[:length]).all())

    def become(self, tokens: Tokens) -> None:
        """Extend the text to these tokens, which begin with it."""
        self._tokens = tokens.copy()


class KnownTexts:
    """Finds the text that each row continues, by its tokens: rows are moved, reused and not named.

    It remembers up to `keep` texts, of present and ended rows. A wrong match costs acceptance, but never changes the
    output.
    """

    def __init__(self, keep: int):
        self._keep, self._next = keep, 0
        self._known: OrderedDict[int, KnownText] = OrderedDict()  # least recently used first
        self._of_row: dict[int, KnownText] = {}

    def find(self, rows: Sequence[tuple[int, Tokens]]) -> list[KnownText]:
        """Return the text of each row, given by number and tokens; a new one if no known text begins it.

        A row keeps its previous text if that still fits. Otherwise it takes the longest fitting text that no row has:
        that of a moved row, or of the previous turn of a conversation.
        """
        text_of: dict[int, KnownText] = {}
        for row, tokens in rows:
            previous = self._of_row.get(row)
            if previous is not None and previous.id in self._known and previous.begins(tokens):
                text_of[row] = previous
        taken = {text.id for text in text_of.values()}
        for row, tokens in rows:
            if row in text_of:
                continue
            text = max(
                (text for text in self._known.values() if text.id not in taken and text.begins(tokens)),
                key=len,
                default=None,
            )
            if text is None:
                text = KnownText(self._next)
                self._next += 1
            text_of[row] = self._known[text.id] = text
            taken.add(text.id)
        for row, tokens in rows:
            text_of[row].become(tokens)
            self._known.move_to_end(text_of[row].id)
        self._of_row = text_of
        return [text_of[row] for row, _ in rows]

    def ended(self) -> list[int]:
        """Return the ids of texts that are no longer remembered, once, and forget them."""
        surplus: list[int] = []
        while len(self._known) > max(self._keep, len(self._of_row)):
            surplus.append(self._known.popitem(last=False)[0])
        return surplus


class RemoteDraft:
    """Drafts of a draft service, for vLLM. With tensor parallelism each rank asks, and vLLM uses one rank's drafts."""

    def __init__(self, vllm_config: Any, environment: Mapping[str, str] | None = None):
        env = os.environ if environment is None else environment
        self._say = ThrottledLog(LOGGER)
        self._draft_length = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._client = uuid.uuid4().hex
        self._texts = KnownTexts(max(64, 2 * int(vllm_config.scheduler_config.max_num_seqs)))
        self._line: DraftLine | None = None
        try:
            self._draft_length = min(self._draft_length, _number(env, "MAX_DRAFT_TOKENS", self._draft_length))
            timeout = _number(env, "DRAFT_TIMEOUT_MS", TIMEOUT_MS) / 1000
            address = checked_url(env.get("DRAFT_ENDPOINT", ""))
            key = env.get("DRAFT_API_KEY", "").strip()
            if not (key.isascii() and key.isprintable()):  # the HTTP library's error would print it
                raise ValueError("DRAFT_API_KEY: expected printable ASCII characters, found others")
        except ValueError as error:  # plain decoding is better than no server
            LOGGER.warning("%s; decoding continues plainly", error)
            return
        self._line = DraftLine(address, timeout, key, LOGGER)
        self._line.start()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the service has the model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None, **others: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Return a draft for each row of the batch, possibly empty.

        `sampled_token_ids` has the tokens that the step emitted for each row, none while a prompt is read in parts.
        `num_tokens_no_spec`, (≥ B,), has each row's length including these, and `token_ids_cpu`, (≥ B, ≥ length), each
        row's tokens. Other arguments, of this vLLM and later ones, are not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        line = self._line
        if line is None:
            return drafts
        try:
            rows = [
                (row, token_ids_cpu[row, : int(num_tokens_no_spec[row])])
                for row, tokens in enumerate(sampled_token_ids)
                if tokens
            ]
            if rows:
                self._propose(line, rows, drafts)
        except Exception as error:  # a bug here must not stop the target
            self._say.warning(f"expected drafts, found {type(error).__name__}: {error}; decoding continues plainly")
            return [[] for _ in sampled_token_ids]
        return drafts

    def _propose(self, line: DraftLine, rows: Sequence[tuple[int, Any]], drafts: list[list[int]]) -> None:
        """Ask for drafts of some rows, given by number and tokens, and write them to `drafts`."""
        service = line.service
        if service is None:
            PLAIN_ROUNDS.inc()
            return
        start = time.perf_counter()
        requested: list[tuple[int, KnownText, DraftRow]] = []
        room = MOST_TOKENS
        for (number, tokens), text in zip(rows, self._texts.find(rows), strict=True):
            length = len(tokens)
            sent = min(text.sent, length - 1)
            want = min(self._draft_length, service.max_draft_length, self._max_length - 1 - length)
            if want > 0 and length < service.max_length and length - sent <= room and len(requested) < service.max_rows:
                room -= length - sent
                requested.append((number, text, DraftRow(text.id, sent, tokens[sent:].tolist(), want)))
        if not requested:
            return
        request_rows = [row for _, _, row in requested]
        body = encode(DraftRequest(VERSION, self._client, request_rows, self._texts.ended()))
        try:
            answer = line.ask(body)
            answers = decode_drafts(answer, request_rows)
        except (LineDown, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                line.refuse(error)
            FAILURES.inc()
            PLAIN_ROUNDS.inc()
            return
        line.accept()
        for (number, text, row), draft in zip(requested, answers, strict=True):
            # Only an answered piece counts as sent; after a null the next round sends the whole text.
            text.sent = 0 if draft is None else row.start + len(row.tokens)
            drafts[number] = self._own(draft or [])
        ROUNDS.inc()
        TOKENS.inc(sum(map(len, drafts)))
        SECONDS.inc(time.perf_counter() - start)
        SENT.inc(len(body))
        RECEIVED.inc(len(answer))

    def _own(self, draft: list[int]) -> list[int]:
        """Return a draft cut at the first token that is outside the target's vocabulary."""
        end = next((index for index, token in enumerate(draft) if token >= self._vocab_size), len(draft))
        return draft[:end]


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "")
    if not value:
        return default
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 31):
        raise ValueError(f"{name}: expected a whole number of at least 1, found {value[:40]!r}")
    return int(value)
