"""`draftsmith adapt` after the embedded target is fine-tuned: its draft loses acceptance, and gets it back."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from draftsmith.decode import DraftModelProposer, replay_acceptance
from draftsmith.scripts import cli
from draftsmith.scripts.adapt.command import adapt
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.train.data.generate import load_completions
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = ROOT / "assets/tiny-target", ROOT / "assets/tiny-draft"
PROSE = ROOT / "LICENSE"  # English that no edit of the documents changes


def fine_tuned(output: Path, rows: torch.Tensor, steps: int) -> Path:
    """Train adapters on prose, merge them, and save the target with its tokenizer."""
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(load_model(str(TARGET), device="cpu"), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=6e-3)
    for batch in rows[torch.randint(len(rows), (steps, 4))]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(model.merge_and_unload().eval(), load_tokenizer(str(TARGET)), output)
    return output


def tau(target: torch.nn.Module, completions: str) -> float:
    samples = load_completions(completions)
    texts = [torch.tensor(ids) for ids in samples["input_ids"]]
    proposer = DraftModelProposer(load_model(str(DRAFT), device="cpu"))
    replay = replay_acceptance(target, proposer, texts, list(samples["prompt_length"]), [4], allow_biased=True)
    return replay.mean_acceptance_length[4].value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_target_that_moved_loses_acceptance_and_a_short_run_finds_it_again(tmp_path):
    tokenizer = load_tokenizer(str(TARGET))
    ids = tokenizer(PROSE.read_text("utf-8"))["input_ids"]
    rows = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    moved = fine_tuned(tmp_path / "target", rows, 10)
    prompts = [json.dumps({"prompt": tokenizer.decode(row[:16])}) for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    (tmp_path / "newest.jsonl").write_text("\n".join(prompts[-16:]))
    old = str(tmp_path / "old")
    writing = ["--max_new_tokens", "24", "--temperature", "1", "--output", old]
    assert cli.main(["prepare", "--target", str(TARGET), "--prompts", str(tmp_path / "newest.jsonl"), *writing]) == 0
    before = tau(load_model(str(TARGET), device="cpu"), old)

    learning = {"training.max_steps": 10, "training.per_device_train_batch_size": 8, "training.learning_rate": 3e-3}
    learning |= {"optimizer": "muon", "prompt_loss": True, "training.use_cpu": True}
    step = adapt(AdaptConfig(
        target=str(moved), drafter=str(DRAFT), log=[str(tmp_path / "prompts.jsonl")], output=str(tmp_path / "new"),
        answers="target", newest=16, least=32, temperature=[1.0], max_new_tokens=24, learning=learning,
    ))  # fmt: skip
    assert step.verdict == "better" and step.deployed == str(DRAFT)
    assert step.compared.old.value < before, (before, step.compared)

    # Linear maps in int8 are nearly the target that they were: the draft still serves it.
    small = torch.ao.quantization.quantize_dynamic(load_model(str(TARGET), device="cpu"), {torch.nn.Linear})
    assert abs(tau(small, old) - before) < 0.2
