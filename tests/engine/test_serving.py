"""A real server, seen from outside: what it answers, and what it counts."""

import asyncio

import pytest
from engine import counters

from draftsmith.train.endpoint.client import Client

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_completion_streams_in_and_is_counted(speculating):
    async def ask(url: str):
        async with Client(url) as client:
            model, before = await client.model(), await counters(url)
            request = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = await client.complete(request)
            return answer, await counters(url) - before

    answer, counted = asyncio.run(ask(speculating.url))
    assert answer.prompt_ids == [5, 6, 7, 8]
    assert len(answer.token_ids) == answer.completion_tokens == sum(n for _, n in answer.arrivals) == 24
    assert answer.finish_reason == "length"
    times = [time for time, _ in answer.arrivals]
    assert answer.sent < times[0] and times == sorted(times) and times[-1] <= answer.ended
    assert counted.num_draft_tokens == 4 * counted.num_drafts > 0
    assert sum(counted.num_accepted_tokens_per_pos) == counted.num_accepted_tokens
