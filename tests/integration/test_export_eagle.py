"""`draftsmith export` with EAGLE-3 heads: what is written and told, launch lines, exit codes."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import cli
from draftsmith.train.models import load_model


def ran(capsys, *argv: object, code: int = 0) -> tuple[list[str], str]:
    assert cli.main(["export", *map(str, argv)]) == code
    out, err = capsys.readouterr()
    return out.splitlines(), err


@pytest.fixture
def heads_dir(pair_dirs, tmp_path) -> Path:
    torch.manual_seed(0)
    heads = EagleHeads.of_target(load_model(pair_dirs[0], dtype="float32", device="cpu"), layer_ids=[1, 2])
    heads.save_pretrained(tmp_path / "heads")
    (tmp_path / "heads" / "README.md").write_text("their card")
    return tmp_path / "heads"


def test_heads_for_servers_and_the_way_back(heads_dir, pair_dirs, tmp_path, capsys):
    target, out = pair_dirs[0], tmp_path / "my out"
    lines, _ = ran(capsys, "--heads", heads_dir, "--format", "vllm", "--output", out, "--dtype", "bfloat16", "--target",
                   target, "--draft_length", 3)  # fmt: skip
    *words, flag, config = shlex.split(lines[-1])
    assert [*words, flag] == ["vllm", "serve", str(target), "--speculative-config"]
    assert json.loads(config) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert all(line.startswith("# ") for line in lines[:-1]) and (out / "README.md").read_text() == "their card"
    written = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}

    shallow = EagleHeads.from_pretrained(heads_dir)
    shallow.config.norm_before_residual = True
    shallow.save_pretrained(tmp_path / "other")
    flags = ["--format", "sglang", "--output", tmp_path / "s"]
    _, err = ran(capsys, "--heads", tmp_path / "other", *flags, code=2)
    assert "expected heads that sglang can hold, found norm_before_residual; take vllm" in err and err.count("\n") == 1
    lines, _ = ran(capsys, "--heads", heads_dir, *flags)
    assert lines[-1].startswith("python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 ")
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in lines[-1]

    lines, _ = ran(capsys, "--import_from", tmp_path / "s", "--output", tmp_path / "back", "--target", target)
    assert lines[-1] == "# EAGLE-3 heads on the target's features after layers 1, 2"
    back, given = EagleHeads.from_pretrained(tmp_path / "back"), EagleHeads.from_pretrained(heads_dir)
    torch.testing.assert_close(back.state_dict(), given.state_dict(), rtol=0, atol=0)
    assert back.config.base_model_name_or_path == str(target)


def test_bad_input_is_one_line(heads_dir, tmp_path, capsys):
    weights = heads_dir / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if k != "fc.weight"}, weights, metadata={"format": "pt"})
    for flags, message in (
        (
            ["--heads", heads_dir, "--format", "own", "--draft_length", 2],
            "draft_length: expected it with vllm or sglang",
        ),
        (["--heads", heads_dir, "--format", "vllm"], "found 1 missing: fc.weight"),
        (["--import_from", heads_dir], "found 1 missing: fc.weight"),
    ):
        _, err = ran(capsys, "--output", tmp_path / "out", *flags, code=2)
        assert message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
