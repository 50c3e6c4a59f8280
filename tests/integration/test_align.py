"""`draftsmith align`: from prompts to an exported drafter, and on from wherever it was stopped."""

import json
import shlex
from contextlib import nullcontext
from dataclasses import replace

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli, stages
from draftsmith.scripts.choose import align as command
from draftsmith.scripts.choose.align import align
from draftsmith.scripts.choose.config import AlignConfig
from draftsmith.scripts.stages import NO_GO, Stages

WORDS = ("def", "return", "class", "import", "for", "while", "with", "yield", "try", "pass")
LEARNING = {"training.max_steps": 1, "training.use_cpu": True, "training.per_device_train_batch_size": 4}


def config(pair_dirs, tmp_path, **fields):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} {b} x"}) + "\n" for a in WORDS for b in WORDS))
    given = {
        "learning": LEARNING, "budget": "1h", "heldout_prompts": 8, "measured_prompts": 8, "max_new_tokens": 8,
        "draft_length": "1,2", "temperature": "0", "dtype": "float32", "compiled": False, "threads": 1, "epochs": 1.0,
        "min_speedup": 0.01,
    }  # fmt: skip
    return AlignConfig(target=str(pair_dirs[0]), prompts=str(prompts), output=str(tmp_path / "all"), **given | fields)


@pytest.fixture
def ran(monkeypatch):
    """The names of the stages whose commands ran."""
    said, own = list[str](), cli.main
    monkeypatch.setattr(stages.cli, "main", lambda argv: said.append(argv[0]) or own(argv))
    return said


CANDIDATES = {"carved": {"command": "distill", "init.layers": 1}}


@pytest.mark.parametrize("drafter", ["carved", None])
def test_a_budget_may_change_where_nothing_is_chosen(pair_dirs, tmp_path, monkeypatch, drafter):
    """Elsewhere `choose` would refuse it."""
    for make in ("_named", "_chosen"):
        monkeypatch.setattr(command, make, lambda *_: None)
    settings = config(pair_dirs, tmp_path, candidates=CANDIDATES, drafter=drafter)
    assert align(settings) == NO_GO
    with nullcontext() if drafter else pytest.raises(InputError, match="of the same budget, '2h'"):
        assert align(replace(settings, budget="2h")) == NO_GO


def test_a_named_candidate_goes_all_the_way_and_on_from_where_it_was_stopped(pair_dirs, tmp_path, ran, capsys):
    settings = config(pair_dirs, tmp_path, candidates=CANDIDATES, drafter="carved")
    own = Stages.run
    for stopped in ("prepare", "train", "measure"):
        with pytest.MonkeyPatch.context() as patch:

            def run(self, name, argv, stopped=stopped):
                if name == stopped:
                    raise KeyboardInterrupt
                return own(self, name, argv)

            patch.setattr(Stages, "run", run)
            with pytest.raises(KeyboardInterrupt) as stop:
                align(settings)
            assert "the same command continues from there" in stop.value.__notes__[0]
    assert ran == ["prepare", "distill"]
    assert align(settings) == 0
    assert ran == ["prepare", "distill", "measure", "export"]
    out = capsys.readouterr().out
    *words, flag, speculative = shlex.split(out.strip().splitlines()[-1])
    assert words == ["vllm", "serve", settings.target] and flag == "--speculative-config"
    assert json.loads(speculative)["model"] == str(tmp_path / "all/drafter")
    report = json.loads((tmp_path / "all/report/report.json").read_text())
    assert (
        {run["draft_length"] for run in report["runs"]} == {1, 2} and "\ngo: " in out and "(T = 0, batch size 1)" in out
    )
    assert report["prompts"]["count"] == 8
    assert f"\n{tmp_path / 'all/drafter'} holds step 1, the last: mean_acceptance_length " in out
    ran.clear()
    assert align(settings) == 0 and not ran
    assert capsys.readouterr().out.strip().splitlines()[-1] == out.strip().splitlines()[-1]
    # What is exported otherwise is exported again; other prompts are another road.
    assert align(replace(settings, server="sglang")) == 0 and ran == ["export"]
    assert "sglang.launch_server" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(InputError, match=r"output: expected .* of the same measured_prompts, 9, found it of 8"):
        align(replace(settings, measured_prompts=9))
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    with pytest.raises(InputError, match=r"output: expected .* of the same prompts"):
        align(settings)


def test_what_does_not_pass_the_gate_is_not_exported(pair_dirs, tmp_path, ran, capsys):
    settings = config(pair_dirs, tmp_path, candidates=CANDIDATES, drafter="carved", min_speedup=1000.0)
    assert align(settings) == 3
    assert ran == ["prepare", "distill", "measure"] and "no-go: " in capsys.readouterr().out
    assert not (tmp_path / "all/launch.txt").exists()


def verdict(go: bool, draft_length: int, temperature: float = 0.0, rows: int = 1) -> dict:
    where = {"temperature": temperature, "batch_size": rows}
    return where | {"go": go, "draft_length": draft_length, "reason": f"because of {draft_length}"}


def report(*verdicts: dict) -> str:
    return json.dumps({"recommendation": {"settings": verdicts}})


def test_the_gate_passes_where_a_verdict_is_go(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(report(verdict(True, 3), verdict(False, 1, rows=8)))
    assert command._gate(path) == {(0.0, 1): 3}
    assert capsys.readouterr().out == "\ngo: because of 3\nno-go: because of 1\n"
    path.write_text(report(verdict(False, 1, rows=8)))
    assert command._gate(path) == {} and "no-go: it pays nowhere" in capsys.readouterr().out


def test_a_dry_run_does_nothing(pair_dirs, tmp_path, capsys, ran):
    flags = ["--target", str(pair_dirs[0]), "--prompts", "no", "--output", str(tmp_path / "no"), "--budget", "40m"]
    assert command.main([*flags, "--dry_run", "true"]) == 0
    assert "to choose among" in capsys.readouterr().out and not ran and not (tmp_path / "no").exists()


def choice(winner: str, way: dict, commands: list[str]) -> str:
    outlook = {"temperature": "0", "rows": 1, "way": way}
    standing = {"name": winner, "command": "distill", "outlooks": [outlook]}
    found = {"winner": winner, "reason": "because", "standings": [standing], "commands": commands, "spent": 600.0}
    return json.dumps(found)


@pytest.mark.parametrize(("winner", "code"), [("carved", 0), ("suffix", 0), ("none", 3)])
def test_the_winner_of_a_choice_is_trained_measured_and_exported(
    pair_dirs, tmp_path, monkeypatch, capsys, winner, code
):
    settings, said = config(pair_dirs, tmp_path), list[list[str]]()
    folder = tmp_path / "all/choice"

    def main(argv):
        said.append(argv)
        if argv[0] == "choose":
            folder.mkdir(parents=True)
            commands = ["draftsmith distill --config winner.yaml", "draftsmith measure --target t"]
            way = {"draft_length": 3, "last": None}
            (folder / "choose.json").write_text(choice(winner, way, commands if winner == "carved" else []))
        if argv[0] == "distill":
            (folder / "winner").mkdir()
            (folder / "winner/config.json").write_text((pair_dirs[1] / "config.json").read_text())
        if argv[0] == "measure":
            (tmp_path / "all/report").mkdir()
            (tmp_path / "all/report/report.json").write_text(report(verdict(True, 3)))
        if argv[0] == "export":
            print("# a comment\nvllm serve it")
        return 0

    monkeypatch.setattr(stages.cli, "main", main)
    assert align(settings) == code
    names = [argv[0] for argv in said]
    if winner == "none":
        assert names == ["choose"] and "no-go: because" in capsys.readouterr().out
        return
    assert names == (["choose", "distill", "measure", "export"] if winner == "carved" else ["choose", "measure"])
    if winner == "carved":  # an hour less what choosing took
        assert said[1] == ["distill", "--config", "winner.yaml", "--stop_after=3000s"]
    flags = said[0][1:]
    assert f"--prompts={tmp_path / 'all/prompts/others.jsonl'}" in flags and "--server=vllm" in flags
    parsed = command.parse_config(cli.config_class("choose", flags), flags)
    assert parsed.temperature == [0.0] and parsed.learning == LEARNING
    measured = next(argv for argv in said if argv[0] == "measure")
    drafter = str(folder / "winner") if winner == "carved" else "suffix"
    assert f"--drafter={winner}={drafter}" in measured or f"--drafter={drafter}" in measured
    assert "--draft_length=3" in measured
    if winner == "carved":
        assert (tmp_path / "all/launch.txt").read_text().splitlines()[-1] == "vllm serve it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"measured_prompts": 4}, r"measured_prompts: expected at least 8, found 4"),
        ({"min_speedup": 0.0}, r"min_speedup: expected"),
        ({"verify": "tgi"}, r"verify: expected one of vllm"),
    ],
)
def test_what_cannot_be_is_refused(pair_dirs, tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        config(pair_dirs, tmp_path, **fields)


def test_too_few_prompts_and_unknown_candidates_are_refused(pair_dirs, tmp_path, ran):
    with pytest.raises(InputError, match=r"prompts: expected at least 120 in .*, 60 of them to be measured on"):
        align(config(pair_dirs, tmp_path, measured_prompts=60))
    with pytest.raises(InputError, match=r"drafter: expected a candidate out of carved, found other"):
        align(config(pair_dirs, tmp_path, candidates=CANDIDATES, drafter="other"))
    assert not ran
