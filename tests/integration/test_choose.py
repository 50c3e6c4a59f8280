"""`draftsmith choose`: candidates are trained on growing amounts of text, and the best is handed on."""

import json
import shlex
import shutil
from contextlib import nullcontext

import pytest
import yaml

from draftsmith.decode.cache import program
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts import cli, stages
from draftsmith.scripts.choose import command, rounds
from draftsmith.scripts.choose import run as run_module
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import Outlook, Trial
from draftsmith.scripts.choose.rounds import Way
from draftsmith.scripts.choose.run import ChooseRun
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import OutOfTime, parse_config
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt

LEARNING = {"training.max_steps": 1, "training.use_cpu": True, "training.per_device_train_batch_size": 4}
HEADS = {"command": "medusa", "num_heads": 2}
CARVED = {"command": "distill", "init.layers": 1}
WORDS = ("def", "return", "class", "import", "for", "while", "with", "yield", "try", "pass")


def config(pair_dirs, tmp_path, **fields):
    """A choice between two drafters of a tiny target, whose time is spent at once."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} {b} x"}) + "\n" for a in WORDS for b in WORDS))
    given = {
        "candidates": {"heads": HEADS, "carved": CARVED},
        "learning": LEARNING, "budget": "1h", "heldout_prompts": 8, "max_new_tokens": 8, "draft_length": "1,3",
        "temperature": "0,1", "dtype": "float32", "compiled": False, "threads": 1,
    }  # fmt: skip
    return ChooseConfig(
        target=str(pair_dirs[0]), prompts=str(prompts), output=str(tmp_path / "choice"), **given | fields
    )


pytestmark = pytest.mark.usefixtures("short_timing")


@pytest.fixture
def ran(monkeypatch):
    """The commands of stages that ran."""
    said, own = list[list[str]](), cli.main

    def main(argv):
        said.append(argv)
        return own(argv)

    monkeypatch.setattr(stages.cli, "main", main)
    return said


def test_a_choice_is_made_and_handed_on_and_goes_on_where_it_was_stopped(pair_dirs, tmp_path, ran, capsys):
    settings = config(pair_dirs, tmp_path)
    own, count = command.Stages.run, 0

    def stopped(self, name, argv, most):
        nonlocal count
        count += name.startswith("train-")
        if count == 4:
            raise KeyboardInterrupt
        return own(self, name, argv, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Stages, "run", stopped)
        with pytest.raises(KeyboardInterrupt) as stop:
            command.choose(settings)
    assert "the same command continues from there" in stop.value.__notes__[0]
    assert ran[0][:2] == ["doctor", f"--target={settings.target}"]
    before = len(ran)
    choice = command.choose(settings)
    trained = [argv[0] for argv in ran if argv[0] in recipes()]
    assert trained == ["medusa", "distill"] * 4  # each amount once, whatever was stopped
    assert [argv for argv in ran[before:] if argv in ran[:before]] == []
    assert sorted(choice.amounts) == choice.amounts and len(set(choice.amounts)) == 4
    standings = {its.name: its for its in choice.standings}
    assert standings.keys() == {"heads", "carved", "suffix", "prompt_lookup"}
    for its in standings.values():
        assert [(each.temperature, each.rows) for each in its.outlooks] == [("0", 1), ("1", 1)]
        assert all(each.now.value > 0 and each.mean_acceptance_length.value >= 1 for each in its.outlooks)
        assert [trial.tokens for trial in its.trials] == (choice.amounts if its.command else choice.amounts[:1])
    kept = json.loads((tmp_path / "choice/choose.json").read_text())
    assert kept["schema"] == "draftsmith.choose/1" and kept["winner"] == choice.winner
    page = (tmp_path / "choice/choose.html").read_text()
    assert all(name in page for name in standings) and page.startswith("<!DOCTYPE html>")
    ran.clear()
    again = command.choose(settings)
    assert not ran and again == choice
    capsys.readouterr()
    command.print_choice(choice, tmp_path / "choice")
    tables, _, rest = capsys.readouterr().out.partition(f"{choice.winner}: {choice.reason}")
    assert all(name in tables for name in standings) and max(map(len, tables.splitlines())) <= 80
    assert all(line in rest for line in choice.commands)


BLOCK = {"command": "block", "layers": 1, "block_size": 3, "markov_rank": 4, "layer_ids": [0], "mask_token": 3}


@pytest.mark.parametrize(
    ("fields", "ways"),
    [
        ({"candidates": {"it": CARVED}, "temperature": "0", "batch_size": "1,2"}, {("0", 1), ("0", 2)}),
        ({"candidates": {"it": BLOCK}, "temperature": "0.7", "server": "vllm", "budget_tokens": 9000}, {("0.7", 1)}),
    ],
    ids=["one", "served"],
)
def test_few_candidates_and_settings_are_enough(pair_dirs, tmp_path, fields, ways):
    choice = command.choose(config(pair_dirs, tmp_path, **fields))
    its = next(each for each in choice.standings if each.name == "it")
    assert {(each.temperature, each.rows) for each in its.outlooks} == ways
    assert len(its.trials) == 4
    if "server" in fields:  # it drafts whole blocks, alone
        assert {each.way for each in its.outlooks} == {Way(3)}
        assert all(each.tokens == 9000 for each in its.outlooks)
    assert its.dropped_after is None and (tmp_path / "choice/choose.html").is_file()


@pytest.mark.parametrize(
    ("failure", "amount"), [(2, 1), (RuntimeError("out of memory\nbeside much else"), 2)], ids=["refused", "memory"]
)
def test_a_candidate_whose_training_fails_is_left_out(pair_dirs, tmp_path, monkeypatch, capsys, failure, amount):
    own, trained = cli.main, []

    def main(argv):
        if argv[0] == "medusa" and argv not in trained:
            trained.append(argv)
        if len(trained) == amount and argv[0] == "medusa":
            if isinstance(failure, int):
                return failure
            raise failure
        return own(argv)

    monkeypatch.setattr(stages.cli, "main", main)
    settings = config(pair_dirs, tmp_path)
    choice = command.choose(settings)
    reason = "found exit code 2" if failure == 2 else "out of memory"
    assert choice.failed.keys() == {"heads"} and reason in choice.failed["heads"]
    assert f"amount {amount}" in choice.failed["heads"] and "\n" not in choice.failed["heads"]
    standings = {its.name: its for its in choice.standings}
    assert len(standings["carved"].trials) == 4
    assert ("heads" in standings) == (amount == 2)
    if amount == 2:
        assert standings["heads"].dropped_after == 1 and len(standings["heads"].trials) == 1
    assert choice.failed["heads"] in (tmp_path / "choice/choose.html").read_text()
    capsys.readouterr()
    command.print_choice(choice, tmp_path / "choice")
    assert choice.failed["heads"] in capsys.readouterr().out
    # Once it can be trained, the same command does so; of what follows there is enough above.

    def once(argv):
        if any(f"trials/{amount + 1}/heads" in word for word in argv):
            raise OutOfTime
        return own(argv)

    monkeypatch.setattr(stages.cli, "main", once)
    again = command.choose(settings)
    assert again.failed == {}
    assert len(next(its for its in again.standings if its.name == "heads").trials) == amount


def test_where_every_training_fails_the_reason_is_an_error(pair_dirs, tmp_path, monkeypatch):
    own = cli.main
    monkeypatch.setattr(stages.cli, "main", lambda argv: 2 if argv[0] in recipes() else own(argv))
    with pytest.raises(InputError, match=r"train-1-carved: expected the stage to end, found exit code 2"):
        command.choose(config(pair_dirs, tmp_path))


def test_prompts_that_are_the_same_to_the_target_are_not_dealt_to_both_sides(pair_dirs, tmp_path):
    texts = [("def f", None), ("import", None), ("def f", "another category"), ("import os", None)]
    prompts = [Prompt(str(at), text, None, category) for at, (text, category) in enumerate(texts)]
    measured, others = command.split_prompts(config(pair_dirs, tmp_path), prompts, 2)
    assert (measured, others) == (prompts[:2], prompts[3:])


@pytest.fixture
def priced(monkeypatch):
    """Seconds that stages are said to take, by how their names begin; an exception is raised in place of the stage."""
    prices, own = {}, stages.Stages.run

    def run(self, name, argv, most):
        price = next((price for begin, price in prices.items() if name.startswith(begin)), 1e-3)
        if isinstance(price, type):
            raise price
        own(self, name, argv, None)
        return price

    monkeypatch.setattr(stages.Stages, "run", run)
    monkeypatch.setattr(stages.Stages, "lap", lambda self: 0.0)
    for module in (run_module, rounds):
        monkeypatch.setattr(module, "interrupt_after", nullcontext)
    return prices


FOUR = {"first": CARVED, "second": BLOCK, "third": CARVED | {"init.layers": 2}, "heads": HEADS}


def test_what_does_not_fit_the_budget_is_not_begun(pair_dirs, tmp_path, ran, priced):
    """Of two minutes for choosing three quarters are for first trials: two of 35 seconds, and no second amount."""
    priced |= {"text-1": 4.0, "heldout": 6.0, "train-": 35.0}
    settings = config(pair_dirs, tmp_path, candidates=FOUR, budget="4m", heldout_prompts=20)
    choice = command.choose(settings)
    assert [argv[0] for argv in ran if argv[0] in recipes()] == ["distill", "block"]  # each kind before another of one
    assert choice.failed.keys() == {"heads", "third"} and "no time" in choice.failed["third"]
    # A prompt costs half a second: 24 fit the share of held-out ones, 19 that of the first amount.
    written = [argv for argv in ran if argv[0] == "prepare"]
    files = [next(word for word in argv if "--prompts=" in word).partition("=")[2] for argv in written]
    counts = [len(read_prompts(file)) for file in files]
    assert counts == [8, 20, 20, 11] and len(choice.amounts) == 1
    took = {what: round(seconds) for what, seconds in choice.ledger.items()}
    assert took["text"] == 4 and took["held-out text"] == 12 and took["training"] == 70
    assert choice.spent == sum(choice.ledger.values()) <= 120.0
    page = (tmp_path / "choice/choose.html").read_text()
    assert "What the time went into" in page and all(what in page for what in choice.ledger)
    ran.clear()
    assert command.choose(settings) == choice and not ran


def test_what_overruns_the_budget_is_ended_and_the_choice_made_of_the_rest(pair_dirs, tmp_path, priced):
    """Each run goes on from the one before it, with another stage that is late."""
    candidates = {name: FOUR[name] for name in ("first", "second")}
    settings = config(pair_dirs, tmp_path, candidates=candidates, temperature="0")
    for late in ("text-3", "train-2-", "train-1-second"):
        priced.clear()
        priced |= {late: OutOfTime}
        choice = command.choose(settings)
        standings = {its.name: its for its in choice.standings}
        assert len(standings["first"].trials) == len(choice.amounts) == (4 if late == "train-1-second" else 1)
        assert ("second" in standings) == (late != "train-1-second") == (choice.failed == {})


def test_a_budget_without_time_for_a_choice_is_refused(pair_dirs, tmp_path, priced):
    priced |= {"text-1": 4.0, "heldout-1": OutOfTime}
    with pytest.raises(
        InputError, match=r"budget: expected time for text, replay and costs, found 4m, .* 0:04 of text"
    ):
        command.choose(config(pair_dirs, tmp_path, budget="4m"))


def test_nothing_is_compiled_that_the_budget_does_not_pay_for(pair_dirs, tmp_path, monkeypatch, priced):
    """Three runs of one output, in which costs alone are measured anew."""
    said, own = [], rounds._measured

    def measured(config, drafters, heldout, compiled, seconds):
        said.append((compiled, program._may_compile))
        if not program._may_compile:
            raise program.NotCompiled("compiled: expected a program")
        return own(config, drafters, heldout, False, seconds)

    monkeypatch.setattr(rounds, "_measured", measured)
    for budget, compiled, tried, why in (
        ("4m", None, [(None, False), (False, True)], ["no time"]),
        ("1h", None, [(None, True)], ["nothing was timed to choose"]),
        ("4m", True, [(True, True)], []),
    ):
        said.clear()
        for path in ("settings.json", "costs.json", "stages/costs.json"):
            (tmp_path / "choice" / path).unlink(missing_ok=True)
        choice = command.choose(
            config(pair_dirs, tmp_path, candidates={"it": CARVED}, temperature="0", budget=budget, compiled=compiled)
        )
        assert said == tried
        assert len(choice.notes) == len(why)
        assert all("eager" in note and words in note for note, words in zip(choice.notes, why, strict=True))


def choosing(settings, tmp_path, prompts: int, used: int, written: float) -> ChooseRun:
    """A run whose target has answered some of its prompts."""
    train = [Prompt(str(number), f"text {number}", None, None) for number in range(prompts)]
    return ChooseRun(
        settings, settings.candidates, tmp_path / "choice", train, stages.Stages(tmp_path / "choice/stages"),
        used=used, written=written, parts=["text-1", "text-2"],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["heads", "carved"])
def test_the_winners_config_goes_on_from_its_last_trial(pair_dirs, tmp_path, name):
    settings = config(pair_dirs, tmp_path, budget_tokens=100_000, top_p=0.9, max_prompt_tokens=99)
    run = choosing(settings, tmp_path, prompts=40, used=4, written=1000.0)
    way, some = Way(3), Estimate(1.5, None, 8)
    won = command.Standing(
        name, settings.candidates[name]["command"], {}, [Trial("trials/2/it", 1000, 1.0, {})], None,
        [Outlook("0", 1, way, some, some, 100_000.0, some)], 0.1,
    )  # fmt: skip
    prepare, train, *searched, measure = command._next(run, won)
    assert [shlex.split(line)[1] for line in searched] == (["tree"] if name == "heads" else [])
    fields = yaml.safe_load((tmp_path / "choice/winner.yaml").read_text())
    assert fields["heads" if name == "heads" else "draft"] == "trials/2/it"
    assert "init" not in fields and fields["training"]["output_dir"] == str(tmp_path / "choice/winner")
    assert [path.rpartition("/")[2] for path in fields["completions"]] == ["text-1", "text-2", "text-winner"]
    words = shlex.split(train)
    assert words[:2] == ["draftsmith", settings.candidates[name]["command"]]
    read = parse_config(recipes()[words[1]].config_class(), [*words[2:], "--training.use_cpu", "true"])
    assert getattr(read, recipes()[words[1]].begun) == "trials/2/it"
    assert read.training.load_best_model_at_end and read.heldout == [str(tmp_path / "choice/completions/heldout-1")]
    for line in (prepare, *searched, measure):
        name_of, *flags = shlex.split(line)[1:]
        parse_config(cli.config_class(name_of, flags), flags)
    assert "--top_p=0.9" in measure and "max_prompt_tokens" in measure and "--dtype=float32" in measure


@pytest.mark.parametrize(
    ("temperature", "missing", "prompts", "samples"),
    [
        ("0,1", 500.0, 2, 1),  # of 250 tokens a prompt, both temperatures together
        ("0,1", 9000.0, 36, 1),  # all that are new
        ("0,1", 30_000.0, 40, 6),  # six more answers at T=1 to each of 40
        ("1", 30_000.0, 40, 3),
        ("1", 10_000_000.0, 40, 8),
        ("0", 30_000.0, 36, 1),  # at T=0 a prompt has one answer
    ],
)
def test_further_text_is_as_much_as_is_missing(pair_dirs, tmp_path, temperature, missing, prompts, samples):
    settings = config(pair_dirs, tmp_path, temperature=temperature)
    run = choosing(settings, tmp_path, prompts=40, used=4, written=1000.0)
    flags = shlex.split(command._more_text(run, missing))[2:]
    read = parse_config(cli.config_class("prepare", flags), flags)
    assert read.samples == samples and len(read_prompts(read.prompts)) == prompts


def test_other_settings_and_too_few_prompts_are_refused(pair_dirs, tmp_path, ran):
    settings = config(pair_dirs, tmp_path, heldout_prompts=40)
    with pytest.raises(InputError, match=r"prompts: expected at least 104 in .*, 40 of them held out, found 100"):
        command.choose(settings)
    command.require_same_settings(config(pair_dirs, tmp_path), command.require_writable(settings.output), [])
    with pytest.raises(InputError, match=r"output: expected .* of the same heldout_prompts, 40, found it of 8"):
        command.require_same_settings(settings, command.require_writable(settings.output), [])
    assert not ran


def test_a_dry_run_says_what_would_be_tried_and_does_nothing(pair_dirs, tmp_path, capsys, ran):
    flags = ["--target", str(pair_dirs[0]), "--prompts", "none", "--output", str(tmp_path / "no"), "--budget", "40m"]
    assert command.main([*flags, "--dry_run", "true"]) == 0
    said = capsys.readouterr().out
    assert "20:00 of 40:00 to choose among" in said and "eagle" in said
    assert not (tmp_path / "no").exists() and not ran


def test_a_target_that_doctor_refuses_is_not_chosen_for(pair_dirs, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(pair_dirs[0], broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    settings = config((broken, None), tmp_path)
    with pytest.raises(InputError, match=r"doctor: expected the stage to end, found exit code 2"):
        command.choose(settings)
    assert "✗" in capsys.readouterr().out and not (tmp_path / "choice/completions").exists()
