"""The report's page: both ends of what a report can hold, hostile words, and that it loads nothing."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from draftsmith.decode import Counts
from draftsmith.decode.measurement.certificate import Certificate, unchecked
from draftsmith.decode.measurement.costs import CostTable
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report import entries, types
from draftsmith.scripts.report.page import lossless, render_page
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report, Run, Speed
from draftsmith.scripts.report.words import turns
from draftsmith.scripts.summary import DOUBTFUL, figures_table

NOTHING = Estimate(None, None, 0)
VOID = {"meta", "link", "img", "br", "use", "path"}
HOSTILE = "<script>alert('x')</script>\"&$x^2$"
LENGTHS, DECODED = (1, 2, 4, 8), (2, 4)
CATEGORIES = {"code": 96, "math": 80}
DRAFTERS = {
    "draft": types.ProposerEntry("draft", "draft", "runs/draft", 926_336, 3_705_344),
    "stock": types.ProposerEntry("stock", "baseline_draft", "assets/draft", 926_336, 3_705_344),
    "medusa": types.ProposerEntry("medusa", "medusa", "runs/heads", 1_204_224, 4_816_896, heads=4, tree_nodes=8),
}
LEVEL = {"draft": 0.7, "stock": 0.6, "medusa": 0.55}
SAMPLED = Certificate(p_value=0.3, tokens=40_000, passed=True)
GREEDY = Certificate(identical=True, prompts_identical=80, near_ties=0, departures=0, passed=True)
NEAR = Certificate(identical=False, prompts_identical=78, near_ties=2, departures=0, passed=True)


def est(value, arm=0.05):
    return Estimate(value, (value - arm, value + arm), 80)


def spd(value):
    return Speed(value, (value - 2, value + 2), 80, median=value)


def tau(name, k):
    return (1 - LEVEL[name] ** (k + 1)) / (1 - LEVEL[name])


def lengths_of(name, of):
    return (4,) if name == "medusa" else of


def curve(name, temperature, verifier="probabilistic") -> types.Curve:
    lengths = {k: est(tau(name, k)) for k in lengths_of(name, LENGTHS)}
    groups = {c: entries.CurveGroup(n, est(LEVEL[name]), lengths, 900) for c, n in CATEGORIES.items()}
    speeds = {b: {k: est(tau(name, k) / b**0.1 / (1 + 0.1 * k)) for k in lengths} for b in (1, 8)}
    rates = [est(LEVEL[name])] * 4
    return types.Curve(
        DRAFTERS[name], temperature, verifier, est(LEVEL[name]), lengths, rates, rates, groups, predicted_speedup=speeds
    )


def run(name, k, temperature, rows) -> Run:
    speed, length = tau(name, k) / rows**0.1 / (1 + 0.1 * k), est(tau(name, k))
    gain = est(tau("draft", k) - tau("stock", k), 0.06)
    return Run(
        proposer=DRAFTERS[name], draft_length=k, temperature=temperature, batch_size=rows,
        counts=Counts(num_drafts=2400, num_draft_tokens=2400 * k, num_accepted_tokens=1200), alpha=est(LEVEL[name]),
        draft_acceptance_rate=est(0.5), mean_acceptance_length=est(tau(name, k) + 0.01, 0.09),
        speedup=est(speed, 0.07), predicted_speedup=est(speed + 0.02), tokens_per_second=spd(95 * speed),
        gain_over_baseline_draft=types.Gains(gain, gain, est(1.14)) if name == "draft" else None,
        replay=types.ReplayedLength(length, True),
        lossless=SAMPLED if temperature else NEAR if name == "medusa" else GREEDY,
        by_category={c: entries.RunGroup(n // 4, est(2), est(speed, 0.13)) for c, n in CATEGORIES.items()},
        repeated_ngram_share=0.04 if temperature else 0.31,
    )  # fmt: skip


def rich() -> Report:
    """A report of three drafters, two categories, two temperatures and two batch sizes."""
    settings = [(t, b) for t in (0.0, 0.8) for b in (1, 8)]
    runs = [run(n, k, t, b) for t, b in settings for n in DRAFTERS for k in lengths_of(n, DECODED)]
    curves = [curve(n, t) for t in (0.0, 0.8) for n in DRAFTERS] + [curve("draft", 0.8, "greedy")]
    compared = [("draft", "stock", 0.28, est(0.11)), ("stock", "medusa", -0.03, NOTHING)]
    best = next(one for one in runs if one.key == ("draft", 4, 1, 0.0))
    seconds = {1: {1: 0.0098, 2: 0.0104, 5: 0.011}, 8: {1: 0.014, 2: 0.018, 5: 0.025}}
    drafters = {name: {1: 0.0011, 8: 0.0014} for name in DRAFTERS}
    return Report(
        environment=types.Environment(
            "3.11.7", "2.13.0", "5.23.0", "cpu: x86_64", 2, "bfloat16", 2, "6473ffa1c0de", True, ["float32"], "9.1 ms"
        ),
        target=types.Target("models/target-36m", 36_442_112, "bfloat16"),
        prompts=types.Prompts("heldout.jsonl", 80, 320, CATEGORIES),
        baseline=types.Baseline(spd(97.1), [types.PlainRun(t, b, spd(95), 0.3) for t, b in settings]),
        runs=runs,
        curves=curves,
        comparisons=[
            types.Comparison(0.0, "probabilistic", k, a, b, est(gain), alpha)
            for k in (*DECODED, 16)
            for a, b, gain, alpha in compared
        ],
        costs=entries.Costs(256, seconds, drafters, drafters, []),
        gate=types.Gate(1.2, 0.1, 0.95),
        forecasts=[
            entries.Forecast(name, 16, 0.8, rows, est(tau(name, 4)), 0.0123, 0.5, est(12, 1.25), est(11.5, 1.25), None)
            for name in DRAFTERS for rows in (1, 16)
        ],
        recommendation=types.Recommendation(
            True, "the interval's lower end is above the speed-up of 1.2.", *best.key, best.predicted_speedup,
            best.speedup,
        ),
    )  # fmt: skip


def minimal(**others) -> Report:
    """A report in which all that may be null is, and nothing paid."""
    alone = Run(
        proposer=types.ProposerEntry("draft", "draft", None, 0, 0), draft_length=4, temperature=1.0, batch_size=1,
        counts=Counts(), draft_acceptance_rate=NOTHING, mean_acceptance_length=NOTHING, speedup=NOTHING,
        tokens_per_second=Speed(None, None, 0, median=0.0), lossless=unchecked("nothing was asked for"),
    )  # fmt: skip
    fields = {
        "environment": types.Environment("–", "–", "–", "–", None, "–", 1, None),
        "target": types.Target("target", 0, "float32"),
        "prompts": types.Prompts("prompts.txt", 1, 1, {}),
        "baseline": types.Baseline(Speed(None, None, 0, median=0.0), []),
        "runs": [alone],
        "recommendation": types.Recommendation(False, "no setting decodes faster than plain decoding."),
    }
    return Report(**(fields | others))


class Page(HTMLParser):
    """Reads a page: that what is opened is closed, what it would load, its headings and its text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.loads, self.ids, self.headings, self.words, self.tags = [], [], [], [], [], set()
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.loads += [url for name, value in attrs if name == "style" for url in re.findall(r"url\((.*?)\)", value)]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data.strip())
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def page_of(report: Report) -> Page:
    return Page(render_page(report))


def printed(report: Report, width: int = 80) -> str:
    shown = io.StringIO()
    print_report(report, Console(width=width, file=shown))
    return shown.getvalue()


@pytest.fixture(scope="module")
def full() -> Report:
    return rich()


@pytest.fixture(scope="module")
def full_page(full) -> str:
    return render_page(full)


def test_a_rich_report_opens_with_the_answer_and_shows_all_that_was_measured(full, full_page):
    page, chosen = Page(full_page), full.recommendation
    hero, low, high = page.text[: page.text.index("Lines: predicted")], *chosen.measured_speedup.ci95
    for words in (
        "draft, γ = 4 batch size 1, T = 0",
        f"{chosen.measured_speedup.value:.2f}× [{low:.2f}, {high:.2f}]",
        f"{tau('draft', 4):.2f} [",
        "80 of 80 texts identical",
        "Text that repeats itself: 31",
    ):
        assert words in hero, words
    assert page.headings == [
        "✓ GO",
        "Recommended setting",
        "Forecast for llama.cpp",
        "Speed-up",
        "Runs",
        "Comparisons",
        "τ: tokens per target forward",
        "Categories and lengths of context",
        "Costs",
        "How it was measured",
    ]
    # A panel for each setting, and for each temperature, each by itself.
    assert full_page.count("<svg ") == 4 + 2 and len(set(page.ids)) == len(page.ids)
    for words in (
        "draft is ahead of stock by 0.28 [0.23, 0.33] τ, 0.11 [0.06, 0.16] α, at γ = 4; told apart.",
        "medusa is ahead of stock by 0.03 [−0.02, 0.08] τ, at γ = 4; too close to tell them apart.",
        "differ from measured ones by 1.3 % in the median",
        "78 of 80 texts identical, 2 part at a near-tie",
        "code0● draft96900",
    ):
        assert words in page.text, words


def test_it_loads_nothing_and_takes_its_colours_from_the_page(full_page):
    page = Page(full_page)
    assert all(load.startswith(("#", "data:")) for load in page.loads)
    assert "@import" not in full_page and "script" not in page.tags
    assert {load[1:] for load in page.loads if load.startswith("#")} <= set(page.ids)
    # A colour that matplotlib chose by itself would be unseen in the dark.
    drawn = "".join(re.findall(r"<svg .*?</svg>", full_page, re.DOTALL))
    assert not re.search(r"(fill|stroke): #", drawn)
    used, defined = set(re.findall(r"var\((--\w+)\)", full_page)), set(re.findall(r"(--\w+):", full_page))
    assert used <= defined


def test_what_is_null_reads_as_a_dash_and_its_section_is_left_out():
    html = render_page(minimal())
    page = Page(html)
    assert page.headings == ["✗ No drafter pays", "Runs", "How it was measured"]
    assert "None" not in page.text and "nan" not in page.text and "<svg" not in html
    row = html[html.index('<td class="l"><b style') : html.index("</tr>", html.index('<td class="l"><b style'))]
    cells = [Page(cell).text.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
    assert cells[1:] == ["4", *["–"] * 10]


def test_no_go_names_what_failed_and_the_lossy_drafter():
    parts = [types.GatePart("speed-up above 1.2", False), types.GatePart("lossless text", True)]
    failures = ["speed-up 1.03 is below 1.2"]
    report = minimal(gate=types.Gate(1.2, None, 0.95, passed=False, failures=failures, parts=parts))
    departs = Certificate(p_value=3e-9, tokens=40_000, passed=False)
    (alone,) = report.runs
    alone = replace(alone, mean_acceptance_length=Estimate(1.31, None, 1), lossless=departs)
    chosen = types.Recommendation(False, "It is slow.", *alone.key, measured_speedup=est(1.08), judged="The best of 4.")
    page = page_of(replace(report, runs=[alone], recommendation=chosen))
    assert page.headings[:2] == ["✗ NO-GO", "Best setting"]
    for words in (
        "speed-up 1.03 is below 1.2",
        "✗ speed-up above 1.2: no, ✓ lossless text.",
        "The best of 4.",
        "1.08× [1.03, 1.13]",
        "1.31",
        "NOdistribution test over 40,000 tokens: p =",
    ):
        assert words in page.text, words


def test_hostile_words_stay_words(full):
    drafter, first = replace(DRAFTERS["draft"], name=HOSTILE, path=HOSTILE), full.curves[0]
    html = render_page(
        replace(
            full,
            runs=[replace(full.runs[0], proposer=drafter)],
            curves=[replace(first, proposer=drafter, by_category={HOSTILE: first.by_category["code"]})],
            target=replace(full.target, path=HOSTILE),
            prompts=replace(full.prompts, path=HOSTILE),
            environment=replace(full.environment, device=HOSTILE),
            gate=replace(full.gate, passed=False, failures=[HOSTILE]),
            recommendation=replace(full.recommendation, proposer=HOSTILE, reason=HOSTILE),
            failures=[types.Failure("replay at T = 1", HOSTILE, 1)],
            costs=None,
        )
    )  # fmt: skip
    page = Page(html)
    assert "script" not in page.tags and html.count(HOSTILE) == 0
    assert page.text.count(HOSTILE) > 10 and f"Failed: replay at T = 1: {HOSTILE}" in page.text


def test_costs_that_do_not_agree_are_named_on_the_page_and_in_the_terminal(full, full_page):
    doubt = f"T=0, 1 at a time: {HOSTILE} takes 9 ms at first, 18 ms later"
    doubts = [doubt] + [f"T=0, 1 at a time: round {n} takes 9 ms at first, 18 ms later" for n in range(4)]
    table = CostTable(9, 0.0, {1: {1: 0.1}}, {1: 0.1}, 5, {1: 0.1}, {}, doubts)
    report = minimal(costs=replace(full.costs, tables=[table]))
    page, shown = page_of(report).text, printed(report, 200)
    assert doubt in page and doubts[4] in page and DOUBTFUL not in Page(full_page).text
    assert doubt in shown and DOUBTFUL in shown and doubts[4] not in shown and "and 2 more" in shown


@pytest.mark.parametrize(
    "certificate, answer",
    [
        (GREEDY, "yes"),
        (NEAR, "rounding"),
        (replace(NEAR, departures=1, passed=False), "no"),
        (SAMPLED, "yes"),
        (replace(SAMPLED, p_value=1e-6, passed=False), "no"),
        (unchecked("nothing was asked for"), "unknown"),
    ],
)
def test_lossless_is_said_only_where_it_was_shown(full, certificate, answer):
    assert lossless(certificate, full)[0] == answer


def test_a_table_s_title_is_shown_as_it_is():
    shown, name = io.StringIO(), "model [/x] [bold] at http://[::1]:80"
    table = figures_table(["a long column's heading, as wide as the title"], "", name)
    Console(width=80, file=shown).print(table)
    assert name in shown.getvalue()


def test_page_and_table_have_the_verdict_of_each_setting(full):
    settings = [
        types.SettingVerdict(0.0, 1, True, "the draft is <fast>.", "draft", 4, est(1.39, 0.11)),
        types.SettingVerdict(0.8, 1, False, "that is not shown.", "medusa", 4, Estimate(1.05, (1.0, 1.12), 80)),
    ]
    chosen = replace(full.recommendation, go=False, reason="Deploy where it pays: T = 0.", settings=settings)
    report = replace(full, gate=None, recommendation=chosen)
    assert report.verdict == "GO IN PART"
    line = "GO at T = 0: 1.39×; at T = 0.8: 1.05× [1.00, 1.12], not shown"
    source = render_page(report)
    page = Page(source)
    assert page.headings[:2] == [f"✓ {line}", "A setting that pays"] and "hero go" in source
    assert "✓ GO the draft is <fast>." in page.text and "✗ NO-GO that is not shown." in page.text
    assert source.count('class="star"') == 1 and "the green ring is the recommended setting" in source
    assert (f"{line}\nDeploy where it pays: T = 0.\n  GO     the draft is <fast>.\n  NO-GO  that is not") in printed(
        report, 100
    )


def test_page_and_table_say_who_drafted_in_the_same_words():
    sources = {
        "suffix": Counts(num_drafts=41, num_emitted_tokens=126),
        "a draft with a long name [/x]": Counts(num_drafts=59, num_emitted_tokens=74),
    }
    (alone,) = minimal().runs
    report = minimal(runs=[replace(alone, sources=sources)] * 2)
    said = "suffix 41 % of rounds, 63 % of tokens; a draft with a long name [/x] 59 %, 37 %"
    assert turns(report.runs[0]) == said
    assert f"draft, γ = 4, T = 1, batch size 1: {said}" in page_of(report).text
    assert f"draft, γ=4, T=1: {said}" in " ".join(printed(report).split())
    assert max(map(len, printed(report).splitlines())) <= 80
    # Of one that drafts alone nothing is said, nor where there was no round.
    for other in (minimal(), minimal(runs=[replace(alone, sources=dict.fromkeys(sources, Counts()))])):
        assert turns(other.runs[0]) is None
        assert "take turns" not in page_of(other).text
