"""`draftsmith tune` on a tiny pair: the curve, and the level it takes."""

import json

import pytest
from conftest import perturbed, tiny_llama

from draftsmith.decode import DraftModelProposer, InputError, speculative_generate
from draftsmith.decode.measurement.intervals import Estimate, confidence_of_each, ratio_interval
from draftsmith.decode.rules import Threshold
from draftsmith.medusa import MedusaHeads
from draftsmith.scripts.cli import main
from draftsmith.scripts.tune.command import TuneConfig, tune
from draftsmith.scripts.tune.tradeoff import BoundedDeparture, choose, departure_estimate
from draftsmith.train.cli import flags_of
from draftsmith.train.models import load_model, load_tokenizer
from draftsmith.train.runs import save_model

PROMPTS = ["def f(x):", "import os", "a story of x", "for i in", "self"]
NEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("tune")
    target = tiny_llama(0, len(tokenizer), scale=40.0)  # sure of itself: half of its argmaxes have p > 0.5
    for name, model in {"target": target, "draft": perturbed(target, 0.2)}.items():
        model.generation_config.eos_token_id = None
        save_model(model, tokenizer, root / name)
    target.generation_config.eos_token_id = list(range(5, len(tokenizer), 8))
    save_model(target, tokenizer, root / "ending")
    MedusaHeads.of_target(target, 2).save_pretrained(root / "heads")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return root


def config_of(root, output, **fields) -> TuneConfig:
    given = {"drafter": [str(root / "draft")], "dtype": "float32", "max_new_tokens": NEW, "draft_length": 3} | fields
    target = given.pop("target", str(root / "target"))
    return TuneConfig(target, str(root / "prompts.jsonl"), str(output), **given)


@pytest.fixture(scope="module")
def tuned(models, tokenizer):
    """A run at T=0 by the command itself, and what it printed."""
    flags = {
        "target": models / "target", "draft": models / "draft", "prompts": models / "prompts.jsonl",
        "output": models / "out", "dtype": "float32", "max-new-tokens": NEW, "draft-length": 3, "max-departure": 0.6,
        "batch-size": 1, "levels": '{"typical": [0.05], "threshold": [0, 0.05, 0.1, 0.6], "cascade": [0, 1]}',
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert main(["tune", *flags_of(flags)]) == 0
    return json.loads((models / "out" / "tune.json").read_text(), object_hook=estimated)


def estimated(values: dict) -> object:
    """Return the estimates of a JSON file as what was written, all else as it is."""
    if "ci95" not in values:
        return values
    return BoundedDeparture(**values) if "upper_bound" in values else Estimate(**values)


def row_of(report, rule: str, level: float) -> dict:
    return next(row for row in report["levels"] if (row["rule"], row["level"]) == (rule, level))


def test_the_figures_are_those_of_the_decoder(models, tuned):
    target, draft = (load_model(models / name, dtype="float32") for name in ("target", "draft"))
    rounds = wrong = exact_rounds = 0
    for text in PROMPTS:
        ids = load_tokenizer(models / "target")(text, return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": NEW, "do_sample": False, "draft_length": 3}
        out = speculative_generate(target, DraftModelProposer(draft), ids, rule=Threshold(0.1), **options)
        exact_rounds += speculative_generate(target, DraftModelProposer(draft), ids, **options).counts.num_drafts
        rounds += out.counts.num_drafts
        # Independently of what the rule tells: the text's tokens beside the target's argmax of their contexts.
        argmax = target(out.sequences).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
        wrong += int((argmax != out.sequences[0, ids.shape[1] :]).sum())
    tokens = NEW * len(PROMPTS)
    row = row_of(tuned, "threshold", 0.1)
    assert row["counts"]["num_emitted_tokens"] == tokens and row["counts"]["num_drafts"] == rounds
    assert wrong > 0 and row["departure"].value == pytest.approx(wrong / tokens)
    assert tuned["exact"]["mean_acceptance_length"].value == pytest.approx(tokens / exact_rounds)
    assert row["gain_over_exact"].value == pytest.approx(tokens / rounds - tokens / exact_rounds)
    assert tuned["plain"]["mean_acceptance_length"].value == 1
    assert tuned["plain"]["speedup"].value == pytest.approx(1)
    assert tuned["exact"]["departure"] is None and tuned["exact"]["speedup"].value > 0


def test_the_ends_of_a_rule(tuned):
    # A cascade of level 0 lets every draft stand, one of level 1 none: γ + 1 tokens a round but for the last, and 1.
    assert row_of(tuned, "cascade", 0)["counts"]["num_drafts"] == len(PROMPTS) * NEW // 4
    assert row_of(tuned, "cascade", 1)["mean_acceptance_length"].value == 1
    assert row_of(tuned, "cascade", 1)["departure"].value == 0
    assert row_of(tuned, "threshold", 0.6)["departure"].value < row_of(tuned, "threshold", 0)["departure"].value
    assert row_of(tuned, "typical", 0.05)["delta"] == pytest.approx(0.05**0.5)


def test_the_fastest_that_is_allowed_is_taken(tuned):
    inside = [row for row in tuned["levels"] if row["departure"].upper_bound < 0.6]
    fastest = max(inside, key=lambda row: row["mean_acceptance_length"].value)
    assert tuned["chosen"] == fastest and fastest["gain_over_exact"].ci95[0] > 0
    assert tuned["reason"].startswith(f"{fastest['rule']} at level ")


@pytest.mark.parametrize("drafter", ["draft", "medusa"])
def test_under_sampling_departure_is_a_distance_in_law(models, tmp_path, drafter):
    given = {"drafter": str(models / "heads")} if drafter == "medusa" else {}
    config = config_of(
        models, tmp_path, temperature=1.0, max_departure=1e-6, levels={"cascade": [1.0], "threshold": [0.01, 0.99]},
        limit=3, max_new_tokens=8, **given,
    )  # fmt: skip
    report = tune(config)
    assert report["departure"] == "mean_total_variation" and report["proposer"]["kind"] == drafter
    low, high = (row_of(report, "threshold", level)["departure"].value for level in (0.01, 0.99))
    assert 0 <= high < low < 1
    # No draft stands in a cascade of level 1, and yet 24 tokens without a departure do not show that it is below 1e-6.
    none = row_of(report, "cascade", 1)
    assert none["departure"].value == 0 and none["departure"].upper_bound > 0.1
    assert report["chosen"] is None and report["reason"].startswith("none: keep exact. No level surely stays below")
    assert report["plain"]["counts"]["num_drafts"] == report["plain"]["counts"]["num_emitted_tokens"] == 24


@pytest.mark.parametrize("greedy", [True, False])
def test_no_departure_in_few_tokens_is_not_none(greedy):
    none = departure_estimate([0] * 5, [100] * 5, greedy)
    assert none.value == 0 and none.ci95 == (0, 0)
    assert none.upper_bound == pytest.approx(1 - 0.025 ** (1 / 500))
    # One prompt in which everything departs: the bootstrap over prompts is wider than independent tokens.
    uneven = departure_estimate([100, 0, 0, 0, 0, 0, 0, 0], [100] * 8, greedy)
    assert uneven.upper_bound == ratio_interval([100, 0, 0, 0, 0, 0, 0, 0], [100] * 8, 0.95)[1] > 0.3
    # Of several rules each is judged at a higher level.
    wider = departure_estimate([100, 0, 0, 0, 0, 0, 0, 0], [100] * 8, greedy, confidence_of_each(0.95, 3))
    assert wider.upper_bound > uneven.upper_bound
    assert departure_estimate([2] * 5, [2] * 5, greedy).upper_bound == 1
    assert departure_estimate([0] * 4, [100] * 4, greedy).upper_bound == 1  # too few prompts for any bound


def entry(rule: str, level: float, bound: float, gain: float, low: float) -> dict:
    estimate = Estimate(gain, (low, 2 * gain - low), 9)
    departure = BoundedDeparture(bound / 2, None, 9, upper_bound=bound)
    return {"rule": rule, "level": level, "delta": None, "gain_over_exact": estimate, "departure": departure}


def test_the_choice():
    strict, lenient = entry("threshold", 0.6, 0.004, 0.1, 0.02), entry("threshold", 0.3, 0.02, 0.4, 0.3)
    quick = entry("cascade", 0.8, 0.009, 0.2, 0.1)
    assert choose([strict, lenient, quick], 0.01)[0] == quick
    assert choose([strict, lenient, quick], 0.03)[0] == lenient
    assert choose([strict, lenient, quick], 0.009)[0] == strict  # at the bound is not below it
    assert choose([strict, lenient, quick], None)[0] is None
    chosen, reason = choose([strict, lenient, quick], 0.001)
    assert chosen is None and reason.startswith(
        "none: keep exact. No level surely stays below 0.10%; the nearest is threshold"
    )
    unsure = entry("threshold", 0.6, 0.004, 0.5, -0.1)
    assert choose([unsure, quick], 0.01)[0] == quick
    chosen, reason = choose([unsure], 0.01)
    assert chosen is None and "surely gains" in reason and "τ +0.50 [-0.10, +1.10] over exact" in reason
    # A level that passes behind a stricter one that does not was lucky.
    lucky = entry("threshold", 0.2, 0.001, 0.6, 0.5)
    assert choose([strict, lenient, lucky], 0.01)[0] == strict


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"drafter": []}, "drafter: expected one, found none"),
        ({"drafter": ["draft", "heads"]}, "drafter: expected one, found draft and heads"),
        ({"max_departure": 1.0}, "max_departure: expected more than 0 and less than 1, found 1.0"),
        ({"temperature": -1.0}, "temperature: expected a finite number, at least 0, found -1.0"),
        ({"levels": {"threshold": [0.1, 1]}}, "levels: threshold: expected levels of at least 0 and less than 1"),
        ({"levels": {"cascade": [1.5]}}, "levels: cascade: expected levels of at least 0 and at most 1, found 1.5"),
        ({"levels": {"sloppy": [0.5]}}, "levels: expected levels of typical, threshold, cascade, found"),
        ({"batch_size": 0}, "batch_size: expected at least 1, found 0"),
        ({"limit": 1}, "limit: expected at least 2, found 1"),
        ({"levels": {"typical": []}}, "levels: expected levels of typical, threshold, cascade, found"),
    ],
)  # fmt: skip
def test_bad_input_is_named(tmp_path, fields, said):
    with pytest.raises(InputError, match=said) as error:
        config_of(tmp_path, tmp_path, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hybrid:suffix", "drafter: expected hybrid:FIRST+LAST, drafters with + between them, found hybrid:suffix"),
        ("hybrid:suffix+unigram@last=0", "drafter: expected last=TOKENS of at least 1 after @, found 0"),
        ("hybrid:suffix+hybrid:a+b", "drafter: expected no hybrid inside of one"),
        ("hybrid:suffix:0+unigram", "drafter: expected suffix:MIN or suffix:MIN,FILE"),
        ("hybrid:suffix:2,none.store+unigram", "store: expected a store in none.store, found"),
    ],
)
def test_hybrids_that_cannot_be_are_refused_in_one_line(models, capsys, argument, message):
    code = main([
        "tune", "--target", str(models / "target"), "--drafter", argument, "--prompts", str(models / "prompts.jsonl"),
        "--output", str(models / "refused"),
    ])  # fmt: skip
    assert code == 2
    assert message in capsys.readouterr().err
