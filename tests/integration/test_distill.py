"""Distillation in one process: what is learned, on which positions, and whether it can be trusted to resume."""

import functools
import importlib.util
import json
import re
import shutil
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from bpe import train_bpe
from conftest import tiny_llama
from huggingface_hub import ModelCard
from pipelines import configured, furthest, history, measured_on_what_it_learns, weights
from safetensors.torch import load_file
from training_steps import error_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.decode.clock import speed
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import reporting
from draftsmith.decode.replay.rounds import expected_rounds
from draftsmith.distill import __main__ as command
from draftsmith.distill.__main__ import authors
from draftsmith.distill.carving import CHOICE, Carving
from draftsmith.distill.config import DraftInit
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.data.examples import CompletionCollator, training_examples
from draftsmith.train.data.first_look import SCALES
from draftsmith.train.job.telemetry import PHASES
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_config, stored_dtype
from draftsmith.train.runs import save_model


@pytest.fixture(scope="module")
def trained(pipeline, tmp_path_factory):
    """Four steps with held-out measurement, and what the trainer knows after them."""
    output = tmp_path_factory.mktemp("trained") / "draft"
    training = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    training["per_device_eval_batch_size"] = 2  # 2 + 2 + 1: an incomplete last batch
    options = {"temperature": 0.8, "draft_length": 3, "heldout": [str(pipeline / "heldout")]}
    return command.distill(configured(pipeline, output, training=training, **options)), output


def test_a_resumed_run_keeps_the_layers_that_were_chosen_and_looks_no_second_time(pipeline, tmp_path, capsys):
    for steps, looks in ((1, True), (2, False)):
        training = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        config = configured(pipeline, tmp_path, draft=None, init=DraftInit(layers=1), training=training)
        trainer = command.distill(config)
        assert ("init: layers" in capsys.readouterr().err) == looks
    assert trainer.state.global_step == 2
    assert Carving.read(tmp_path / CHOICE) in (Carving([layer], scale) for layer in (0, 1) for scale in SCALES)


@pytest.mark.parametrize("divergence", ["forward_kl", "tvd", "cross_entropy", {"tvd": 1.0, "forward_kl": 0.1}], ids=str)
def test_a_divergence_is_learned(pipeline, tmp_path, divergence):
    data = [str(pipeline / "short"), str(pipeline / "long")]
    training = {"max_steps": 40, "eval_on_start": True, "logging_steps": 40}
    config = configured(pipeline, tmp_path / "out", divergence=divergence, heldout=data, training=training)
    with measured_on_what_it_learns():
        trainer = command.distill(config)
    (before, after), alpha = history(trainer, "eval_loss"), history(trainer, "eval_alpha")
    assert after < 0.9 * before
    if divergence != "cross_entropy":
        assert alpha[1] > alpha[0] + 0.05
        lengths = history(trainer, "eval_mean_acceptance_length")
        assert 1 <= lengths[0] < lengths[1]
    if divergence == "tvd":
        assert [before, after] == pytest.approx([1 - a for a in alpha], abs=1e-5)


def collated(pipeline: Path, trainer: DistillTrainer) -> tuple[list[dict], dict[str, torch.Tensor]]:
    samples = list(training_examples([str(pipeline / "short"), str(pipeline / "heldout")]))[6:12]
    return samples, CompletionCollator(trainer.processing_class)(samples)


def forwards(trainer: DistillTrainer, sample: dict) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A sample's logits, each model alone and unpadded, and where its completion begins."""
    ids = torch.tensor([sample["input_ids"]])
    start = sum(label == -100 for label in sample["labels"])
    assert sample["labels"][start:] == sample["input_ids"][start:]
    with torch.no_grad():
        return trainer.target(ids).logits[0], trainer.model.eval()(ids).logits[0], start


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy"])
def test_the_loss_is_that_of_the_completion_tokens(pipeline, trained, monkeypatch, name):
    """Trap 17: position t − 1 predicts token t; the first counted token is the completion's first."""
    trainer, _ = trained
    monkeypatch.setattr(trainer, "objective", Objective({name: 1.0}, temperature=0.8))
    samples, batch = collated(pipeline, trainer)
    terms = []
    for sample in samples:
        p, q, start = forwards(trainer, sample)
        for t in range(start, len(sample["input_ids"])):
            log_p, log_q = (x[t - 1].div(0.8).log_softmax(-1) for x in (p, q))
            if name == "forward_kl":
                terms.append(float((log_p.exp() * (log_p - log_q)).sum()))
            else:
                terms.append(-float(q[t - 1].log_softmax(-1)[sample["input_ids"][t]]))
    with torch.no_grad():
        alone = trainer.compute_loss(trainer.model, batch).item()
        part = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(100)).item()
    # float32, and other shapes of the same forward.
    assert alone == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert part == pytest.approx(sum(terms) / 100, rel=1e-5)


def test_prompts_and_padding_carry_no_loss(pipeline, trained):
    trainer, _ = trained
    samples, batch = collated(pipeline, trainer)
    hidden = []
    hook = trainer.model.model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    loss = trainer.compute_loss(trainer.model.eval(), batch)
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, hidden)
    carries = torch.zeros(gradient.shape[:2], dtype=torch.bool)
    for row, sample in enumerate(samples):
        start = sum(label == -100 for label in sample["labels"])
        carries[row, start - 1 : len(sample["input_ids"]) - 1] = True
    assert torch.equal(gradient.abs().sum(-1) > 0, carries)
    sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
    padding = torch.arange(batch["input_ids"].shape[1]) >= sizes[:, None]
    assert padding.any()
    batch["input_ids"] = torch.where(padding, 7, batch["input_ids"])
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(loss.item(), rel=1e-6)


def test_the_split_of_a_batch_changes_nothing(pipeline, tmp_path, monkeypatch):
    """4 × 1 and 2 × 2: the mean is over the tokens of the whole batch, and completions differ in length."""
    parts = []
    real = DistillTrainer.compute_loss

    def spy(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        count = int((inputs["labels"] != -100).sum())
        loss = real(self, model, inputs, return_outputs, num_items_in_batch)
        parts.append((loss.item() * float(num_items_in_batch), count, int(num_items_in_batch)))
        return loss

    whole = command.distill(configured(pipeline, tmp_path / "whole", training={"max_steps": 8}))
    monkeypatch.setattr(DistillTrainer, "compute_loss", spy)
    training = {"max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    split = command.distill(configured(pipeline, tmp_path / "split", training=training))
    # Eight steps of float32 in which the sums of a batch are taken in two parts.
    assert history(split, "loss") == pytest.approx(history(whole, "loss"), rel=1e-5)
    assert history(split, "grad_norm") == pytest.approx(history(whole, "grad_norm"), rel=1e-4)
    assert furthest(weights(tmp_path / "whole"), weights(tmp_path / "split")) < 1e-5

    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    assert len(pairs) == 8 and all(a[1] + b[1] == a[2] == b[2] for a, b in pairs)
    over_tokens = [(a[0] + b[0]) / (a[1] + b[1]) for a, b in pairs]
    mean_of_means = [(a[0] / a[1] + b[0] / b[1]) / 2 for a, b in pairs]
    assert history(split, "loss") == pytest.approx(over_tokens, rel=1e-5)
    # The data can tell: averaging the two halves' means would have been off by far more than that.
    assert max(abs(m - t) / t for m, t in zip(mean_of_means, over_tokens, strict=True)) > 1e-2


def test_the_result_is_an_ordinary_directory(trained, tokenizer):
    trainer, output = trained
    model, own = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert own.get_vocab() == tokenizer.get_vocab()
    ids = own(["def f(x):"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, trainer.model.eval()(ids).logits)
    assert model.config.num_hidden_layers == 1 and model.config.use_cache
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert (output / "model.safetensors").is_file()
    assert not list(output.glob("pytorch_model*"))
    record = json.loads((output / "draftsmith.json").read_text())
    assert record["config"]["divergence"] == "forward_kl" and record["config"]["temperature"] == 0.8
    assert record["config"]["training"]["max_steps"] == 4
    assert record["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.bfloat16), ({"save_dtype": "float32"}, torch.float32)])
def test_a_draft_is_saved_in_the_dtype_that_it_came_in(pipeline, tmp_path, tokenizer, options, dtype):
    """A tied one, whose head is in the file once; what trains, and checkpoints, are float32."""
    start = tiny_llama(1, len(tokenizer), layers=1, tie_word_embeddings=True).bfloat16()
    save_model(start, tokenizer, tmp_path / "start")
    training = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    options = {"draft": str(tmp_path / "start"), "training": training, **options}
    trainer = command.distill(configured(pipeline, tmp_path / "out", **options))
    saved, kept = (
        load_file(tmp_path / "out" / name) for name in ("model.safetensors", "checkpoint-2/model.safetensors")
    )
    assert saved.keys() == kept.keys() and "lm_head.weight" not in saved
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    trained = trainer.model.state_dict()
    assert all(torch.equal(tensor, trained[name].to(dtype)) for name, tensor in saved.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype
    assert stored_dtype(load_config(tmp_path / "out")) == str(dtype).removeprefix("torch.")


def test_the_card_says_what_the_draft_is_and_what_it_accepts(pipeline, trained):
    trainer, output = trained
    text = (output / "README.md").read_text()
    card = ModelCard(text)  # its head is valid YAML of the hub's
    assert card.data.library_name == "transformers" and card.data.base_model is None  # a path is no name there
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))
    parameters = sum(tensor.numel() for tensor in load_file(output / "model.safetensors").values())
    assert rows["Parameters"] == f"{parameters:,}, float32"
    assert rows["Data"] == "20 completions of `short`, `long`: written by the target"
    assert rows["Training"] == f"{trainer.state.max_steps} steps of 4 samples"
    last = history(trainer, "eval_mean_acceptance_length")[-1]
    assert rows[f"Tokens a round (τ), {trainer.config.draft_length} drafted"] == f"{last:.2f}"
    assert rows["α, drafts drawn from the draft"] == f"{100 * history(trainer, 'eval_alpha')[-1]:.1f}%"
    assert "vllm serve" in text and "--speculative-algorithm STANDALONE" in text


def test_the_card_says_who_wrote_what_it_learned_from(pipeline, tmp_path):
    given = shutil.copytree(pipeline / "short", tmp_path / "given")
    manifest = json.loads((given / "manifest.json").read_text())
    assert manifest["source"]["answers"] == "target"
    (given / "manifest.json").write_text(json.dumps(manifest | {"source": {"answers": "given"}}))
    other = shutil.copytree(pipeline / "short", tmp_path / "other")
    written = manifest["target"] | {"path": "another", "config.json": "0"}
    (other / "manifest.json").write_text(json.dumps(manifest | {"target": written}))

    def told(*paths):
        return authors(configured(pipeline, tmp_path / "out", completions=[str(path) for path in paths]))

    assert told(given) == "answers that were given"
    assert told(pipeline / "short", pipeline / "long", given) == "written by the target, answers that were given"
    assert told(other) == "written by `another`"


@pytest.mark.parametrize(
    "options", [{}, {"on_policy": 1.0, "on_policy_tokens": 4}, {"packing": True, "max_length": 64}]
)
def test_a_log_line_says_how_fast_and_where_the_time_goes(pipeline, tmp_path, capsys, monkeypatch, options):
    seconds = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # a second from one look to the next
    training = {"max_steps": 3, "logging_steps": 2, "disable_tqdm": False, "gradient_accumulation_steps": 2}
    training |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options = options | {"heldout": [str(pipeline / "heldout")]}
    with reporting(every=0, bars=False):
        trainer = command.distill(configured(pipeline, tmp_path, training=training, **options))
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(lines) == 1
    shares = {name: value for name, value in lines[0].items() if name.startswith("time_")}
    assert shares.keys() == {f"time_{name}" for name in (*PHASES, "rest")}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(shares[f"time_{name}"] > 0 for name in ("teacher", "draft", "loss", "data"))
    assert lines[0]["hours_left"] > 0 and "mfu" not in lines[0]  # the peak of this device is not known
    samples, tokens = lines[0]["samples_per_second"], lines[0]["tokens_per_second"]
    if not options.get("on_policy"):
        rows = trainer.train_dataset
        learned = [sum(label != IGNORED for label in row["labels"][1:]) for row in rows]
        assert min(learned) <= tokens / samples <= max(learned)
    out, err = capsys.readouterr()
    assert "'loss': '" in out and "'eval_loss': '" in out
    assert "train: 1 of 3 steps" in err and "evaluate: 1 of " in err
    assert f"train: 3 of 3 steps, {speed(tokens)} tokens/s: " in err and "\r" not in err  # no bars in a log


def test_held_out_metrics_are_those_computed_by_hand(pipeline, trained):
    trainer, _ = trained
    temperature, overlap, greedy, agree, rounds, loss, tokens = 0.8, 0.0, 0.0, 0, 0.0, 0.0, 0
    for sample in training_examples([str(pipeline / "heldout")]):
        p_logits, q_logits, start = forwards(trainer, sample)
        a = []
        for t in range(start, len(sample["input_ids"])):
            p, q = (x[t - 1].double().div(temperature).softmax(-1) for x in (p_logits, q_logits))
            token = sample["input_ids"][t]
            a.append(min(1.0, float(q[token] / p[token])))
            overlap += float(torch.minimum(p, q).sum())
            agree += int(p.argmax() == q.argmax())
            greedy += float(p[q.argmax()])
            loss += float((p * (p / q).log()).sum())
        tokens += len(a)
        rounds += float(expected_rounds(torch.tensor([a], dtype=torch.float64), torch.tensor([len(a)]), 3))
    measured = [entry for entry in trainer.state.log_history if "eval_alpha" in entry]
    assert [entry["step"] for entry in measured] == [2, 4]
    last = measured[-1]
    # float32 against float64, over some forty tokens.
    assert last["eval_alpha"] == pytest.approx(overlap / tokens, rel=1e-5)
    assert last["eval_greedy_alpha"] == pytest.approx(greedy / tokens, rel=1e-5)
    assert last["eval_agreement"] == pytest.approx(agree / tokens)
    assert last["eval_mean_acceptance_length"] == pytest.approx(tokens / rounds, rel=1e-5)
    assert last["eval_loss"] == pytest.approx(loss / tokens, rel=1e-5)


def test_padded_heads_are_cut_to_the_tokens(pipeline, tmp_path, tokenizer):
    """Trap 10: entries that are no token have no law, in training as in measuring, whatever their logits."""
    for name, seed, rows, layers in (("target", 0, 13, 2), ("draft", 1, 20, 1)):
        model = tiny_llama(seed, len(tokenizer) + rows, layers=layers)
        loud = model.lm_head.weight[len(tokenizer) :] * 50  # would draw nearly all of the mass
        own = weights(pipeline / name)
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            own[key] = torch.cat([own[key], loud])
        model.load_state_dict(own)
        save_model(model, tokenizer, tmp_path / name)
    training = {"max_steps": 3, "eval_on_start": True}
    plain, padded = (
        command.distill(
            configured(
                pipeline, output, target=str(pair / "target"), draft=str(pair / "draft"), training=training,
                heldout=[str(pipeline / "heldout")],
            )
        )
        for pair, output in ((pipeline, tmp_path / "plain"), (tmp_path, tmp_path / "padded"))
    )  # fmt: skip
    for key in ("loss", "eval_loss", "eval_alpha", "eval_agreement"):
        assert history(padded, key) == pytest.approx(history(plain, key), rel=1e-5)
    found = weights(tmp_path / "padded")["lm_head.weight"]
    padding = found[len(tokenizer) :]
    assert len(padding) == 13  # as wide as the target's, and no padding speaks up any longer
    assert (padding == padding[0]).all() and padding[0].norm() < 0.2 * loud.norm(dim=1).min()
    assert furthest({"head": found[: len(tokenizer)]}, {"head": weights(tmp_path / "plain")["lm_head.weight"]}) < 1e-5


fails = functools.partial(error_line, command.main)


def test_the_command_refuses_bad_input_in_one_line(pipeline, tmp_path, tokenizer, capsys):
    flags = ["--target", str(pipeline / "target"), "--draft", str(pipeline / "draft"), "--training.report_to", "none"]
    flags += ["--completions", f"[{pipeline / 'short'}]", "--training.output_dir", str(tmp_path / "out")]
    flags += ["--training.max_steps", "1", "--training.use_cpu", "true"]
    gone, elsewhere, part = (tmp_path / name for name in ("gone", "elsewhere", "part"))
    save_model(tiny_llama(9, len(tokenizer)), tokenizer, elsewhere)
    manifest = json.loads((shutil.copytree(pipeline / "short", part) / "manifest.json").read_text())
    count = manifest["shards"] + 1
    (part / "manifest.json").write_text(json.dumps(manifest | {"shards": count}))
    for name, value, message in (
        ("divergance", "tvd", "divergance"),
        ("temperature", "0", "temperature: expected more than 0, found 0.0"),
        ("max_length", "0", "max_length: expected at least 2, found 0"),
        ("target", gone, f"target: expected a model directory or a hub id, found nothing at {gone}"),
        ("completions", f"[{gone}]", f"{gone}: expected a directory of completions, found none"),
        ("target", elsewhere, f"{pipeline / 'short'}: expected completions that {elsewhere} wrote, found those of"),
        ("completions", f"[{part}]", f"{part}: expected all {count} shards, found"),
        ("heldout", f"[{pipeline / 'short'}]", "heldout: expected prompts that are not learned from, found 10 of 10"),
    ):
        assert message in fails(capsys, [*flags, f"--{name}", str(value)])
    other = train_bpe(["zebra quagga okapi giraffe", "wildebeest hartebeest " * 3, "the quick brown fox"], 300)
    assert len(other) == len(tokenizer)
    save_model(tiny_llama(1, 300, layers=1), other, tmp_path / "stranger")
    message = fails(capsys, [*flags, "--draft", str(tmp_path / "stranger")])
    assert "expected the tokenizer of target" in message and "tokens that differ" in message
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_quantised_target_needs_its_library(pipeline, tmp_path):
    with pytest.raises(InputError, match="target_quantization: expected one of 8bit, 4bit, found '2bit'"):
        configured(pipeline, tmp_path / "out", target_quantization="2bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(InputError, match=r"target: expected a causal LM in .* for bitsandbytes in 4bit"):
            command.distill(configured(pipeline, tmp_path / "out", target_quantization="4bit"))


@pytest.mark.parametrize("packing", [False, True])
def test_prompts_may_be_learned_from_too(pipeline, tmp_path, packing):
    """The first step's loss is the mean KL over all positions of its texts but the first of each."""
    options = {"packing": packing, "max_length": 64, "training": {"max_steps": 1, "per_device_train_batch_size": 20}}
    trainer = command.distill(configured(pipeline, tmp_path / "out", prompt_loss=True, **options))
    draft, total, count = AutoModelForCausalLM.from_pretrained(pipeline / "draft"), 0.0, 0
    for sample in training_examples([str(pipeline / "short"), str(pipeline / "long")]):
        ids = sample["input_ids"]
        with torch.no_grad():
            log_p, log_q = (m(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for m in (trainer.target, draft))
        total += float((log_p.exp() * (log_p - log_q)).sum())
        count += len(ids) - 1
    assert history(trainer, "loss")[0] == pytest.approx(total / count, rel=1e-5)


def test_prompts_are_not_learned_by_heart(pipeline, tmp_path):
    with pytest.raises(InputError, match="prompt_loss: expected false with cross_entropy alone"):
        configured(pipeline, tmp_path / "out", prompt_loss=True, divergence="cross_entropy")
