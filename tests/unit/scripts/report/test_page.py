"""The report's page: both ends of what a report can hold, hostile words, and that it loads nothing."""

import copy
import io
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from draftsmith.decode.measurement.certificate import Certificate, unchecked
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.page import lossless, number, render_page, visible, write_page
from draftsmith.scripts.report.summary import markdown
from draftsmith.scripts.report.table import print_report
from draftsmith.scripts.report.types import Report, Speed
from draftsmith.scripts.report.words import turns
from draftsmith.scripts.summary import DOUBTFUL, figures_table
from draftsmith.train.kinds.quantities import size

NOTHING = Estimate(None, None, 0)
TYPED = TypeAdapter(Report)
VOID = {"meta", "link", "img", "br", "use", "path"}
HOSTILE = "<script>alert('x')</script>\"&$x^2$"
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="120" viewBox="0 0 300 120"><rect width="100%" '
    'height="100%" fill="white"/><path d="M 20 60 C 80 60, 80 30, 140 30" fill="none" stroke="#cbd2d9"/>'
    '<circle cx="20" cy="60" r="15" fill="#334e68"/><circle cx="140" cy="30" r="9" fill="#0b69a3"/></svg>'
)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
DECODED = (2, 4, 8)
CATEGORIES = {"code": 96, "math": 80, "summarisation": 64, "chat": 80}
SHIFTS = {"code": 0.09, "math": 0.03, "summarisation": -0.02, "chat": -0.08}
ALPHAS = {"draft": (0.74, 0.66), "stock": (0.62, 0.57), "medusa": (0.56, 0.45)}
STEPS = {"draft": 0.0011, "stock": 0.0014, "medusa": 0.0002}
FORWARD = {1: {1: 9.8, 2: 10.4, 4: 11.0, 8: 12.1, 16: 14.9}, 8: {1: 14.1, 2: 17.9, 4: 24.8, 8: 38.0, 16: 66.0}}


def est(value, arm):
    return Estimate(value, (value - arm, value + arm), 80)


def spd(value, arm):
    return Speed(value, (value - arm, value + arm), 80, median=value)


def chain_length(alpha, length):
    return (1 - alpha ** (length + 1)) / (1 - alpha)


def forward(batch, tokens):
    known = FORWARD[batch]
    below = max(k for k in known if k <= tokens)
    above = min((k for k in known if k >= tokens), default=below)
    share = 0 if above == below else (tokens - below) / (above - below)
    return (known[below] + share * (known[above] - known[below])) / 1000 + (0.0022 if tokens > 16 else 0)


def proposer(name):
    kinds = {"draft": "draft", "stock": "baseline_draft", "medusa": "medusa", "lookup": "prompt_lookup"}
    size = {"draft": 926_336, "stock": 926_336, "medusa": 1_204_224, "lookup": 0}[name]
    path = None if name == "lookup" else f"runs/quickstart/{name}"
    own = {"name": name, "kind": kinds[name], "path": path, "parameters": size, "bytes": 4 * size}
    return own | ({"heads": 4, "tree_nodes": 8} if name == "medusa" else {})


def tau(name, temperature, length, shift=0.0):
    if name == "lookup":
        return 1 + 0.22 * chain_length(0.5, length - 1)
    alpha = ALPHAS[name][temperature > 0] + shift
    return chain_length(alpha, length) + (0.45 if name == "medusa" else 0)


def predicted(name, temperature, batch, length, shift=0.0):
    seconds = length * STEPS.get(name, 0.00002) + forward(batch, (9 if name == "medusa" else length + 1)) + 0.0009
    return tau(name, temperature, length, shift) * forward(batch, 1) / seconds


def lengths_of(name, all_of=LENGTHS):
    return (4,) if name == "medusa" else all_of


def rich():
    """A report of four drafters, four categories, two temperatures and two batch sizes."""
    noise = random.Random(0)
    names = ("draft", "stock", "medusa", "lookup")
    curves, runs = [], []
    for temperature in (0.0, 0.8):
        for name in names:
            for verifier in (
                ("probabilistic", "greedy") if temperature and name in ("draft", "stock") else ("probabilistic",)
            ):
                shift = -0.05 if verifier == "greedy" else 0.0
                alpha = NOTHING if name == "lookup" else est(ALPHAS[name][temperature > 0] + shift, 0.022)
                conditional = [
                    est((alpha.value or 0.4) + 0.015 * i, 0.02 + 0.006 * i)
                    for i in range(min(4 if name == "medusa" else 8, 8))
                ]
                curves.append(
                    {
                        "proposer": proposer(name),
                        "temperature": temperature,
                        "verifier": verifier,
                        "alpha": alpha,
                        "mean_acceptance_length": {
                            str(k): est(tau(name, temperature, k, shift), 0.05 + 0.006 * k) for k in lengths_of(name)
                        },
                        "acceptance_per_position": conditional,
                        "conditional_acceptance": conditional,
                        "by_category": {
                            c: {
                                "prompts": n,
                                "alpha": alpha,
                                "mean_acceptance_length": {
                                    str(k): est(tau(name, temperature, k, shift + SHIFTS[c]), 0.14)
                                    for k in lengths_of(name)
                                },
                            }
                            for c, n in CATEGORIES.items()
                        },
                        "predicted_speedup": {
                            str(b): {
                                str(k): est(predicted(name, temperature, b, k, shift), 0.03 + 0.003 * k)
                                for k in lengths_of(name)
                            }
                            for b in (1, 8)
                        },
                        "break_even_alpha": {}
                        if name == "lookup"
                        else {
                            str(b): {
                                str(k): None if b == 8 and k > 8 else min(0.2 + 0.028 * b + 0.03 * k, 0.97)
                                for k in lengths_of(name)
                            }
                            for b in (1, 8)
                        },
                    }
                )
            for batch in (1, 8):
                for k in lengths_of(name, DECODED):
                    guess = predicted(name, temperature, batch, k)
                    speed = guess * noise.gauss(0.99, 0.04)
                    plain = 8 ** (batch > 1) * (98.4 - 3 * temperature) * (0.7 if batch > 1 else 1)
                    gain = est(tau("draft", temperature, k) - tau("stock", temperature, k), 0.06)
                    accepted = tau(name, temperature, k) - 1
                    greedy = Certificate(identical=True, prompts_identical=80, near_ties=0, departures=0, passed=True)
                    if name == "medusa":
                        greedy = replace(greedy, identical=False, prompts_identical=78, near_ties=2)
                    sampled = Certificate(p_value=noise.uniform(0.01, 1), tokens=40_000, passed=True)
                    if name == "lookup":
                        sampled = unchecked("no tokens were asked for")
                    conditional = [0.7 + 0.01 * i for i in range(k)]
                    runs.append(
                        {
                            "proposer": proposer(name),
                            "draft_length": k,
                            "rule": "exact",
                            "temperature": temperature,
                            "batch_size": batch,
                            "counts": {
                                "num_drafts": 2400,
                                "num_draft_tokens": 2400 * k,
                                "num_accepted_tokens": int(2400 * accepted),
                            },
                            "alpha": None if name == "lookup" else est(ALPHAS[name][temperature > 0], 0.022),
                            "draft_acceptance_rate": est(accepted / k, 0.04),
                            "mean_acceptance_length": est(tau(name, temperature, k) + noise.gauss(0, 0.02), 0.09),
                            "acceptance_per_position": conditional,
                            "conditional_acceptance": conditional,
                            "speedup": est(speed, 0.07),
                            "predicted_speedup": est(guess, 0.04),
                            "tokens_per_second": spd(plain * speed, 6),
                            "gain_over_baseline_draft": {
                                "mean_acceptance_length": gain,
                                "decoded_mean_acceptance_length": gain,
                                "speedup": est(1.14, 0.05),
                            }
                            if name == "draft"
                            else None,
                            "replay": {"mean_acceptance_length": est(tau(name, temperature, k), 0.05), "agrees": True},
                            "lossless": sampled if temperature else greedy,
                            "by_category": {
                                c: {
                                    "prompts": n // 4,
                                    "mean_acceptance_length": est(2, 0.1),
                                    "speedup": est(speed + 2 * SHIFTS[c], 0.13),
                                }
                                for c, n in CATEGORIES.items()
                            },
                            "repeated_ngram_share": 0.31 if temperature == 0 else 0.04,
                        }
                    )
    comparisons = [
        {
            "temperature": t,
            "verifier": "probabilistic",
            "draft_length": k,
            "proposer": a,
            "other": b,
            "mean_acceptance_length": est(sign * (0.07 * k if more == 0 else 0.03), 0.05),
            "alpha": est(sign * 0.11, 0.02) if b == "stock" else NOTHING,
            "more_prompts": more,
        }
        for t in (0.0, 0.8)
        for k in LENGTHS[:8]
        for a, b, sign, more in (("draft", "stock", 1, 0), ("stock", "medusa", -1, 40 if t else 0))
    ]
    source = (
        "def area(shape):\n\tif not shape:\n        return None\n    width, height = shape\n\n\nprint(area((3, 4)))\n"
    )
    tokens = re.findall(r"\n+|\t|\s+(?=\s)|\s?\w+|[^\w\s]+|\s", source)
    texts = [
        {
            "category": category,
            "prompt": "Complete the function.\n\n# "
            + "It returns the area of a rectangle. " * (1 + 12 * (category == "math")),
            "tokens": [
                {"text": t, "acceptance": noise.choice((0.0, 0.2, 0.5, 0.8, 1.0, 1.0, 1.0, 1.0))} for t in tokens
            ],
        }
        for category in CATEGORIES
    ]
    rejected = ["\n", "    ", " the", "return", " self", "\t", "(", " None", ".", "\u200b", " x\ny", "日本"]
    points = [
        {
            "proposer": r["proposer"]["name"],
            "draft_length": r["draft_length"],
            "batch_size": r["batch_size"],
            "temperature": r["temperature"],
            "predicted": r["predicted_speedup"].value,
            "measured": r["speedup"].value,
        }
        for r in runs
    ]
    best = next(
        r
        for r in runs
        if (r["proposer"]["name"], r["draft_length"], r["batch_size"], r["temperature"]) == ("draft", 4, 1, 0.0)
    )
    return {
        "schema": "draftsmith.report/1",
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "device": "cpu: x86_64",
            "cores": 2,
            "dtype": "bfloat16",
            "threads": 2,
            "git_sha": "6473ffa1c0de",
            "compiled": True,
            "draft_dtypes": ["float32"],
            "settings_by": "milliseconds per token of plain decoding: float32 9.1, bfloat16 10, bfloat16 compiled 6.5",
        },
        "target": {"path": "models/target-36m", "parameters": 36_442_112, "dtype": "bfloat16"},
        "prompts": {"path": "heldout.jsonl", "count": 80, "replayed": 320, "categories": CATEGORIES},
        "baseline": {
            "tokens_per_second": spd(97.1, 2),
            "by_temperature": [
                {
                    "temperature": t,
                    "batch_size": b,
                    "tokens_per_second": spd((98.4 - 3 * t) * (5.6 if b > 1 else 1), 2),
                    "repeated_ngram_share": 0.3,
                }
                for t in (0.0, 0.8)
                for b in (1, 8)
            ],
        },
        "runs": runs,
        "curves": curves,
        "comparisons": comparisons,
        "costs": {
            "context": 256,
            "target_seconds": {str(b): {str(k): forward(b, k) for k in (1, 2, 3, 4, 5, 9, 16)} for b in (1, 8)},
            "draft_seconds": {
                n: {str(b): {str(k): k * s * (1 + 0.04 * b) for k in LENGTHS} for b in (1, 8)} for n, s in STEPS.items()
            },
            "draft_seconds_per_token": {n: {str(b): s * (1 + 0.04 * b) for b in (1, 8)} for n, s in STEPS.items()},
            "overhead_seconds": {name: {"1": 0.0009, "8": 0.0014} for name in ("draft", "stock", "medusa", "lookup")},
            "plain_overhead_seconds": {"1": 0.0004, "8": 0.0009},
            "prefill_seconds": {"1": 0.02, "8": 0.1},
            "tables": [],
        },
        "planner_check": {"median_relative_error": 0.031, "points": points},
        "memory": {
            "target_bytes": 72_884_224,
            "target_cache_bytes_per_token": 4096,
            "drafters": {
                n: {
                    "weights_bytes": 2 * proposer(n)["parameters"],
                    "cache_bytes_per_token": None if n == "lookup" else 1024,
                }
                for n in names
            },
        },
        "rejections": {
            "temperature": 0.0,
            "proposer": "draft",
            "texts": texts,
            "tokens": [{"text": t, "seen": 420 - 30 * i, "rejected": 131.4 - 10 * i} for i, t in enumerate(rejected)],
        },
        "trees": [{"proposer": "medusa", "svg": SVG}],
        "gate": {"min_speedup": 1.2, "min_gain": 0.1, "confidence": 0.95, "passed": True, "failures": []},
        "recommendation": {
            "go": True,
            "proposer": "draft",
            "draft_length": 4,
            "batch_size": 1,
            "temperature": 0.0,
            "predicted_speedup": best["predicted_speedup"],
            "measured_speedup": best["speedup"],
            "reason": "the interval's lower end is above the speed-up of 1.2 that was asked for.",
        },
    }


def minimal():
    """A report in which all that may be null is, and nothing paid."""
    run = {
        "proposer": {"name": "draft", "kind": "draft", "path": None, "parameters": 0, "bytes": 0},
        "draft_length": 4,
        "rule": "exact",
        "temperature": 1.0,
        "batch_size": 1,
        "counts": {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0},
        "alpha": None,
        "draft_acceptance_rate": NOTHING,
        "mean_acceptance_length": NOTHING,
        "acceptance_per_position": [None] * 4,
        "conditional_acceptance": [None] * 4,
        "speedup": NOTHING,
        "predicted_speedup": None,
        "tokens_per_second": Speed(None, None, 0, median=0.0),
        "gain_over_baseline_draft": None,
        "replay": None,
        "lossless": unchecked("nothing was asked for"),
        "by_category": {},
        "repeated_ngram_share": None,
    }
    return {
        "schema": "draftsmith.report/1",
        "environment": dict.fromkeys(("python", "torch", "transformers", "device", "dtype"), "–")
        | {"cores": None, "threads": 1, "git_sha": None, "compiled": False, "draft_dtypes": [], "settings_by": None},
        "target": {"path": "target", "parameters": 0, "dtype": "float32"},
        "prompts": {"path": "prompts.txt", "count": 1, "replayed": 1, "categories": {}},
        "baseline": {"tokens_per_second": Speed(None, None, 0, median=0.0), "by_temperature": []},
        "runs": [run],
        "curves": [],
        "comparisons": [],
        "costs": None,
        "planner_check": None,
        "memory": {"target_bytes": 4, "target_cache_bytes_per_token": None, "drafters": {}},
        "rejections": None,
        "trees": [],
        "gate": None,
        "recommendation": {
            "go": False,
            "proposer": None,
            "draft_length": None,
            "batch_size": None,
            "temperature": None,
            "predicted_speedup": None,
            "measured_speedup": None,
            "reason": "no setting decodes faster than plain decoding.",
        },
    }


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


@pytest.fixture(scope="module")
def full():
    return rich()


@pytest.fixture(scope="module")
def full_page(full, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    write_page(TYPED.validate_python(full), path)
    assert [other.name for other in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def test_a_rich_report_opens_with_the_answer_and_shows_all_that_was_measured(full, full_page):
    page, chosen = Page(full_page), full["recommendation"]
    assert page.headings[0] == "✓ GO" and page.headings[1] == "Recommended setting"
    hero = page.text[: page.text.index("Lines: predicted")]
    low, high = chosen["measured_speedup"].ci95
    assert "draft, γ = 4 batch size 1, T = 0" in hero
    assert f"{chosen['measured_speedup'].value:.2f}× [{low:.2f}, {high:.2f}]" in hero
    run = next(r for r in full["runs"] if r["draft_length"] == 4)
    assert f"{run['replay']['mean_acceptance_length'].value:.2f} [" in hero and "80 of 80 texts identical" in hero
    assert page.headings[2:] == [
        "Speed-up",
        "Runs",
        "Comparisons",
        "τ: tokens per target forward",
        "Acceptance by position",
        "Categories",
        "α measured and break-even α",
        "Costs",
        "The planner's check",
        "Where tokens are rejected",
        "Trees",
        "Losslessness",
        "Memory",
        "How it was measured",
    ]
    # 4 + 2 + 2 + (2 + 2) + 2 + 1 charts, each of them for itself
    assert full_page.count("<svg ") == 15 and len(set(page.ids)) == len(page.ids)
    assert len(full_page) < 1_500_000
    for words in (
        "draft is ahead of stock by 0.28 [0.23, 0.33] τ, 0.11 [0.09, 0.13] α, at γ = 4; told apart.",
        "medusa is ahead of stock by 0.03 [−0.02, 0.08] τ, at γ = 4; 40 more prompts to tell these apart.",
        "the median relative error is 3.1 %",
        "78 of 80 texts identical, 2 part at a near-tie",
        "69.5 MiB",
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
    html = render_page(TYPED.validate_python(minimal()))
    page = Page(html)
    assert page.headings == ["✗ No drafter pays", "Runs", "Memory", "How it was measured"]
    assert "None" not in page.text and "nan" not in page.text and "<svg" not in html
    row = html[html.index('<td class="l"><b style') : html.index("</tr>", html.index('<td class="l"><b style'))]
    cells = [Page(cell).text.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
    assert cells[1:] == ["4", "–", "–", "–", "–", "–", "–", "–", "–", "–", "–", "–"]


def test_memory_has_states_where_there_are_some(full):
    report = copy.deepcopy(full)
    assert "states of a row" not in Page(render_page(TYPED.validate_python(report))).text
    report["memory"]["target_state_bytes"] = 3 * 2**20
    text = Page(render_page(TYPED.validate_python(report))).text
    assert "states of a row, kept K + 2 times in a round" in text and "3.0 MiB" in text


def test_a_partial_report_names_the_parts_that_failed():
    report = minimal() | {"failures": [{"what": "replay at T = 1", "error": HOSTILE, "exit_code": 1}]}
    page = Page(render_page(TYPED.validate_python(report)))
    assert f"Failed: replay at T = 1: {HOSTILE}" in page.text


def test_no_go_names_what_failed_and_the_lossy_drafter():
    report = minimal()
    report["recommendation"] |= {
        "proposer": "draft",
        "draft_length": 4,
        "batch_size": 1,
        "temperature": 1.0,
        "measured_speedup": est(1.08, 0.05),
    }
    report["gate"] = {
        "min_speedup": 1.2,
        "min_gain": None,
        "confidence": 0.95,
        "passed": False,
        "failures": ["speed-up 1.03 is below 1.2"],
    }
    report["runs"][0]["mean_acceptance_length"] = Estimate(1.31, None, 1)
    report["runs"][0]["lossless"] = Certificate(p_value=3e-9, tokens=40_000, passed=False)
    page = Page(render_page(TYPED.validate_python(report)))
    assert page.headings[:2] == ["✗ NO-GO", "Best setting"]
    for words in (
        "speed-up 1.03 is below 1.2",
        "1.08× [1.03, 1.13]",
        "1.31",
        "NOdistribution test over 40,000 tokens: p = 3e-09",
    ):
        assert words in page.text, words


def test_hostile_words_stay_words(full):
    report = copy.deepcopy(full)
    report["curves"], report["runs"] = report["curves"][:1], report["runs"][:1]
    report["comparisons"], report["costs"], report["planner_check"] = [], None, None
    report["target"]["path"] = report["prompts"]["path"] = report["recommendation"]["reason"] = HOSTILE
    report["environment"]["device"], report["gate"]["failures"] = HOSTILE, [HOSTILE]
    for one in (*report["curves"], *report["runs"]):
        one["proposer"] |= {"name": HOSTILE, "path": HOSTILE}
        one["by_category"] = {HOSTILE: next(iter(one["by_category"].values()))}
    report["recommendation"]["proposer"] = report["rejections"]["proposer"] = HOSTILE
    report["memory"]["drafters"] = {HOSTILE: {"weights_bytes": 2, "cache_bytes_per_token": 3}}
    report["rejections"]["tokens"] = [{"text": HOSTILE, "seen": 2, "rejected": 1.0}]
    report["rejections"]["texts"] = [
        {"category": HOSTILE, "prompt": HOSTILE, "tokens": [{"text": HOSTILE, "acceptance": 0.0}]}
    ]
    report["trees"] = [{"proposer": HOSTILE, "svg": SVG.replace("<circle", "<script>alert(1)</script><circle", 1)}]
    html = render_page(TYPED.validate_python(report))
    page = Page(html)
    assert "script" not in page.tags and html.count(HOSTILE) == 0
    assert page.text.count(HOSTILE) > 10


def test_costs_that_do_not_agree_are_named_on_the_page_and_in_the_terminal(full):
    doubt, report = f"T=0, 1 at a time: {HOSTILE} takes 9 ms at first, 18 ms later", copy.deepcopy(full)
    doubts = [doubt] + [f"T=0, 1 at a time: round {n} takes 9 ms at first, 18 ms later" for n in range(4)]
    table = {"context": 9, "temperature": 0.0, "prompt": 5, "drafters": {}, "doubts": doubts}
    table |= {name: {1: 0.1} for name in ("plain_overhead_seconds", "prefill_seconds")}
    report["costs"]["tables"] = [table | {"target_seconds": {1: {1: 0.1}}}]
    typed = TYPED.validate_python(report)
    console = Console(file=io.StringIO(), width=200)
    print_report(typed, console)
    assert doubt in Page(render_page(typed)).text and doubt in console.file.getvalue()
    assert DOUBTFUL in console.file.getvalue() and DOUBTFUL not in words_of(full)
    assert doubts[4] in Page(render_page(typed)).text and doubts[4] not in console.file.getvalue()
    assert "and 2 more" in console.file.getvalue()


def test_numbers_and_tokens_are_written_to_be_read():
    assert number(-0.314) == "−0.31" and number(0.58, ".0%") == "58\N{NARROW NO-BREAK SPACE}%" and number(None) == "–"
    assert size(1023) == "1023 B" and size(1536) == "1.5 KiB" and size(3 * 2**30) == "3.0 GiB"
    assert visible(" a\n\tb") == " a↵\n⇥\tb" and visible(" a\n", whole=True) == "␣a↵"
    assert visible("\u202e\x00") == "\\u202e\\u0000" and visible("") == "∅" and visible("日本") == "日本"


@pytest.mark.parametrize(
    "certificate, answer",
    [
        (Certificate(identical=True, prompts_identical=80, departures=0, passed=True), "yes"),
        (Certificate(identical=False, prompts_identical=78, near_ties=2, departures=0, passed=True), "rounding"),
        (Certificate(identical=False, prompts_identical=77, near_ties=2, departures=1, passed=False), "no"),
        (Certificate(p_value=0.3, tokens=5000, passed=True), "yes"),
        (Certificate(p_value=1e-6, tokens=5000, passed=False), "no"),
        (unchecked("nothing was asked for"), "unknown"),
    ],
)
def test_lossless_is_said_only_where_it_was_shown(full, certificate, answer):
    assert lossless(certificate, TYPED.validate_python(full))[0] == answer


def test_a_table_s_title_is_shown_as_it_is():
    shown, name = io.StringIO(), "model [/x] [bold] at http://[::1]:80"
    table = figures_table(["a long column's heading, as wide as the title"], "", name)
    Console(width=80, file=shown).print(table)
    assert name in shown.getvalue()


def words_of(report) -> str:
    return Page(render_page(TYPED.validate_python(report))).text


def test_each_gate_says_whether_it_passed_and_the_sentence_how_it_was_judged():
    report = minimal()
    parts = [{"what": "speed-up above 1.2", "passed": False}, {"what": "lossless text", "passed": True}]
    gate = {"min_speedup": 1.2, "min_gain": None, "min_alpha": None, "confidence": 0.95, "passed": False}
    report["gate"] = gate | {"failures": ["too slow"], "parts": parts}
    report["recommendation"]["judged"] = "The best of 4 settings was taken."
    words = words_of(report)
    assert "✗ speed-up above 1.2: no, ✓ lossless text." in words and "The best of 4 settings was taken." in words


def verdict(temperature, go, proposer, k, speedup, reason):
    where = {"temperature": temperature, "batch_size": 1, "go": go, "reason": reason}
    return where | {"proposer": proposer, "draft_length": k, "speedup": speedup}


def test_page_table_and_summary_have_the_verdict_of_each_setting(full):
    settings = [
        verdict(0.0, True, "draft", 4, est(1.39, 0.11), "the draft is <fast>."),
        verdict(0.8, False, "lookup", 2, Estimate(1.05, (1.0, 1.12), 80), "that is not shown."),
    ]
    why = {"go": False, "reason": "Deploy where it pays: T = 0.", "settings": settings}
    typed = TYPED.validate_python(full | {"gate": None, "recommendation": full["recommendation"] | why})
    assert typed.verdict == "GO IN PART"
    line = "GO at T = 0: 1.39×; at T = 0.8: 1.05× [1.00, 1.12], not shown"
    page, source, shown = Page(render_page(typed)), render_page(typed), io.StringIO()
    assert page.headings[:2] == [f"✓ {line}", "A setting that pays"] and "hero go" in source
    assert "✓ GO the draft is <fast>." in page.text and "✗ NO-GO that is not shown." in page.text
    assert source.count('class="star"') == 1 and "the green ring is the recommended setting" in source
    assert f"## draftsmith: {line}\n\nDeploy where it pays: T = 0.\n" in markdown(typed)
    assert "* GO: the draft is <fast>.\n* NO-GO: that is not shown.\n" in markdown(typed)
    print_report(typed, Console(width=100, file=shown))
    assert (
        f"{line}\nDeploy where it pays: T = 0.\n  GO     the draft is <fast>.\n  NO-GO  that is not" in shown.getvalue()
    )


def test_text_that_repeats_itself_is_warned_of():
    report = minimal()
    for share, warned in ((0.3, True), (0.1, False)):
        report["runs"][0]["repeated_ngram_share"] = share
        assert ("Text that repeats itself: 30" in words_of(report)) is warned


def test_categories_of_few_prompts_are_counted_and_not_drawn():
    report = minimal()
    report["prompts"]["categories"] = {"code": 1, "prose": 4}
    assert "fewer than 5 prompts are too few for an interval: 2 categories" in words_of(report)


def test_page_table_and_summary_say_who_drafted_in_the_same_words():
    report = minimal()
    counts = {"num_draft_tokens": 0, "num_accepted_tokens": 0}
    sources = {
        "suffix": {"num_drafts": 41, "num_emitted_tokens": 126} | counts,
        "a draft with a long name [/x]": {"num_drafts": 59, "num_emitted_tokens": 74} | counts,
    }
    typed = TYPED.validate_python(report | {"runs": [report["runs"][0] | {"sources": sources}] * 2})
    said = "suffix 41 % of rounds, 63 % of tokens; a draft with a long name [/x] 59 %, 37 %"
    assert turns(typed.runs[0]) == said
    assert f"draft, γ = 4, T = 1, batch size 1: {said}" in Page(render_page(typed)).text
    assert f"* draft, γ = 4, T = 1, B = 1: {said}\n" in markdown(typed)
    shown = io.StringIO()
    print_report(typed, Console(width=80, file=shown))
    assert f"draft, γ=4, T=1: {said}" in " ".join(shown.getvalue().split())
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    # Of one that drafts alone nothing is said, nor where there was no round.
    alone = TYPED.validate_python(report)
    nothing = dict.fromkeys(sources, counts | {"num_drafts": 0, "num_emitted_tokens": 0})
    empty = TYPED.validate_python(report | {"runs": [report["runs"][0] | {"sources": nothing}]})
    for other in (alone, empty):
        assert turns(other.runs[0]) is None
        assert "take turns" not in Page(render_page(other)).text and "Who drafted" not in markdown(other)


def groups_of(prompts, lengths, drafters=None):
    return {
        name: {"prompts": count, "tokens": 100 * count, "alpha": est(0.6, 0.1), "drafters": drafters}
        | {"mean_acceptance_length": {"4": length}, "predicted_speedup": {"1": {"4": est(1.5, 0.1)}}}
        for (name, count), length in zip(prompts.items(), lengths, strict=True)
    }


def test_parts_turns_and_lengths_of_context_have_charts_and_figures(full):
    shares = {
        name: {"4": {"rounds": est(x, 0.1), "accepted": est(x / 2, 0.1)}}
        for name, x in (("suffix", 0.8), ("model", 0.2))
    }
    report = copy.deepcopy(full)
    curve, run = report["curves"][0], report["runs"][0]
    curve["by_part"] = groups_of({"answer": 80, "thinking": 60, "tool call": 4}, [est(2, 0.1)] * 3, shares)
    curve["by_turn"] = groups_of({"1": 80, "2": 30}, [est(2, 0.1)] * 2)
    run["by_turn"] = {"1": {"prompts": 20, "mean_acceptance_length": est(2, 0.1), "speedup": est(1.5, 0.1)}}
    page = Page(source := render_page(TYPED.validate_python(report)))
    for heading in ("Thinking, answer and tool calls", "Turns"):
        assert heading in page.headings
    assert "Length of context" not in page.headings  # this report has none
    assert "Prompts: answer (80), thinking (60)." in page.text and "an interval: 1 part." in page.text
    said = "suffix 40 % of the tokens in 80 % of the rounds; model 10 % in 20 %"
    assert f"tool call, T = 0: ● draft: {said}" in page.text
    assert "predicted speed-up by part, T = 0, batch size 1" in source and "predicted speed-up by turn" not in source


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([est(2.3, 0.1), est(1.4, 0.1), est(1.08, 0.05)], "2.30 (contexts below 1k tokens) to 1.08 (16k to 32k)"),
        ([est(1.2, 0.1), est(2.3, 0.1), est(1.4, 0.1)], "2.30 (contexts 8k to 16k tokens) to 1.40 (16k to 32k)"),
        ([est(2.3, 0.1), est(1.8, 0.1), est(1.6, 0.1)], None),  # by less than a third
        ([est(2.3, 0.5), est(1.9, 0.5), est(1.4, 0.5)], None),  # perhaps by chance
        ([est(1.1, 0.1), est(1.9, 0.1), Estimate(1.0, None, 2)], None),
    ],
)  # fmt: skip
def test_where_acceptance_falls_off_with_the_length_of_context_is_named(full, lengths, said):
    report = copy.deepcopy(full)
    names = {"1024": 80, "16384": 40, "32768": 20}
    report["curves"][0]["by_context"] = dict(reversed(groups_of(names, lengths).items()))
    typed, shown = TYPED.validate_python(report), io.StringIO()
    print_report(typed, Console(width=80, file=shown))
    line = f"draft, γ = 4, T = 0: τ falls from {said}"
    places = Page(render_page(typed)).text, markdown(typed), " ".join(shown.getvalue().split())
    assert [line in place for place in places] == [said is not None] * 3
    assert ["τ falls" in place for place in places] == [said is not None] * 3
