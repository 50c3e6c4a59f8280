"""The profiler: it changes nothing, its spans add up, and time lands in the part that took it."""

import json
from itertools import pairwise
from unittest import mock

import pytest
import torch
from conftest import perturbed, tiny_llama
from listening import LOADING, listened
from programs import Untraced
from rich.console import Console

from draftsmith.decode import DraftModelProposer, PromptLookupProposer, Tree, speculative_generate
from draftsmith.decode.measurement import profiler
from draftsmith.decode.measurement.profiler import PARTS, TRACKS, Profile, chrome_trace, profile_table
from draftsmith.medusa import MedusaConfig, MedusaHeads, MedusaProposer
from draftsmith.scripts import cli
from draftsmith.scripts.kinds import kind_named
from draftsmith.scripts.profile import main
from draftsmith.train.cli import run
from draftsmith.train.runs import save_model

NEW = 17
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "draft_length": 3}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 5, "draft_length": 3}
IDS = torch.randint(1, 97, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(9) >= torch.tensor([0, 4, 2])[:, None]).long()


def proposers(target):
    torch.manual_seed(2)
    heads = MedusaHeads(
        MedusaConfig(hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size, num_heads=3)
    )
    return {
        "the target itself": DraftModelProposer(target),  # its forwards as a drafter are part of the draft
        "lookup": PromptLookupProposer(),
        "medusa": MedusaProposer(heads, Tree.from_choices([(0,), (1,), (0, 0)])),
    }


def check(profile: Profile) -> None:
    """Spans fill their round without overlap; rounds lie in their call, one behind the other."""
    assert [round.number for round in profile.rounds] == list(range(1, len(profile.rounds) + 1))
    for round in profile.rounds:
        edges = [(span.begin, span.end) for span in round.spans]
        assert edges[0][0] == round.begin and edges[-1][1] == round.end
        assert all(end == begin for (_, end), (begin, _) in pairwise(edges))
        kinds = [span.kind for span in round.spans if span.kind != "rest"]
        assert kinds.count("accept") == 1  # of all rows at once
        assert next(span.name for span in round.spans if span.kind == "draft") == "propose"
        # The prompts of a batch have a forward of their own; one prompt shares it with its first draft.
        forwards = [kind for kind in kinds if kind in ("prefill", "target")]
        assert forwards in ([["prefill"], ["prefill", "target"]] if round.first else [["target"]])
    for call in profile.calls:
        own = [round for round in profile.rounds if call.begin <= round.begin <= round.end <= call.end]
        assert own[0].first and not any(round.first for round in own[1:])
        assert all(a.end == b.begin for a, b in pairwise(own))


def check_totals(found: dict) -> None:
    parts = [times["total_seconds"] or 0 for times in found["parts"].values()]
    assert sum(parts) == pytest.approx(found["round"]["total_seconds"], abs=1e-9)
    assert sum(times["share"] or 0 for times in found["parts"].values()) == pytest.approx(1)
    whole = sum(found[name]["total_seconds"] for name in ("round", "prefill", "outside"))
    assert whole == pytest.approx(found["total_seconds"], abs=1e-9)


@pytest.mark.parametrize(("name", "options"), [("the target itself", SAMPLED), ("lookup", GREEDY), ("medusa", SAMPLED)])
def test_nothing_changes_and_the_spans_add_up(target, name, options):
    proposer, profile, rounds = proposers(target)[name], Profile(), []
    for ids, mask in ((IDS[:1], None), (IDS[2:, 2:], None)):
        expected = speculative_generate(target, proposer, ids, mask, **options)
        before = len(profile.rounds)
        out = profile.generate(target, proposer, ids, mask, observer=rounds.append, **options)
        assert torch.equal(out.sequences, expected.sequences) and out.counts == expected.counts
        own, counts = profile.rounds[before:], out.counts
        assert len(own) == counts.num_drafts
        assert sum(r.accepted for r in own) == counts.num_accepted_tokens
        assert sum(r.drafted for r in own) == counts.num_draft_tokens
        assert sum(r.emitted for r in own) == counts.num_emitted_tokens
    assert len(rounds) == len(profile.rounds)  # a user's own observer goes on to hear
    check(profile)
    check_totals(profile.breakdown())
    expected = speculative_generate(target, proposer, IDS, MASK, **options)
    profile = Profile()
    out = profile.generate(target, proposer, IDS, MASK, **options)
    assert torch.equal(out.sequences, expected.sequences) and out.row_counts == expected.row_counts
    assert sum(round.rows for round in profile.rounds) == out.counts.num_drafts
    assert max(counts.num_drafts for counts in out.row_counts) == len(profile.rounds)
    check(profile)
    check_totals(profile.breakdown())
    assert not target._forward_hooks and not target._forward_pre_hooks


def test_compiled_and_lossy_calls(untraced, monkeypatch):
    target, call = tiny_llama(0, layers=1), Untraced.__call__
    draft = perturbed(target, 0.05)

    def past_hooks(program, *inputs):
        """Compute as a compiled forward does."""
        with mock.patch.multiple(target, _forward_hooks={}, _forward_pre_hooks={}):
            return call(program, *inputs)

    monkeypatch.setattr(Untraced, "__call__", past_hooks)
    for ids, mask in ((IDS[:1], None), (IDS, MASK)):
        expected = speculative_generate(target, DraftModelProposer(draft), ids, mask, compiled=True, **SAMPLED)
        profile = Profile()
        out = profile.generate(target, DraftModelProposer(draft), ids, mask, compiled=True, **SAMPLED)
        assert torch.equal(out.sequences, expected.sequences) and out.row_counts == expected.row_counts
        check(profile)
    assert {id(model) for model, _ in untraced} >= {id(target), id(draft)}
    expected = speculative_generate(target, DraftModelProposer(draft), IDS[:1], rule="typical", **SAMPLED)
    out = Profile().generate(target, DraftModelProposer(draft), IDS[:1], rule="typical", **SAMPLED)
    assert torch.equal(out.sequences, expected.sequences) and out.departure == expected.departure


class Clock:
    """A clock that stands still but for what the work is said to take."""

    def __init__(self):
        self.now = 1_000

    def perf_counter_ns(self) -> int:
        return self.now

    def advances(self, function, by: int):
        def call(*args, **kwargs):
            self.now += by
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("waits", [False, True], ids=["cpu", "a device that runs behind"])
def test_time_lands_in_the_part_that_took_it(draft, monkeypatch, waits):
    clock, proposer, target = Clock(), DraftModelProposer(draft), tiny_llama(0)
    monkeypatch.setattr(profiler, "time", clock)
    for method, by in (("start", 7), ("propose", 100), ("commit", 20)):
        monkeypatch.setattr(proposer, method, clock.advances(getattr(proposer, method), by))
    monkeypatch.setattr(target, "forward", clock.advances(target.forward, 3_000))
    rule = profiler.as_rule("exact")
    object.__setattr__(rule, "verify_batch", clock.advances(rule.verify_batch, 40_000))
    profile = Profile()
    if waits:  # only the waiting looks at the device
        monkeypatch.setattr(torch.cuda, "synchronize", clock.advances(lambda device: None, 1))
        monkeypatch.setattr(
            Profile, "_device", property(lambda self: torch.device("cuda"), lambda self, to: None), raising=False
        )
    observer = clock.advances(lambda round: None, 500_000)
    out = profile.generate(target, proposer, IDS[:1], rule=rule, observer=observer, **GREEDY)
    check(profile)
    found, n = profile.breakdown(), out.counts.num_drafts - 1
    parts = {kind: found["parts"][kind]["median_seconds"] for kind in PARTS}
    # The last round has no commit.
    assert n > 2 and found["rounds"] == n
    assert parts["draft"] == pytest.approx(120e-9) and parts["target"] == pytest.approx(3e-6)
    assert parts["accept"] == pytest.approx(40e-6) and parts["rest"] == pytest.approx(500e-6)
    assert found["parts"]["draft"]["total_seconds"] == pytest.approx((n * 120 - 20) * 1e-9)
    first = 543_120 + (8 if waits else 0)
    assert found["prefill"]["total_seconds"] == pytest.approx(first * 1e-9)
    if waits:  # before and after each of propose, forward, verify and commit
        assert parts["sync"] == pytest.approx(8e-9)
        medians = {kind: times["median_seconds"] for kind, times in found["sync_after"].items()}
        assert medians == pytest.approx({"draft": 2e-9, "target": 1e-9, "accept": 1e-9, "rest": 4e-9})
    else:
        assert parts["sync"] is None and found["sync_after"] == {}
        assert found["outside"]["total_seconds"] == pytest.approx(7e-9)
    check_totals(found)
    console = Console(width=80, record=True)
    console.print(profile_table([profile]))
    rows = [line.split() for line in console.export_text().splitlines()]
    (sync,) = (row for row in rows if row and row[0] == "sync")
    assert sync[1:] == (["–", "–", "–"] if not waits else ["0.0%", "0.000", "0.000"])
    assert any(row[:3] == [str(n), "rounds", "100.0%"] for row in rows)


def test_a_failed_call_leaves_no_hooks_and_the_next_one_is_whole(target, draft):
    class Stops(DraftModelProposer):
        def propose(self, contexts, draft_lengths):
            if len(contexts[0]) > 12:
                raise RuntimeError("stopped")
            return super().propose(contexts, draft_lengths)

    profile = Profile()
    with pytest.raises(RuntimeError, match="stopped"):
        profile.generate(target, Stops(draft), IDS[:1], **GREEDY)
    assert not target._forward_hooks and not target._forward_pre_hooks
    before = len(profile.rounds)
    out = profile.generate(target, DraftModelProposer(draft), IDS[:1], **GREEDY)
    assert len(profile.rounds) - before == out.counts.num_drafts
    check_totals(profile.breakdown())
    # One round alone is all prefill; there is nothing to take a median of.
    profile = Profile()
    profile.generate(target, DraftModelProposer(draft), IDS[:1], **GREEDY | {"max_new_tokens": 1})
    found = profile.breakdown()
    assert found["rounds"] == 0 and found["round"]["median_seconds"] is None and found["prefill"]["total_seconds"] > 0
    console = Console(width=80, record=True)
    console.print(profile_table([profile]))
    assert "0 rounds" in console.export_text()


def check_trace(trace: dict, sizes: list[int]) -> list[dict]:
    """Check a trace as its readers take it: complete events that do not overlap in a thread, parts within rounds."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"batch size {size}" for size in sizes]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"} and min(e["ts"] for e in spans) == 0
    for e in spans:
        assert names[e["pid"], e["tid"]] == e["cat"] and e["cat"] in TRACKS and e["dur"] >= 0
    for pid, tid in names:
        own = [(e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid)]
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(sorted(own)))
    rounds = {(e["pid"], e["args"]["round"]): e for e in spans if e["cat"] == "round"}
    for e in spans:
        if "args" in e:
            outer = rounds[e["pid"], e["args"]["round"]]
            assert outer["args"] == e["args"]
            assert outer["ts"] - 1e-6 <= e["ts"] <= e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] + 1e-6
        else:
            assert e["cat"] == "call" or (e["cat"], e["name"]) == ("draft", "start")
    return list(rounds.values())


def test_the_trace_is_what_its_readers_take(target, draft):
    one, three = Profile(), Profile()
    out = one.generate(target, DraftModelProposer(draft), IDS[:1], **GREEDY)
    three.generate(target, DraftModelProposer(draft), IDS, MASK, **GREEDY)
    rounds = check_trace(json.loads(json.dumps(chrome_trace([one]))), [1])
    assert len(rounds) == out.counts.num_drafts
    assert [r["args"]["round"] for r in rounds] == list(range(1, len(rounds) + 1))
    assert sum(r["args"]["accepted"] for r in rounds) == out.counts.num_accepted_tokens
    assert {r["args"]["draft_length"] for r in rounds} <= {0, 1, 2, 3} and rounds[0]["args"]["draft_length"] == 3
    assert len(check_trace(chrome_trace([one, three]), [1, 3])) == len(one.rounds) + len(three.rounds)


@pytest.fixture(scope="module")
def root(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("profiled")
    target = tiny_llama(0, len(tokenizer))
    for name, model in {"target": target, "draft": perturbed(target, 0.05)}.items():
        save_model(model, tokenizer, root / name)
    MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=len(tokenizer), num_heads=2)).save_pretrained(root / "heads")
    (root / "prompts.txt").write_text("def f(x):\nimport os\na story of x\nfor i in\nself\n")
    return root


def flags(root, *more: str) -> list[str]:
    return [
        "--target", str(root / "target"), "--prompts", str(root / "prompts.txt"), "--dtype", "float32",
        "--max-new-tokens", "9", *more,
    ]  # fmt: skip


def test_the_command(root, tmp_path, capsys):
    assert "profile" in cli.COMMANDS
    for i, (drafter, kind, temperature, depth) in enumerate(
        [(("--draft", str(root / "draft")), "draft", "0.8", 3), (("--medusa", str(root / "heads")), "medusa", "0", 2)]
    ):
        out = tmp_path / str(i)
        more = ["--batch-size", "1,2", "--temperature", temperature, "--draft-length", "3", "--output", str(out)]
        with listened() as heard:
            assert main(flags(root, *drafter, *more)) == 0
        heard.require("prompts", "batch size 1", "batch size 2", *LOADING)
        printed = capsys.readouterr().out
        report = json.loads((out / "profile.json").read_text())
        assert report["schema"] == "draftsmith.profile/1" and report["draft_length"] == depth
        assert report["proposer"]["kind"] == kind and report["temperature"] == float(temperature)
        rounds = check_trace(json.loads((out / "trace.json").read_text()), [1, 2])
        one, two = report["batches"]
        assert (one["batch_size"], one["prompts"]) == (1, 5) and (two["batch_size"], two["prompts"]) == (2, 4)
        for batch in (one, two):
            check_totals(batch)
            rows = sum(r["args"]["rows"] for r in rounds if r["pid"] == batch["batch_size"])
            assert rows == batch["counts"]["num_drafts"]
            assert batch["counts"]["num_emitted_tokens"] == 9 * batch["prompts"]
        lines = printed.splitlines()
        assert lines[0].startswith(f"{kind_named(kind).title}, γ = {depth}, T = ") and max(map(len, lines[1:-1])) <= 80
        assert "…" not in printed and f"{one['rounds']} rounds " in printed and " rows" in printed
        assert lines[-1].endswith(str(out / "trace.json"))


def test_bad_input_is_refused_in_one_line(root, tmp_path, capsys):
    draft = ("--draft", str(root / "draft"))
    for more, named in [
        ((), "drafter: expected one, found none"),
        ((*draft, "--prompt_lookup", "true"), "drafter: expected one, found draft:"),
        ((*draft, "--batch_size", "1,6"), "batch_size: expected at most the 5 prompts, found 6"),
        ((*draft, "--batch_size", "2,0"), "batch_size: "),
        ((*draft, "--draft_length", "0"), "draft_length: "),
        ((*draft, "--temperature=-1"), "temperature: "),
    ]:
        arguments = flags(root, *more, "--output", str(tmp_path / "out"))
        capsys.readouterr()
        assert run(lambda arguments=arguments: main(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and named in line
    assert not (tmp_path / "out").exists()
