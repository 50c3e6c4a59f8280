"""`draftsmith export`: launch lines, exit codes."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from transformers import Gemma3Config, LlamaConfig

from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.scripts import cli
from draftsmith.scripts.engines.draft_lengths import NUM, SCHEMA
from draftsmith.train.kinds.export import vllm_command, vocabulary_override
from draftsmith.train.models import load_model
from draftsmith.train.runs import save_model

K = 3


def ran(capsys, *argv: object, code: int = 0) -> tuple[list[str], str]:
    capsys.readouterr()
    assert cli.main(["export", *map(str, argv)]) == code
    out, err = capsys.readouterr()
    assert bool(err.strip()) == bool(code) and err.count("\n") == (1 if code else 0), err
    return out.splitlines(), err


@pytest.fixture
def heads_dir(tmp_path, pair_dirs) -> Path:
    """Noisy heads of the pair's target, in our own format."""
    heads = MedusaHeads.of_target(
        load_model(pair_dirs[0], device="cpu"), K, medusa_fc_bias=True, base_model_name_or_path=str(pair_dirs[0])
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    heads.config.medusa_choices = [[0], [1], [0, 0]]
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def logits(heads: MedusaHeads) -> torch.Tensor:
    hidden = torch.randn(4, heads.config.hidden_size, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return heads(hidden).float()


def speculative(line: str) -> tuple[list[str], dict]:
    """The words of a launch line before its config, and the config, as a shell would hand them over."""
    *words, flag, config = shlex.split(line)
    assert flag == "--speculative-config"
    return words, json.loads(config)


def test_a_launch_line_has_the_draft_lengths_of_each_load(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    ranges = [[1, 4, 3], [5, 8, 0]]
    entry = {"path": str(draft), "temperatures": [0.0], "num_speculative_tokens": 3, f"{NUM}_per_batch_size": ranges}
    file = tmp_path / "draft_lengths.json"
    file.write_text(json.dumps({"schema": SCHEMA, "target": str(target), "drafters": {"draft": entry}}))
    flags = ["--draft", draft, "--target", target, "--draft-lengths", file]
    lines, _ = ran(capsys, *flags, "--format", "vllm")
    _, config = speculative(lines[-1])
    assert config["method"] == "draft_model" and config[NUM] == 3 and config[f"{NUM}_per_batch_size"] == ranges
    _, err = ran(capsys, *flags, "--format", "sglang", code=2)
    assert "draft_lengths: expected format vllm and no draft_length with it, found format sglang" in err
    _, err = ran(capsys, *flags, "--format", "vllm", "--draft-length", 2, code=2)
    assert "found draft_length 2" in err


def test_heads_for_vllm(heads_dir, pair_dirs, tmp_path, capsys):
    output = tmp_path / "my heads"
    flags = ["--format", "vllm", "--dtype", "bfloat16", "--target", pair_dirs[0]]
    lines, _ = ran(capsys, "--heads", heads_dir, "--output", output, *flags)
    words, config = speculative(lines[-1])
    assert words == ["vllm", "serve", str(pair_dirs[0])]
    assert config == {"method": "medusa", "model": str(output), "num_speculative_tokens": K}
    told = "\n".join(lines[:-1])
    assert "the tree of 3 tokens is not written" in told
    assert all(line.startswith("# ") for line in lines[:-1])
    same = logits(import_heads(heads_dir).to(torch.bfloat16).float())
    assert torch.equal(logits(import_heads(output).float()), same)


def test_other_formats_and_the_way_back(heads_dir, pair_dirs, tmp_path, capsys):
    expected = logits(import_heads(heads_dir))
    for format in ("own", "vllm"):
        ran(capsys, "--heads", heads_dir, "--format", format, "--output", tmp_path / format)
        for flags in ((), ("--format", format, "--target", pair_dirs[0])):
            back = tmp_path / f"{format}-{len(flags)}"
            lines, _ = ran(capsys, "--import-from", tmp_path / format, "--output", back, *flags)
            assert lines == [f"# wrote {back}", "# 3 heads, 1 block each"]
            read = MedusaHeads.from_pretrained(back)
            assert torch.equal(logits(read), expected)
    lines, _ = ran(capsys, "--heads", heads_dir, "--format=vllm", "--output", tmp_path / "v", "--draft-length", 2)
    assert speculative(lines[-1])[1]["num_speculative_tokens"] == 2


def test_a_draft_for_vllm_and_sglang(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    before = sorted(path.name for path in tmp_path.rglob("*"))
    lines, _ = ran(capsys, "--draft", draft, "--format", "vllm", "--target", target, "--draft_length", 5)
    assert speculative(lines[-1]) == (
        ["vllm", "serve", str(target)],
        {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5},
    )
    assert "draft_sample_method" in lines[1]
    lines, _ = ran(capsys, "--draft", draft, "--format", "sglang")
    assert "cannot sample" in lines[1] and "greedy" in lines[1]
    assert shlex.split(lines[-1]) == [
        "python", "-m", "sglang.launch_server", "--model-path", "TARGET", "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", str(draft), "--speculative-num-steps", "4", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "5",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_target_whose_vocabulary_vllm_does_not_find():
    """Configs of several modalities have vocab_size in their text_config alone; vLLM's medusa reads the top."""
    assert vocabulary_override(LlamaConfig(vocab_size=97)) == {}
    config = Gemma3Config(text_config={"vocab_size": 97, "hidden_size": 32})
    override = vocabulary_override(config)
    assert override == {"vocab_size": 97}
    command = shlex.split(vllm_command("a target", {"method": "medusa"}, override))
    assert command[:4] == ["vllm", "serve", "a target", "--hf-overrides"] and json.loads(command[4]) == override
    assert speculative(shlex.join(command))[1] == {"method": "medusa"}


def test_drafts_that_cannot_be_served(pair_dirs, tmp_path, tokenizer, capsys):
    target, draft = pair_dirs

    def refused(message: str, *argv: object, format: str = "vllm") -> None:
        _, err = ran(capsys, "--format", format, *argv, code=2)
        assert err.startswith("error: ") and message in err, err

    refused("draft: expected a directory, found none at nowhere/x", "--draft", "nowhere/x")
    other = tmp_path / "other"
    save_model(tiny_llama(1, len(tokenizer) + 7, layers=1), tokenizer, other)
    for format, server in (("vllm", "vLLM"), ("sglang", "SGLang")):
        message = f"the target's vocab_size {len(tokenizer)}, which {server} requires, found {len(tokenizer) + 7}"
        refused(message, "--draft", other, "--target", target, format=format)
    file = tmp_path / "t.json"
    tokenizer.backend_tokenizer.save(str(file))
    changed = json.loads(file.read_text())
    vocab = changed["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    shutil.copytree(draft, tmp_path / "renumbered")
    (tmp_path / "renumbered" / "tokenizer.json").write_text(json.dumps(changed))
    refused("2 tokens that differ", "--draft", tmp_path / "renumbered", "--target", target)
    refused("target: expected a model directory", "--draft", draft, "--target", "nowhere/else/x")
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:999])
    refused("draft: expected whole weights in", "--draft", draft)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "drafter: expected one, or import_from, found neither"),
        (["--medusa", "H", "--draft", "D", "--format", "vllm"], "found draft:D and medusa:H"),
        (["--medusa", "H", "--format", "vllm"], "output: expected a directory to write in, found none"),
        (["--import_from", "H", "--draft_length", "2"], "draft_length: expected none with heads to import"),
        (["--medusa", "H", "--output", "O"], "format: expected one, found none"),
        (["--draft", "D", "--format", "vllm", "--dtype", "float16"], "dtype: expected none with a draft model"),
        (["--draft", "D", "--format", "vllm", "--draft_length", "0"], "draft_length: expected at least 1 and at"),
        (["--medusa", "H", "--output", "O", "--format", "own", "--draft_length", "2"],
         "draft_length: expected it with vllm, found it with own"),
        (["--medusa", "H", "--output", "O", "--format", "vllm", "--dtype", "int4"], "dtype: expected one of float32"),
        (["--heads", "x", "--output", "O", "--format", "vllm"], "drafter: expected a directory, a hub id or one of"),
        (["--drafter", "lookahead", "--format", "own"], "can be exported, found look-ahead: it has no files"),
        (["--drafter", "run_ahead:D", "--format", "vllm"], "found draft that runs ahead: no other tool reads"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line_and_2(capsys, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, err = ran(capsys, *flags, code=2)
    assert err.startswith("error: ") and message in err
    assert not list(tmp_path.iterdir())


def test_heads_that_do_not_fit(heads_dir, pair_dirs, tmp_path, tokenizer, capsys):
    flags = ["--heads", heads_dir, "--format", "vllm", "--output", tmp_path / "out"]
    save_model(tiny_llama(1, len(tokenizer), hidden=16), tokenizer, tmp_path / "small")
    _, err = ran(capsys, *flags, "--target", tmp_path / "small", code=2)
    assert "hidden_size 16, found 32" in err
    _, err = ran(capsys, *flags, "--target", "nowhere/else/x", code=2)
    assert err.startswith("error: target: expected a model directory or a hub id, found nothing at nowhere/else/x")
    _, err = ran(capsys, *flags, "--draft_length", K + 1, code=2)
    assert f"draft_length: expected at most the {K} heads, found 4" in err
    _, err = ran(capsys, *flags[:-1], heads_dir, code=2)
    assert "output: expected a new or empty directory" in err
    _, err = ran(capsys, "--medusa", pair_dirs[0], *flags[2:], code=2)
    assert err.startswith(f"error: {pair_dirs[0]}")
    assert not (tmp_path / "out").exists()


def test_a_draft_that_drafts_in_one_forward_is_served_so(pair_dirs, tmp_path, capsys):
    target, draft = pair_dirs
    shutil.copytree(draft, tmp_path / "parallel")
    path = tmp_path / "parallel" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": 1, "parallel_length": 6}))
    flags = ["--draft", tmp_path / "parallel", "--target", target]
    speculative = {"method": "draft_model", "model": str(tmp_path / "parallel"), "parallel_drafting": True}
    for more, length in (([], 6), (["--draft_length", 3], 3)):
        lines, _ = ran(capsys, *flags, "--format", "vllm", *more)
        assert json.loads(shlex.split(lines[-1])[-1]) == speculative | {"num_speculative_tokens": length}
        assert lines[1].startswith("# it drafts all tokens in one forward")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parallel_tree": [[0], [1], [0, 0]]}))
    lines, _ = ran(capsys, *flags, "--format", "vllm")
    assert "# the tree of 3 tokens in its config.json is not for vLLM, which drafts chains" in lines
    assert json.loads(shlex.split(lines[-1])[-1]) == speculative | {"num_speculative_tokens": 6}
    lines, _ = ran(capsys, *flags, "--format", "sglang")
    assert "# SGLang's STANDALONE drafts a token a forward" in lines[-2] and "--speculative-num-steps 4 " in lines[-1]
    _, err = ran(capsys, *flags, "--format", "vllm", "--draft_length", 7, code=2)
    assert "draft_length: expected at most the 6 tokens that the draft was trained to propose, found 7" in err
