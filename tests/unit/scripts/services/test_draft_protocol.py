"""The draft protocol: what is said is read as it was meant, and nothing else is."""

import json
import subprocess
import sys

import pytest

from draftsmith.scripts.services import draft_protocol as protocol
from draftsmith.scripts.services.draft_protocol import ClientReport, DraftRequest, DraftRow, ProtocolError, Service

REQUEST = DraftRequest("c0ffee", [DraftRow(7, 120, [11, 12], 4), DraftRow(8, 0, [1], 0)], [3], ClientReport(2, 5))


def said(**changes) -> bytes:
    return json.dumps(json.loads(protocol.encode_request(REQUEST)) | changes).encode()


def row(**changes) -> dict:
    return {"id": 1, "start": 2, "tokens": [3], "want": 4} | changes


def test_what_is_said_is_read():
    assert protocol.decode_request(protocol.encode_request(REQUEST)) == REQUEST
    drafts = [[5, 6], None]
    assert protocol.decode_drafts(protocol.encode_drafts(drafts), REQUEST.rows) == drafts
    service = Service(protocol.VERSION, "tiny", 4096, 512, 64, 8)
    assert protocol.decode_service(protocol.encode_service(service)) == service


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "request: expected JSON"),
        (b"[" * 100_000, "request: expected JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "request: expected JSON"),
        (b"\xff\xfe\x00", "request: expected JSON"),
        (b"[]", "request: expected an object"),
        (b" " * (protocol.MOST_BYTES + 1), "request: expected at most"),
        (said(version=2), "version: expected 1, found 2"),
        (said(version=True), "version: expected 1, found True"),
        (said(more=1), "request: expected the fields"),
        (said(client=""), "client: expected"),
        (said(client="a" * 65), "client: expected"),
        (said(client="a b"), "client: expected"),
        (said(rows={}), "rows: expected a list"),
        (said(rows=[1]), r"rows\[0\]: expected the fields"),
        (said(rows=[row(id=-1)]), r"rows\[0\].id: expected a whole number from 0 to"),
        (said(rows=[row(id=1.0)]), r"rows\[0\].id"),
        (said(rows=[row(start=1 << 31)]), r"rows\[0\].start"),
        (said(rows=[row(tokens=[-1])]), r"rows\[0\].tokens"),
        (said(rows=[row(tokens=["1"])]), r"rows\[0\].tokens"),
        (said(rows=[row(tokens=[True])]), r"rows\[0\].tokens"),
        (said(rows=[row(tokens=None)]), r"rows\[0\].tokens: expected a list"),
        (said(rows=[row(start=0, tokens=[])]), r"rows\[0\]: expected a text of at least one token"),
        (said(rows=[row(want=-1)]), r"rows\[0\].want"),
        (said(rows=[row(), row()]), "rows: expected each id once"),
        (said(rows=[row(tokens=[1] * (protocol.MOST_TOKENS + 1))]), "rows: expected at most"),
        (said(ended=[None]), "ended: expected"),
        (said(report={}), "report: expected the fields"),
        (said(report={"failures": -1, "plain_rounds": 0}), "report.failures"),
    ],
)
def test_other_requests_are_refused_in_a_line(body, words):
    with pytest.raises(ProtocolError, match=words) as refusal:
        protocol.decode_request(body)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize("drafts", [[[1]], [[1], None, None], [[1, 2, 3, 4, 5], None], [[1], [1]], [["a"], None], "no"])
def test_answers_that_do_not_fit_are_refused(drafts):
    with pytest.raises(ProtocolError, match="drafts"):
        protocol.decode_drafts(protocol.encode_drafts(drafts), REQUEST.rows)


def test_another_version_is_named():
    body = protocol.encode_service(Service(2, "tiny", 4096, 512, 64, 8))
    with pytest.raises(ProtocolError, match="version: expected 1, found 2"):
        protocol.decode_service(body)


HEAVY = {"torch", "numpy", "transformers", "httpx2", "draftsmith.decode", "draftsmith.train"}


def test_inside_the_engine_nothing_heavy_is_imported():
    code = "import sys, draftsmith.scripts.services.remote_draft as r; print(r.RemoteDraft.__name__, *sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown[0] == "RemoteDraft" and not HEAVY & set(shown)
