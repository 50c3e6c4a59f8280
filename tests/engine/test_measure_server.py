"""A real vLLM, seen from outside: what it answers and counts, and what `measure --server` and its gate make of it."""

import asyncio
import json
import re

import pytest
from engine import ROOT, TARGET, counters

from draftsmith.scripts import cli
from draftsmith.scripts.report.schema import report_schema
from draftsmith.train.data.corpus import stdlib_prompts, write_prompts
from draftsmith.train.endpoint.client import Client

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COUNT, NEW = 10, 32


def test_one_and_four_at_once_beside_plain_decoding(speculating, plain, tmp_path, capsys):
    """Acceptance does not depend on the load, every token is ours, and every text is plain decoding's."""
    jsonschema = pytest.importorskip("jsonschema")
    write_prompts(tmp_path / "prompts.jsonl", stdlib_prompts(COUNT, heldout=True))
    argv = ["measure", "--config", str(ROOT / "configs" / "measure" / "server.yaml"), "--target", str(TARGET)]
    argv += ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out"), "--ignore-eos", "true"]
    argv += ["--server", speculating.url, "--baseline-server", plain.url, "--max-new-tokens", str(NEW)]
    assert cli.main(argv) == 0  # no gate was asked for
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    jsonschema.validate(report, report_schema())
    one, four = report["runs"]
    assert (one["batch_size"], four["batch_size"]) == (1, 4)
    for run, counted in zip(report["runs"], report["server"]["counted"], strict=True):
        assert counted["source"] == "answers"
        assert counted["generated_tokens"] == counted["completion_tokens"] == COUNT * NEW
        assert run["counts"] == one["counts"] and run["draft_length"] == 4
        assert run["lossless"]["identical"] and run["lossless"]["prompts_identical"] == COUNT
        emitted = run["counts"]["num_emitted_tokens"] - COUNT  # vLLM's prompt step drafts nothing
        assert run["mean_acceptance_length"]["value"] == pytest.approx(emitted / run["counts"]["num_drafts"])
        low, high = run["alpha"]["ci95"]
        assert low < run["alpha"]["value"] < high and run["alpha"]["n"] == COUNT
    assert one["speedup"]["n"] == COUNT
    alone = [*argv[:-4], "--max-new-tokens", str(NEW), "--concurrency", "1", "--baseline-server", "null"]
    for least, code in ((0.1, 0), (high, 3)):
        assert cli.main([*alone, "--min-alpha", str(least)]) == code
    out = capsys.readouterr().out
    assert "NO-GO" in out and re.search(r"(?<!-)\bGO\b", out)


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
