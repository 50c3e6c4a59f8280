"""A draft service behind a real vLLM: the same texts and counts as ever, and plain decoding while it is away."""

import asyncio
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from draft_service import totals
from engine import DRAFT, TARGET, counters, end

from draftsmith.decode import DraftModelProposer, HybridProposer, SuffixProposer, Switch, speculative_generate
from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.measurement.server_counts import pooled, vllm_counts
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts import cli
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.data.decoding import left_padded
from draftsmith.train.endpoint.client import Client
from draftsmith.train.models import load_model, load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GAMMA, TOKENS = 4, 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(TARGET)
    return [tokenizer(record["prompt"])["input_ids"][-48:] for record in stdlib_prompts(64, heldout=True)]


@pytest.fixture(scope="module")
def longer(plain, prompts) -> list[list[int]]:
    """What plain vLLM writes, γ tokens beyond the texts' end."""
    return asyncio.run(write(plain.url, prompts, TOKENS + GAMMA))


def request(model: str, prompt: list[int], tokens: int = TOKENS) -> dict:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def write(url: str, prompts: list[list[int]], tokens: int = TOKENS, at_once: int = 4, before=None) -> list:
    """Return what a server writes behind each prompt; `before` is awaited before each request."""
    slots = asyncio.Semaphore(at_once)
    async with Client(url) as client:
        model = await client.model()

        async def one(prompt: list[int]) -> list[int]:
            async with slots:
                if before is not None:
                    await before()
                return (await client.complete(request(model, prompt, tokens))).token_ids

        return await asyncio.gather(*map(one, prompts))


async def settled(url: str):
    """Return what was counted when nothing more comes: a server may count a step after it has sent it."""
    last = await counters(url)
    while True:
        await asyncio.sleep(0.3)
        if (now := await counters(url)) == last:
            return now
        last = now


async def metrics(url: str, prefix: str) -> dict[str, float]:
    async with Client(url) as client:
        return totals(await client.get_text("/metrics"), prefix)


async def until_drafting(url: str) -> None:
    """Have short texts written until one of them was drafted for: the line to the service is up then."""
    before = await counters(url)
    async with asyncio.timeout(60):
        while (await counters(url) - before).num_drafts == 0:
            await write(url, [[5, 6, 7]], 8)


def test_texts_are_plain_decoding_s_and_counts_are_those_computed(pair, longer, prompts):
    """32 prompts × 64 tokens: as of plain vLLM and of our decoder; counted as replay says, integer for integer."""
    prompts, longer = prompts[:32], longer[:32]

    async def ask():
        await until_drafting(pair.server.url)
        before = await settled(pair.server.url)
        texts = await write(pair.server.url, prompts)
        return texts, await settled(pair.server.url) - before

    texts, counted = asyncio.run(ask())
    assert texts == [text[:TOKENS] for text in longer]

    target, draft = load_model(TARGET, dtype="float32"), DraftModelProposer(load_model(DRAFT, dtype="float32"))
    target.generation_config.eos_token_id = None
    ours = []
    for start in range(0, len(prompts), 8):
        ids, mask = left_padded(prompts[start : start + 8], target.device)
        out = speculative_generate(target, draft, ids, mask, draft_length=GAMMA, max_new_tokens=TOKENS)
        ours += out.sequences[:, ids.shape[1] :].tolist()
    assert texts == ours

    sequences = [torch.tensor([*prompt, *text]) for prompt, text in zip(prompts, longer, strict=True)]
    lengths = [len(prompt) for prompt in prompts]
    replay = replay_drafters(target, {"": draft}, sequences, lengths, [GAMMA], Sampler.of(0.0), rounds_of=GAMMA)[""]
    expected = pooled([vllm_counts(text.rounds, TOKENS, GAMMA) for text in replay.texts])
    assert counted.num_drafts == expected.num_drafts
    assert counted.num_draft_tokens == expected.num_draft_tokens
    assert counted.num_accepted_tokens == expected.num_accepted_tokens > counted.num_drafts / 4
    assert counted.num_accepted_tokens_per_pos == expected.num_accepted_tokens_per_pos


def test_drafters_that_take_turns_draft_for_it(pair, longer, prompts):
    """A hybrid in the service: vLLM's texts are those of plain decoding, its counts those of a local measurement."""
    prompts, longer = prompts[:32], longer[:32]
    end(pair.draft)
    pair.restart(f"hybrid:suffix:1+{DRAFT}@match=2,score=0.5,last=3")

    async def ask():
        await until_drafting(pair.server.url)
        before = await settled(pair.server.url)
        texts = await write(pair.server.url, prompts)
        return texts, await settled(pair.server.url) - before

    try:
        texts, counted = asyncio.run(ask())
    finally:
        end(pair.draft)
        pair.restart()
    assert texts == [text[:TOKENS] for text in longer]

    target, draft = load_model(TARGET, dtype="float32"), load_model(DRAFT, dtype="float32")
    hybrid = HybridProposer([SuffixProposer(1), DraftModelProposer(draft)], Switch(2, 0.5), last_length=3)
    sequences = [torch.tensor([*prompt, *text]) for prompt, text in zip(prompts, longer, strict=True)]
    lengths = [len(prompt) for prompt in prompts]
    replay = replay_drafters(target, {"": hybrid}, sequences, lengths, [GAMMA], Sampler.of(0.0), rounds_of=GAMMA)[""]
    drafted = np.concatenate([text.drafted[:TOKENS] for text in replay.texts])
    assert {3, 4} <= set(drafted)  # by the draft, and copied
    expected = pooled([vllm_counts(text.rounds, TOKENS, GAMMA, drafted_T=text.drafted) for text in replay.texts])
    assert counted.same_as(expected)
    assert counted.num_accepted_tokens > counted.num_drafts / 4


def test_sampled_texts_follow_the_target_s_law(pair, tmp_path):
    """Certified at T=1, with the draft to look for what leans towards it; a false alarm has probability 1e-3."""
    asyncio.run(until_drafting(pair.server.url))
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts, stdlib_prompts(16, heldout=True, seed=3))
    argv = ["certify", "--server", pair.server.url, "--target", str(TARGET), "--draft", str(DRAFT), "--threads", "1"]
    argv += ["--prompts", str(prompts), "--output", str(tmp_path / "out"), "--temperature", "1", "--concurrency", "8"]
    argv += ["--config", "{max_prompt_tokens: 40}", "--max-new-tokens", "16", "--sampled-tokens", "2400"]
    argv += ["--false-alarm", "0.001"]
    assert cli.main(argv) == 0
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["passed"] and found["servers"]["server"]["counters"]["num_accepted_tokens"] > 0


def test_a_service_that_is_killed_and_comes_back(pair, longer, prompts):
    """64 requests, 4 at a time, SIGKILL in between: all texts whole, acceptance falls to zero and comes back."""
    url, begun, snapshots, lock = pair.server.url, 0, [], asyncio.Lock()

    async def before() -> None:
        nonlocal begun
        async with lock:
            begun += 1
            if begun == 20:  # three others are being written
                snapshots.append(await counters(url))
                pair.draft.kill()
                pair.draft.wait()
            elif begun == 28:  # what was being written then has ended
                snapshots.append(await counters(url))
            elif begun == 40:
                snapshots.append(await counters(url))
                await asyncio.to_thread(pair.restart)
                await until_drafting(url)

    async def ask():
        await until_drafting(url)
        counts = [await counters(url)]
        texts = await write(url, prompts, before=before)
        counts += [*snapshots, await counters(url)]
        ours = await metrics(url, "draftsmith_remote_draft_")
        return texts, counts, ours

    texts, counts, ours = asyncio.run(ask())
    assert texts == [text[:TOKENS] for text in longer]
    with_it, _, without, after = (later - sooner for sooner, later in pairwise(counts))
    assert with_it.num_accepted_tokens > 0 and after.num_accepted_tokens > 0
    assert without.num_drafts == without.num_accepted_tokens == 0
    assert ours["failures_total"] >= 1 and ours["plain_rounds_total"] > TOKENS and ours["rounds_total"] > TOKENS
    assert "decoding continues plainly" in pair.server.log.read_text()
