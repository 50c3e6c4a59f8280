"""Training of MTP layers: the loss is its formula, runs continue, layers learn and go back into the target's files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from families import tiny_model
from native_layers import deepseek_names, qwen_names, save_with_mtp
from pipelines import furthest, history, mtp_configured
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specimens import mtp
from torch import Tensor
from training_steps import assert_same, batch_of, some_samples
from transformers.cache_utils import MtpCache

from draftsmith.decode.errors import InputError
from draftsmith.medusa.mtp import __main__ as command
from draftsmith.medusa.mtp.__main__ import MtpTrainer
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.mtp.stitching import stitch
from draftsmith.scripts.cli import main
from draftsmith.train import launch
from draftsmith.train.checkpoint import is_mtp
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_config
from draftsmith.train.runs import save_model
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache

T = 0.8
"""The temperature of the runs whose numbers are computed by hand."""
SHIPPED = {
    "dense": ("llama", 1, "qwen", "num_mtp_layers"),
    "several layers with a window": ("qwen2-window", 2, "deepseek", "num_nextn_predict_layers"),
    "experts": ("deepseek-v3", 1, "deepseek", "num_nextn_predict_layers"),
    "states": ("qwen3-5", 1, "qwen", "mtp_num_hidden_layers"),
    "sinks and windows": ("gpt-oss", 1, "qwen", "num_mtp_layers"),
}


@pytest.fixture
def untrained(monkeypatch):
    """Builds a trainer by the command and trains nothing."""
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    return command.train_heads


@pytest.fixture(scope="module")
def shipping(tmp_path_factory, tokenizer):
    """Return the directory of a target with MTP layers, by the name of its case, written once."""
    root = tmp_path_factory.mktemp("shipping")

    def directory(case: str) -> Path:
        family, layers, names, field = SHIPPED[case]
        path = root / case.replace(" ", "-")
        if not path.exists():
            model = tiny_model(family, vocab_size=len(tokenizer))
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            own = model.config.get_text_config().num_hidden_layers
            named = qwen_names if names == "qwen" else deepseek_names(own)
            save_with_mtp(model, mtp(model, layers), named, path, **{field: layers})
            tokenizer.save_pretrained(path)
        return path

    return directory


def rounds_of(trainer: MtpTrainer, sample: dict) -> tuple[Tensor, list[list[Tensor]]]:
    """The target's logits of one text, (T, V), and those of each step of each round: by the library's layers."""
    native, ids = trainer.heads.native, torch.tensor([sample["input_ids"]])
    with torch.no_grad():
        out = trainer.target(ids, output_hidden_states=True)
    steps: list[list[Tensor]] = [[] for _ in range(trainer.count)]
    for start in range(ids.shape[1] - 2):
        states, tokens = out.hidden_states[-1][:, : start + 1], ids[:, 1 : start + 2]
        cache, positions = MtpCache(config=native.config), torch.arange(1, start + 2)[None]
        for k in range(min(trainer.count, ids.shape[1] - 2 - start)):
            several = len(native.layers) > 1
            states = native.forward_layer(k if several else 0, states, positions, cache, input_ids=tokens)
            steps[k].append(native._project_to_logits(states[0, -1]).double())
            further = ids[:, start + 2 + k : start + 3 + k]
            if several:
                tokens, positions = torch.cat([tokens[:, 1:], further], 1), positions + 1
            else:
                states, tokens, positions = states[:, -1:], further, positions[:, -1:] + 1
    return out.logits[0].double(), steps


def eager(trainer: MtpTrainer, samples: list[dict]) -> Tensor:
    """Σ_k decay^k Σ_s objective(p(· | x_{≤ s+k+1}), step k of the round from s), in float64."""
    config, total = trainer.config, torch.zeros((), dtype=torch.float64)
    for sample in samples:
        labels = sample["input_ids"] if config.prompt_loss else sample["labels"]
        columns = {t for t, label in enumerate(labels) if label != IGNORED and t > 0}
        p_logits, steps = rounds_of(trainer, sample)
        for k, rounds in enumerate(steps):
            for s, q in enumerate(rounds):
                if columns >= set(range(s + 1, s + k + 3)):
                    q = q[: trainer.vocab_size]
                    if config.divergence == "cross_entropy":
                        value = -q.log_softmax(-1)[sample["input_ids"][s + k + 2]]
                    else:
                        log_p = (p_logits[s + k + 1, : trainer.vocab_size] / T).log_softmax(-1)
                        value = (log_p.exp() * (log_p - (q / T).log_softmax(-1))).sum(-1)
                    total = total + config.decay**k * value
    return total


CASES = {
    "new layers": {},
    "hard": {"divergence": "cross_entropy", "num_steps": 2},
    "several new layers": {"num_layers": 2, "decay": 0.5},
    "prompts too": {"prompt_loss": True},
    "too long for short texts": {"num_steps": 9},
}


@pytest.mark.parametrize("case", [*CASES, *SHIPPED])
def test_the_loss_is_its_formula(pipeline, shipping, tmp_path, untrained, case):
    options = CASES[case] if case in CASES else {"target": str(shipping(case))}
    trainer = untrained(mtp_configured(pipeline, tmp_path, temperature=T, **options))
    assert trainer.count == options.get("num_steps") or (
        len(trainer.heads.layers) if len(trainer.heads.layers) > 1 else 4
    )
    samples = some_samples(pipeline)[::4]
    loss = trainer.compute_loss(trainer.heads, batch_of(trainer, samples), num_items_in_batch=torch.tensor(100))
    assert_same(loss, eager(trainer, samples) / 100, list(trainer.heads.parameters()))


def test_earlier_layers_continue_and_others_are_refused(pipeline, shipping, tmp_path):
    training = {"max_steps": 1}
    command.train_heads(mtp_configured(pipeline, tmp_path / "one", training=training))
    again = mtp_configured(pipeline, tmp_path / "on", heads=str(tmp_path / "one"), training=training)
    assert command.train_heads(again).args.learning_rate == 3e-3
    wrong = mtp_configured(
        pipeline, tmp_path / "no", heads=str(tmp_path / "one"), target=str(shipping("experts")), training=training
    )
    with pytest.raises(InputError, match=r"^mtp: expected layers\.0\.\S+ of .* for this target in .*, found"):
        command.train_heads(wrong)


def test_a_cache_takes_the_targets_place(pipeline, shipping, tmp_path):
    target = shipping("dense")
    texts = [str(pipeline / name) for name in ("short", "long")]
    options = {"features": True, "feature_dtype": "float32", "dtype": "float32"}
    make_cache(CacheConfig(str(target), texts, str(tmp_path / "cache"), **options))
    options = {"target": str(target), "training": {"max_steps": 3}}
    live = command.train_heads(mtp_configured(pipeline, tmp_path / "live", **options))
    options |= {"teacher_cache": [str(tmp_path / "cache")]}
    cached = command.train_heads(mtp_configured(pipeline, tmp_path / "cached", **options))
    assert history(cached, "loss") == pytest.approx(history(live, "loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 0}, "num_steps: expected at least 1, found 0"),
        ({"num_layers": 0}, "num_layers: expected at least 1, found 0"),
        ({"draft_vocabulary": 8}, "draft_vocabulary: expected none, as MTP layers draft all"),
        ({"heads": "DIR", "num_layers": 1}, "num_layers: expected none with heads"),
        ({"training": {"activation_checkpointing": True}}, "training.activation_checkpointing: expected false"),
    ],
)
def test_options_that_cannot_be_are_refused(pipeline, tmp_path, options, said):
    with pytest.raises(InputError) as error:
        mtp_configured(pipeline, tmp_path, **options)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_several_layers_have_a_step_each(pipeline, shipping, tmp_path):
    config = mtp_configured(pipeline, tmp_path, target=str(shipping("several layers with a window")), num_steps=3)
    with pytest.raises(InputError, match=r"^num_steps: expected none with 2 layers, one step each, found 3$"):
        command.train_heads(config)


def tensors_in(directory: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("case", ["dense", "several layers with a window", "experts"])
def test_layers_go_back_into_the_targets_files(pipeline, shipping, tmp_path, capsys, case):
    """Untrained ones to the bit; after some steps only theirs differ, and the target loads with them."""
    target = shipping(case)
    before, config = tensors_in(target), load_config(str(target))
    trained = command.train_heads(
        mtp_configured(pipeline, tmp_path / "mtp", target=str(target), training={"max_steps": 2})
    )
    heads = MtpHeads.native_to(trained.target)
    heads.save_pretrained(tmp_path / "untrained")
    for source, same in (("untrained", True), ("mtp", False)):
        output = tmp_path / f"{source}-out"
        flags = ["--drafter", f"mtp:{tmp_path / source}", "--target", str(target), "--format", "target"]
        assert main(["export", *flags, "--output", str(output)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith(f"vllm serve {output} --speculative-config") and '"mtp"' in lines[-1]
        after = tensors_in(output)
        assert after.keys() == before.keys() and tensors_in(target).keys() == before.keys()
        changed = {name for name, part in before.items() if not torch.equal(part, after[name])}
        assert not changed if same else changed and all(is_mtp(name, config) for name in changed)
        assert (output / "config.json").read_bytes() == (target / "config.json").read_bytes()
    model = trained.target
    model.config.name_or_path = str(tmp_path / "mtp-out")
    read = MtpHeads.native_to(model).state_dict()
    assert all(torch.equal(part.to(read[name].dtype), read[name]) for name, part in trained.heads.state_dict().items())


def split(target: Path, directory: Path) -> Path:
    """Write a target's tensors in three files: of its own layers, of both, of MTP layers."""
    shutil.copytree(target, directory)
    tensors, config = load_file(directory / "model.safetensors"), load_config(str(target))
    (directory / "model.safetensors").unlink()
    own, of_mtp = ([name for name in sorted(tensors) if is_mtp(name, config) is wanted] for wanted in (False, True))
    parts, index = (own[1:], [own[0], of_mtp[0]], of_mtp[1:]), {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def test_files_without_mtp_layers_are_linked(pipeline, shipping, tmp_path):
    target = split(shipping("dense"), tmp_path / "target")
    command.train_heads(mtp_configured(pipeline, tmp_path / "mtp", target=str(target), training={"max_steps": 1}))
    stitch(str(tmp_path / "mtp"), str(target), tmp_path / "out")
    same = [(tmp_path / "out" / f.name).samefile(f) for f in sorted(target.glob("*.safetensors"))]
    assert same == [True, False, False]
    for name in ("config.json", "model.safetensors.index.json"):
        assert not (tmp_path / "out" / name).samefile(target / name)
    target_file = target / "model-00001-of-00003.safetensors"
    content = bytearray(target_file.read_bytes())
    content[-1] ^= 1
    (tmp_path / "out" / target_file.name).unlink()
    target_file.write_bytes(content)
    with pytest.raises(
        InputError, match=r"^target: expected the model-00001-of-00003.safetensors that .*mtp was trained on"
    ):
        stitch(str(tmp_path / "mtp"), str(target), tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("layers", [1, 2])
def test_new_layers_become_a_further_file(pipeline, tmp_path, tokenizer, layers):
    """Of a target that ships without any: it loads with them, by draftsmith and the library."""
    target = tmp_path / "target"
    save_model(tiny_llama(0, len(tokenizer)), tokenizer, target)
    options = {"target": str(target), "num_layers": layers, "training": {"max_steps": 1}}
    trainer = command.train_heads(mtp_configured(pipeline, tmp_path / "mtp", **options))
    assert stitch(str(tmp_path / "mtp"), str(target), tmp_path / "out") == layers
    before, after = tensors_in(target), tensors_in(tmp_path / "out")
    assert all(torch.equal(part, after[name]) for name, part in before.items()) and len(after) > len(before)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_mtp_layers"] == layers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert furthest(model.state_dict(), trainer.target.state_dict()) == 0
    read = MtpHeads.native_to(model).state_dict()
    with safe_open(tmp_path / "mtp/model.safetensors", "pt") as stored:
        assert all(torch.equal(stored.get_tensor(name).float(), part.float()) for name, part in read.items())


def test_what_cannot_go_back_is_refused(pipeline, shipping, tmp_path, capsys):
    target = shipping("several layers with a window")
    trained = mtp_configured(pipeline, tmp_path / "one", target=str(target), num_layers=1, training={"max_steps": 1})
    command.train_heads(trained)
    with pytest.raises(InputError, match=r"^drafter: expected 2 MTP layers as in .*, found 1 in"):
        stitch(str(tmp_path / "one"), str(target), tmp_path / "out")
    with pytest.raises(InputError, match=r"^target: expected a directory with the target's files, found some/hub-id$"):
        stitch(str(tmp_path / "one"), "some/hub-id", tmp_path / "out")
    (tmp_path / "pickled").mkdir()
    shutil.copy(target / "config.json", tmp_path / "pickled")
    with pytest.raises(InputError, match=r"^target: expected safetensors in .*pickled, found none$"):
        stitch(str(tmp_path / "one"), str(tmp_path / "pickled"), tmp_path / "out")
    capsys.readouterr()
    assert main(["export", "--drafter", "mtp", "--target", str(target), "--format", "target", "--output", "o"]) == 2
    assert "drafter: expected mtp:DIR to export, found mtp alone" in capsys.readouterr().err
