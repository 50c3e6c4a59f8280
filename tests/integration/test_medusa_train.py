"""Training of Medusa heads in one process: what is learned, by which formula, and what is left on disk."""

import functools
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from pipelines import furthest, heads_configured, history, weights
from safetensors.torch import load_file
from torch import Tensor, nn
from training_steps import KillAfterSave, Killed, assert_same, batch_of, error_line, some_samples
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainerCallback

from draftsmith.decode.errors import InputError
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.heads import __main__ as command
from draftsmith.medusa.heads import trainer as module
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.trainer import MedusaTrainer
from draftsmith.train import launch
from draftsmith.train.cli import run
from draftsmith.train.data.examples import frequent_tokens, training_examples
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_model
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model
from draftsmith.train.trainer import RecipeTrainer

T = 0.8
"""The temperature of the runs whose numbers are computed by hand."""


@pytest.fixture
def untrained(monkeypatch):
    """Builds a trainer by the command and trains nothing: its heads' blocks, which begin as the identity, are noise."""
    monkeypatch.setattr(launch, "run_training", lambda *_: None)

    def build(config: MedusaTrainingConfig) -> MedusaTrainer:
        trainer = command.train_heads(config)
        heads = heads_of(trainer)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in heads.parameters():
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        return trainer

    return build


def heads_of(trainer: MedusaTrainer) -> MedusaHeads:
    return trainer.model.heads if trainer.config.joint else trainer.model


def eager(trainer: MedusaTrainer, samples: list[dict]) -> Tensor:
    """Σ_i λ_i Σ_t objective(p(· | x_{≤ t+1+i}), head_i(h_t)), each sample alone, whole vocabulary, float64."""
    config, heads = trainer.config, heads_of(trainer)
    terms = {config.divergence: 1.0} if isinstance(config.divergence, str) else config.divergence
    backbone = trainer.model.backbone if config.joint else trainer.target
    original = load_model(config.target, dtype=config.target_dtype, device="cpu")
    vocab = len(trainer.processing_class)
    kept = torch.arange(vocab) if heads.token_map is None else heads.token_map
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        labels = sample["input_ids"] if config.prompt_loss else sample["labels"]
        learned = {t for t, label in enumerate(labels) if label != IGNORED} - {0}
        hidden = backbone.model(ids).last_hidden_state[0]
        with torch.no_grad():
            p_logits = original(ids).logits[0].double()
        for i in range(config.num_heads):
            at = [t for t in range(ids.shape[1]) if learned >= set(range(t + 1, t + 3 + i))]
            if not at:
                continue
            seen = torch.stack([backbone.model.embed_tokens(ids[0, t + 1 : t + 2 + i]) for t in at]).detach()
            q_logits = heads.logits(i, hidden[at].float(), seen.float()).double()[:, kept]
            log_p = (p_logits[[t + 1 + i for t in at]][:, kept] / T).log_softmax(-1)
            log_q = (q_logits / T).log_softmax(-1)
            tokens = ids[0, [t + 2 + i for t in at]]
            found = torch.zeros(len(at), dtype=torch.float64)
            for name, weight in terms.items():
                if name == "forward_kl":
                    value = (log_p.exp() * (log_p - log_q)).sum(-1)
                elif name == "jsd":
                    log_m = (log_p.exp() / 2 + log_q.exp() / 2).log()
                    value = sum((a.exp() * (a - log_m)).sum(-1) for a in (log_p, log_q)) / 2
                elif name in ("lk_hybrid", "nla"):
                    alpha = torch.minimum(log_p, log_q).exp().sum(-1)
                    lam = (-config.eta * alpha.detach()).exp()
                    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
                    value = -alpha.log() if name == "nla" else lam * kl + (1 - lam) * (1 - alpha)
                else:
                    assert name == "cross_entropy"
                    hit = kept == tokens[:, None]
                    value = -(q_logits.log_softmax(-1) * hit).sum(-1)
                found = found + weight * value
            total = total + config.decay**i * found.sum()
    return total


def count(samples: list[dict]) -> int:
    return sum(label != IGNORED for sample in samples for label in sample["labels"][1:])


CASES = {
    "soft": {},
    "jsd": {"divergence": "jsd"},
    "hard": {"divergence": "cross_entropy"},
    "following acceptance": {"divergence": {"lk_hybrid": 1.0, "nla": 0.5}, "eta": 2.0},
    "shared": {"lm_heads": "shared", "num_layers": 2, "decay": 0.5},
    "truncated, mixture": {"draft_vocabulary": 20, "divergence": {"forward_kl": 1.0, "cross_entropy": 0.3}},
    "hydra, prompts too": {"prompt_loss": True, "hydra": True},
    "too short for the last heads": {"num_heads": 6, "completions": ["short"]},
    "half precision target": {"target_dtype": "bfloat16", "hydra": True},
    "padded target": {"target": "padded"},
    "padded target, hard": {"target": "padded", "divergence": "cross_entropy"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_its_formula(pipeline, tmp_path, padded, untrained, case):
    options = dict(CASES[case])
    if "target" in options:
        options["target"] = str(padded)
    if "completions" in options:
        options["completions"] = [str(pipeline / name) for name in options["completions"]]
    trainer = untrained(heads_configured(pipeline, tmp_path, temperature=T, **options))
    samples = list(training_examples([str(pipeline / "short")]))[:5] if "too short" in case else some_samples(pipeline)
    heads = heads_of(trainer)
    if heads.token_map is not None:
        outside = [x for sample in samples for x in sample["labels"] if x != IGNORED and x not in heads.token_map]
        assert outside or "soft" in case  # the hard labels' test can tell
    batch = batch_of(trainer, samples)
    # float32 forwards of rows that are padded and alone; bfloat16 rounds them in other places, and its laws with them.
    loss = trainer.compute_loss(heads, batch, num_items_in_batch=torch.tensor(100))
    expected = eager(trainer, samples) / 100
    if case == "half precision target":
        assert loss.item() == pytest.approx(expected.item(), rel=0.02)
        return
    assert_same(loss, expected, list(heads.parameters()))
    if not trainer.config.prompt_loss:
        alone = trainer.compute_loss(heads, batch)
        assert alone.item() == pytest.approx(expected.item() * 100 / count(samples), rel=1e-5)


@pytest.fixture(scope="module")
def padded(pipeline, tmp_path_factory, tokenizer) -> Path:
    """The target with 13 rows that are no token, and would draw nearly all of the mass."""
    root = tmp_path_factory.mktemp("padded") / "target"
    model, own = tiny_llama(0, len(tokenizer) + 13), weights(pipeline / "target")
    loud = model.lm_head.weight[len(tokenizer) :] * 50
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        own[key] = torch.cat([own[key], loud])
    model.load_state_dict(own)
    save_model(model, tokenizer, root)
    return root


def test_the_most_frequent_tokens_are_kept_and_none_that_no_text_holds(pipeline, caplog):
    data = training_examples([str(pipeline / "long")])
    tokens = [x for row in data for x in row["labels"] if x != IGNORED]
    ranked = sorted(set(tokens), key=lambda x: (-tokens.count(x), x))
    assert frequent_tokens(data, 9, 300).tolist() == sorted(ranked[:9])
    assert frequent_tokens(data, len(ranked), 300).tolist() == sorted(ranked)
    assert not caplog.records
    assert frequent_tokens(data, len(ranked) + 4, 300).tolist() == sorted(ranked)
    told = f"draft_vocabulary: the completions hold {len(ranked)} different tokens, which are drafted, not"
    assert f"{told} {len(ranked) + 4}" in caplog.text
    end = next(token for token in range(300) if token not in ranked)  # a token that ends texts, which none of these do
    assert frequent_tokens(data, len(ranked) + 4, 300, [end]).tolist() == sorted([*ranked, end])
    assert frequent_tokens(data, 9, 300, [end]).tolist() == sorted([*ranked[:8], end])
    with pytest.raises(InputError, match="draft_vocabulary: expected at most 300, found 301"):
        frequent_tokens(data, 301, 300)


# Medusa-2.


def moved(trainer: MedusaTrainer) -> None:
    """Move the backbone away from what it was."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.backbone.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.05


JOINT = {"lora": {"backbone": "lora", "lora": LoraOptions(r=4)}, "full": {"backbone": "full"}}


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("lora", {}),
        ("full", {}),
        ("full", {"divergence": "cross_entropy"}),
        ("lora", {"hydra": True}),
        ("full", {"divergence": "cross_entropy", "draft_vocabulary": 20}),
    ],
    ids=["lora", "full", "hard heads", "hydra", "hard heads, cut"],
)
def test_the_joint_loss_is_its_formula(pipeline, tmp_path, untrained, backbone, options):
    """The backbone's own + 0.2 · the heads', to the law before training; gradients flow into it from both."""
    options = options | JOINT[backbone] | {"temperature": T}
    trainer = untrained(heads_configured(pipeline, tmp_path, **options))
    moved(trainer)
    samples, joint, vocab = some_samples(pipeline), trainer.model, len(trainer.processing_class)
    original = load_model(pipeline / "target", dtype="float32", device="cpu")
    own = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([sample["input_ids"]])
        start = sum(label == IGNORED for label in sample["labels"])
        log_q, log_p = (m(ids).logits[0, start - 1 : -1].double().log_softmax(-1) for m in (joint.backbone, original))
        own = own + (log_p.exp() * (log_p - log_q)).sum()
    assert log_p.shape[1] == vocab
    expected = (own + 0.2 * eager(trainer, samples)) / 100
    loss = trainer.compute_loss(joint, batch_of(trainer, samples), num_items_in_batch=torch.tensor(100))
    parameters = [p for p in joint.parameters() if p.requires_grad]
    assert {len(p.shape) for p in parameters} >= {2} and len(parameters) > 6
    assert_same(loss, expected, parameters)


class Watching(TrainerCallback):
    """Keeps the backbone's weights after every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []

    def _keep(self, model) -> None:
        self.seen.append({name: tensor.clone() for name, tensor in model.backbone.state_dict().items()})

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._keep(model)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._keep(model)
        self.rates.append(sorted({group["lr"] for group in optimizer.param_groups}))


def watched(monkeypatch, *callbacks: TrainerCallback) -> None:
    monkeypatch.setattr(command.MedusaRun, "trainer_class", functools.partial(MedusaTrainer, callbacks=list(callbacks)))


@pytest.mark.parametrize("backbone", JOINT)
def test_joint_training_warms_up_and_leaves_two_models(pipeline, tmp_path, monkeypatch, backbone):
    watching, kls = Watching(), []
    watched(monkeypatch, watching)
    real = module.chunked_objective

    def spy(*args, **kwargs):
        total = real(*args, **kwargs)
        kls.append(total.detach())
        return total

    monkeypatch.setattr(module, "chunked_objective", spy)
    training = {"max_steps": 6, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    options = JOINT[backbone] | {"warmup_heads": 0.5, "head_learning_rate_multiplier": 5.0, "training": training}
    trainer = command.train_heads(heads_configured(pipeline, tmp_path / "out", **options))

    # Three steps of the heads alone; then the backbone's own loss too.
    seen = watching.seen
    assert all(furthest(later, seen[0]) == 0 for later in seen[1:4])
    assert all(furthest(later, before) > 1e-4 for before, later in pairwise(seen[3:]))
    assert len(kls) == 3
    first, second = kls[:2]
    assert first.abs().max() < 1e-6 < second.abs().max()  # what it was, and what it is after a step

    groups = trainer.optimizer.param_groups
    heads = {id(p) for p in trainer.model.heads.parameters()}
    of_heads = [{id(p) in heads for p in group["params"]} for group in groups]
    assert {True} in of_heads and {False} in of_heads and {True, False} not in of_heads
    everything = {id(p) for p in trainer.model.parameters() if p.requires_grad}
    assert {id(p) for group in groups for p in group["params"]} == everything
    assert all(high == pytest.approx(5 * low) for low, high in watching.rates[:-1])  # at the end both are 0
    assert watching.rates[0][0] == pytest.approx(3e-3 * 5 / 6)

    found = MedusaHeads.from_pretrained(tmp_path / "out")
    assert furthest(found.state_dict(), trainer.model.heads.state_dict()) == 0
    assert found.config.base_model_name_or_path == str(pipeline / "target")
    ids = torch.tensor([[5, 9, 2, 77, 8]])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "backbone", dtype="auto")
    assert plain.state_dict().keys() == weights(pipeline / "target").keys()
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "backbone").get_vocab()
    trained = trainer.model.backbone.eval()
    with torch.no_grad():
        assert (plain(ids).logits - trained(ids).logits).abs().max() < 1e-4
    found.check_fits(plain)
    assert plain.config.use_cache and plain.config.eos_token_id == trained.config.eos_token_id
    changed = furthest(weights(tmp_path / "out" / "backbone"), weights(pipeline / "target"))
    assert changed > 1e-4


@pytest.fixture(scope="module")
def family(pipeline, tmp_path_factory, tokenizer) -> Path:
    """A GPT-2: tied, Conv1D, with dropout."""
    torch.manual_seed(3)
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 512, "vocab_size": len(tokenizer)}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    root = tmp_path_factory.mktemp("family") / "target"
    save_model(GPT2LMHeadModel(GPT2Config(**small, **ends)), tokenizer, root)
    return root


@pytest.mark.parametrize("backbone", JOINT)
def test_the_law_before_training_has_no_dropout(pipeline, tmp_path, family, untrained, backbone):
    trainer = untrained(heads_configured(pipeline, tmp_path, target=str(family), **JOINT[backbone]))
    moved(trainer)
    joint = trainer.model.train()
    batch = {"input_ids": batch_of(trainer, some_samples(pipeline))["input_ids"]}
    original = load_model(family, dtype="float32", device="cpu")
    with torch.no_grad():
        expected = original.transformer(**batch).last_hidden_state
        assert (joint.original_hidden(batch) - expected).abs().max() < 1e-5
        assert not torch.equal(*(last_hidden(joint.backbone, **batch) for _ in range(2)))
    assert joint.backbone.training
    adapters = [p for name, p in joint.backbone.named_parameters() if "lora_" in name]
    assert all(p.requires_grad for p in adapters) and bool(adapters) == (backbone == "lora")
    assert torch.equal(joint.original_head().weight, original.lm_head.weight)


class Whole(nn.Linear):
    """Stands in for a layer of bitsandbytes: whole numbers and a scale a row, which the forward multiplies."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight * self.scale)


@pytest.fixture
def quantised(monkeypatch):
    """Has the command load a target whose largest maps are `Whole`."""

    def load(config, tokenizer):
        model = load_model(config.target, dtype="float32", device="cpu")
        for layer in model.model.layers:
            layer.mlp.up_proj = Whole(layer.mlp.up_proj)
        model.config.quantization_config = {"quant_method": "a stand-in"}
        return model

    monkeypatch.setattr(launch, "load_target", load)


def test_adapters_of_a_quantised_backbone_are_merged_into_what_it_was_read_from(pipeline, tmp_path, quantised):
    options = JOINT["lora"] | {"target_quantization": "8bit", "training": {"max_steps": 3, "save_steps": 2}}
    options["training"]["save_strategy"] = "steps"
    trainer = command.train_heads(heads_configured(pipeline, tmp_path, **options))
    kept = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(name.startswith("heads.") or "lora_" in name for name in kept)
    assert history(trainer, "loss")[2] < history(trainer, "loss")[0]
    found, stored = weights(tmp_path / "backbone"), weights(pipeline / "target")
    adapters = trainer.model.backbone.model.layers[0].mlp.up_proj
    delta = adapters.scaling["default"] * adapters.lora_B["default"].weight @ adapters.lora_A["default"].weight
    name = "model.layers.0.mlp.up_proj.weight"
    assert delta.abs().max() > 1e-4
    torch.testing.assert_close(found[name], stored[name] + delta)
    assert furthest({"": found["lm_head.weight"]}, {"": stored["lm_head.weight"]}) == 0
    assert "quantization_config" not in json.loads((tmp_path / "backbone" / "config.json").read_text())


def test_a_backbone_that_is_quantised_is_refused_where_it_cannot_be_trained(pipeline, tmp_path, quantised, monkeypatch):
    """Read from a quantised checkpoint, nothing is there to merge adapters into; and whole numbers are not sharded."""
    with pytest.raises(InputError, match="target: expected a checkpoint in floating point for a backbone in training"):
        command.train_heads(heads_configured(pipeline, tmp_path, **JOINT["lora"]))
    create = RecipeTrainer.create_accelerator_and_postprocess

    def sharded(trainer: RecipeTrainer) -> None:
        create(trainer)
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(RecipeTrainer, "create_accelerator_and_postprocess", sharded)
    with pytest.raises(InputError, match="target_quantization: expected none for a backbone that FSDP or DeepSpeed"):
        command.train_heads(heads_configured(pipeline, tmp_path, **JOINT["lora"], target_quantization="4bit"))


# What training leaves behind. Checkpoints, resuming and non-finite losses of the shared trainer: test_reliability.py.


def logged(trainer: MedusaTrainer) -> list[tuple]:
    names = ("loss", "grad_norm", "eval_loss", "eval_alpha", "eval_mean_acceptance_length")
    return [
        (entry["step"], name, entry[name]) for entry in trainer.state.log_history for name in names if name in entry
    ]


def trained_weights(directory: Path) -> dict[str, Tensor]:
    heads = load_file(directory / "model.safetensors")
    return heads | {f"backbone.{name}": value for name, value in weights(directory / "backbone").items()}


def test_interrupted_joint_training_goes_on_as_if_it_had_not_been(pipeline, family, tmp_path, monkeypatch):
    """To the bit, right after a checkpoint in the second epoch; the backbone has dropout, and so have its adapters."""
    training = {"max_steps": 9, "save_strategy": "steps", "save_steps": 7, "lr_scheduler_type": "cosine"}
    training |= {"eval_strategy": "steps", "eval_steps": 4}
    options = {"target": str(family), "heldout": [str(pipeline / "heldout")], "training": training, "warmup_heads": 0.3}
    options |= JOINT["lora"] | {"lora": LoraOptions(r=4, dropout=0.2)}
    whole = command.train_heads(heads_configured(pipeline, tmp_path / "whole", **options))
    with monkeypatch.context() as patch:
        watched(patch, KillAfterSave())
        with pytest.raises(Killed):
            command.train_heads(heads_configured(pipeline, tmp_path / "cut", **options))
    checkpoint = tmp_path / "cut" / "checkpoint-7"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 7 and 1 < state["epoch"] < 2
    assert not (tmp_path / "cut" / "model.safetensors").exists() and not (tmp_path / "cut" / "backbone").exists()
    names = load_file(checkpoint / "model.safetensors")  # no more than what is trained
    assert all(name.startswith("heads.") or "lora_" in name for name in names)
    resumed = command.train_heads(heads_configured(pipeline, tmp_path / "cut", **options))
    assert logged(resumed) == logged(whole)
    assert furthest(trained_weights(tmp_path / "cut"), trained_weights(tmp_path / "whole")) == 0


def test_heads_may_be_trained_further(pipeline, tmp_path):
    options = {"training": {"max_steps": 3}}
    first = command.train_heads(
        heads_configured(pipeline, tmp_path / "first", hydra=True, draft_vocabulary=50, **options)
    )
    again = command.train_heads(heads_configured(pipeline, tmp_path / "more", heads=str(tmp_path / "first"), **options))
    assert again.model.config.hydra and torch.equal(again.model.token_map, first.model.token_map)
    losses, more = history(first, "loss"), history(again, "loss")
    assert more[0] < losses[0]
    # The very samples of the first step, three steps later.
    assert furthest(again.model.state_dict(), first.model.state_dict()) > 1e-3


# The command.


fails = functools.partial(error_line, command.main)


def test_the_command_trains_or_refuses_in_one_line(pipeline, tmp_path, tokenizer, capsys):
    good, out = tmp_path / "good.yaml", tmp_path / "out"
    text = (
        f"target: {pipeline / 'target'}\ncompletions: [{pipeline / 'short'}]\nnum_heads: 2\ntarget_dtype: float32\n"
        f"training: {{output_dir: {out}, max_steps: 1, use_cpu: true, report_to: none}}\n"
    )
    good.write_text(text)
    flags = ["--config", str(good)]
    (tmp_path / "bad.yaml").write_text(text + "num_head: 3\n")
    assert "num_head" in fails(capsys, ["--config", str(tmp_path / "bad.yaml")])
    for flag, value, message in (
        ("heads", str(tmp_path / "gone"), "Medusa heads: expected a model directory or a hub id, found nothing at"),
        ("draft_vocabulary", "301", "draft_vocabulary: expected at most 3"),
    ):
        assert message in fails(capsys, [*flags, f"--{flag}", value])
    for name, other in {"hidden_size": tiny_llama(0, len(tokenizer), hidden=16), "vocab_size": tiny_llama(0)}.items():
        MedusaHeads.of_target(other, 2).save_pretrained(tmp_path / name)
        message = fails(capsys, [*flags, "--heads", str(tmp_path / name)])
        assert f"medusa: expected heads with the target's {name}" in message
    assert not (out / "model.safetensors").exists()
    assert run(lambda: command.main(flags)) == 0
    assert MedusaHeads.from_pretrained(out).config.num_heads == 2
