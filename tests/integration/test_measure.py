"""`draftsmith measure` on a tiny pair: what the report says, that it is consistent with itself, and what it decides."""

import copy
import functools
import inspect
import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import perturbed, tiny_llama
from drafter_fields import with_drafters
from jsonschema import Draft202012Validator
from listening import LOADING, listened
from pydantic import TypeAdapter
from rich.console import Console
from short_timing import shorten
from trained_heads import own_texts, train_heads
from trained_parallel import train_parallel
from training_steps import error_line
from transformers import AutoModelForCausalLM

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement import intervals
from draftsmith.decode.measurement.certificate import Certificate, certify_sampled
from draftsmith.decode.measurement.costs import CostTable, DraftCosts
from draftsmith.decode.options import Sampling
from draftsmith.decode.replay.rounds import expected_counts
from draftsmith.medusa import MedusaConfig, MedusaHeads
from draftsmith.scripts.engines.draft_lengths import speculative_fields
from draftsmith.scripts.kinds import short_names
from draftsmith.scripts.measure import certify, command, round_costs, side_by_side, stages
from draftsmith.scripts.measure.command import main, measure
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.measure.state import Method
from draftsmith.scripts.report.rounds import read_rounds
from draftsmith.scripts.report.schema import report_schema
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report
from draftsmith.scripts.report.words import turns
from draftsmith.train.cli import flags_of
from draftsmith.train.runs import save_model

PROMPTS = [("def f(x):", "code"), ("import os", "code"), ("a story of x", "prose"), ("self", None)]
PROMPTS += [("for i in", "code"), ("return a", "code")]  # as many as an interval needs, and one more
NEW = 9
LENGTHS = (2, 3)
CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0]]
NAMES = {"draft": "draft", "stock": "baseline_draft", "parallel_draft": "parallel_draft", "medusa": "medusa"}
NAMES |= {"prompt_lookup": "prompt_lookup"}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Few resamples and repeats: no test looks at how wide an interval is or how long anything took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "RESAMPLES", 100)
        patch.setattr(side_by_side, "REPEATS", 1)
        shorten(patch)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory, tokenizer):
    """A target; drafts that are close to it, further off and far away; heads that draft a tree of depth 2; prompts."""
    root = tmp_path_factory.mktemp("measured")
    target = tiny_llama(0, len(tokenizer), layers=1)
    models = {"draft": perturbed(target, 0.02), "stock": perturbed(target, 0.2), "bad": perturbed(target, 3.0)}
    ids = [torch.tensor(tokenizer.encode(text)) for text, _ in PROMPTS]
    texts = own_texts(target, ids, max_new_tokens=NEW, do_sample=False)
    models["parallel"] = train_parallel(perturbed(target, 0.02), 0, 3, texts)
    for name, model in (models | {"target": target}).items():
        model.generation_config.eos_token_id = None
        save_model(model, tokenizer, root / name)
    rows = [{"prompt": text} | ({"category": category} if category else {}) for text, category in PROMPTS]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    heads = train_heads(target, MedusaHeads.of_target(target, 3), texts, steps=15)
    heads.config.medusa_choices = CHOICES
    heads.save_pretrained(root / "heads")
    return root


def checked(root, output, page=False, **settings):
    """Measure, and require what was left in report.json to be of the schema: every report of these tests is."""
    fixed = {"target": str(root / "target"), "prompts": str(root / "prompts.jsonl"), "dtype": "float32"}
    others = {"max_new_tokens": NEW, "draft_length": "2", "costs": "none", "compiled": False}
    with pytest.MonkeyPatch.context() as patch:
        if not page:  # it takes a second
            patch.setattr(command, "render_page", lambda report: "<!DOCTYPE html>")
        report = measure(MeasureConfig(**with_drafters(fixed | others | settings), output=str(output)))
    return valid(output, report)


def valid(output, report=None):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((output / "report.json").read_text(), parse_constant=refuse)
    assert report is None or found == json.loads(json.dumps(asdict(report)))
    assert [f"{error.json_path}: {error.message[:200]}" for error in VALIDATOR.iter_errors(found)] == []
    assert (output / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(output.glob(".*"))
    check_by_load(output, found)
    return found


def check_by_load(output, report):
    """Draft lengths by load are in ranges that servers take, and drafting pays where there is a length."""
    assert bool(report["by_load"]) == (output / "draft_lengths.json").is_file()
    for load in report["by_load"]:
        assert load["goodput"].keys() >= {str(rows) for rows in {run["batch_size"] for run in report["runs"]}}
        ranges = load["ranges"]
        assert [each["first"] for each in ranges] == [1, *(each["last"] + 1 for each in ranges[:-1])]
        assert speculates(output, load) == any(each["draft_length"] for each in ranges)
        if len(load["temperatures"]) > 1:
            continue
        for rows, goodput in load["goodput"].items():
            chosen = next(each["draft_length"] for each in ranges if each["first"] <= int(rows) <= each["last"])
            ratio = goodput["drafting"] / goodput["plain"]
            assert ratio > 0.98 if chosen else ratio < 1.02


def speculates(output, load):
    entry = json.loads((output / "draft_lengths.json").read_text())["drafters"][load["proposer"]]
    try:
        fields = speculative_fields(str(output / "draft_lengths.json"), str(entry["path"]))
    except InputError as error:
        assert "pays" in str(error) or entry["path"] is None
        return any(each["draft_length"] for each in load["ranges"]) if entry["path"] is None else False
    assert fields["num_speculative_tokens"] == max(each["draft_length"] for each in load["ranges"])
    return True


TYPED = TypeAdapter(Report)
VALIDATOR = Draft202012Validator(report_schema())
fails = functools.partial(error_line, main)


@pytest.fixture(scope="module")
def measured(root):
    """All kinds of drafters: 2 temperatures × 2 batch sizes × 2 lengths, with costs; and what was decoded."""
    decoded = {}

    def remembered(*args, **options):
        found = decode(*args, **options)
        decoded[args[1], args[2]] = found
        return found

    decode = stages.decode_side_by_side
    with pytest.MonkeyPatch.context() as patch, listened() as heard:
        patch.setattr(stages, "decode_side_by_side", remembered)
        report = checked(
            root, root / "out", draft=str(root / "draft"), baseline_draft=str(root / "stock"),
            parallel_draft=str(root / "parallel"), medusa=str(root / "heads"), prompt_lookup=True, temperature="0,1",
            draft_length="2,3", batch_size="1,2", costs=None, page=True,
        )  # fmt: skip
    heard.require("prompts", "T=0, B=2", "T=1, B=1", "replay", "margins", "further tokens", "certificates", "report")
    heard.require("costs of rounds", *LOADING)
    return report, decoded


def runs_of(report: dict, name: str | None = None, **where: object) -> list[dict]:
    runs = [run for run in report["runs"] if name in (None, run["proposer"]["name"])]
    return [run for run in runs if all(run[key] == value for key, value in where.items())]


def curve_of(report: dict, name: str, temperature: float, verifier: str = "probabilistic") -> dict:
    (found,) = (
        curve
        for curve in report["curves"]
        if (curve["proposer"]["name"], curve["temperature"], curve["verifier"]) == (name, temperature, verifier)
    )
    return found


def walk(value: object):
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


@pytest.fixture(scope="module")
def brief(measured):
    """A report with one entry of each kind: to validate all of them takes ten times as long."""
    report, _ = measured
    return report | {name: report[name][:1] for name in ("runs", "curves", "comparisons")}


def test_the_schema_is_strict(brief):
    Draft202012Validator.check_schema(report_schema())
    for path, wrong in [
        (("schema",), "draftsmith.report/2"),
        (("surprise",), 1),
        (("runs", 0, "alpha"), {"value": 0.5, "ci95": None}),
        (("runs", 0, "conditional_acceptance", 0), 1.5),
        (("curves", 0, "mean_acceptance_length", "γ"), {"value": 1.0, "ci95": None, "n": 1}),
        (("recommendation", "reason"), None),
    ]:
        changed = copy.deepcopy(brief)
        functools.reduce(lambda value, key: value[key], path[:-1], changed)[path[-1]] = wrong
        assert not VALIDATOR.is_valid(changed), path
    for key in brief:
        assert not VALIDATOR.is_valid({name: value for name, value in brief.items() if name != key}), key


def test_what_was_measured(measured, root):
    report, _ = measured
    parameters = AutoModelForCausalLM.from_pretrained(root / "target").num_parameters()
    none = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    assert report["target"] == {
        "path": str(root / "target"), "parameters": parameters, "dtype": "float32", "quantization": None,
        "filters": none, "left_out": [],
    }  # fmt: skip
    assert report["prompts"] == {
        "path": str(root / "prompts.jsonl"), "count": 6, "replayed": 6, "categories": {"code": 4, "prose": 1},
    }  # fmt: skip
    settings = [(t, b) for t in (0.0, 1.0) for b in (1, 2)]
    assert [(of["temperature"], of["batch_size"]) for of in report["baseline"]["by_temperature"]] == settings
    # Heads draft their tree, whatever γ the others have.
    asked = [(t, b, k, name) for t, b in settings for name in NAMES for k in ((2,) if name == "medusa" else LENGTHS)]
    found = [(r["temperature"], r["batch_size"], r["draft_length"], r["proposer"]["name"]) for r in report["runs"]]
    assert found == asked
    proposers = {run["proposer"]["name"]: run["proposer"] for run in report["runs"]}
    assert {name: proposer["kind"] for name, proposer in proposers.items()} == NAMES
    of_heads = MedusaHeads.from_pretrained(root / "heads").num_parameters()
    sizes = dict.fromkeys(("draft", "stock", "parallel_draft"), parameters) | {"medusa": of_heads, "prompt_lookup": 0}
    paths = {"draft": "draft", "stock": "stock", "parallel_draft": "parallel", "medusa": "heads"}
    for name, proposer in proposers.items():
        assert proposer["path"] == (str(root / paths[name]) if name in paths else None)
        assert (proposer["parameters"], proposer["bytes"]) == (sizes[name], 4 * sizes[name])
    assert (proposers["medusa"]["heads"], proposers["medusa"]["tree_nodes"]) == (3, len(CHOICES))


def test_counts_are_integers_and_ratios_are_theirs(measured):
    report, _ = measured
    for run in report["runs"]:
        counts, gamma, heads = run["counts"], run["draft_length"], run["proposer"]["kind"] == "medusa"
        assert all(type(value) is int for value in walk(counts) if not isinstance(value, dict | list))
        assert counts["num_emitted_tokens"] == NEW * len(PROMPTS)
        assert counts["num_accepted_tokens"] == sum(counts["num_accepted_tokens_per_pos"])
        # A tree drafts more tokens than positions.
        positions = sum(counts["num_draft_tokens_per_pos"])
        assert positions < counts["num_draft_tokens"] if heads else positions == counts["num_draft_tokens"]
        # Every round emits its accepted tokens and one more: no text ends inside a block here.
        assert counts["num_emitted_tokens"] == counts["num_drafts"] + counts["num_accepted_tokens"]
        ratio = counts["num_accepted_tokens"] / counts["num_draft_tokens"]
        assert run["draft_acceptance_rate"]["value"] == pytest.approx(ratio, rel=1e-12)
        tau = counts["num_emitted_tokens"] / counts["num_drafts"]
        assert run["mean_acceptance_length"]["value"] == pytest.approx(tau, rel=1e-12)
        assert 1 <= tau <= gamma + 1
        assert run["speedup"]["ci95"] is None or run["batch_size"] == 1  # three batches are too few
        for name in ("alpha", "draft_acceptance_rate", "mean_acceptance_length", "speedup"):
            if run[name] is not None and run[name]["ci95"] is not None:
                assert run[name]["ci95"][0] <= run[name]["value"] <= run[name]["ci95"][1]


def test_batches_write_the_same_texts(measured):
    report, decoded = measured
    for temperature in (0.0, 1.0):  # with the same seeds under sampling, too
        for method, groups in decoded[temperature, 1].items():
            alone, together = (
                [row for group in found for row in group.rows] for found in (groups, decoded[temperature, 2][method])
            )
            assert [row.prompt for row in together] == list(range(len(PROMPTS))) and alone == together
        for run in runs_of(report, temperature=temperature, batch_size=1):
            where = {"temperature": temperature, "draft_length": run["draft_length"]}
            (other,) = runs_of(report, run["proposer"]["name"], batch_size=2, **where)
            assert run["counts"] == other["counts"] and run["replay"] == other["replay"]


def test_greedy_texts_are_identical_and_replay_is_exact(measured):
    report, _ = measured
    for run in runs_of(report, temperature=0.0):
        assert run["lossless"]["checked"] is run["lossless"]["identical"] is run["lossless"]["passed"] is True
        assert run["replay"]["agrees"] is True
        replayed = curve_of(report, run["proposer"]["name"], 0.0)["mean_acceptance_length"][str(run["draft_length"])]
        assert run["replay"]["mean_acceptance_length"] == replayed
        assert replayed["value"] == pytest.approx(run["mean_acceptance_length"]["value"], rel=1e-12)
        if run["batch_size"] == 1:
            assert replayed["ci95"] == pytest.approx(run["mean_acceptance_length"]["ci95"], rel=1e-12)


def test_every_round_is_written_down_for_servers_to_be_compared_with(measured, root):
    report, decoded = measured
    settings, texts = read_rounds(str(root / "out"))
    assert settings.drafters["draft"] == {"kind": "draft", "path": str(root / "draft")}
    assert (settings.max_new_tokens, settings.draft_length) == (NEW, max(LENGTHS))
    for temperature in (0.0, 1.0):
        of = [text for text in texts if text.temperature == temperature]
        plain = [row for group in decoded[temperature, 1][Method()] for row in group.rows]
        assert [list(text.tokens[: text.length]) for text in of] == [row.tokens for row in plain]
        assert {len(text.tokens) - text.length for text in of} == {max(LENGTHS)}
        sizes = torch.full((1,), NEW)
        for name in ("draft", "stock"):
            for k in LENGTHS:
                counts = [
                    expected_counts(
                        torch.tensor(text.acceptance(name, "probabilistic", k)[:NEW].copy())[None], sizes, sizes
                    )[0]
                    for text in of
                ]
                curve = curve_of(report, name, temperature)["mean_acceptance_length"][str(k)]["value"]
                assert curve == pytest.approx(NEW * len(of) / sum(c.num_drafts for c in counts), abs=2e-4)
                if temperature == 0:
                    rows = [row.counts for group in decoded[0.0, 1][Method(name, k)] for row in group.rows]
                    for expected, found in zip(counts, rows, strict=True):
                        assert (expected.num_drafts, expected.num_accepted_tokens_per_pos) == (
                            found.num_drafts,
                            found.num_accepted_tokens_per_pos,
                        )
        assert all((text.margins is None) is (temperature > 0) for text in of)
    assert all(len(t.margins) == NEW and min(t.margins) >= 0 for t in texts if t.margins is not None)
    greedy = [text for text in texts if text.temperature == 0]
    chains = [text.acceptance("medusa", "probabilistic", 2) for text in greedy]
    assert {chain.shape for chain in chains} == {(NEW + max(LENGTHS), 2)} and 0 < np.mean(chains) < 1
    # What copies found is verified: as many tokens as there are, which may be fewer than γ.
    copied = [(text.acceptance("prompt_lookup", "probabilistic", 2), text.lengths("prompt_lookup")) for text in greedy]
    assert all((chain.sum(1) <= lengths.clip(max=2)).all() for chain, lengths in copied)
    assert 0 in (lengths := np.concatenate([lengths for _, lengths in copied])) and max(LENGTHS) in lengths
    assert all("greedy" in text.accepted["draft"] for text in texts if text.temperature == 1)


def test_sampled_runs_claim_no_identity(measured):
    report, _ = measured
    for run in runs_of(report, temperature=1.0):
        assert run["lossless"]["checked"] is False and "would be recommended" in run["lossless"]["reason"]
        if run["proposer"]["name"] == "medusa":  # siblings that are drawn are not replayed
            assert run["replay"] is run["alpha"] is None
            assert run["gain_over_baseline_draft"]["mean_acceptance_length"] == {"value": None, "ci95": None, "n": 0}
        else:
            assert run["replay"]["agrees"] in (True, False)
            assert run["alpha"] == curve_of(report, run["proposer"]["name"], 1.0)["alpha"]


def test_curves_cover_every_draft_length(measured):
    report, _ = measured
    found = [(c["temperature"], c["proposer"]["name"], c["verifier"]) for c in report["curves"]]
    models = "draft", "stock", "parallel_draft"
    both = [(1.0, name, verifier) for name in models for verifier in ("probabilistic", "greedy")]
    greedy = [(0.0, name, "probabilistic") for name in NAMES]
    assert found == [*greedy, *both, (1.0, "prompt_lookup", "probabilistic")]
    for curve in report["curves"]:
        # A tree is not cut, and a parallel draft has its longest.
        lengths = {"medusa": [2], "parallel_draft": [1, 2, 3]}.get(curve["proposer"]["name"], list(range(1, 17)))
        length = curve["mean_acceptance_length"]
        assert [int(k) for k in length] == lengths
        values = [of["value"] for of in length.values()]
        assert values == sorted(values) and all(1 <= v <= k + 1 for k, v in zip(lengths, values, strict=True))
        if curve["proposer"]["name"] in ("draft", "stock"):  # up to the last token of a text but one
            assert len(curve["acceptance_per_position"]) == NEW - 1 == len(curve["conditional_acceptance"])
        assert {name: of["prompts"] for name, of in curve["by_category"].items()} == {"code": 4, "prose": 1}
        assert curve["by_category"]["prose"]["mean_acceptance_length"].keys() == length.keys()
        predicted = curve["predicted_speedup"]
        assert list(predicted) == ["1", "2"] and all(of.keys() == length.keys() for of in predicted.values())
    # What is predicted at γ = 16 rests on a forward of 17 tokens, not on a line through shorter ones.
    assert all({"1", "17"} <= of.keys() for of in report["costs"]["target_seconds"].values())
    assert all((run["predicted_speedup"] is None) == (run["replay"] is None) for run in report["runs"])


def test_both_verifiers_are_the_laws_overlap(measured, root, tokenizer):
    report, decoded = measured
    target, draft = (AutoModelForCausalLM.from_pretrained(root / name) for name in ("target", "draft"))
    drawn, certain = [], []
    for group, (prompt, _) in zip(decoded[1.0, 1][Method()], PROMPTS, strict=True):
        ids = tokenizer.encode(prompt)
        sequence = torch.tensor([[*ids, *group.rows[0].tokens]])
        with torch.no_grad():
            p, q = (model(sequence).logits[0, len(ids) - 1 : -1].softmax(-1) for model in (target, draft))
        drawn.append(torch.minimum(p, q).sum(-1))
        certain.append(p.gather(-1, q.argmax(-1)[:, None])[:, 0])
    for verifier, overlaps in (("probabilistic", drawn), ("greedy", certain)):
        alpha = float(torch.cat(overlaps).mean())
        assert curve_of(report, "draft", 1.0, verifier)["alpha"]["value"] == pytest.approx(alpha, abs=1e-5)
    # A drafter that proposes its argmax where the target draws is accepted less.
    assert alpha < curve_of(report, "draft", 1.0)["alpha"]["value"]


def test_gains_are_paired_and_not_the_stock_drafts(measured):
    report, _ = measured
    assert all(run["gain_over_baseline_draft"] is None for run in runs_of(report, "stock"))
    for run in runs_of(report, "draft"):  # its noise is a tenth of the stock draft's
        where = {name: run[name] for name in ("temperature", "draft_length", "batch_size")}
        (stock,) = runs_of(report, "stock", **where)
        gain, decoded = run["gain_over_baseline_draft"], [r["mean_acceptance_length"]["value"] for r in (run, stock)]
        assert gain["decoded_mean_acceptance_length"]["value"] == pytest.approx(decoded[0] - decoded[1], abs=1e-12)
        # Both are replayed on the same texts.
        replayed = [r["replay"]["mean_acceptance_length"]["value"] for r in (run, stock)]
        assert 0 < gain["mean_acceptance_length"]["value"] == pytest.approx(replayed[0] - replayed[1], abs=1e-12)
        assert run["alpha"]["value"] > stock["alpha"]["value"]


def test_categories_part_the_prompts(measured):
    report, _ = measured
    for run in report["runs"]:
        code, prose = run["by_category"]["code"], run["by_category"]["prose"]
        assert (code["prompts"], prose["prompts"]) == (4, 1)
        assert code["mean_acceptance_length"]["value"] >= 1 and prose["mean_acceptance_length"]["ci95"] is None
        assert code["speedup"]["value"] > 0
        # In batches of two, prose shares its clock with a prompt of no category.
        assert (prose["speedup"]["value"] is None) == (run["batch_size"] == 2)


def test_drafters_that_take_turns_are_measured_each_by_itself(root, tmp_path):
    drafters = [f"hybrid:prompt_lookup+{root / 'draft'}@match=1"]
    fixed = {"drafter": drafters, "temperature": "0,1", "batch_size": "1,2"}
    report = checked(root, tmp_path / "out", page=True, costs=None, **fixed)
    tables = report["costs"]["tables"]
    names = {"hybrid", "hybrid/prompt_lookup", "hybrid/draft"}
    assert all(table["drafters"].keys() == names for table in tables)
    assert report["costs"]["draft_seconds_per_token"].keys() == {"hybrid"}
    said = [turns(run) for run in TYPED.validate_python(report).runs]
    for run in report["runs"]:
        assert run["sources"].keys() == {"prompt_lookup", "draft"}
        assert all(counts["num_drafts"] > 0 for counts in run["sources"].values())
        for name in ("num_drafts", "num_draft_tokens", "num_emitted_tokens"):
            assert sum(counts[name] for counts in run["sources"].values()) == run["counts"][name]
        assert run["predicted_speedup"]["value"] > 0 and run["replay"]["agrees"] is True
    page, text = (tmp_path / "out/report.html").read_text(), printed(report, tmp_path)
    assert all(words in page and words in " ".join(text.split()) for words in said)
    assert max(map(len, text.splitlines())) <= 80
    predicted = curve_of(report, "hybrid", 0.0)["predicted_speedup"]
    assert list(predicted) == ["1", "2"]
    assert all(list(by_length) == [str(k) for k in range(1, 17)] for by_length in predicted.values())


def test_fewer_prompts_are_decoded_than_replayed(measured, root, tmp_path):
    report, _ = measured
    shutil.copytree(root / "heads", tmp_path / "chain")
    config = json.loads((root / "heads/config.json").read_text())
    (tmp_path / "chain/config.json").write_text(json.dumps(config | {"medusa_choices": None}))
    fewer = checked(
        root, tmp_path / "out", draft=str(root / "draft"), medusa=str(tmp_path / "chain"), temperature="0,1",
        draft_length="3", batch_size=2, limit=3, replay_limit=6,
    )  # fmt: skip
    # Batches are whole, so that speeds are those of one batch size.
    assert (fewer["prompts"]["count"], fewer["prompts"]["replayed"]) == (2, 6)
    for run in fewer["runs"]:
        assert run["counts"]["num_emitted_tokens"] == 2 * NEW and run["alpha"]["ci95"]
        if run["proposer"]["name"] == "medusa":  # a chain is replayed under sampling, too
            assert run["draft_length"] == run["proposer"]["tree_nodes"] == 3 and run["replay"] is not None
        elif run["temperature"] == 0:
            # Texts written in a batch are the ones that are decoded plainly, so all six replay as before.
            (full,) = runs_of(report, run["proposer"]["name"], temperature=0.0, draft_length=3, batch_size=1)
            assert run["alpha"]["value"] == pytest.approx(full["alpha"]["value"], rel=1e-6)
    text = printed(fewer, tmp_path)
    assert text.startswith("2 prompts (6 for") and " medusa " in text and "medusa/" not in text
    # Nothing is predicted without costs.
    assert fewer["costs"] is None and {run["predicted_speedup"] for run in fewer["runs"]} == {None}


def test_forecasts_for_llama_cpp_decode_with_no_drafter(root, tmp_path, stopped, monkeypatch):
    """Its servers price the rounds, here with t(k) = 1 + k / 10 and half a token for a draft; replay counts them."""
    free, priced = DraftCosts(0.0, 0.0, 0.0, 0.0), DraftCosts(0.0, 0.0, 0.55, 0.0)

    def tables(costs, drafters):
        forwards = {1: {k: 1 + k / 10 for k in (1, 2, 3)}}
        named = {name: {1: priced if lengths[2] else free} for name, lengths in drafters.items()}
        return [CostTable(9, t, forwards, {1: 0.0}, 9, {1: 1.0}, named) for t in costs.temperatures]

    def decoded(client, job, **cuts):
        assert job.target == "t.gguf" and cuts["top_k"] == 40
        return SimpleNamespace(token_ids=[[5] * job.max_tokens for _ in job.prompts])

    served = nullcontext(SimpleNamespace())
    engine = SimpleNamespace(program=str, target_file=lambda *words: "t.gguf", serve=lambda *words: served)
    monkeypatch.setattr(round_costs, "decoded", decoded)
    monkeypatch.setattr(round_costs.LlamaCpp, "found", lambda: engine)
    monkeypatch.setattr(round_costs, "served_at", lambda *given: dict.fromkeys(given[-1], "served"))
    monkeypatch.setattr(round_costs.LlamaCosts, "tables", tables)
    fields = {"drafter": [str(root / "draft"), "prompt_lookup:simple-2"], "temperature": "0,1", "costs": "llama.cpp"}
    fields["top_k"] = 40
    report = checked(root, tmp_path / "out", page=True, **fields)
    assert (report["runs"], report["baseline"], report["prompts"]["count"]) == ([], None, 6)
    draft, copies, *_ = report["forecasts"]
    tau = {name: curve_of(report, name, 0.0)["mean_acceptance_length"]["2"] for name in ("draft", "prompt_lookup")}
    assert draft["speedup"]["value"] == pytest.approx(tau["draft"]["value"] * 1.1 / (1.3 + 0.55))
    assert tau["prompt_lookup"]["value"] * 1.1 / 1.3 < copies["speedup"]["value"] <= tau["prompt_lookup"]["value"]
    assert draft["bounds"][0] < draft["speedup"]["ci95"][0]  # four forecasts hold together
    assert "Forecast for llama.cpp: 6 prompts" in printed(report, tmp_path)
    assert "6 replayed" in (page := (tmp_path / "out/report.html").read_text()) and "decoded, 6 replayed" not in page


def test_what_is_not_measured_is_null_and_never_zero(root, tmp_path):
    report = checked(
        root, tmp_path / "out", draft=str(root / "draft"), prompt_lookup=True, temperature=[0, 1], limit=1,
        max_new_tokens=1, costs=None, page=True,
    )  # fmt: skip
    assert report["prompts"]["count"] == 1 and report["gate"] is None
    for run in report["runs"]:
        # One token a text: nothing is drafted before the last token, and one prompt has no interval.
        assert run["counts"]["num_draft_tokens"] == 0 and run["counts"]["num_drafts"] == 1
        assert run["draft_acceptance_rate"] == {"value": None, "ci95": None, "n": 1}
        assert run["mean_acceptance_length"] == {"value": 1.0, "ci95": None, "n": 1}
        assert run["acceptance_per_position"] == []
        assert run["gain_over_baseline_draft"] is None and run["repeated_ngram_share"] is None
        assert run["alpha"]["ci95"] is None and run["replay"]["agrees"] in (True, None)
    assert all(curve["acceptance_per_position"] == [] for curve in report["curves"])
    assert report["recommendation"]["go"] is False  # one prompt shows nothing for certain
    assert "NO-GO" in printed(report, tmp_path)


def test_what_fails_the_law_test_is_not_deployed(root, tmp_path, monkeypatch):
    asked = []

    def certified(*args, **options):
        asked.append(inspect.signature(certify_sampled).bind(*args, **options).arguments)
        return Certificate(
            p_value=1e-9, tokens=2048, passed=False, reason="the tokens' distribution is not the target's"
        )

    monkeypatch.setattr(certify, "certify_sampled", certified)
    report = checked(
        root, tmp_path, draft=str(root / "draft"), temperature="1", top_k=50, batch_size="1,2", limit=2,
        lossless_tokens=2000, min_speedup=0.001,
    )  # fmt: skip
    (call,) = asked  # once for all batch sizes: the test has batches of its own
    sampling = Sampling(temperature=1.0, top_k=50)
    wanted = {"tokens": 2000, "sampling": sampling, "draft_length": 2, "max_new_tokens": NEW}
    assert {name: call[name] for name in wanted} == wanted and len(call["prompts"]) == 2
    assert [run["lossless"]["passed"] for run in report["runs"]] == [False, False]
    assert sum("the text is not the target's" in failure for failure in report["gate"]["failures"]) == 2
    assert report["recommendation"]["go"] is False


@pytest.fixture
def stopped(monkeypatch):
    """Nothing may be decoded."""

    def decode(*args, **options):
        raise AssertionError("decoded before the input was looked at")

    monkeypatch.setattr(stages, "decode_side_by_side", decode)


def arguments(root, output, **settings) -> list[str]:
    fixed = {"target": root / "target", "prompts": root / "prompts.jsonl", "output": output / "out"}
    fixed |= {"dtype": "float32", "draft_length": 2, "max_new_tokens": NEW, "costs": "none"}
    fixed |= {"compiled": "false"}
    return flags_of(fixed | settings)


def test_a_draft_that_gains_passes_the_gate(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "render_page", lambda report: "<!DOCTYPE html>")
    drafts = json.dumps([str(root / "bad"), str(root / "target")])
    argv = arguments(root, tmp_path, draft=drafts, baseline_draft=root / "stock", min_gain=0.1, min_speedup=0.001)
    assert main(argv) == 0
    report = valid(tmp_path / "out")
    # Several drafts are called by the ends of their paths.
    assert [run["proposer"]["name"] for run in report["runs"]] == ["bad", "target", "stock"]
    gate, chosen = report["gate"], report["recommendation"]
    asked = {"min_speedup": 0.001, "min_gain": 0.1, "min_alpha": None, "confidence": 0.95}
    parts = ["speed-up above 0.001", "gain of τ over the stock draft above 0.1", "lossless text"]
    assert gate == asked | {"passed": True, "failures": [], "parts": [{"what": p, "passed": True} for p in parts]}
    assert chosen["go"] is True and (chosen["proposer"], chosen["draft_length"]) == ("target", 2)
    signs = {(c["proposer"], c["other"]): c["mean_acceptance_length"]["value"] for c in report["comparisons"]}
    assert signs.keys() == {("bad", "target"), ("bad", "stock"), ("target", "stock")}
    assert signs["target", "stock"] > 0.1 and signs["bad", "target"] < 0
    out = capsys.readouterr().out
    assert "\nGO " in out and f"report: {tmp_path / 'out/report.html'}" in out


def test_a_bad_draft_does_not_pass(root, tmp_path, capsys):
    argv = arguments(root, tmp_path, draft=root / "bad", baseline_draft=root / "draft", min_gain=0, confidence=0.9)
    assert main([*argv, "--min-speedup", "1000"]) == 3
    report = valid(tmp_path / "out")
    assert report["gate"]["passed"] is report["recommendation"]["go"] is False
    slow, worse = report["gate"]["failures"]
    assert "speed-up" in slow and "1000" in slow and "90%" in slow
    assert "gain of τ over the stock draft" in worse and "bad" not in worse
    # The stock draft is what is to be beaten, not what is to be deployed.
    assert report["recommendation"]["proposer"] == "draft" and report["runs"][0]["proposer"]["path"].endswith("bad")
    page = (tmp_path / "out/report.html").read_text()
    assert "\nNO-GO " in capsys.readouterr().out and all(f"<li>{failure}</li>" in page for failure in (slow, worse))


def test_drafts_have_names_that_tell_them_apart():
    taken = {"stock", "medusa", "prompt_lookup"}  # other drafters'
    assert short_names("draft", ["runs/a"], taken) == ["draft"]
    assert short_names("draft", ["runs/a", "other/b/"], taken) == ["a", "b"]
    assert short_names("draft", ["runs/a/draft", "runs/b/draft"], taken) == ["a/draft", "b/draft"]
    assert short_names("draft", ["runs/stock", "runs/medusa"], taken) == ["runs/stock", "runs/medusa"]
    here, there = short_names("draft", [".", "a"], taken)
    assert here and there == "a"


def printed(report: dict, tmp_path) -> str:
    with (tmp_path / "table.txt").open("w") as file:
        print_report(TYPED.validate_python(report), Console(width=80, file=file))
    return (tmp_path / "table.txt").read_text()


def test_the_table_fits_80_columns(measured, tmp_path):
    report, _ = measured
    text = printed(report, tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    assert sum(" plain " in line and "1.00×" in line for line in text.splitlines()) == 4
    assert text.count(" stock ") >= 8 and text.count(" medusa/5 ") == 4
    assert "name/n: drafts a tree of n nodes" in text
    for run in report["runs"]:
        shown = run["mean_acceptance_length"] if run["replay"] is None else run["replay"]["mean_acceptance_length"]
        assert f"{shown['value']:.2f}" in text
    assert "…" not in text  # no figure is cut off


def test_bad_input_is_refused_in_one_line(root, tmp_path, capsys, stopped):
    argv = arguments(root, tmp_path, draft=root / "draft")
    strangers = tmp_path / "strangers"
    MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=300, num_heads=2)).save_pretrained(strangers)
    assert "drafter: expected at least one drafter, found none" in fails(capsys, arguments(root, tmp_path))
    for flags, named in [
        (["--draft_length", "4,0"], "draft_length: "),
        (["--draft_length", "many"], "draft_length: "),
        (["--temperature", "0,hot"], "temperature: "),
        (["--temperature=-1"], "temperature: "),
        (["--batch-size", "0"], "batch_size: "),
        (["--batch-size", "1,7"], "batch_size: expected at most the 6 prompts that are decoded, found 7"),
        (["--limit", "3", "--replay_limit", "2"], "replay_limit: "),
        (["--drafter", "prompt_lookup:4-3"], "drafter: "),
        (["--confidence", "95"], "confidence: "),
        (["--min-gain", "0.1"], "min_gain: "),
        (
            ["--config", '{"no_repeat_ngram_size": 3}', "--costs", "llama.cpp"],
            "no_repeat_ngram_size: expected 0 for llama.cpp",
        ),
        (["--config", '{"lossless_tokens": 10}'], "lossless_tokens: "),
        (["--draft", json.dumps(2 * [str(root / "draft")])], "drafter: expected each draft once, found "),
        (["--medusa", str(strangers)], "medusa: expected heads with the target's hidden_size 32, found 8"),
        (["--parallel_draft", str(root / "stock")], "parallel draft: expected pard_token in the config"),
        (["--parallel_draft", str(root / "parallel"), "--draft-length", "2,4"], "draft_length: expected at most the 3"),
        (["--baseline_draft", str(tmp_path / "gone")], "baseline_draft: expected a model directory or a hub id"),
    ]:
        assert named in fails(capsys, [*argv, *flags])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert "bad.jsonl:2: expected a JSON object" in fails(capsys, [*argv, "--prompts", str(tmp_path / "bad.jsonl")])
    assert not (tmp_path / "out" / "report.json").exists()
