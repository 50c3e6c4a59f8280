"""States of a target that vLLM serves: the library's, for texts in any company, and nothing that stays on the disk."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engine import TARGET, extracting, vllm_server
from safetensors.torch import load
from torch import Tensor, nn

from draftsmith.scripts.services.target_states import ORPHANED
from draftsmith.train.files import identity
from draftsmith.train.models import load_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYERS = (0, 2, 6, 12)
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 129, 300, 511)
"""Within a block of 16 tokens, at its end, and beyond it; within a part of 64, at its end, and beyond it."""


class Teacher(NamedTuple):
    """A server, and the folder of its states."""

    url: str
    folder: Path

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as answer:
            return answer.read()

    def complete(self, prompt: list[int], headers: dict[str, str] | None = None, **others: object) -> dict:
        """Return the answer to a text."""
        request = {"model": str(TARGET), "prompt": prompt, "max_tokens": 1, "temperature": 0} | others
        sent = {"Content-Type": "application/json"} | (headers or {})
        called = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(request).encode(), sent)
        with urllib.request.urlopen(called, timeout=60) as answer:
            return json.load(answer)

    def states(self, prompt: list[int], **others: object) -> tuple[dict[str, Tensor], dict]:
        """Return the file of a text's states, and the answer."""
        answer = self.complete(prompt, **others)
        name = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        return load(self.get(f"draftsmith/states/{name}")), answer


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Iterator[Teacher]:
    """The embedded target, in two processes, which reads prompts in parts of 64 tokens and keeps prefixes."""
    folder = tmp_path_factory.mktemp("teacher")
    # vLLM sorts layers.
    method, flags, environment = extracting(LAYERS[::-1], folder / "states")
    flags += "--tensor-parallel-size", "2", "--enable-prefix-caching", "--max-num-batched-tokens", "64"
    with vllm_server(TARGET, folder / "log", method, *flags, environment=environment) as server:
        yield Teacher(server.url, folder / "states")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Texts of several lengths, and one that begins as the longest does."""
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 4096, (length,), generator=random).tolist() for length in LENGTHS]
    return [*texts, [*texts[-1][:250], 7, 8, 9]]


def test_the_server_tells_what_it_serves(teacher):
    found = json.loads(teacher.get("draftsmith/target"))
    assert found["layer_ids"] == list(LAYERS) and found["num_hidden_layers"] == 12 and found["hidden_size"] == 256
    assert (found["model"], found["dtype"], found["quantization"]) == (str(TARGET), "float32", None)
    assert found["max_model_len"] == 512 and found["vllm"]
    assert found["files"] == identity(str(TARGET)) and found["commit"] is None and found["revision"] is None


def test_states_are_the_librarys(teacher, texts):
    model = load_model(TARGET, dtype="float32")
    norm, model.model.norm = model.model.norm, nn.Identity()  # the last state before it
    hidden = [torch.stack(model(torch.tensor([text]), output_hidden_states=True).hidden_states) for text in texts]
    # Two clients at once, each with all texts. The second time prefixes are kept; log-probabilities do not use them.
    for others in ({}, {}, {"prompt_logprobs": 0}):
        with ThreadPoolExecutor(2 * len(texts)) as pool:
            found = list(pool.map(lambda text, others=others: teacher.states(text, **others), 2 * texts))
        for text, expected, (file, answer) in zip(2 * texts, 2 * hidden, found, strict=True):
            assert file["token_ids"].tolist() == text
            assert file["hidden_states"].shape == (len(text), len(LAYERS), 256)
            for layer, states in zip(LAYERS, file["hidden_states"].unbind(1), strict=True):
                size = expected[layer].abs().max().item()
                torch.testing.assert_close(states, expected[layer, 0], rtol=0, atol=1e-5 * size)
            if others and len(text) > 1:
                logits = model.lm_head(norm(file["hidden_states"][:-1, -1]))
                own = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
                said = [
                    parts[str(token)]["logprob"]
                    for token, parts in zip(text[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
                ]
                torch.testing.assert_close(own, torch.tensor(said), rtol=0, atol=1e-4)
    hits = re.search(r"^vllm:prefix_cache_hits_total\S* (\S+)$", teacher.get("metrics").decode(), re.MULTILINE)
    assert hits and float(hits[1]) > sum(LENGTHS)
    assert os.listdir(teacher.folder) == []


def test_a_request_that_breaks_off_leaves_nothing(teacher, texts):
    request = {"model": str(TARGET), "prompt": texts[5], "max_tokens": 400, "ignore_eos": True}
    connection = http.client.HTTPConnection(teacher.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
    until(lambda: os.listdir(teacher.folder))  # it is running
    connection.close()
    until(lambda: not os.listdir(teacher.folder))


def until(holds: Callable[[], object]) -> None:
    """Wait for something."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_states_that_nobody_asks_for_are_removed(teacher, texts):
    path = Path(teacher.complete(texts[1])["kv_transfer_params"]["hidden_states_path"])
    until(path.exists)
    teacher.get("draftsmith/target")
    assert path.exists()
    os.utime(path, (time.time() - ORPHANED - 1,) * 2)
    teacher.get("draftsmith/target")
    assert os.listdir(teacher.folder) == []


def test_completions_of_a_request_have_files_of_their_own(teacher, texts):
    """One lock for both would hang the server: the second waits for it in the thread that computes the first."""
    several = {"n": 2, "temperature": 1, "max_tokens": 20, "ignore_eos": True}
    assert teacher.complete(texts[1], {"X-Request-Id": "x" * 300}, **several)["choices"]
    # Each a file and its lock; the library writes under names of its own before.
    until(lambda: sorted(path.suffix for path in teacher.folder.iterdir()) == 2 * [".lock"] + 2 * [".safetensors"])
    for path in teacher.folder.iterdir():
        path.unlink()


def test_no_path_leads_out_of_the_folder(teacher, texts):
    inside, _ = teacher.states(texts[1], headers={"X-Request-Id": "../../elsewhere" + "x" * 300})
    assert inside["token_ids"].tolist() == texts[1]
    assert os.listdir(teacher.folder) == []
    for name in ("..%2flog", "%2e%2e/log", "../log"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            teacher.get(f"draftsmith/states/{name}")
    assert (teacher.folder.parent / "log").exists()
