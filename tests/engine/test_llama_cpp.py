"""Drafters in a real llama.cpp: its texts are plain decoding's, and it counts what replay says, to the integer."""

import json

import pytest
import torch
from engine import DRAFT, TARGET
from prepare_inputs import write_prompts
from trained_block import train_block
from trained_eagle import train_eagle
from transformers import GenerationConfig

from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.decode.validation import parse_json
from draftsmith.medusa.block.initial import begin_as_last_layers
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import cli
from draftsmith.scripts.engines.offline.jobs import Job
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp
from draftsmith.train.data.corpus import encoded_prompts, stdlib_prompts
from draftsmith.train.models import load_model, load_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DRAFTERS = {
    "draft": None,
    "EAGLE-3": {},
    "EAGLE-3, cut, other norms": {"norm_before_residual": True, "norm_before_fc": True, "cut": True},
    "DFlash": {"block_size": 4, "anchor_guesses": False},
    "DFlash 2": dict(block_size=4, anchor_guesses=False, selector_rank=8, selector_top_k=8, conv_kernel_size=3),
    "DSpark": {"block_size": 4, "anchor_guesses": True, "markov_rank": 8},
    "DSpark, cut": {"block_size": 4, "anchor_guesses": False, "markov_rank": 8, "cut": True},
}


@pytest.fixture(scope="module")
def target():
    model = load_model(TARGET, dtype="float32", device="cpu")
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    """By name, the directory of a drafter that learnt a little of the target's own text."""
    prompts = encoded_prompts(None, load_tokenizer(TARGET), 8, 48)
    texts = plain_texts(target, [torch.tensor(ids) for ids in prompts[:6]], 6, max_new_tokens=40)
    frequent = torch.cat(texts).bincount(minlength=target.config.vocab_size).topk(400).indices.sort().values
    folder = tmp_path_factory.mktemp("drafters")

    def made(name: str):
        shape = DRAFTERS[name]
        if shape is None:
            return DRAFT
        torch.manual_seed(0)
        shape = {"base_model_name_or_path": str(TARGET)} | shape
        tokens = frequent if shape.pop("cut", False) else None
        if name.startswith("EAGLE"):
            heads = train_eagle(target, EagleHeads.of_target(target, tokens, **shape), texts, steps=30)
        else:
            drafter = BlockDrafter.of_target(target, 1, token_map=tokens, **shape)
            begin_as_last_layers(drafter, target)
            heads = train_block(target, drafter, texts)
        heads.save_pretrained(folder / name)
        return folder / name

    return made


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """The embedded target in floats and in blocks of 8 bits, and the embedded draft, also as a target."""
    made = {}
    for name, quantize in (("f32", "f32"), ("q8_0", "q8_0"), ("draft", "f32"), ("other", "f32")):
        source = DRAFT if name in ("draft", "other") else TARGET
        made[name] = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        LlamaCpp.found().convert(str(source), made[name], quantize, None)
    return made


@pytest.mark.parametrize(("served", "code"), [("f32", 0), ("other", 3)], ids=["its own", "another"])
def test_a_server_of_the_target_is_certified_and_one_of_another_is_not(gguf, served, code, tmp_path, capsys):
    speculative = {"method": "draft-simple", "model": str(gguf["draft"]), "num_speculative_tokens": 3}
    job = Job(str(gguf[served]), [[0]], speculative=speculative, max_tokens=16, max_model_len=256, max_num_seqs=4)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in stdlib_prompts(8, heldout=True, seed=3)))
    argv = ["--target", TARGET, "--drafter", DRAFT, "--prompts", prompts, "--output", tmp_path / "out"]
    argv += ["--temperature", "0,1", "--max-new-tokens", 16, "--config", "{max_prompt_tokens: 40}"]
    with LlamaCpp.found().serve(job) as client:
        url = str(client.base_url)
        assert cli.main(["certify", "--server", url, *map(str, argv), "--sampled-tokens", "2400"]) == code
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["greedy"]["identical"] is (code == 0) and found["sampled"][0]["passed"] is (code == 0)
    assert found["servers"]["server"]["counters"]["num_accepted_tokens"] > 0


def test_a_target_in_blocks_is_verified_as_the_file_that_llama_cpp_serves(gguf, tmp_path, capsys):
    assert export(DRAFT, tmp_path / "d.gguf", target=gguf["q8_0"]) == 0
    out = capsys.readouterr().out
    assert f"llama-server -m {gguf['q8_0']} " in out and "draft-simple: 8 of 8 texts are its text without" in out
    assert "as replay says that llama.cpp counts" in out


def export(drafter, output, *more, target=TARGET):
    argv = ["export", "--drafter", drafter, "--target", target, "--format", "gguf", "--output", output, *more]
    return cli.main([*map(str, argv), "--quantize", "f32", "--verify", "llama.cpp"])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_verified_by_the_command(name, saved, tmp_path, capsys):
    code = export(saved(name), tmp_path / "d.gguf")
    out, err = capsys.readouterr()
    assert err == ""
    assert code == 0
    assert "# llama.cpp without a drafter: 8 of 8 texts are draftsmith's plain text\n" in out
    (line,) = (line for line in out.splitlines() if "tokens accepted" in line)
    assert line.endswith("as replay says that llama.cpp counts")
    first, second, *_ = [int(number) for number in line[line.index("[") + 1 : line.index("]")].split(", ")]
    assert first > second > 0, "a drafter that guesses nothing proves nothing"


def test_measure_forecasts_what_drafters_bring_there(tmp_path):
    """By the clock of real servers: a round costs more than a token, and τ is replay's."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    config = (
        f"{{prompts: {prompts}, lossless_tokens: 0, replay_limit: 4, limit: 2, max_new_tokens: 24, draft_length: 3}}"
    )
    argv = [
        "measure",
        "--target",
        str(TARGET),
        "--drafter",
        str(DRAFT),
        "--drafter",
        "prompt_lookup",
        "--config",
        config,
    ]
    argv += ["--threads", "1", "--costs", "llama.cpp", "--compiled", "false", "--output", str(tmp_path / "r")]
    cli.main(argv)
    found = parse_json((tmp_path / "r" / "report.json").read_text())
    curves = {curve["proposer"]["name"]: curve["mean_acceptance_length"] for curve in found["curves"]}
    assert found["costs"] is None and not found["failures"] and len(found["forecasts"]) == 2
    for one in found["forecasts"]:
        assert one["mean_acceptance_length"] == curves[one["proposer"]]["3"]
        assert one["round_seconds"] > one["plain_seconds"] / 2
