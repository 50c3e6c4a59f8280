"""Drafters in a real llama.cpp: its texts are plain decoding's, and it counts what replay says, to the integer."""

import inspect
import json
import re
from functools import cache

import pytest
import torch
from bpe import train_bpe
from engine import DRAFT, TARGET
from families import noisy, tiny_model
from gemma import gemma_tokenizer
from gguf import GGUFReader
from native_layers import qwen_names, save_with_mtp
from pipelines import mtp_configured, write_completions
from prepare_inputs import write_prompts
from trained_block import train_block
from trained_eagle import train_eagle
from transformers import GenerationConfig
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from draftsmith.decode.measurement.distribution_test import plain_texts
from draftsmith.decode.validation import parse_json
from draftsmith.medusa.block.initial import begin_as_last_layers
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.mtp.__main__ import train_heads
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.scripts import cli
from draftsmith.scripts.engines import export
from draftsmith.scripts.engines.offline.jobs import Job
from draftsmith.scripts.engines.offline.llama_cpp import EXACT, LlamaCpp
from draftsmith.train.data.corpus import encoded_prompts, stdlib_prompts
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPE = {"max_position_embeddings": 512, "num_hidden_layers": 4, "eos_token_id": 0, "initializer_range": 0.1}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(7)]
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
THREES = PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TARGETS = {
    "Qwen 3": ("qwen3", PRETOKENIZE_REGEX, {}),
    "Llama 3": ("llama", THREES, {"rope_parameters": SCALED | {"original_max_position_embeddings": 64}}),
    "Qwen 3.5": ("qwen3-5", PRETOKENIZE_REGEX, {"head_dim": 256, "layer_types": LINEAR, "initializer_range": 0.2}),
    "Gemma 3": ("gemma3", None, {"num_hidden_layers": 7, "layer_types": WINDOWS, "initializer_range": 0.3}),
}
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
def target(tmp_path_factory):
    """By name, the directory of a target: the embedded one, or a random one with its family's kind of tokenizer."""

    @cache
    def made(name: str):
        if name not in TARGETS:
            return TARGET
        family, words, options = TARGETS[name]
        tokenizer = train_bpe([inspect.getsource(inspect)], 600, words) if words else gemma_tokenizer()
        tokenizer.backend_tokenizer.model.ignore_merges = name == "Llama 3"
        model = tiny_model(family, vocab_size=len(tokenizer) - (words is None), **SHAPE | options)
        save_model(model, tokenizer, folder := tmp_path_factory.mktemp("target") / name)
        if family == "qwen3-5":
            save_with_mtp(model, MtpHeads.of_target(model), qwen_names, folder, mtp_num_hidden_layers=1)
        return folder

    return made


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    """By name and target, the directory of a drafter that learnt a little of the target's own text."""
    folder = tmp_path_factory.mktemp("drafters")

    @cache
    def of(name: str):
        model, tokenizer = load_model(target(name), dtype="float32", device="cpu"), load_tokenizer(target(name))
        model.generation_config = GenerationConfig(pad_token_id=0)
        prompts = [torch.tensor(ids) for ids in encoded_prompts(None, tokenizer, 8, 128 if name else 48)[:6]]
        return model, tokenizer, plain_texts(model, prompts, 6, max_new_tokens=64 if name else 40)

    @cache
    def made(name: str, whose: str = ""):
        if (name, whose) == ("draft", ""):
            return DRAFT
        (model, tokenizer, texts), output = of(whose), folder / f"{name} of {whose}"
        torch.manual_seed(0)
        shape = {"base_model_name_or_path": str(target(whose))} | (DRAFTERS.get(name) or {})
        frequent = torch.cat(texts).bincount(minlength=model.config.vocab_size).topk(400).indices.sort().values
        tokens = frequent if shape.pop("cut", False) else None
        if name == "draft":
            save_model(noisy(model), tokenizer, output)
        elif name == "MTP":
            labels = [[IGNORED] * (len(text) - 64) + text[-64:].tolist() for text in texts]
            samples = [{"id": str(n), "input_ids": ids.tolist(), "labels": labels[n]} for n, ids in enumerate(texts)]
            options = {"target": str(target(whose)), "completions": [write_completions(folder / "text", samples)]}
            options |= {"training": {"max_steps": 20, "per_device_train_batch_size": 6, "learning_rate": 6e-3}}
            train_heads(mtp_configured(folder, output, divergence="cross_entropy", **options))
            return f"mtp:{output}"
        elif name.startswith("EAGLE"):
            train_eagle(model, EagleHeads.of_target(model, tokens, **shape), texts, steps=30).save_pretrained(output)
        else:
            drafter = BlockDrafter.of_target(model, 1, token_map=tokens, **shape)
            begin_as_last_layers(drafter, model)
            train_block(model, drafter, texts).save_pretrained(output)
        return output

    return made


def exported(drafter, target, output, *more):
    argv = ["export", "--drafter", drafter, "--target", target, "--format", "gguf", "--output", output, *more]
    return cli.main([*map(str, argv), "--quantize", "f32"])


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
    with LlamaCpp.found().serve(job, more=EXACT) as client:
        url = str(client.base_url)
        assert cli.main(["certify", "--server", url, *map(str, argv), "--sampled-tokens", "2400"]) == code
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert found["greedy"]["identical"] is (code == 0) and found["sampled"][0]["passed"] is (code == 0)
    assert found["servers"]["server"]["counters"]["num_accepted_tokens"] > 0


def test_a_target_in_blocks_is_verified_as_the_file_that_llama_cpp_serves(gguf, tmp_path, capsys):
    assert exported(DRAFT, gguf["q8_0"], tmp_path / "d.gguf", "--verify", "llama.cpp") == 0
    out = capsys.readouterr().out
    assert f"llama-server -m {gguf['q8_0']} " in out and "draft-simple: 8 of 8 texts are its text without" in out
    assert "as replay says that llama.cpp counts" in out


CASES = [(name, "") for name in DRAFTERS]
CASES += [("MTP", "Qwen 3.5"), ("draft", "Qwen 3"), ("EAGLE-3", "Qwen 3"), ("DSpark", "Llama 3"), ("draft", "Gemma 3")]


@pytest.mark.parametrize(("name", "whose"), CASES)
def test_a_drafter_is_verified_by_the_command(name, whose, target, saved, tmp_path, capsys):
    drafter, _ = saved(name, whose), capsys.readouterr()
    assert exported(drafter, target(whose), tmp_path / "d.gguf", "--verify", "llama.cpp") == 0
    out = capsys.readouterr().out
    assert "# llama.cpp without a drafter: 8 of 8 texts are draftsmith's plain text\n" in out
    (line,) = (line for line in out.splitlines() if "tokens accepted" in line)
    assert name == "MTP" or line.endswith("as replay says that llama.cpp counts")
    first, second, *_ = [int(number) for number in line[line.index("[") + 1 : line.index("]")].split(", ")]
    assert first >= second > 0, "a drafter that guesses nothing proves nothing"


def test_measure_forecasts_what_drafters_bring_there(tmp_path):
    """By the clock of real servers: a round costs more than a token, and τ is replay's."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    argv = f"measure --target={TARGET} --drafter={DRAFT} --drafter=prompt_lookup:simple-2 --costs=llama.cpp".split()
    argv += ["--threads=1", "--max_new_tokens=24", "--draft_length=3"]
    argv += [f"--prompts={prompts}", f"--output={tmp_path / 'r'}"]
    assert cli.main([*argv, "--drafter=suffix"]) == 2  # llama.cpp has no such copies
    cli.main(argv)
    found = parse_json((tmp_path / "r" / "report.json").read_text())
    curves = {curve["proposer"]["name"]: curve["mean_acceptance_length"] for curve in found["curves"]}
    assert not found["runs"] and not found["failures"] and len(found["forecasts"]) == 2
    best = max(found["forecasts"], key=lambda one: one["speedup"]["value"])  # four prompts have no interval
    assert found["recommendation"]["reason"].endswith("too few prompts for an interval.")
    assert found["recommendation"]["proposer"] == best["proposer"]
    for one in found["forecasts"]:
        assert one["mean_acceptance_length"] == curves[one["proposer"]]["3"]
        assert one["round_seconds"] > one["plain_seconds"] / 2


@pytest.mark.parametrize("name", TARGETS)
def test_text_is_split_there_as_here(name, target, tmp_path):
    text = "I'LL pay 12345 €, isn't it?\n\n  Ça va — नमस्ते  x=[1,22];\r\n\tend "
    LlamaCpp.found().convert(str(target(name)), tmp_path / "t.gguf", "f32", None)
    with LlamaCpp.found().serve(Job(str(tmp_path / "t.gguf"), [])) as client:
        found = client.post("/tokenize", json={"content": text}).json()["tokens"]
        assert found == load_tokenizer(target(name)).encode(text, add_special_tokens=False)


# By name: the drafter, the tensor or field of its file, and what becomes of its values.
FAULTS = {
    "layers": ("EAGLE-3", "eagle3.target_layers", lambda layer: layer - 1),
    "a norm that adds 1": ("EAGLE-3", "blk.0.attn_norm_2.weight", lambda gain: gain - 1),
    "token map": ("EAGLE-3, cut, other norms", "d2t", lambda tokens: tokens[::-1].copy()),
    "rotation": ("DSpark", "rope_freqs.weight", lambda factors: 1),
    "mask": ("DSpark", "tokenizer.ggml.mask_token_id", lambda token: token - 1),
    "tokenizer": ("draft", "tokenizer.ggml.tokens", lambda word: word[::-1].copy() if bytes(word).isalpha() else word),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_file_is_named(name, target, saved, tmp_path, capsys, monkeypatch):
    (drafter, where, change), write = FAULTS[name], export.export

    def faulty(config, files):
        lines, reader = write(config, files), GGUFReader(config.output, "r+")
        parts = [field.parts[i] for field in reader.fields.values() if field.name == where for i in field.data]
        for values in parts + [tensor.data for tensor in reader.tensors if tensor.name == where]:
            values[:] = change(values)
        return lines

    monkeypatch.setattr(export, "export", faulty)
    assert exported(saved(drafter, "Llama 3"), target("Llama 3"), tmp_path / "d.gguf", "--verify", "llama.cpp") == 1
    assert re.search(r"^error: verify: expected llama.cpp with .* to count", capsys.readouterr().err, re.MULTILINE)
