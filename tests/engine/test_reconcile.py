"""A server's counters beside a local measurement: equal to the integer, and each planted fault named."""

import json

import pytest
import torch
from engine import DRAFT, TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.scripts.cli import main
from draftsmith.train.data.corpus import stdlib_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPTS, TOKENS, GAMMA = 32, 64, 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Conversations: the target has no chat template, and is given their text as it is."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [
        {"id": record["id"], "messages": [{"role": "user", "content": record["prompt"]}]}
        for record in stdlib_prompts(PROMPTS, heldout=True)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def local(prompts, draft, output):
    """Measure the pair here: a few prompts decoded, all replayed."""
    flags = ["--dtype", "float32", "--threads", "1", "--compiled", "false", "--costs", "none", "--limit", "5"]
    flags += ["--replay-limit", str(PROMPTS), "--temperature", "0,1", "--draft-length", str(GAMMA)]
    flags += ["--target", str(TARGET), "--draft", str(draft), "--prompts", str(prompts)]
    assert main(["measure", *flags, "--max-new-tokens", str(TOKENS), "--output", str(output)]) in (0, 3)
    return output


@pytest.fixture(scope="module")
def report(prompts, tmp_path_factory):
    return local(prompts, DRAFT, tmp_path_factory.mktemp("local") / "report")


def reconciled(server, report, prompts, output, *flags, temperature="0"):
    """Measure a server and return its exit code and what its report says of each setting."""
    given = ["--server", server.url, "--expect", str(report), "--prompts", str(prompts), "--temperature", temperature]
    given += ["--max-new-tokens", str(TOKENS), "--output", str(output), "--warm-up", "1"]
    code = main(["measure", *given, *flags])
    return code, json.loads((output / "report.json").read_text())["server"]["reconciliations"]


def test_the_servers_counters_are_those_expected(speculating, report, prompts, tmp_path):
    """32 prompts × 64 tokens, one at a time and four at once: every integer."""
    flags = "--target", str(TARGET), "--concurrency", "1,4"
    code, found = reconciled(speculating, report, prompts, tmp_path / "out", *flags)
    assert code == 0 and len(found) == 2
    for one in found:
        assert one["agrees"] and one["exact"] and one["expected"] == one["counted"] and one["causes"] == []
        assert one["same_texts"] == one["same_prompts"] == one["answers"] == PROMPTS
        assert one["counted"]["num_accepted_tokens"] > 1000


def test_sampled_counters_are_within_the_interval_of_the_right_verifier(speculating, report, prompts, tmp_path):
    """A false alarm has a probability of 1 % at most; the seeds are fixed."""
    flags = "--target", str(TARGET), "--expect-verifier", "greedy"
    code, (found,) = reconciled(speculating, report, prompts, tmp_path / "out", *flags, temperature="1")
    assert found["agrees"] and not found["exact"] and code == 0
    assert found["counted"]["num_drafts"] > 0 and all(shares["difference"] for shares in found["positions"])


def test_another_template_is_named(astray, report, prompts, tmp_path):
    code, (found,) = reconciled(astray, report, prompts, tmp_path / "out")
    assert code == 3 and [cause["name"] for cause in found["causes"]] == ["template"]
    assert found["same_prompts"] == 0
    assert (found["departure"]["what"], found["departure"]["token"]) == ("prompt", 0)


def test_another_revision_of_the_draft_is_named(speculating, prompts, tmp_path):
    """The report's draft is another one than the server's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(DRAFT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.2)
    model.save_pretrained(tmp_path / "draft")
    AutoTokenizer.from_pretrained(DRAFT).save_pretrained(tmp_path / "draft")
    report = local(prompts, tmp_path / "draft", tmp_path / "report")
    code, (found,) = reconciled(speculating, report, prompts, tmp_path / "out", "--target", str(TARGET))
    assert code == 3 and found["same_texts"] == PROMPTS and found["exact"]
    assert found["causes"][0]["name"] == "draft" and found["first_position"] == 1
    assert found["departure"]["what"] == "round"


def test_a_quantised_target_is_named(astray, report, prompts, tmp_path):
    code, (found,) = reconciled(astray, report, prompts, tmp_path / "out", "--target", str(TARGET))
    assert code == 3 and found["same_texts"] < PROMPTS and found["same_prompts"] == PROMPTS
    assert found["causes"][0]["name"] == "target" and found["departure"]["what"] == "text"
