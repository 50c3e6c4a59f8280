"""docs/realign.md on the embedded pair: the target is fine-tuned, its draft loses acceptance, and gets it back."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from draftsmith.decode import DraftModelProposer, replay_acceptance
from draftsmith.scripts import cli
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


def tau(target: torch.nn.Module, draft: Path, completions: Path) -> float:
    samples = load_completions(str(completions))
    texts = [torch.tensor(ids) for ids in samples["input_ids"]]
    proposer = DraftModelProposer(load_model(str(draft), device="cpu"))
    replay = replay_acceptance(target, proposer, texts, list(samples["prompt_length"]), [4], allow_biased=True)
    return replay.mean_acceptance_length[4].value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_target_that_moved_loses_acceptance_and_a_short_run_finds_it_again(tmp_path, capsys):
    tokenizer = load_tokenizer(str(TARGET))
    ids = tokenizer(PROSE.read_text("utf-8"))["input_ids"]
    rows = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    moved = fine_tuned(tmp_path / "target", rows, 10)
    for name, chosen in (("learned", rows[: len(rows) // 2]), ("heldout", rows[len(rows) // 2 :])):
        step = max(len(chosen) // 48, 1) if name == "learned" else max(len(chosen) // 16, 1)
        records = [{"prompt": tokenizer.decode(row[:16])} for row in chosen[::step]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))

    def prepare(target: Path, prompts: str, output: str) -> Path:
        flags = ["--target", target, "--prompts", tmp_path / f"{prompts}.jsonl", "--output", tmp_path / output]
        flags += ["--max_new_tokens", "24", "--batch_size", "48", "--dtype", "float32"]
        assert cli.main(["prepare", *map(str, flags)]) == 0
        return tmp_path / output

    before = tau(load_model(str(TARGET), device="cpu"), DRAFT, prepare(TARGET, "heldout", "old"))
    heldout, learned = prepare(moved, "heldout", "new"), prepare(moved, "learned", "completions")
    target = load_model(str(moved), device="cpu")
    lost = tau(target, DRAFT, heldout)

    run = ["distill", "--target", str(moved), "--draft", str(DRAFT), "--training.output_dir", str(tmp_path / "draft")]
    run += ["--training.max_steps", "10", "--training.per_device_train_batch_size", "8", "--training.report_to", "[]"]
    run += ["--training.learning_rate", "3e-3", "--optimizer", "muon", "--prompt_loss", "--training.use_cpu", "true"]
    assert cli.main([*run, "--completions", json.dumps([str(tmp_path / "old")])]) == 2
    assert "expected completions that" in capsys.readouterr().err  # another target's are refused
    assert cli.main([*run, "--completions", json.dumps([str(learned)])]) == 0
    found = tau(target, tmp_path / "draft", heldout)
    assert lost < before and found > lost, (before, lost, found)

    # Linear maps in int8 are nearly the target that they were: the draft still serves it.
    small = torch.ao.quantization.quantize_dynamic(load_model(str(TARGET), device="cpu"), {torch.nn.Linear})
    assert abs(tau(small, DRAFT, tmp_path / "old") - before) < 0.2

    gate = ["measure", "--target", moved, "--draft", tmp_path / "draft", "--baseline-draft", DRAFT, "--limit", "2"]
    gate += ["--replay-limit", "4", "--prompts", tmp_path / "heldout.jsonl", "--max-new-tokens", "4", "--repeats", "1"]
    gate += ["--measure-costs", "false", "--compiled", "false", "--threads", "1", "--dtype", "float32"]
    gate += ["--draft-length", "2", "--temperature", "1", "--min-gain", "0.0", "--output", tmp_path / "report"]
    assert cli.main([*map(str, gate)]) in (0, 3)
    report = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    gains = [run["gain_over_baseline_draft"] for run in report["runs"] if run["proposer"]["kind"] == "draft"]
    assert gains and all(gain is not None for gain in gains)
