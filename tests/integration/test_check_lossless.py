"""The command that checks a pair: what it finds, its exit codes, and a decoder that is wrong."""

import json
import re

import pytest
from conftest import perturbed, tiny_llama
from listening import LOADING, listened
from trained_parallel import as_parallel

from draftsmith.decode import speculative
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import check_lossless
from draftsmith.scripts.configs import CHECKED, EAGLE_CHECKED, PARALLEL_CHECKED
from draftsmith.train.cli import run
from draftsmith.train.models import load_model
from draftsmith.train.runs import save_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("pair")
    target = tiny_llama(0, len(tokenizer), layers=1)
    target.generation_config.eos_token_id = 5
    save_model(target, tokenizer, root / "target")
    save_model(perturbed(target, 0.05), tokenizer, root / "draft")
    save_model(as_parallel(perturbed(target, 0.05), 0, 4), tokenizer, root / "parallel")
    lines = [{"question_id": i, "category": "c", "turns": [f"def f{i}(x): return {'x' * i}"]} for i in range(5)]
    (root / "prompts.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return root


def flags(pair, *more):
    own = {"target": pair / "target", "draft": pair / "draft", "prompts": pair / "prompts.jsonl", "max_new_tokens": 20}
    return [part for name, value in own.items() for part in (f"--{name}", str(value))] + [
        "--batch_size", "2", "--threads", "1", *more
    ]  # fmt: skip


def test_a_right_decoder_passes(pair, tmp_path, capsys):
    output = tmp_path / "figures.json"
    argv = flags(pair, "--sampled_tokens", "2000", "--temperature", "0.9", "--output", str(output))
    argv += ["--batch_size", "50"]  # many short texts at a time: as much to test on, in a tenth of the forwards
    with listened() as heard:
        assert check_lossless.main([*argv, "--proposers", "[draft, prompt_lookup]"]) == 0
    heard.require("plain decoding", "speculative decoding", "texts beside plain decoding's", "sampled texts")
    heard.require("test of the law", *LOADING)
    assert "lossless" in capsys.readouterr().out
    figures = json.loads(output.read_text())
    assert figures["prompts"] == 5 and set(figures["drafters"]) == {"draft", "prompt_lookup"}
    for entry in figures["drafters"].values():
        assert entry["greedy"]["prompts_identical"] == 5 and entry["greedy"]["passed"] is True
        assert entry["sampled"]["tokens"] >= 2000 and entry["sampled"]["p_value"] > 1e-4


def test_figures_do_not_depend_on_the_batch_size(pair, tmp_path):
    found = []
    for rows in (12, 50):
        argv = flags(pair, "--sampled_tokens", "2000", "--output", str(tmp_path / "figures.json"))
        argv += ["--batch_size", str(rows), "--proposers", "[draft]"]
        assert check_lossless.main(argv) == 0
        found.append(json.loads((tmp_path / "figures.json").read_text())["drafters"])
    expected, other = (figures["draft"] for figures in found)
    assert other["greedy"] == expected["greedy"]
    assert other["sampled"]["tokens"] == expected["sampled"]["tokens"]
    assert other["sampled"]["p_value"] == pytest.approx(expected["sampled"]["p_value"], rel=1e-6)


@pytest.mark.parametrize("proposer", CHECKED)
def test_every_drafter_is_compared_at_t_0(pair, proposer):
    assert check_lossless.main(flags(pair, "--proposers", f"[{proposer}]")) == 0


@pytest.mark.parametrize("proposer", PARALLEL_CHECKED)
def test_parallel_drafts_are_compared_too(pair, tmp_path, capsys, proposer):
    argv = flags(pair, "--parallel_draft", str(pair / "parallel"), "--output", str(tmp_path / "figures.json"))
    assert check_lossless.main([*argv, "--proposers", f"[{proposer}]", "--draft_length", "3"]) == 0
    counts = json.loads((tmp_path / "figures.json").read_text())["drafters"][proposer]["counts"]
    assert len(counts["num_draft_tokens_per_pos"]) == 3 and counts["num_accepted_tokens_per_pos"][0] > 0
    tau = counts["num_emitted_tokens"] / counts["num_drafts"]
    assert f"{proposer}, T=0: 5 of 5 identical, τ {tau:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("proposer", EAGLE_CHECKED)
def test_eagle_heads_are_compared_too(pair, tmp_path, proposer):
    EagleHeads.of_target(load_model(pair / "target")).save_pretrained(tmp_path / "eagle")
    argv = flags(pair, "--eagle", str(tmp_path / "eagle"), "--output", str(tmp_path / "figures.json"))
    assert check_lossless.main([*argv, "--proposers", f"[{proposer}]", "--draft_length", "2"]) == 0
    counts = json.loads((tmp_path / "figures.json").read_text())["drafters"][proposer]["counts"]
    assert len(counts["num_draft_tokens_per_pos"]) == 2


def test_a_wrong_decoder_fails(pair, monkeypatch, capsys):
    real = speculative._verify

    def shifted(*args):
        logits = real(*args)
        logits[:, -1, 7] += 100.0
        return logits

    monkeypatch.setattr(speculative, "_verify", shifted)
    assert check_lossless.main(flags(pair, "--proposers", "[draft]")) == 3
    printed = capsys.readouterr().out
    assert "0 of 5" in printed and "5 departures: prompt 0, token " in printed and ": 7 in place of " in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--proposers", "[medusa]"], "proposers: expected some of draft, .*, found medusa"),
        (
            ["--proposers", "[parallel_tree]"],
            "parallel_draft: expected one with the proposer parallel_tree, found none",
        ),
        (["--sampled_tokens", "100"], "sampled_tokens: expected 0 or at least 2000, found 100"),
        (["--sampled_tokens", "2000", "--temperature", "0"], "temperature: expected more than 0 .*, found 0.0"),
        (["--draft_length", "0"], "draft_length: expected at least 1 and at most 256, found 0"),
    ],
)
def test_bad_input_is_one_line(pair, capsys, more, message):
    assert run(lambda: check_lossless.main(flags(pair, *more))) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(message, err)
