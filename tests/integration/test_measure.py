"""`draftsmith measure` on a tiny pair: what the report says, and that it is consistent with itself."""

import json
import math
import shutil

import pytest
import torch
from conftest import perturbed, tiny_llama
from rich.console import Console
from trained_heads import own_texts, train_heads
from transformers import AutoModelForCausalLM

from draftsmith.medusa import MedusaConfig, MedusaHeads
from draftsmith.scripts.measure import MeasureConfig, main, measure
from draftsmith.scripts.report import print_report
from draftsmith.train import cli
from draftsmith.train.runs import save_model

TOP = {"schema", "environment", "target", "prompts", "baseline", "runs", "costs", "recommendation"}
ENVIRONMENT = {"python", "torch", "transformers", "device", "dtype", "threads", "git_sha"}
COUNTS = {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_emitted_tokens"}
RUN = {
    "proposer", "draft_length", "rule", "temperature", "batch_size", "counts", "alpha", "draft_acceptance_rate",
    "mean_acceptance_length", "acceptance_per_position", "conditional_acceptance", "speedup", "predicted_speedup",
    "tokens_per_second", "gain_over_baseline_draft", "replay", "lossless", "by_category", "repeated_ngram_share",
}  # fmt: skip
PROMPTS = [
    ("def f(x):", "code"),
    ("import os", "code"),
    ("a story of x", "prose"),
    ("for i in", "code"),
    ("self", None),
]
NEW = 13


CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tokenizer):
    """A draft that is close to the target beside a stock draft that is further off: 2 temperatures × 2 lengths × 2."""
    root = tmp_path_factory.mktemp("measured")
    target = tiny_llama(0, len(tokenizer))
    for name, model in {"target": target, "draft": perturbed(target, 0.02), "stock": perturbed(target, 0.2)}.items():
        model.generation_config.eos_token_id = None
        save_model(model, tokenizer, root / name)
    rows = [{"prompt": text} | ({"category": category} if category else {}) for text, category in PROMPTS]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = MeasureConfig(
        target=str(root / "target"), draft=str(root / "draft"), baseline_draft=str(root / "stock"),
        prompts=str(root / "prompts.jsonl"), output=str(root / "out"), temperature="0,1", draft_length="1,3",
        max_new_tokens=NEW, dtype="float32",
    )  # fmt: skip
    return measure(config, progress=False), root


def runs_of(report: dict, **where: object) -> list[dict]:
    return [run for run in report["runs"] if all(run[key] == value for key, value in where.items())]


def walk(value: object):
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


def test_the_file_is_the_report(measured):
    report, root = measured
    text = (root / "out" / "report.json").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(text, parse_constant=refuse) == report
    assert not list((root / "out").glob(".*"))


def test_every_field_of_the_schema_is_there(measured):
    report, root = measured
    assert report["schema"] == "draftsmith.report/1"
    assert report.keys() >= TOP and report["environment"].keys() >= ENVIRONMENT
    assert report["target"] == {
        "path": str(root / "target"),
        "parameters": AutoModelForCausalLM.from_pretrained(root / "target").num_parameters(),
        "dtype": "float32",
    }
    assert report["prompts"] == {"path": str(root / "prompts.jsonl"), "count": len(PROMPTS), "replayed": len(PROMPTS)}
    assert report["baseline"]["tokens_per_second"]["median"] > 0
    asked = [(t, k, kind) for t in (0.0, 1.0) for k in (1, 3) for kind in ("draft", "baseline_draft")]
    found = [(r["temperature"], r["draft_length"], r["proposer"]["kind"]) for r in report["runs"]]
    assert sorted(found) == sorted(asked)
    for run in report["runs"]:
        assert run.keys() >= RUN and run["counts"].keys() >= COUNTS
        assert (run["rule"], run["batch_size"]) == ("exact", 1)
        assert run["proposer"]["path"] == str(
            root / {"draft": "draft", "baseline_draft": "stock"}[run["proposer"]["kind"]]
        )
        assert run["proposer"]["parameters"] == report["target"]["parameters"]
        for name in ("alpha", "draft_acceptance_rate", "mean_acceptance_length", "speedup"):
            low, high = run[name]["ci95"]
            assert low <= run[name]["value"] <= high
        assert run["tokens_per_second"]["median"] > 0
        assert 0 <= run["repeated_ngram_share"] <= 1
    assert all(math.isfinite(value) for value in walk(report) if isinstance(value, float))


def test_counts_are_integers_and_ratios_are_theirs(measured):
    report, _ = measured
    for run in report["runs"]:
        counts, gamma = run["counts"], run["draft_length"]
        assert all(type(value) is int for value in walk(counts) if not isinstance(value, dict | list))
        assert counts["num_emitted_tokens"] == NEW * len(PROMPTS)
        assert counts["num_accepted_tokens"] == sum(counts["num_accepted_tokens_per_pos"])
        assert counts["num_draft_tokens"] == sum(counts["num_draft_tokens_per_pos"])
        assert counts["num_accepted_tokens"] <= counts["num_draft_tokens"] <= gamma * counts["num_drafts"]
        # Every round emits its accepted tokens and one more: no text ends inside a block here.
        assert counts["num_emitted_tokens"] == counts["num_drafts"] + counts["num_accepted_tokens"]
        assert len(run["acceptance_per_position"]) == len(run["conditional_acceptance"]) == gamma
        per_position = counts["num_accepted_tokens_per_pos"]  # as shares they need not fall: the last rounds draft less
        assert per_position == sorted(per_position, reverse=True)
        ratio = counts["num_accepted_tokens"] / counts["num_draft_tokens"]
        assert run["draft_acceptance_rate"]["value"] == pytest.approx(ratio, rel=1e-12)
        tau = counts["num_emitted_tokens"] / counts["num_drafts"]
        assert run["mean_acceptance_length"]["value"] == pytest.approx(tau, rel=1e-12)
        assert 0 < run["alpha"]["value"] < 1 <= tau <= gamma + 1


def test_greedy_texts_are_identical_and_replay_is_exact(measured):
    report, _ = measured
    for run in runs_of(report, temperature=0.0):
        assert run["lossless"]["checked"] is run["lossless"]["identical"] is True
        assert run["replay"]["agrees"] is True
        replayed, decoded = run["replay"]["mean_acceptance_length"], run["mean_acceptance_length"]
        assert replayed["value"] == pytest.approx(decoded["value"], rel=1e-12)
        assert replayed["ci95"] == pytest.approx(decoded["ci95"], rel=1e-12)


def test_sampled_runs_claim_no_identity_and_replay_covers_both_lengths(measured):
    report, _ = measured
    for run in runs_of(report, temperature=1.0):
        assert run["lossless"]["checked"] is False and run["lossless"]["identical"] is None
        assert run["replay"]["agrees"] in (True, False)
    for kind in ("draft", "baseline_draft"):
        pair = [r for r in runs_of(report, temperature=1.0) if r["proposer"]["kind"] == kind]
        short, long = sorted(pair, key=lambda r: r["draft_length"])
        # One plain text a prompt is replayed at both draft lengths.
        assert short["alpha"] == long["alpha"]
        tau = [r["replay"]["mean_acceptance_length"]["value"] for r in (short, long)]
        assert 1 <= tau[0] < tau[1]


def test_gains_are_paired_and_only_the_drafts(measured):
    report, _ = measured
    for run in report["runs"]:
        if run["proposer"]["kind"] == "baseline_draft":
            assert run["gain_over_baseline_draft"] is None
            continue
        (stock,) = (
            other
            for other in runs_of(report, temperature=run["temperature"], draft_length=run["draft_length"])
            if other["proposer"]["kind"] == "baseline_draft"
        )
        gain = run["gain_over_baseline_draft"]["mean_acceptance_length"]
        # Both drafts are replayed on the same texts; at T=0 that is what the decoder counted.
        replayed = [r["replay"]["mean_acceptance_length"]["value"] for r in (run, stock)]
        difference = replayed[0] - replayed[1]
        if run["temperature"] == 0:
            decoded = run["mean_acceptance_length"]["value"] - stock["mean_acceptance_length"]["value"]
            assert difference == pytest.approx(decoded, abs=1e-12)
        assert gain["value"] == pytest.approx(difference, abs=1e-12)
        assert gain["ci95"][0] <= gain["value"] <= gain["ci95"][1]
        decoded = [r["mean_acceptance_length"]["value"] for r in (run, stock)]
        counted = run["gain_over_baseline_draft"]["decoded_mean_acceptance_length"]
        assert counted["value"] == pytest.approx(decoded[0] - decoded[1], abs=1e-12)
        assert run["gain_over_baseline_draft"]["speedup"]["value"] > 0
        # The draft's noise is a tenth of the stock draft's.
        assert run["alpha"]["value"] > stock["alpha"]["value"] and difference > 0


def test_further_prompts_are_replayed_without_being_decoded(measured, tmp_path):
    report, root = measured
    config = MeasureConfig(
        str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path / "out"), str(root / "draft"),
        baseline_draft=str(root / "stock"), draft_length="1,3", temperature="0,1", limit=2, replay_limit=5,
        max_new_tokens=NEW, dtype="float32",
    )  # fmt: skip
    fewer = measure(config, progress=False)
    assert fewer["prompts"] == {"path": config.prompts, "count": 2, "replayed": len(PROMPTS)}
    for run in runs_of(fewer, temperature=0.0):
        assert run["counts"]["num_emitted_tokens"] == 2 * NEW and run["replay"]["agrees"] is True
        # Texts written in a batch are the ones that are decoded plainly, so all five replay as before.
        (full,) = (
            other
            for other in runs_of(report, temperature=0.0, draft_length=run["draft_length"])
            if other["proposer"] == run["proposer"]
        )
        pairs = [(run["alpha"], full["alpha"])]
        pairs.append(tuple(r["replay"]["mean_acceptance_length"] for r in (run, full)))
        if run["gain_over_baseline_draft"]:
            pairs.append(tuple(r["gain_over_baseline_draft"]["mean_acceptance_length"] for r in (run, full)))
        for own, other in pairs:
            assert own["value"] == pytest.approx(other["value"], rel=1e-6)
    for run in runs_of(fewer, temperature=1.0):
        assert run["alpha"]["ci95"] and run["counts"]["num_emitted_tokens"] == 2 * NEW


def test_categories_part_the_prompts(measured):
    report, _ = measured
    for run in report["runs"]:
        assert {name: of["prompts"] for name, of in run["by_category"].items()} == {"code": 3, "prose": 1}
        code, prose = run["by_category"]["code"], run["by_category"]["prose"]
        assert code["mean_acceptance_length"]["ci95"] and code["speedup"]["value"] > 0
        assert prose["mean_acceptance_length"]["value"] >= 1 and prose["mean_acceptance_length"]["ci95"] is None


def test_what_is_not_measured_is_null_and_never_zero(measured, tmp_path):
    _, root = measured
    config = MeasureConfig(
        str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path / "out"), str(root / "draft"),
        draft_length=[2], temperature=[0, 1], limit=1, max_new_tokens=1, dtype="float32",
    )  # fmt: skip
    report = measure(config, progress=False)
    assert report["prompts"]["count"] == 1
    for run in report["runs"]:
        # One token a text: nothing is drafted before the last token, and one prompt has no interval.
        assert run["counts"]["num_draft_tokens"] == 0 and run["counts"]["num_drafts"] == 1
        assert run["draft_acceptance_rate"] == {"value": None, "ci95": None}
        assert run["mean_acceptance_length"] == {"value": 1.0, "ci95": None}
        assert run["acceptance_per_position"] == []
        assert run["gain_over_baseline_draft"] is None and run["repeated_ngram_share"] is None
        assert run["alpha"]["ci95"] is None
    assert all(run["replay"]["agrees"] in (True, None) for run in report["runs"])
    with (tmp_path / "table.txt").open("w") as file:
        print_report(report, Console(width=120, file=file))


@pytest.fixture(scope="module")
def with_heads(measured, tokenizer, tmp_path_factory):
    """Heads that draft a tree of depth 2 beside both draft models, in one run."""
    _, root = measured
    target = AutoModelForCausalLM.from_pretrained(root / "target")
    ids = [torch.tensor(tokenizer.encode(text)) for text, _ in PROMPTS]
    texts = own_texts(target, ids, max_new_tokens=NEW, do_sample=False)
    heads = train_heads(target, MedusaHeads.of_target(target, 3), texts, steps=15)
    heads.config.medusa_choices = CHOICES
    heads.save_pretrained(root / "heads")
    config = MeasureConfig(
        str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path_factory.mktemp("heads")), str(root / "draft"),
        medusa=str(root / "heads"), baseline_draft=str(root / "stock"), temperature="0,1", draft_length="1,3,4",
        max_new_tokens=NEW, dtype="float32",
    )  # fmt: skip
    return measure(config, progress=False), root, heads.num_parameters()


def test_heads_are_measured_beside_drafts(measured, with_heads):
    before, _ = measured
    report, root, parameters = with_heads
    # Heads draft their tree, whatever γ the draft models have.
    asked = [(t, k, kind) for t in (0.0, 1.0) for k in (1, 3, 4) for kind in ("draft", "baseline_draft")]
    asked += [(t, 2, "medusa") for t in (0.0, 1.0)]
    found = [(r["temperature"], r["draft_length"], r["proposer"]["kind"]) for r in report["runs"]]
    assert sorted(found) == sorted(asked)
    for run in report["runs"]:
        assert run.keys() >= RUN and run["counts"].keys() >= COUNTS
        if run["proposer"]["kind"] != "medusa":
            continue
        depth, counts = run["draft_length"], run["counts"]
        assert run["proposer"] == {
            "kind": "medusa", "path": str(root / "heads"), "parameters": parameters, "heads": 3,
            "tree_nodes": 5,
        }  # fmt: skip
        assert counts["num_emitted_tokens"] == NEW * len(PROMPTS) and len(run["acceptance_per_position"]) == depth
        assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
        assert sum(counts["num_draft_tokens_per_pos"]) < counts["num_draft_tokens"]
        tau = counts["num_emitted_tokens"] / counts["num_drafts"]
        assert run["mean_acceptance_length"]["value"] == pytest.approx(tau, rel=1e-12)
        assert run["speedup"]["value"] > 0 and run["by_category"]["code"]["prompts"] == 3
        assert run["lossless"]["identical"] is (True if run["temperature"] == 0 else None)
        assert 0 < run["alpha"]["value"] < 1 and run["gain_over_baseline_draft"] is None
        if run["temperature"] == 0:  # the same rounds, text by text
            assert run["replay"]["agrees"] is True
            assert run["replay"]["mean_acceptance_length"]["value"] == pytest.approx(tau, rel=1e-12)
        else:  # siblings that are drawn are not replayed
            assert run["replay"] is None
    # What stands beside them changes no other run's counts.
    for run in before["runs"]:
        (same,) = (
            other
            for other in runs_of(report, temperature=run["temperature"], draft_length=run["draft_length"])
            if other["proposer"] == run["proposer"]
        )
        assert same["counts"] == run["counts"] and same["alpha"] == run["alpha"]


def test_heads_are_measured_alone(with_heads, tmp_path):
    _, root, _ = with_heads
    alone = measure(
        MeasureConfig(
            str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path / "out"), medusa=str(root / "heads"),
            draft_length="2", limit=2, replay_limit=4, max_new_tokens=NEW, dtype="float32",
        ),
        progress=False,
    )  # fmt: skip
    assert alone["prompts"]["count"] == 2 and alone["prompts"]["replayed"] == 4
    (run,) = alone["runs"]
    assert run["proposer"]["kind"] == "medusa" and run["gain_over_baseline_draft"] is None
    assert run["lossless"]["identical"] is True
    path = tmp_path / "table.txt"
    with path.open("w") as file:
        print_report(alone, Console(width=80, file=file))
    assert " medusa/5 " in path.read_text() and path.read_text().startswith("2 prompts (4 for")
    # A chain says no number of nodes.
    config = json.loads((root / "heads/config.json").read_text())
    shutil.copytree(root / "heads", tmp_path / "chain")
    (tmp_path / "chain/config.json").write_text(json.dumps(config | {"medusa_choices": None}))
    chain = measure(
        MeasureConfig(
            str(root / "target"), str(root / "prompts.jsonl"), str(tmp_path / "out"), medusa=str(tmp_path / "chain"),
            draft_length="8", limit=2, max_new_tokens=NEW, dtype="float32",
        ),
        progress=False,
    )  # fmt: skip
    assert chain["runs"][0]["draft_length"] == chain["runs"][0]["proposer"]["tree_nodes"] == 3
    with path.open("w") as file:
        print_report(chain, Console(width=80, file=file))
    assert " medusa " in path.read_text() and "medusa/" not in path.read_text()


def test_a_table_of_both_kinds_fits_80_columns(with_heads, tmp_path):
    report, _, _ = with_heads
    path = tmp_path / "table.txt"
    with path.open("w") as file:
        print_report(report, Console(width=80, file=file))
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count(" medusa/5 ") == 2 and "medusa/n: heads that draft a tree" in text


def test_the_table_fits_80_columns(measured, tmp_path):
    report, _ = measured
    path = tmp_path / "table.txt"
    with path.open("w") as file:
        print_report(report, Console(width=80, file=file))
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count(" plain ") == 2 and text.count(" stock ") >= 4
    for run in report["runs"]:
        assert f"{run['mean_acceptance_length']['value']:.2f}" in text
    assert "…" not in text  # no figure is cut off


def fails(capsys, argv: list[str]) -> str:
    capsys.readouterr()
    assert cli.run(lambda: main(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_bad_input_is_refused_in_one_line(measured, tmp_path, capsys):
    _, root = measured
    argv = [
        part
        for name in ("target", "draft", "prompts")
        for part in (f"--{name}", str(root / name) + (".jsonl" if name == "prompts" else ""))
    ]
    argv += ["--output", str(tmp_path / "out"), "--dtype", "float32"]
    strangers = tmp_path / "strangers"
    MedusaHeads(MedusaConfig(8, 300, 2)).save_pretrained(strangers)
    neither = [part for part in argv if part not in ("--draft", str(root / "draft"))]
    assert "draft: expected a draft model or, as `medusa`, heads to measure, found neither" in fails(capsys, neither)
    for flags, named in [
        (["--draft_length", "0"], "draft_length: expected at least 1, found 0"),
        (["--draft_length", "4,0"], "draft_length: expected at least 1, found 0"),
        (["--draft_length", "many"], "draft_length: expected numbers separated by commas, found 'many'"),
        (["--draft_length", "1.5"], "draft_length"),
        (["--temperature", "0,hot"], "temperature: expected numbers separated by commas, found '0,hot'"),
        (["--temperature=-1"], "temperature: expected 0 or more, found -1.0"),
        (["--top_p", "0"], "top_p: expected more than 0"),
        (["--limit", "3", "--replay_limit", "2"], "replay_limit: expected at least 3, found 2"),
        (["--repeats", "0"], "repeats: expected at least 1, found 0"),
        (["--dtype", "float8"], "dtype: expected one of float32"),
        (["--draft_lenght", "4"], "draft_lenght"),
        (["--medusa", str(tmp_path / "gone")], "gone: expected Medusa heads"),
        (["--medusa", str(strangers)], "medusa: expected heads with the target's hidden_size 32, found 8"),
        (["--prompts", str(tmp_path / "gone.jsonl")], "gone.jsonl: expected a file of prompts, found nothing there"),
        (["--draft", str(tmp_path / "gone")], "draft: expected a model directory or a hub id, found nothing at"),
    ]:
        assert named in fails(capsys, [*argv, *flags])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert "bad.jsonl:2: expected a JSON object" in fails(capsys, [*argv, "--prompts", str(tmp_path / "bad.jsonl")])
    assert not (tmp_path / "out" / "report.json").exists()
