"""`measure --server` against servers that speculate by a known law: the report says what they counted."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from simulated_server import MODEL, simulated_server

from draftsmith.scripts import cli
from draftsmith.scripts.measure.server import observe
from draftsmith.scripts.report.schema import report_schema

COUNT, NEW = 12, 40
VALIDATOR = Draft202012Validator(report_schema())


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(observe, "READ_AGAIN", 0.01)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"word {i}", "category": "ab"[i % 2]} for i in range(COUNT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"word {i}"}]} for i in range(COUNT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def measure(tmp_path, capsys):
    def run(server, prompts, *flags, baseline=None) -> tuple[int, dict | None, str]:
        argv = ["measure", "--server", server.url, "--prompts", str(prompts), "--output", str(tmp_path / "out")]
        argv += ["--max-new-tokens", str(NEW), "--warm-up", "0", *map(str, flags)]
        argv += ["--baseline-server", baseline.url] if baseline else []
        code = cli.main(argv)
        path = tmp_path / "out" / "report.json"
        report = json.loads(path.read_text()) if path.exists() else None
        if report is not None:
            VALIDATOR.validate(report)
        out = capsys.readouterr()
        run.out = out.out
        return code, report, out.err

    return run


def last_line(err: str) -> str:
    return [line for line in err.replace("\r", "\n").splitlines() if line.strip()][-1]


def expected(server) -> dict[str, float]:
    """What the law's steps did: τ in the texts, and α as it is counted."""
    drafts, gamma = len(server.emitted), server.draft_length
    alpha = sum(server.steps) / sum(min(accepted + 1, gamma) for accepted in server.steps)
    return {"tau": sum(server.emitted) / drafts, "alpha": alpha, "drafts": drafts}


def check_run(report: dict, server) -> None:
    (run,), law = report["runs"], expected(server)
    assert run["counts"]["num_drafts"] == law["drafts"]
    assert run["counts"]["num_accepted_tokens"] == sum(server.steps)
    for name, value, most in (("mean_acceptance_length", "tau", server.draft_length + 1), ("alpha", "alpha", 1)):
        assert run[name]["value"] == pytest.approx(law[value]) and run[name]["n"] == COUNT
        low, high = run[name]["ci95"]
        assert 0 < low < law[value] < high <= most
    by_position = [sum(s > i for s in server.steps) / law["drafts"] for i in range(server.draft_length)]
    assert run["acceptance_per_position"] == pytest.approx(by_position)


@pytest.mark.parametrize(
    "law, source",
    [
        ({}, "parts"),
        ({"counts_answers": True}, "answers"),
        ({"kind": "sglang"}, "answers"),
        ({"kind": "sglang", "metrics": False}, "answers"),
    ],
    ids=["vllm", "vllm that counts answers", "sglang", "sglang without metrics"],
)
def test_what_a_server_counts_is_what_is_reported(measure, prompts, law, source):
    with simulated_server(**law) as server:
        code, report, _ = measure(server, prompts)
    assert code == 0
    (run,) = report["runs"]
    check_run(report, server)
    assert report["server"]["counted"][0]["source"] == source
    assert run["draft_length"] == 4 and run["proposer"]["kind"] == "server"
    assert run["counts"]["num_emitted_tokens"] == COUNT * NEW
    assert report["baseline"] is report["gate"] is None
    assert not report["recommendation"]["go"] and "Nothing to decide" in report["recommendation"]["reason"]
    assert "MEASURED" in measure.out
    assert report["server"]["servers"][0]["kind"] == law.get("kind", "vllm")
    assert report["server"]["warnings"] == []
    assert {name: of["prompts"] for name, of in run["by_category"].items()} == {"a": COUNT / 2, "b": COUNT / 2}


@pytest.mark.parametrize(
    "law",
    [{"beyond_end": False}, {"alpha": 1.0, "draft_length": 8}, {"alpha": 1.0, "draft_length": 8, "beyond_end": False}],
    ids=str,
)
def test_a_step_emits_what_stands_in_the_text(measure, prompts, law):
    """τ has nothing past the end of a text, whether or not that is counted."""
    with simulated_server(**law) as server:
        code, report, _ = measure(server, prompts)
    (run,), found = report["runs"], expected(server)
    assert code == 0 and run["mean_acceptance_length"]["value"] == pytest.approx(found["tau"])
    assert run["alpha"]["value"] == pytest.approx(found["alpha"]) and run["alpha"]["value"] > 0.5


def test_the_page_names_the_server(measure, prompts, tmp_path):
    with simulated_server() as server, simulated_server(draft_length=0) as plain:
        measure(server, prompts, "--concurrency", "1,2", "--drafter", "<script>alert(1)</script>", baseline=plain)
        page = (tmp_path / "out/report.html").read_text()
        for words in (server.url, plain.url, "vLLM 0.32.0", "Latency", "2 requests at once"):
            assert words in page
        assert "<script" not in page and "&lt;script&gt;alert(1)" in page


def test_steps_that_come_together_leave_no_interval_and_so_no_pass(measure, prompts):
    with simulated_server(merges=True) as server:
        code, report, _ = measure(server, prompts, "--min-alpha", "0.1")
    (run,), (counted,), law = report["runs"], report["server"]["counted"], expected(server)
    assert counted["source"] == "counters"
    for name, value in (("mean_acceptance_length", "tau"), ("alpha", "alpha")):
        assert run[name]["value"] == pytest.approx(law[value]) and run[name]["ci95"] is None
    assert code == 3 and "no interval over prompts" in report["server"]["warnings"][0]


@pytest.mark.parametrize("told", [True, False])
def test_chats_of_sglang_are_counted_one_by_one_where_it_tells(measure, chats, told):
    """Versions since 0.5.19 do."""
    with simulated_server(kind="sglang", counts_answers=told) as server:
        code, report, _ = measure(server, chats, *(("--min-alpha", "0.3") if told else ()))
    assert code == 0 and report["server"]["counted"][0]["source"] == ("answers" if told else "counters")
    assert {path for path, _ in server.asked} == {"/v1/chat/completions"}
    if told:
        check_run(report, server)
        return
    (run,) = report["runs"]
    assert run["alpha"]["value"] is None and run["mean_acceptance_length"]["ci95"] is None
    assert run["mean_acceptance_length"]["value"] == pytest.approx(COUNT * (NEW - 1) / len(server.steps))
    assert len(report["server"]["warnings"]) == 2


def test_alpha_is_a_gate_for_a_cron_job(measure, prompts):
    """The lower end of the interval decides: above it 0, below it 3."""
    with simulated_server(alpha=0.7, counts_answers=True) as server:
        report = measure(server, prompts)[1]
        low, high = report["runs"][0]["alpha"]["ci95"]
        good, report, _ = measure(server, prompts, "--min-alpha", low - 0.01)
        assert good == 0 and report["gate"]["passed"] and report["recommendation"]["go"]
        assert "GO" in measure.out and "Acceptance holds" in report["recommendation"]["reason"]
        bad, report, _ = measure(server, prompts, "--min-alpha", (low + high) / 2)
        assert bad == 3 and not report["gate"]["passed"] and not report["recommendation"]["go"]
        assert report["gate"]["failures"][0].startswith("α must exceed")


def test_two_servers_take_turns_and_the_speed_up_is_a_gate(measure, prompts):
    """No bound here depends on how fast this machine is."""
    with simulated_server() as server, simulated_server(draft_length=0) as plain:
        flags = ["--concurrency", "1,2"]
        code, report, _ = measure(server, prompts, *flags, "--min-speedup", "1e-6", baseline=plain)
        assert code == 0 and report["recommendation"]["go"] and report["gate"]["passed"]
        one, two = report["runs"]
        assert (one["batch_size"], one["speedup"]["n"]) == (1, COUNT)  # over prompts
        assert (two["batch_size"], two["speedup"]["n"]) == (2, COUNT // 2)  # over turns
        assert server.busiest == plain.busiest == 2
        assert all(run["lossless"]["passed"] and run["lossless"]["prompts_identical"] == COUNT for run in (one, two))
        both = [[body["prompt"] for _, body in each.asked] for each in (server, plain)]
        assert both[0][:COUNT] == both[1][:COUNT] and sorted(both[0]) == sorted(both[1])
        assert {each["role"] for each in report["server"]["latencies"]} == {"server", "baseline_server"}
        code, report, _ = measure(server, prompts, *flags, "--min-speedup", "1e6", baseline=plain)
        assert code == 3 and "the speed-up must exceed 1e+06" in report["gate"]["failures"][0]


def test_what_a_draft_length_of_0_costs_is_measured(measure, prompts):
    """A server whose table says 0 at every load still runs what belongs to its drafter."""
    with simulated_server(draft_length=0, has_drafter=True) as server, simulated_server(draft_length=0) as plain:
        code, report, _ = measure(server, prompts, "--draft_length", "0", baseline=plain)
    (run,) = report["runs"]
    assert code == 0 and report["server"]["warnings"] == []
    assert run["draft_length"] == 0 and run["speedup"]["value"] > 0 and run["lossless"]["passed"]
    assert run["mean_acceptance_length"]["value"] is run["alpha"]["value"] is None
    with simulated_server() as server:
        code, _, err = measure(server, prompts, "--draft_length", "0")
    assert code == 2 and "draft_length: expected a server that drafts nothing" in last_line(err)


def test_a_server_that_dies_leaves_the_finished_settings(measure, prompts):
    for answers, settings in ((3, 0), (COUNT + 5, 1)):
        with simulated_server(dies_after=answers) as server:
            code, report, err = measure(server, prompts, "--concurrency", "1,2")
        assert code == 1 and last_line(err).startswith("error: server: expected an answer")
        assert (report is not None) == bool(settings)
    assert len(report["runs"]) == 1 and report["failures"][0]["exit_code"] == 1 and not report["recommendation"]["go"]


@pytest.mark.parametrize("reading", [8, 9, 10])
def test_a_server_that_started_anew_is_not_counted_on(measure, prompts, reading):
    """During a turn, or between two."""
    with simulated_server() as server:
        page, count = server.page, 0

        def forgets():
            nonlocal count
            count += 1
            if count == reading:
                server.steps, server.generated = [], 0
            return page()

        server.page = forgets
        code, _, err = measure(server, prompts)
    assert code == 1 and "was it started anew?" in last_line(err)


def test_the_traffic_of_others_is_seen(measure, prompts):
    with simulated_server(others=7) as server:
        code, report, _ = measure(server, prompts)
    warnings = report["server"]["warnings"]
    assert code == 0 and f"the server wrote {COUNT * (NEW + 7)} tokens; {COUNT * NEW} were ours" in warnings.pop()
    assert report["runs"][0]["mean_acceptance_length"]["value"] is None


def refused(measure, server, prompts, *flags) -> str:
    code, report, err = measure(server, prompts, *flags)
    assert code == 2 and report is None
    return last_line(err)


def test_what_cannot_be_measured_is_refused_in_one_line(measure, prompts, chats, tmp_path):
    with simulated_server() as server:
        assert "server: expected a model other" in refused(measure, server, prompts, "--model", "other")
        assert "no_repeat_ngram_size" in refused(measure, server, prompts, "--config={no_repeat_ngram_size: 2}")
        assert "min_speedup: expected a `baseline_server`" in refused(measure, server, prompts, "--min-speedup", "2")
        assert "max_prompt_tokens: expected a `target`" in refused(
            measure, server, prompts, "--config={max_prompt_tokens: 2}"
        )
        server.metrics = False
        assert re.search("found 404", refused(measure, server, prompts))
    assert "server: expected an answer" in refused(measure, server, prompts)  # it has ended
    for law in ({"draft_length": 0}, {"kind": "sglang", "verify_calls": False}):  # an SGLang with gauges alone
        with simulated_server(**law) as plain:
            line = refused(measure, plain, chats, "--output", tmp_path / plain.kind)
            assert "expected one that speculates" in line


def test_a_prompt_that_is_too_long_is_named_before_it_is_sent(measure, tmp_path):
    target = Path(__file__).parents[2] / "assets" / "tiny-target"
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "prompt": "word " * 600}) + "\n")
    with simulated_server() as server:
        line = refused(measure, server, path, "--target", target)
        assert "prompt 'long'" in line and "at most 512 tokens" in line and not server.asked


def test_prompts_go_as_tokens_text_or_messages(measure, prompts, chats):
    target = Path(__file__).parents[2] / "assets" / "tiny-target"
    with simulated_server() as server:
        measure(server, prompts, "--temperature", "0.7", "--top_k", "5")
        path, body = server.asked[0]
        assert (path, body["prompt"], body["model"]) == ("/v1/completions", "word 0", MODEL)
        assert (body["temperature"], body["top_k"]) == (0.7, 5) and 0 <= body["seed"] < 2**31
        server.asked.clear()
        measure(server, prompts, "--target", target)
        assert all(isinstance(token, int) for token in server.asked[0][1]["prompt"])
        server.asked.clear()
        measure(server, chats, "--system_prompt", "Be brief.")
        path, body = server.asked[0]
        assert path == "/v1/chat/completions" and [m["role"] for m in body["messages"]] == ["system", "user"]
