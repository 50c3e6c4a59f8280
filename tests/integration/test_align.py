"""`draftsmith align`: from prompts to an exported drafter, resumed wherever it was stopped."""

import json
import shlex
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli, stages
from draftsmith.scripts.choose import align as command
from draftsmith.scripts.choose.align import align
from draftsmith.scripts.choose.config import AlignConfig, ChooseConfig
from draftsmith.scripts.choose.rounds import Way
from draftsmith.scripts.stages import NO_GO, Stages

WORDS = ("def", "return", "class", "import", "for", "while", "with", "yield", "try", "pass")
CANDIDATES = {"carved": {"command": "distill", "init.layers": 1}}


@pytest.fixture
def config(pair_dirs, tmp_path, short_timing):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} {b} x"}) + "\n" for a in WORDS for b in WORDS))
    return AlignConfig(
        target=str(pair_dirs[0]), prompts=str(prompts), output=str(tmp_path / "all"), budget="1h", max_new_tokens=8,
        candidates=CANDIDATES, drafter="carved", draft_length="1,2", temperature="0", dtype="float32", compiled=False,
        learning={"training.max_steps": 1, "training.use_cpu": True, "training.per_device_train_batch_size": 4},
        threads=1, min_speedup=0.01,
    )  # fmt: skip


@pytest.fixture
def ran(monkeypatch):
    """The names of the commands that ran."""
    commands, own = list[str](), cli.main
    monkeypatch.setattr(stages.cli, "main", lambda argv: commands.append(argv[0]) or own(argv))
    return commands


@pytest.mark.parametrize("drafter", ["carved", None])
def test_a_budget_may_change_if_nothing_is_chosen(config, monkeypatch, drafter):
    for make in ("_named", "_chosen"):
        monkeypatch.setattr(command, make, lambda *_: None)
    settings = replace(config, drafter=drafter)
    assert align(settings) == NO_GO
    with nullcontext() if drafter else pytest.raises(InputError, match="of the same budget, '2h'"):
        assert align(replace(settings, budget="2h")) == NO_GO


def test_a_named_candidate_goes_all_the_way_and_continues_where_it_was_stopped(config, tmp_path, ran, capsys):
    own = Stages.run
    for stopped in ("prepare", "train", "measure"):
        with pytest.MonkeyPatch.context() as patch:

            def run(self, name, argv, stopped=stopped):
                if name == stopped:
                    raise KeyboardInterrupt
                own(self, name, argv)

            patch.setattr(Stages, "run", run)
            with pytest.raises(KeyboardInterrupt) as stop:
                align(config)
            assert "the same command continues from there" in stop.value.__notes__[0]
    assert ran == ["prepare", "distill"]
    assert align(config) == 0
    assert ran == ["prepare", "distill", "measure", "export"]
    out = capsys.readouterr().out
    *words, flag, speculative = shlex.split(out.strip().splitlines()[-1])
    assert words == ["vllm", "serve", config.target] and flag == "--speculative-config"
    assert json.loads(speculative)["model"] == str(tmp_path / "all/drafter")
    report = json.loads((tmp_path / "all/report/report.json").read_text())
    assert {run["draft_length"] for run in report["runs"]} == {1, 2} and report["prompts"]["count"] == 12
    assert "\ngo: " in out and "(T = 0, batch size 1)" in out
    assert f"\n{tmp_path / 'all/drafter'} holds step 1, the last: mean_acceptance_length " in out
    ran.clear()
    assert align(config) == 0 and not ran
    assert capsys.readouterr().out.strip().splitlines()[-1] == out.strip().splitlines()[-1]
    # Another server's export is a new one; other prompts need another directory.
    assert align(replace(config, server="sglang")) == 0 and ran == ["export"]
    assert "sglang.launch_server" in capsys.readouterr().out.splitlines()[-1]
    ran.clear()
    assert align(replace(config, min_speedup=1000.0)) == NO_GO and ran == ["measure"]
    assert "no-go: it pays nowhere" in capsys.readouterr().out
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(80)))
    with pytest.raises(InputError, match=r"output: expected .* of the same prompts"):
        align(config)


def test_the_gate_passes_if_one_verdict_is_go(tmp_path, capsys):
    path, passed = tmp_path / "report.json", {"go": True, "draft_length": 3, "reason": "because of 3"}
    refused = {"go": False, "draft_length": 1, "reason": "because of 1"}
    path.write_text(json.dumps({"recommendation": {"settings": [refused, passed]}}))
    assert command._gate(path) == 3
    assert capsys.readouterr().out == "\nno-go: because of 1\ngo: because of 3\n"


@pytest.mark.parametrize(("winner", "code"), [("carved", 0), ("suffix", 0), ("none", NO_GO)])
def test_the_winner_of_a_choice_is_trained_measured_and_exported(
    config, pair_dirs, tmp_path, monkeypatch, capsys, winner, code
):
    ran, asked, folder = list[list[str]](), list[ChooseConfig](), tmp_path / "all/choice"

    def choose(settings):
        asked.append(settings)
        commands = [["distill", "--config", "winner.yaml"], ["measure", "--target", "t"]]
        standing = SimpleNamespace(name=winner, outlooks=[SimpleNamespace(way=Way(3))])
        return SimpleNamespace(
            winner=winner, reason="because", standings=[standing], seconds={"text": 600.0},
            commands=commands if winner == "carved" else [],
        )  # fmt: skip

    def main(argv):
        ran.append(argv)
        if argv[0] == "distill":
            (folder / "winner").mkdir(parents=True)
            (folder / "winner/config.json").write_text((pair_dirs[1] / "config.json").read_text())
        if argv[0] == "measure":
            (tmp_path / "all/report").mkdir()
            verdict = {"go": True, "draft_length": 3, "reason": "because of 3"}
            (tmp_path / "all/report/report.json").write_text(json.dumps({"recommendation": {"settings": [verdict]}}))
        if argv[0] == "export":
            print("# a comment\nvllm serve it")
        return 0

    monkeypatch.setattr(command, "choose", choose)
    monkeypatch.setattr(stages.cli, "main", main)
    assert align(replace(config, drafter=None)) == code
    assert asked[0].prompts == str(tmp_path / "all/prompts/others.jsonl") and asked[0].server == "vllm"
    assert asked[0].temperature == [0.0] and asked[0].learning == config.learning
    names = [argv[0] for argv in ran]
    if winner == "none":
        assert names == [] and "no-go: because" in capsys.readouterr().out
        return
    assert names == (["distill", "measure", "export"] if winner == "carved" else ["measure"])
    measured = next(argv for argv in ran if argv[0] == "measure")
    drafter = str(folder / "winner") if winner == "carved" else "suffix"
    assert f"--drafter={winner}={drafter}" in measured and "--draft_length=3" in measured
    if winner == "carved":  # an hour less what choosing took
        assert ran[0] == ["distill", "--config", "winner.yaml", '--config={"stop_after": "3000s"}']
        assert (tmp_path / "all/launch.txt").read_text().splitlines()[-1] == "vllm serve it"


def test_too_few_prompts_and_unknown_candidates_are_refused(config, tmp_path, ran):
    with pytest.raises(InputError, match=r"drafter: expected a candidate out of carved, found other"):
        align(replace(config, drafter="other"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n' * 63)
    with pytest.raises(InputError, match=r"prompts: expected at least 64 in .*, found 63"):
        align(config)
    assert not ran
