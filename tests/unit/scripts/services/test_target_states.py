"""States of a served target over HTTP: each file is sent once and removed, whatever the client does."""

import asyncio
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from draftsmith.scripts.services.target_states import NAME as NAMES
from draftsmith.scripts.services.target_states import ORPHANED, StatesConnector, StatesMiddleware
from draftsmith.train.files import identity

NAME = "cmpl-1-0-abcdef01.safetensors"
CONTENT = os.urandom(5 << 20)  # two pieces


def application(folder: Path | None, model: str = "own/model", keys: list[str] | None = None) -> Starlette:
    """Return a server that stands in for vLLM, with the parts of its state that the middleware reads."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[8, 2, 5]))
    served = SimpleNamespace(
        model=model,
        revision=None,
        dtype=torch.bfloat16,
        quantization="fp8",
        max_model_len=512,
        get_total_num_hidden_layers=lambda: 8,
        get_hidden_size=lambda: 64,
    )
    app = Starlette(routes=[Route("/v1/models", lambda request: PlainTextResponse("vLLM's"))])
    app.add_middleware(StatesMiddleware)
    app.state.args = SimpleNamespace(api_key=keys)
    app.state.vllm_config = SimpleNamespace(
        model_config=served,
        speculative_config=SimpleNamespace(method="extract_hidden_states", draft_model_config=draft),
        kv_transfer_config=folder and SimpleNamespace(get_from_extra_config=lambda name, default: folder),
    )
    return app


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return TestClient(application(tmp_path))


def write(folder: Path, name: str = NAME, age: float = 0, lock_age: float | None = None) -> Path:
    """Write a file of states as the connector does; ages are in seconds."""
    for file, old in ((folder / name, age), (folder / f"{name}.lock", age if lock_age is None else lock_age)):
        file.write_bytes(CONTENT if file.suffix == ".safetensors" else b"")
        os.utime(file, (time.time() - old,) * 2)
    return folder / name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_requests_have_files_of_their_own_in_the_folder(tmp_path):
    connector = StatesConnector()
    connector._storage_path = str(tmp_path)
    ids = ["x" * 300, "0_" + "x" * 300, "1_" + "x" * 300, "../a", ".._a", "\ud800", "/etc/passwd"]
    files = {Path(connector._file(request)) for request in ids}
    assert len(files) == len(ids) and all(file.parent == tmp_path and NAMES.fullmatch(file.name) for file in files)


def test_the_target_is_described(client, tmp_path, pair_dirs):
    assert client.get("/draftsmith/target").json() == {
        "model": "own/model",
        "revision": None,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "layer_ids": [2, 5, 8],  # vLLM stacks them in this order, whatever was asked for
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "max_model_len": 512,
        "files": None,
        "commit": None,  # it is not in the cache of the hub
        "vllm": "",
    }
    directory = pair_dirs[0]
    found = TestClient(application(tmp_path, str(directory))).get("/draftsmith/target").json()
    assert found["files"] == identity(str(directory)) and found["commit"] is None and found["files"]


def test_a_hubs_model_served_offline_has_its_commit(tmp_path):
    place = tmp_path / "models--own--model" / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    found = TestClient(application(tmp_path, str(place))).get("/draftsmith/target").json()
    assert found["commit"] == "0123abcd" and list(found["files"]) == ["config.json"]


def test_a_server_without_extraction_has_no_layers(tmp_path):
    app = application(None)
    app.state.vllm_config.speculative_config = None
    client = TestClient(app)
    assert client.get("/draftsmith/target").json()["layer_ids"] == []
    assert client.get(f"/draftsmith/states/{NAME}").status_code == 404


def test_states_are_sent_once_and_removed(client, tmp_path):
    write(tmp_path)
    answer = client.get(f"/draftsmith/states/{NAME}")
    assert answer.content == CONTENT and int(answer.headers["content-length"]) == len(CONTENT)
    assert names(tmp_path) == []
    assert client.get(f"/draftsmith/states/{NAME}").status_code == 404


def ask(app: Starlette, receive, send):
    """Call a server as HTTP servers do."""
    scope = {"type": "http", "method": "GET", "path": f"/draftsmith/states/{NAME}", "headers": [], "app": app}
    return app(scope | {"query_string": b"", "asgi": {"spec_version": "2.3"}}, receive, send)


def test_states_are_waited_for_until_they_are_written(tmp_path):
    held = os.open(tmp_path / f"{NAME}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    sent = []

    async def send(message):
        sent.append(message)

    async def run():
        task = asyncio.create_task(ask(application(tmp_path), asyncio.Event().wait, send))
        await asyncio.sleep(0.05)
        assert not sent and not task.done()
        (tmp_path / NAME).write_bytes(CONTENT)
        os.close(held)
        await task

    asyncio.run(run())
    assert b"".join(message.get("body", b"") for message in sent) == CONTENT and names(tmp_path) == []


@pytest.mark.parametrize("leaves", ["before", "within", "broken"])
def test_states_are_removed_when_the_client_leaves(tmp_path, leaves):
    write(tmp_path)

    async def receive():
        await asyncio.sleep(0 if leaves == "before" else 0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        if leaves == "broken":
            raise OSError("broken pipe")
        await asyncio.Event().wait()  # nobody reads

    with suppress(OSError):
        asyncio.run(ask(application(tmp_path), receive, send))
    assert names(tmp_path) == []


def test_states_that_could_not_be_written_are_named(client, tmp_path):
    write(tmp_path).unlink()
    answer = client.get(f"/draftsmith/states/{NAME}")
    assert answer.status_code == 500 and "could not be written" in answer.json()["error"]["message"]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        "%2e%2e/secret.safetensors",
        "..%2fsecret.safetensors",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "below/secret.safetensors",
        "%00.safetensors",
        "unlocked.safetensors",
        "link.safetensors",
        "other.bin",
        "other.safetensors.lock",
        "",
    ],
)
def test_other_files_are_neither_sent_nor_removed(tmp_path, path):
    folder = tmp_path / "states"
    (folder / "below").mkdir(parents=True)
    for place, name in ((tmp_path, "secret.safetensors"), (folder / "below", "secret.safetensors")):
        write(place, name)
    for name in ("other.bin", "link.safetensors"):
        write(folder, name)
    (folder / "unlocked.safetensors").write_bytes(CONTENT)
    (folder / "link.safetensors").unlink()
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    before = names(tmp_path), names(folder), names(folder / "below")
    assert TestClient(application(folder)).get(f"/draftsmith/states/{path}").status_code == 404
    assert before == (names(tmp_path), names(folder), names(folder / "below"))


def test_keys_are_those_of_the_server(tmp_path, monkeypatch):
    write(tmp_path)
    path, right = f"/draftsmith/states/{NAME}", {"Authorization": "Bearer two"}
    guarded = TestClient(application(tmp_path, keys=["one", "two"]))
    for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic two"}, {"Authorization": "Bearer"}):
        assert guarded.get(path, headers=headers).status_code == 401
        assert guarded.get("/draftsmith/target", headers=headers).status_code == 401
    assert guarded.get("/draftsmith/target", headers=right).status_code == 200
    assert guarded.get(path, headers=right).content == CONTENT
    monkeypatch.setenv("VLLM_API_KEY", "two")
    guarded = TestClient(application(tmp_path))
    assert guarded.get("/draftsmith/target").status_code == 401
    assert guarded.get("/draftsmith/target", headers=right).status_code == 200


def test_what_nobody_asked_for_is_removed_when_a_run_begins(client, tmp_path):
    old = ORPHANED + 1
    write(tmp_path, "old.safetensors", old)
    write(tmp_path, "lock.safetensors", old).unlink()
    half = write(tmp_path, "half.safetensors", old)
    half.with_suffix(".safetensors.partial").mkdir()
    half.rename(tmp_path / "half.safetensors.partial" / ".tmpA1b2C3")
    kept = [write(tmp_path, name, age, old).name for name, age in (("late.safetensors", 0), ("read.safetensors", old))]
    (tmp_path / "mine.safetensors").write_bytes(b"")
    os.utime(tmp_path / "mine.safetensors", (0, 0))
    with (tmp_path / "read.safetensors.lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert client.get("/draftsmith/target").status_code == 200
    assert names(tmp_path) == sorted([*kept, *(f"{name}.lock" for name in kept), "mine.safetensors"])


def test_states_may_be_taken_while_a_server_looks_for_old_ones(client, tmp_path, monkeypatch):
    write(tmp_path, "taken.safetensors")
    write(tmp_path, "old.safetensors", ORPHANED + 1)
    stat = Path.stat

    def taken(self, **others):
        if self.name.startswith("taken"):
            for path in tmp_path.glob("taken*"):
                path.unlink()
        return stat(self, **others)

    monkeypatch.setattr(Path, "stat", taken)
    assert client.get("/draftsmith/target").status_code == 200
    assert names(tmp_path) == []


def test_other_requests_are_the_servers(client):
    assert client.get("/v1/models").text == "vLLM's"
    assert client.get("/draftsmith/other").status_code == 404
    assert client.post(f"/draftsmith/states/{NAME}").status_code == 404
