"""`draftsmith choose`: candidates are trained on growing amounts of text, and the best is handed on."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts import cli, stages
from draftsmith.scripts.choose import command, rounds, sweep
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import Outlook, Trial
from draftsmith.scripts.choose.rounds import Way
from draftsmith.scripts.choose.sweep import Sweep
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import parse_config
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt

LEARNING = {"training.max_steps": 1, "training.use_cpu": True, "training.per_device_train_batch_size": 4}
HEADS = {"command": "medusa", "num_heads": 2}
CARVED = {"command": "distill", "init.layers": 1}
BLOCK = {"command": "block", "layers": 1, "block_size": 3, "markov_rank": 4, "layer_ids": [0], "mask_token": 3}
WORDS = ("def", "return", "class", "import", "for", "while", "with", "yield", "try", "pass")
pytestmark = pytest.mark.usefixtures("short_timing")


def config(pair_dirs, tmp_path, **fields):
    """A choice between two drafters of a tiny target."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} {b} x"}) + "\n" for a in WORDS for b in WORDS))
    given = {
        "candidates": {"heads": HEADS, "carved": CARVED}, "learning": LEARNING, "budget": "1h", "max_new_tokens": 8,
        "draft_length": "1,3", "dtype": "float32", "compiled": False, "threads": 1,
    }  # fmt: skip
    return ChooseConfig(
        target=str(pair_dirs[0]), prompts=str(prompts), output=str(tmp_path / "choice"), **given | fields
    )


@pytest.fixture
def ran(monkeypatch):
    """The commands of stages that ran."""
    commands, own = list[list[str]](), cli.main
    monkeypatch.setattr(stages.cli, "main", lambda argv: commands.append(argv) or own(argv))
    return commands


def test_a_stopped_choice_continues_and_hands_on_its_winner(pair_dirs, tmp_path, ran, monkeypatch, capsys):
    settings = config(pair_dirs, tmp_path)
    for module in (command, sweep):
        monkeypatch.setattr(module, "AMOUNTS", 2)
    own, count = command.Stages.run, 0

    def stopped(self, name, argv, fresh=None):
        nonlocal count
        count += name.startswith("train-")
        if count == 4:
            raise KeyboardInterrupt
        own(self, name, argv, fresh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Stages, "run", stopped)
        with pytest.raises(KeyboardInterrupt) as stop:
            command.choose(settings)
    assert "the same command continues from there" in stop.value.__notes__[0]
    assert ran[0][:2] == ["doctor", f"--target={settings.target}"]
    choice = command.choose(settings)
    assert [argv[0] for argv in ran if argv[0] in recipes()] == ["medusa", "distill"] * 2
    assert len(set(map(tuple, ran))) == len(ran)  # each once
    assert sorted(choice.amounts) == choice.amounts and len(set(choice.amounts)) == 2
    standings = {standing.name: standing for standing in choice.standings}
    assert standings.keys() == {"heads", "carved", "suffix", "prompt_lookup"}
    for standing in standings.values():
        assert [(outlook.temperature, outlook.rows) for outlook in standing.outlooks] == [("0", 1), ("1", 1)]
        assert all(o.now.value > 0 and o.mean_acceptance_length.value >= 1 for o in standing.outlooks)
        amounts = choice.amounts if standing.command else choice.amounts[:1]
        assert [trial.tokens for trial in standing.trials] == amounts
    kept = json.loads((tmp_path / "choice/choose.json").read_text())
    assert kept["schema"] == "draftsmith.choose/2" and kept["winner"] == choice.winner
    ran.clear()
    assert command.choose(settings) == choice and not ran
    capsys.readouterr()
    command.print_choice(choice, tmp_path / "choice")
    tables, _, rest = capsys.readouterr().out.partition(f"{choice.winner}: {choice.reason}")
    assert all(name in tables for name in standings) and max(map(len, tables.splitlines())) <= 80
    assert all(shlex.join(line) in rest for line in choice.commands)
    with pytest.raises(InputError, match=r"output: expected .* of the same budget, '2h', found it of '1h'"):
        command.choose(config(pair_dirs, tmp_path, budget="2h"))


def test_candidates_are_judged_as_they_will_be_deployed(pair_dirs, tmp_path, monkeypatch):
    monkeypatch.setattr(Sweep, "growth", lambda *_: None)
    fields = {"candidates": {"it": BLOCK}, "temperature": "0.7", "batch_size": "1,2", "server": "vllm"}
    choice = command.choose(config(pair_dirs, tmp_path, **fields))
    standing = next(each for each in choice.standings if each.name == "it")
    judged = {(outlook.temperature, outlook.rows, outlook.way) for outlook in standing.outlooks}
    assert judged == {("0.7", rows, Way(3)) for rows in (1, 2)}  # it drafts whole blocks, alone


def test_for_llama_cpp_rounds_are_priced_by_its_clock_and_copies_come_first(pair_dirs, tmp_path, monkeypatch):
    def tables(self, drafters):
        copies = ("prompt_lookup:simple-2", "prompt_lookup:simple-4")
        assert drafters == {**{key: {1: None, 3: None} for key in copies}, "it": dict.fromkeys((1, 2, 3))}
        assert (self.rows, self.temperatures, self.threads) == ([1], [0.0], 1)
        forwards, free = {1: {1: 1.0, 2: 1.0, 4: 1.0}}, {1: DraftCosts(0.0, 0.0, 0.0, 0.0)}
        return [CostTable(self.context, 0.0, forwards, {1: 0.0}, 1, {1: 1.0}, dict.fromkeys(drafters, free))]

    monkeypatch.setattr(Sweep, "growth", lambda *_: None)
    engine = SimpleNamespace(program=str, target_file=lambda *words: "t.gguf")
    monkeypatch.setattr(rounds.LlamaCpp, "found", lambda: engine)
    monkeypatch.setattr(rounds, "served_at", lambda *given: dict.fromkeys(given[-1]))
    monkeypatch.setattr(rounds.LlamaCosts, "tables", tables)
    fields = {"candidates": {"it": BLOCK}, "temperature": "0", "server": "llama.cpp"}
    choice = command.choose(config(pair_dirs, tmp_path, **fields))
    standing = next(each for each in choice.standings if each.name == "it")
    (outlook,) = standing.outlooks
    hybrid = next(way for way in standing.trials[-1].replayed["0"].ways() if way.last)
    drafted = standing.drafter(replace(outlook, way=hybrid), "d")
    assert drafted == f"hybrid:prompt_lookup:simple-2+d@last={hybrid.last}"
    assert choice.winner != "none" and "--costs=llama.cpp" in choice.commands[-1]
    assert outlook.now == outlook.mean_acceptance_length  # rounds cost a token here


def test_prompts_that_are_the_same_to_the_target_are_not_dealt_to_both_sides(pair_dirs, tmp_path):
    texts = [("def f", None), ("import", None), ("def f", "another category"), ("import os", None)]
    prompts = [Prompt(str(at), text, None, category) for at, (text, category) in enumerate(texts)]
    measured, others = command.split_prompts(config(pair_dirs, tmp_path), prompts, 2)
    assert (measured, others) == (prompts[:2], prompts[3:])


@pytest.mark.parametrize("name", ["heads", "carved"])
def test_the_winners_config_begins_with_its_last_trial(pair_dirs, tmp_path, name):
    settings = config(pair_dirs, tmp_path, writing={"top_p": 0.9, "max_prompt_tokens": 99})
    train = [Prompt(str(number), f"text {number}", None, None) for number in range(40)]
    made = Sweep(settings, settings.candidates, tmp_path / "choice", train, stages.Stages(tmp_path / "stages"))
    made.heldout, made.texts, made.used, made.amounts = {0.0: "held-0", 1.0: "held-1"}, ["text-1"], 4, [1000]
    way, some = Way(3), Estimate(1.5, None, 8)
    won = command.Standing(
        name, settings.candidates[name]["command"], {}, [Trial("trials/2/it", 1000, 1.0, 1.0, {})], None,
        [Outlook("0", 1, way, some, some, 6000.0, some)],
    )  # fmt: skip
    prepare, train, *searched, measure = command.next_commands(made, won)
    assert [line[0] for line in searched] == (["tree"] if name == "heads" else [])
    fields = yaml.safe_load((tmp_path / "choice/winner.yaml").read_text())
    assert fields["heads" if name == "heads" else "draft"] == "trials/2/it"
    assert "init" not in fields and fields["training"]["output_dir"] == str(tmp_path / "choice/winner")
    assert fields["completions"] == ["text-1", str(tmp_path / "choice/completions/text-winner")]
    assert len(read_prompts(str(tmp_path / "choice/prompts/text-winner.jsonl"))) == 20  # of 250 tokens each
    read = parse_config(recipes()[train[0]].config_class(), [*train[1:], "--training.use_cpu", "true"])
    assert getattr(read, recipes()[train[0]].begun) == "trials/2/it"
    assert read.training.load_best_model_at_end and read.heldout == ["held-1"]
    for line in (prepare, *searched, measure):
        parse_config(cli.config_class(line[0], line[1:]), line[1:])
    assert "--top_p=0.9" in measure and "max_prompt_tokens" in "".join(measure) and "--dtype=float32" in measure
