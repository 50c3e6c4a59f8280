"""A tiny target, a server for it, and the settings that ask this server."""

import asyncio
import json
import shutil
import threading
import time

import pytest
import torch
from fake_server import COUNT, Served
from local_server import LocalHandler, LocalServer
from prepare_inputs import save_target, write_prompts
from transformers import GenerationConfig

from draftsmith.train.data import generate as completions
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare
from draftsmith.train.endpoint import retries


@pytest.fixture(scope="module")
def remote_target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), ends=1.3, padding=0)


@pytest.fixture(scope="module")
def described(remote_target, tmp_path_factory):
    """The target without its weights: all that a client of a server needs."""
    path = tmp_path_factory.mktemp("described") / "target"
    shutil.copytree(remote_target, path, ignore=shutil.ignore_patterns("*.safetensors"))
    return path


@pytest.fixture(scope="module")
def remote_prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", COUNT)


@pytest.fixture(scope="module")
def in_process(remote_target, remote_prompts, tmp_path_factory):
    output = tmp_path_factory.mktemp("in_process")
    prepare(
        PrepareConfig(
            str(remote_target), str(remote_prompts), str(output), max_new_tokens=12, shard_size=2, temperature=0.0
        )
    )
    return load_completions(str(output)).to_list()


@pytest.fixture(scope="module")
def greedy(remote_target):
    """The server's own target: ids in, ids and the reason that they ended out."""
    model = completions.load_model(remote_target)
    generation = GenerationConfig(
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        do_sample=False,
    )
    model.generation_config = generation
    lock = threading.Lock()

    def generate(ids: list[int], max_new_tokens: int) -> tuple[list[int], str]:
        with lock:
            row = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens)[0, len(ids) :].tolist()
        return row, "stop" if row[-1] in generation.eos_token_id else "length"

    return generate


@pytest.fixture(scope="module")
def remote_tokenizer(remote_target):
    return completions.load_tokenizer(remote_target)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Served()

    class Handler(LocalHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, headers, data = served.respond(self.path, dict(self.headers), body)
            try:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                pieces = [data] if served.drips is None else [data[i : i + 1] for i in range(len(data))]
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(served.drips or 0)
            except OSError:  # the client gave up waiting
                self.close_connection = True
            if "Connection" in headers:
                self.close_connection = True

        do_POST = do_GET

    http = LocalServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    served.root = f"http://127.0.0.1:{http.server_port}"
    yield served
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def remote(described, remote_prompts, server, tmp_path, monkeypatch):
    """The settings of a run that asks for one completion at a time, so that the server's answers are in order."""
    monkeypatch.setattr(retries, "FIRST_REQUESTS", 1)
    monkeypatch.setattr(retries, "MOST_REQUESTS", 1)

    def make(output: str = "out", **settings) -> PrepareConfig:
        given = {"max_new_tokens": 12, "shard_size": 2, "endpoint": f"{server.root}/v1", "temperature": 0.0}
        given |= {"target": str(described), "prompts": str(remote_prompts)} | settings
        return PrepareConfig(output=str(tmp_path / output), **given)

    return make


@pytest.fixture
def waits(monkeypatch):
    """The waits between tries, which nobody waits for."""
    asked = []
    real = asyncio.sleep

    async def sleep(seconds):
        asked.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked
