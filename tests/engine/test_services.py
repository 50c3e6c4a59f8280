"""The coordinator in front of real servers: one decodes plainly, the draft of the other is a service."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
from coordinating import coordinator, metric, wait_until
from engine import TARGET, counters

from draftsmith.train.data.corpus import stdlib_prompts
from draftsmith.train.endpoint.client import Client
from draftsmith.train.models import load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXT = "/v1/completions"
TOKENS, LONG = 48, 400


@pytest.fixture(scope="module")
def door(plain, pair, tmp_path_factory) -> Iterator[str]:
    def served(name: str, url: str) -> dict:
        return {"name": name, "models": ["code"], "endpoints": [url], "server_model": str(TARGET)}

    config = {
        "pairs": [
            served("plain", plain.url),
            served("serviced", pair.server.url),
            served("by-keyword", pair.server.url),
        ],
        "rules": [
            {"pair": "plain", "category": ["prose"]},
            {"pair": "serviced", "category": ["code"]},
            {"pair": "by-keyword", "keywords": ["class "]},
            {"pair": "serviced", "load_of": "serviced", "load_below": 2},
            {"pair": "plain"},
        ],
    }
    with coordinator(config, tmp_path_factory.mktemp("coordinator")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    tokenizer = load_tokenizer(TARGET)
    texts = [
        tokenizer.decode(tokenizer(each["prompt"])["input_ids"][-48:]) for each in stdlib_prompts(24, heldout=True)
    ]
    return [text for text in texts if "class " not in text][:6]


def body(prompt: str, tokens: int = TOKENS, **fields) -> dict:
    return {"model": "code", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


def ask(url: str, prompt: str, **fields) -> tuple[str, str]:
    """Return the pair that answered, and its text."""
    response = httpx2.post(f"{url}{TEXT}", json=body(prompt, **fields), timeout=300)
    assert response.status_code == 200, response.text
    return response.headers["x-draftsmith-pair"], response.json()["choices"][0]["text"]


def test_the_same_texts_by_every_pair_routed_by_rule(door, plain, pair, prompts):
    urls = {"plain": plain.url, "serviced": pair.server.url}
    before = {name: asyncio.run(counters(url)).num_drafts for name, url in urls.items()}
    texts = {}
    for name, fields in (("plain", {"metadata": {"category": "prose"}}), ("serviced", {})):
        answers = [ask(door, prompt, **fields) for prompt in prompts]
        assert {found for found, _ in answers} == {name}
        texts[name] = [text for _, text in answers]
    marked = [f"class A: pass\n{prompt}" for prompt in prompts]  # the rule's word stands in the prompt
    drafted = [ask(door, prompt) for prompt in marked]
    assert {found for found, _ in drafted} == {"by-keyword"}
    assert [text for _, text in drafted] == [ask(door, p, metadata={"category": "prose"})[1] for p in marked]
    assert texts["serviced"] == texts["plain"]
    counted = {name: asyncio.run(counters(url)).num_drafts - before[name] for name, url in urls.items()}
    assert counted["plain"] == 0 and counted["serviced"] > 0


def test_a_pair_that_is_loaded_leaves_the_next_request_to_another(door, prompts):
    """Two long texts have begun, and go on for seconds, when the third is asked for."""
    wait_until(lambda: metric(door, "in_flight") == 0)
    with ExitStack() as begun:
        streams = []
        for prompt in prompts[:2]:
            asked = body(prompt, LONG, stream=True)
            response = begun.enter_context(httpx2.stream("POST", f"{door}{TEXT}", json=asked, timeout=300))
            parts = response.iter_bytes()
            next(parts)
            streams.append((response.headers["x-draftsmith-pair"], parts))
        assert [found for found, _ in streams] == ["serviced", "serviced"]
        third = ask(door, prompts[2])
        assert third[0] == "plain"
        assert all(b"".join(parts).endswith(b"data: [DONE]\n\n") for _, parts in streams)
    wait_until(lambda: metric(door, "in_flight") == 0)
    assert ask(door, prompts[2]) == ("serviced", third[1])


def test_a_draft_service_that_dies_and_comes_back_costs_no_answer(door, pair, prompts):
    """Three processes, 64 requests, 4 at a time; SIGKILL at the 20th, and the service is started anew at the 40th."""
    expected = [ask(door, prompt, metadata={"category": "prose"})[1] for prompt in prompts]
    asked, snapshots = [prompts[i % len(prompts)] for i in range(64)], []

    def some(first: int, last: int) -> list[tuple[str, str]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda prompt: ask(door, prompt, metadata={"category": "code"}), asked[first:last]))

    def accepted() -> int:
        return asyncio.run(counters(pair.server.url)).num_accepted_tokens

    snapshots.append(accepted())
    ended = metric(door, "requests_total")
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(some, 0, 28)
        wait_until(lambda: metric(door, "requests_total") >= ended + 20)
        pair.draft.kill()
        pair.draft.wait()
        answers = answering.result()
    snapshots.append(accepted())
    answers += some(28, 40)
    snapshots.append(accepted())
    pair.restart()
    wait_until(lambda: ask(door, prompts[0], metadata={"category": "code"}) and accepted() > snapshots[-1])
    answers += some(40, 64)
    assert [text for _, text in answers] == [expected[i % len(prompts)] for i in range(64)]
    assert {found for found, _ in answers} == {"serviced"}
    assert snapshots[1] > snapshots[0] and snapshots[2] == snapshots[1]


def test_a_client_reads_a_stream_through_it_as_from_the_server(door, plain, prompts):
    async def read(url: str, model: str, **fields):
        async with Client(url) as client:
            return await client.complete({**body(prompts[0], **fields), "model": model})

    there = asyncio.run(read(plain.url, str(TARGET)))
    here = asyncio.run(read(door, "code", metadata={"category": "prose"}))
    assert (here.token_ids, here.prompt_ids, here.text) == (there.token_ids, there.prompt_ids, there.text)
    assert len(here.token_ids) == here.completion_tokens == TOKENS
    # How many tokens an event holds is for the server's clock to say: what it has while its reader is late, it joins.
    for answer in (here, there):
        assert len(answer.arrivals) > 1 and sum(count for _, count in answer.arrivals) == TOKENS
    assert json.loads(httpx2.get(f"{door}/v1/models").text)["data"][0]["id"] == "code"
