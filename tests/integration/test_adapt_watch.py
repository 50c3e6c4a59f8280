"""`draftsmith adapt --server`: live counters are looked at, a new drafter is checked, and taken back where it falls."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from local_server import LocalHandler, LocalServer
from processes import exit_code

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts import cli
from draftsmith.scripts.adapt import command, watch
from draftsmith.scripts.adapt.config import AdaptConfig
from draftsmith.scripts.adapt.traffic import Comparison, Traffic
from draftsmith.scripts.adapt.watch import ServerState, acceptance_length, check, look, read_server_state, record_swap
from draftsmith.train.cli import parse_config
from draftsmith.train.job.lock import lock_directory

POS = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} {}\n'


class Counting:
    """A server that shows counters."""

    def __init__(self):
        self.counts, self.texts, self.tokens, self.counts_tokens = ServerCounts(), 0, 0, True
        counting = self

        class Handler(LocalHandler):
            def do_GET(self):
                counts = counting.counts
                names = ("drafts", "draft_tokens", "accepted_tokens")
                values = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
                text = "".join(
                    f"vllm:spec_decode_num_{name}_total {value}\n" for name, value in zip(names, values, strict=True)
                )
                if counting.counts_tokens:
                    text += f"vllm:generation_tokens_total {counting.tokens}\n"
                text += f'vllm:request_success_total{{finished_reason="stop"}} {counting.texts}\n'
                text += "".join(
                    POS.format(place, accepted) for place, accepted in enumerate(counts.num_accepted_tokens_per_pos)
                )
                if self.path == "/v1/models":
                    text = json.dumps({"object": "list", "data": [{"id": "t", "object": "model"}]})
                self.send_response(200)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        self.server = LocalServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def write(self, drafts: int, *per_pos: int) -> None:
        """Write texts of twenty drafts each, whose ends cut none."""
        self.texts += drafts // 20
        self.tokens += drafts + sum(per_pos) + drafts // 20
        self.counts += ServerCounts(drafts, drafts * len(per_pos), sum(per_pos), per_pos)


@pytest.fixture
def server():
    found = Counting()
    yield found
    found.server.shutdown()


@pytest.fixture
def config(tmp_path, server):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("old", target_is_directory=True)
    return AdaptConfig(
        target="t", drafter=str(tmp_path / "current"), log=["log"], output=str(tmp_path), server=server.url, swap=True
    )


def test_live_acceptance_that_falls_is_seen(config, server, tmp_path):
    server.write(9000, 8000, 7000)  # of what was before the first look, nothing is known
    assert look(config, tmp_path) == (None, False)
    server.write(300, 200, 100)
    assert look(config, tmp_path) == (None, False)  # too few: they count with the next ones
    server.write(700, 500, 300)
    said, fell = look(config, tmp_path)
    assert said == "the server's τ since the last look: 2.10 [1.95, 2.25]" and not fell
    server.write(1000, 690, 390)
    said, fell = look(config, tmp_path)
    assert said.endswith("2.08 [1.93, 2.23]; 2.10 [1.95, 2.25] in the first one after the last step") and not fell
    server.write(1000, 400, 150)
    said, fell = look(config, tmp_path)
    assert said.endswith("1.55 [1.41, 1.69]; 2.10 [1.95, 2.25] in the first one after the last step: it fell") and fell
    lines = [json.loads(line) for line in (tmp_path / "looks.jsonl").read_text().splitlines()]
    assert [line["fell"] for line in lines] == [False, False, True]
    assert [line["counts"]["num_drafts"] for line in lines] == [1000, 1000, 1000]


def test_a_server_that_was_started_again_counts_from_nothing(config, server, tmp_path):
    server.write(5000, 4000)
    look(config, tmp_path)
    server.counts, server.texts, server.tokens = ServerCounts(), 0, 0
    server.write(100, 60)
    assert look(config, tmp_path) == (None, False)
    server.write(500, 300)
    assert look(config, tmp_path)[0] == "the server's τ since the last look: 1.60 [1.48, 1.72]"
    server.server.shutdown()
    server.server.server_close()
    said, fell = look(config, tmp_path)
    assert server.url in said and not fell and read_server_state(tmp_path).totals.num_drafts == 600


def test_the_interval_is_that_of_drafts_with_their_spread():
    alike, spread = ServerCounts(1000, 4000, 2000, (500, 500, 500, 500)), ServerCounts(1000, 4000, 2000, (1000, 1000))
    assert acceptance_length(alike, 50, 3050).value == acceptance_length(spread, 50, 3050).value == 3.0
    assert acceptance_length(spread, 50, 3050).ci95 == (3.0, 3.0)  # each accepts two
    # Half of them accept four, half none: a standard deviation of 2. Of 50 texts with 20 drafts on the mean a variance
    # that is 20 × 0.4 + 0.8 times that of drafts alone.
    for texts, effect in ((50, 8.8), (1000, 1.2)):
        low, high = acceptance_length(alike, texts, 3000 + texts).ci95
        assert high - low == pytest.approx(2 * 1.96 * 2 * (effect / 1000) ** 0.5)


def test_live_acceptance_is_what_was_emitted():
    """Texts of one draft whose ends cut it: vLLM counts eight accepted tokens, and three were emitted."""
    perfect = ServerCounts(1000, 8000, 8000, (1000,) * 8)
    found = acceptance_length(perfect, 1000, 4000)
    assert found.value is None and found.ci95 == (3.0, 4.0)  # 4 if the prompt's step drafted, too
    assert acceptance_length(ServerCounts(1000, 8000, 3000, (1000,) * 3), 1000, 4000).ci95 == (3.0, 4.0)
    (low, high), least = (
        acceptance_length(perfect, 1000, 8200).ci95,
        acceptance_length(perfect, 1000, 4000, (100, 50)).ci95[0],
    )
    assert (low, high) == (7.2, 8.2) and least == pytest.approx(4.0 - 1.05)
    assert acceptance_length(perfect, 1000, 900).ci95 is None  # fewer tokens than drafts


def test_a_server_that_does_not_count_its_tokens_has_no_live_acceptance(config, server, tmp_path):
    server.counts_tokens = False
    server.write(5000, 4000)
    said, fell = look(config, tmp_path)
    assert "so that its τ is not known" in said and not fell


def report(step: Path, alpha: float | None, passed: bool) -> None:
    (step / "server").mkdir(parents=True, exist_ok=True)
    found = {"value": alpha, "ci95": None if alpha is None else [alpha - 0.02, alpha + 0.02], "n": 9}
    failures = [] if passed else ["α must exceed 0.4"]
    within = found["ci95"]
    text = json.dumps(
        {
            "runs": [{"alpha": found}],
            "gate": {"passed": passed, "failures": failures, "min_alpha": 0.4},
            "server": {"counted": [{"alpha_within": within}]},
        }
    )
    (step / "server/report.json").write_text(text)


@pytest.mark.parametrize(
    ("alpha", "passed", "stays", "word"),
    [
        (0.5, True, True, "holds"),
        (0.3, False, False, "is below what was promised: α must exceed 0.4"),
        (None, False, True, "is not known"),
    ],
)
def test_a_new_drafter_stays_unless_the_server_accepts_less(
    config, server, tmp_path, monkeypatch, alpha, passed, stays, word
):
    step, ran = tmp_path / "step-0001", list[list[str]]()
    (step / "drafter").mkdir(parents=True)
    monkeypatch.setattr(watch.Stages, "run", lambda self, name, argv: ran.append(argv) or report(step, alpha, passed))
    restarted = tmp_path / "restarted"
    config.restart = f"sh -c 'echo again >> {restarted}'"
    assert check(config, tmp_path) is None
    command.move_link(tmp_path / "current", str(step / "drafter"))
    record_swap(config, tmp_path, step, str(tmp_path / "old"), ["--server=x"])
    assert restarted.read_text() == "again\n"
    said, stayed = check(config, tmp_path)
    assert word in said and stayed is stays and ran == [["measure", "--server=x"]]
    assert (tmp_path / "current").resolve() == (step / "drafter" if stays else tmp_path / "old").resolve()
    assert restarted.read_text() == "again\n" * (1 if stays else 2)
    assert check(config, tmp_path) is None and read_server_state(tmp_path) == ServerState()


def test_a_restart_that_fails_is_a_line(config, tmp_path, monkeypatch):
    for line, message in (
        ("false", "restart: expected exit code 0 of false, found 1"),
        ("no-such-program now", "restart: expected a command that can be run, found no-such-program"),
    ):
        config.restart = line
        with pytest.raises(InputError, match=message):
            record_swap(config, tmp_path, tmp_path / "s", "old", [])
        assert read_server_state(tmp_path).unchecked is not None
    config.restart, config.server = "true", "http://127.0.0.1:9"  # where nobody listens
    monkeypatch.setattr(watch, "STARTING", 0.5)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    with pytest.raises(
        InputError, match=r"restart: expected http://127.0.0.1:9 to answer within 0:00, found no answer"
    ):
        record_swap(config, tmp_path, tmp_path / "s", "old", [])


def flags(config: AdaptConfig) -> list[str]:
    return [
        "--target", config.target, "--drafter", config.drafter, "--log", json.dumps(config.log), "--output",
        config.output, "--server", str(config.server), "--swap",
    ]  # fmt: skip


def test_one_call_checks_looks_and_learns(config, server, tmp_path, monkeypatch, capsys):
    asked = list[bool]()
    monkeypatch.setattr(command, "adapt", lambda config, fell: asked.append(fell))
    server.write(1000, 700)
    assert cli.main(["adapt", *flags(config)]) == 0
    server.write(1000, 700)
    assert cli.main(["adapt", *flags(config)]) == 0
    server.write(1000, 400)
    assert cli.main(["adapt", *flags(config)]) == 0
    assert asked == [False, False, True]
    assert "it fell\nnothing to do" in capsys.readouterr().out
    step = tmp_path / "step-0001"
    (step / "drafter").mkdir(parents=True)
    command.move_link(tmp_path / "current", str(step / "drafter"))
    record_swap(config, tmp_path, step, str(tmp_path / "old"), ["--server=x"])
    monkeypatch.setattr(watch.Stages, "run", lambda self, name, argv: report(step, 0.2, passed=False))
    assert cli.main(["adapt", *flags(config)]) == 3
    said = capsys.readouterr().out
    assert (
        "is below what was promised: α must exceed 0.4" in said
        and f"points to {(tmp_path / 'old').resolve()} again" in said
    )
    assert len(asked) == 3  # nothing is learned in a call that takes a drafter back


def step_of(path: Path) -> command.Step:
    estimate = Estimate(0.5, (0.45, 0.55), 64)
    compared = Comparison(estimate, estimate, estimate, {"0": estimate}, {}, {"0": estimate})
    return command.Step("s", "better", "because", str(path / "old"), str(path / "step-0001/drafter"), 9, compared)


def test_a_restart_that_fails_is_tried_again_before_anything_is_checked(config, server, tmp_path, monkeypatch, capsys):
    step, asked = tmp_path / "step-0001", list[list[str]]()
    (step / "drafter").mkdir(parents=True)
    restarted, broken = tmp_path / "restarted", tmp_path / "broken"
    restart = ["--restart", f"sh -c 'test ! -e {broken} && echo again >> {restarted}'"]
    monkeypatch.setattr(command, "_step", lambda config, folder: step_of(tmp_path))
    monkeypatch.setattr(command, "read_traffic", lambda *given: Traffic([], [], 300))
    monkeypatch.setattr(watch.Stages, "run", lambda self, name, argv: asked.append(argv) or report(step, 0.5, True))
    report(step, 0.1, passed=False)  # of the server before
    broken.touch()
    assert cli.main(["adapt", *flags(config), *restart]) == 2
    assert (tmp_path / "current").resolve() == step / "drafter" and not asked and not restarted.exists()
    broken.unlink()
    assert cli.main(["adapt", *flags(config), *restart]) == 0
    assert restarted.read_text() == "again\n" and len(asked) == 1
    assert (tmp_path / "current").resolve() == step / "drafter"
    # At 64 requests the server's interval is as wide: it is below the promised one where its lower end is at 0.35.
    assert "--min_alpha=0.35" in asked[0] and f"--server={server.url}" in asked[0]
    assert "acceptance on the server holds" in capsys.readouterr().out
    monkeypatch.setattr(command, "read_traffic", lambda *given: None)
    assert cli.main(["adapt", *flags(config), *restart]) == 0 and len(asked) == 1  # once


def test_two_steps_at_a_time_are_refused(config, tmp_path, capsys):
    with lock_directory(tmp_path):
        assert cli.main(["adapt", *flags(config)]) == 2
    assert "output: expected a directory that no other run writes" in capsys.readouterr().err


def test_fewer_requests_are_enough_where_acceptance_fell(config):
    config.newest, config.least = 64, 256
    assert [command.enough(config, seen, fell=True) for seen in (0, 100, 500)] == [128, 64, 64]
    assert command.enough(config, 0, fell=False) == 256


def ended(process: BaseProcess, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_goes_on_until_it_is_told_and_lets_its_step_keep_what_it_has(tmp_path, number):
    step = tmp_path / "step.py"
    step.write_text(
        "import signal, sys, time\n"
        "def keep(number, frame):\n"
        f"    signal.signal(number, signal.SIG_DFL); time.sleep(0.3); open({str(tmp_path / 'kept')!r}, 'w').close()\n"
        "    sys.exit(128 + number)\n"
        "signal.signal(signal.SIGINT, keep); signal.signal(signal.SIGTERM, keep)\n"
        f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"count = len(open({str(tmp_path / 'asked')!r}).readlines())\n"
        "time.sleep(60 if count == 3 else 0)\n"
        "sys.exit(int(sys.argv[2]) if count == 1 else 2)\n"
    )
    own, asked = subprocess.Popen, tmp_path / "asked"

    def work(code: str) -> None:  # in a fork, which has imported everything
        os.setsid()
        watch.subprocess.Popen = lambda command: own([sys.executable, str(step), *command[3:]])
        sys.exit(watch.loop([code], 0.05))

    assert exit_code(partial(work, "2")) == 2
    assert asked.read_text() == "adapt 2 --watch=null\n"  # the first step must be possible
    asked.unlink()
    process = multiprocessing.get_context("fork").Process(target=work, args=("3",))
    process.start()
    ended(process, lambda: asked.exists() and asked.read_text().count("\n") == 3)
    time.sleep(0.2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(process.pid, number)
    process.join(30)
    assert (tmp_path / "kept").exists() and process.exitcode not in (None, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--restart", "true", "--swap", "false"], "restart: expected --swap with it"),
        (["--watch", "soon"], "watch: expected a time such as 40m, 2h or 1h30m, found 'soon'"),
        (["--server", "x"], "server: expected a URL"),
        (["--restart", "sh -c 'x"], 'restart: expected a command, found "sh -c \'x": No closing quotation'),
        (["--restart", " "], "restart: expected a command, found none"),
    ],
)
def test_what_cannot_be_is_refused(config, more, message):
    with pytest.raises(InputError, match=message):
        parse_config(AdaptConfig, [*flags(config), *more])


def test_the_loops_own_call_is_one_step(config):
    assert parse_config(AdaptConfig, [*flags(config), "--watch", "10m", "--watch=null"]).watch is None
