"""`draftsmith adapt`: a deployed drafter learns from traffic, and a better one takes its place."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from draftsmith.decode import DraftModelProposer, replay_acceptance
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts import cli, stages
from draftsmith.scripts.adapt import command, traffic
from draftsmith.scripts.adapt.command import adapt
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.adapt.traffic import Comparison
from draftsmith.train.data.generate import load_completions
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

WORDS = ("def", "return", "class", "import", "for", "while", "with", "yield", "try", "pass")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}<|pad|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant<|pad|>{% endif %}"
)


def log(path: Path, first: int, last: int) -> None:
    """Requests as a coordinator writes them, numbered."""
    lines = [
        {"request": {"prompt": f"{WORDS[n % 10]} {WORDS[n // 10 % 10]} x"}, "category": WORDS[n % 2]}
        for n in range(first, last)
    ]
    path.write_text(path.read_text() if path.exists() else "")
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def config(pair_dirs, tmp_path):
    target, draft = pair_dirs
    (tmp_path / "current").symlink_to(draft, target_is_directory=True)
    log(tmp_path / "log.jsonl", 0, 40)
    learning = {"training.max_steps": 1, "training.use_cpu": True, "training.per_device_train_batch_size": 4}
    return AdaptConfig(
        target=str(target), drafter=str(tmp_path / "current"), log=[str(tmp_path / "log.jsonl")], newest=8, least=20,
        output=str(tmp_path / "adapted"), answers="target", max_new_tokens=8, learning=learning, swap=True,
    )  # fmt: skip


@pytest.fixture
def ran(monkeypatch):
    said, own = list[list[str]](), cli.main
    monkeypatch.setattr(stages.cli, "main", lambda argv: said.append(argv) or own(argv))
    return said


def gains(low: float, high: float):
    gain = Estimate((low + high) / 2, (low, high), 8)
    return lambda *given: Comparison(Estimate(1.5, None, 8), Estimate(1.6, None, 8), gain, {"0": gain}, {"code": gain})


def test_a_better_drafter_takes_the_place_of_the_deployed_one(config, pair_dirs, tmp_path, ran, monkeypatch, capsys):
    own = command.Stages.run

    def stopped(self, name, argv, fresh=None):
        if name == "train":
            raise KeyboardInterrupt
        return own(self, name, argv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Stages, "run", stopped)
        with pytest.raises(KeyboardInterrupt) as stop:
            adapt(config)
    assert "the same command continues from there" in stop.value.__notes__[0]
    log(tmp_path / "log.jsonl", 40, 50)  # what comes while a step is under way is of the next one
    monkeypatch.setattr(command, "compare", gains(0.1, 0.3))
    step = adapt(config)
    assert [argv[0] for argv in ran] == ["prepare", "prepare", "prepare", "distill"]
    assert step.verdict == "better" and step.learned == 32 and step.deployed == str(pair_dirs[1].resolve())
    new = tmp_path / "adapted/step-0001/drafter"
    assert (tmp_path / "current").resolve() == new.resolve() and (new / "model.safetensors").is_file()
    assert f"--draft={pair_dirs[1].resolve()}" in ran[-1]
    learned = set((tmp_path / "adapted/step-0001/learned.jsonl").read_text().splitlines())
    newest = (tmp_path / "adapted/step-0001/newest.jsonl").read_text().splitlines()
    assert len(newest) == 8 and json.loads(newest[-1])["prompt"] == "pass import x" and not learned & set(newest)
    ran.clear()
    assert adapt(config) is None and not ran  # ten requests are too few
    log(tmp_path / "log.jsonl", 50, 61)
    monkeypatch.setattr(command, "compare", gains(-0.1, 0.3))
    step = adapt(config)
    assert step.verdict == "refused" and step.deployed == str(new.resolve()) and step.learned == 53
    assert "gains +0.10 [-0.10, +0.30]; its lower end must exceed 0" in step.reason
    assert (tmp_path / "current").resolve() == new.resolve()
    assert json.loads((tmp_path / "adapted/step-0002/adapt.json").read_text())["verdict"] == "refused"


def test_a_step_that_is_stopped_before_it_is_closed_swaps_all_the_same(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "compare", gains(0.1, 0.3))
    own = command.write_json

    def stopped(path, value):
        if path.name == command.STATE and not value.open:
            raise KeyboardInterrupt
        own(path, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "write_json", stopped)
        with pytest.raises(KeyboardInterrupt):
            adapt(config)
    new = (tmp_path / "adapted/step-0001/drafter").resolve()
    assert (tmp_path / "current").resolve() == new
    step = adapt(config)
    assert step.verdict == "better" and step.drafter == str(tmp_path / "adapted/step-0001/drafter")
    assert (tmp_path / "current").resolve() == new and adapt(config) is None


@pytest.mark.parametrize(("low", "code", "word"), [(0.1, 0, "better: "), (-0.1, 3, "refused: ")])
def test_the_exit_code_is_the_gates(config, tmp_path, monkeypatch, capsys, low, code, word):
    monkeypatch.setattr(command, "_step", lambda config, step: command.Step(
        "s", "better" if low > 0 else "refused", "because", "old", str(tmp_path), 3, gains(low, 0.3)(),
    ))  # fmt: skip
    flags = [
        "--target", config.target, "--drafter", config.drafter, "--log", json.dumps(config.log), "--newest", "8",
        "--least", "20", "--answers", "target", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert command.main(flags) == code
    said = capsys.readouterr().out
    assert word + "because" in said
    assert command.main(flags) == 0 and "nothing to do: the log has fewer than 20 requests" in capsys.readouterr().out


def test_drafters_are_compared_on_the_same_texts(config, pair_dirs, tmp_path):
    target, draft = pair_dirs
    texts = {}
    for temperature in (0.0, 1.0):
        texts[temperature] = str(tmp_path / f"texts-{temperature:g}")
        flags = ["--prompts", config.log[0], "--limit", "12", "--max_new_tokens", "8", "--temperature", temperature]
        assert cli.main(["prepare", "--target", str(target), "--output", texts[temperature], *map(str, flags)]) == 0
    perfect = tmp_path / "perfect"
    shutil.copytree(target, perfect)
    found = traffic.compare(config, str(draft), str(perfect), texts)
    assert found.new.value > found.old.value and found.gain.ci95[0] > 0
    assert found.gain.value == pytest.approx(found.new.value - found.old.value)
    assert found.by_temperature.keys() == {"0", "1"} and found.by_category.keys() == {"def", "return"}
    same = traffic.compare(config, str(draft), str(draft), texts)
    assert same.gain.value == 0 and same.gain.ci95 == (0, 0)


def test_a_log_of_other_answers_than_the_targets_is_refused(config, tmp_path, ran):
    model, tokenizer = load_model(config.target, device="cpu"), load_tokenizer(config.target)
    with torch.no_grad():
        model.lm_head.weight *= 40  # it knows what it wants to say
    tokenizer.chat_template = TEMPLATE
    save_model(model, tokenizer, Path(config.target))
    poisoned = [
        {"request": {"messages": [{"role": "user", "content": f"{WORDS[n % 10]} {n}"}]},
         "response": {"choices": [{"message": {"content": "zq" * 30}, "finish_reason": "stop"}]}}
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in poisoned))
    given = replace(config, answers="given")
    step = adapt(given)
    assert step.verdict == "foreign" and [argv[0] for argv in ran] == ["prepare"]
    assert "100% of the log's answers are not the target's, at most 10% may be" in step.reason
    assert (tmp_path / "current").resolve() == (tmp_path / "draft").resolve()
    for temperature in ("0", "0.7", "1"):  # of its own at any temperature
        flags = ["--prompts", config.log[0], "--limit", "16", "--max_new_tokens", "24", "--temperature", temperature]
        own = str(tmp_path / f"own-{temperature}")
        assert cli.main(["prepare", "--target", config.target, "--output", own, *flags]) == 0
        assert traffic.foreign_share(given, own) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log": []}, r"log: expected at least one file"),
        ({"newest": 4}, r"newest: expected at least 8"),
        ({"answers": "none"}, r"answers: expected one of given, target"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(config, fields, message):
    with pytest.raises(InputError, match=message):
        replace(config, **fields)


def test_what_swap_moves_must_be_a_link_and_the_log_long_enough(config, pair_dirs):
    with pytest.raises(InputError, match=r"drafter: expected a link to the deployed drafter, which swap moves, found"):
        adapt(replace(config, drafter=str(pair_dirs[1])))
    with pytest.raises(InputError, match=r"log: expected at least 60 requests with answers, found 40"):
        adapt(replace(config, newest=30))


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
