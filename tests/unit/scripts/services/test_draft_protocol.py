"""Services over HTTP: the server, the protocol of drafts, and texts of rows."""

import asyncio
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from draftsmith.scripts.services import draft_protocol as protocol
from draftsmith.scripts.services.draft_protocol import (
    VERSION,
    DraftAnswer,
    DraftRequest,
    DraftRow,
    ProtocolError,
    Service,
    decode,
    encode,
)
from draftsmith.scripts.services.http_server import BodyError, read_body
from draftsmith.scripts.services.remote_draft import KnownTexts

REQUEST = DraftRequest(VERSION, "c0ffee", [DraftRow(7, 120, [11, 12], 4), DraftRow(8, 0, [1], 0)], [3])
SERVICE = Service(VERSION, "tiny", 4096, 512, 64, 8)


def said(**changes) -> bytes:
    return json.dumps(json.loads(encode(REQUEST)) | changes).encode()


def row(**changes) -> dict:
    return {"id": 1, "start": 2, "tokens": [3], "want": 4} | changes


def answer(drafts: object) -> bytes:
    return json.dumps({"version": VERSION, "drafts": drafts}).encode()


def test_what_is_said_is_read():
    for message in (REQUEST, SERVICE):
        assert decode(type(message), encode(message)) == message
    drafts = [[5, 6], None]
    assert protocol.decode_drafts(encode(DraftAnswer(VERSION, drafts)), REQUEST.rows) == drafts


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", ""),
        (b"[" * 100_000, ""),
        (b'{"a":' + b"9" * 5000 + b"}", ""),
        (b"\xff\xfe\x00", ""),
        (b" " * (protocol.MOST_BYTES + 1), ""),
        (said(version=1), "version"),
        (said(more=1), "more"),
        (said(client=""), "client"),
        (said(client="a" * 65), "client"),
        (said(rows=[1]), "rows.0"),
        (said(rows=[row(id=-1)]), "rows.0.id"),
        (said(rows=[row(start=1 << 31)]), "rows.0.start"),
        (said(rows=[row(tokens=[-1])]), "rows.0.tokens"),
        (said(rows=[row(tokens=[True])]), "rows.0.tokens"),
        (said(rows=[row(start=0, tokens=[])]), "rows.0: .*at least one token"),
        (said(rows=[row(want=-1)]), "rows.0.want"),
        (said(rows=[row(), row()]), ".*each id once"),
        (said(rows=[row(tokens=[1] * (protocol.MOST_TOKENS + 1))]), ".*at most"),
    ],
)
def test_other_requests_are_refused_in_a_line(body, field):
    with pytest.raises(ProtocolError, match=rf"^DraftRequest[.:] ?{field}") as refusal:
        decode(DraftRequest, body)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize("drafts", [[[1]], [[1], None, None], [[1, 2, 3, 4, 5], None], [[1], [1]], [["a"], None], "no"])
def test_answers_that_do_not_fit_are_refused(drafts):
    with pytest.raises(ProtocolError, match="drafts"):
        protocol.decode_drafts(answer(drafts), REQUEST.rows)


HEAVY = {"torch", "numpy", "transformers", "httpx2", "draftsmith.decode", "draftsmith.train"}


def test_inside_the_engine_nothing_heavy_is_imported():
    code = "import sys, draftsmith.scripts.services.remote_draft as r; print(r.RemoteDraft.__name__, *sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown[0] == "RemoteDraft" and not HEAVY & set(shown)


def test_a_body_that_is_too_large_is_refused():
    class Sent:
        async def stream(self):
            for part in (b"abc", b"def"):
                yield part

    with pytest.raises(BodyError, match="body: expected at most 5 bytes, found more"):
        asyncio.run(read_body(Sent(), 5))
    assert asyncio.run(read_body(Sent(), 6)) == b"abcdef"


def rows(*texts: list[int]) -> list[tuple[int, np.ndarray]]:
    return [(row, np.array(text, dtype=np.int32)) for row, text in enumerate(texts)]


def ids(found) -> list[int]:
    return [text.id for text in found]


def test_an_ended_row_s_place_is_another_text():
    texts = KnownTexts(8)
    a, b = ids(texts.find(rows([1, 2, 3], [4, 5])))
    again = ids(texts.find(rows([1, 2, 4], [4, 5, 6])))
    assert again[0] not in (a, b) and again[1] == b
    assert ids(texts.find([(5, np.array([1, 2, 3, 7]))])) == [a]  # a conversation goes on with its next turn


def test_equal_texts_are_two():
    texts = KnownTexts(8)
    found = ids(texts.find(rows([1, 2], [1, 2])))
    assert len(set(found)) == 2 and set(ids(texts.find(rows([1, 2, 3], [1, 2, 3])))) == set(found)


def test_the_longest_beginning_is_taken():
    texts = KnownTexts(8)
    _, longer = ids(texts.find(rows([1], [1, 2, 3])))
    assert ids(texts.find([(7, np.array([1, 2, 3, 4]))])) == [longer]


def test_only_so_many_are_remembered_but_all_of_the_batch():
    texts = KnownTexts(2)
    first = ids(texts.find(rows([1], [2], [3])))
    assert texts.ended() == []
    second = ids(texts.find(rows([4])))
    assert texts.ended() == first[:2] and texts.ended() == []
    assert ids(texts.find(rows([3, 1], [4, 1]))) == [first[2], *second]


def test_random_batches():
    """Texts whose tokens all differ, in rows that are shuffled each round: always the text that it is."""
    rng = random.Random(0)
    texts, running, of, fresh = KnownTexts(4), {}, {}, iter(range(10**6))
    for _ in range(200):
        for key in [key for key in running if rng.random() < 0.1]:
            del running[key]
        while len(running) < 6 and (not running or rng.random() < 0.5):
            running[next(fresh)] = [next(fresh) for _ in range(rng.randint(1, 5))]
        order = rng.sample(sorted(running), len(running))
        for key in order:
            running[key] += [next(fresh) for _ in range(rng.randint(1, 4))]
        for key, found in zip(order, texts.find(rows(*[running[key] for key in order])), strict=True):
            assert of.setdefault(key, found.id) == found.id
        texts.ended()
    assert len(set(of.values())) == len(of)


def test_what_is_told_is_a_copy():
    texts, tokens = KnownTexts(8), np.array([1, 2, 0, 0])
    (text,) = texts.find([(0, tokens[:2])])
    tokens[:2] = 9  # the engine's batch is written in place
    assert texts.find([(0, np.array([1, 2, 3]))]) == [text]
