"""The contents of `report.json`: `scripts.measure` builds it; the table, the page and the summary read it.

Names of fields are the keys of the file. A value that is missing is None, in the file null, never 0. After a change run
`python -m draftsmith.scripts.report.schema`, which writes `report.schema.json` from these classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from draftsmith.decode import Counts
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.cost_types import Costs, Memory, PlannerCheck
from draftsmith.scripts.report.entry import (
    AboveZero,
    ByNumber,
    Count,
    Entry,
    Name,
    NotNegative,
    Positive,
    Says,
    Share,
    Some,
    Temperature,
)
from draftsmith.scripts.report.serving_types import Serving

SCHEMA: Literal["draftsmith.report/1"] = "draftsmith.report/1"


Verifier = Literal["probabilistic", "greedy"]
"""probabilistic: of drafts drawn from q; greedy: of the draft's argmax, which servers draft by default. At T=0 they are
the same, listed as probabilistic."""


@dataclass(frozen=True)
class Environment(Entry):
    """Where it was measured."""

    python: str
    torch: str
    transformers: str
    device: str | None
    """Null of a server, as are dtype, threads and compiled: it does not say."""
    cores: Positive | None
    dtype: str | None
    threads: Positive | None
    git_sha: str | None
    compiled: bool | None
    """Whether forwards ran compiled, plain decoding's too."""
    draft_dtypes: list[str]
    """Of the draft models."""
    settings_by: str | None
    """What was timed to choose dtype, threads and compilation; null where they were given."""
    compilation_seconds: NotNegative | None = None
    """What compiling took, or reading programs that were there already; null where nothing ran compiled."""


@dataclass(frozen=True)
class Target(Entry):
    """The target."""

    path: str
    """On a server, its name there."""
    parameters: Count | None
    dtype: str | None
    filters: Mapping[str, float] | None = None
    """What was left of its distribution at each temperature, by the options; null in reports that do not say."""
    left_out: Sequence[str] = ()
    """What its generation config says of how texts are written, and was not applied."""


@dataclass(frozen=True)
class Prompts(Entry):
    """The prompts."""

    path: str
    count: Positive
    """Prompts that were decoded."""
    replayed: Positive | None
    """Null of a server."""
    categories: Mapping[str, Positive]
    """Replayed prompts by category; of a server those that were decoded."""


@dataclass(frozen=True)
class Speed(Estimate, Entry):
    """Tokens per second of the whole, with its interval over batches."""

    median: AboveZero
    """Over batches."""


@dataclass(frozen=True)
class PlainRun(Entry):
    """Plain decoding in one setting."""

    temperature: Temperature
    batch_size: Positive
    tokens_per_second: Speed
    repeated_ngram_share: Share | None


@dataclass(frozen=True)
class Baseline(Entry):
    """Plain decoding of the same prompts in the same run."""

    tokens_per_second: Speed
    by_temperature: Some[PlainRun]


@dataclass(frozen=True)
class ProposerEntry(Entry):
    """A drafter."""

    name: Name
    kind: Annotated[str, Says(minLength=1)]
    """The name of its kind; of the draft to beat `baseline_draft`, of whatever drafts on a server `server`."""
    path: str | None
    parameters: Count | None
    bytes: Count | None
    """Of its weights."""
    heads: Positive | None = None
    """Of several heads, how many there are."""
    tree_nodes: Positive | None = None
    """Of a drafter with a tree of its own, a chain of several heads included, the nodes that are drafted."""
    prompt_lookup_min: Positive | None = None
    """Of prompt lookup, the shortest n-gram that it looks for."""
    prompt_lookup_max: Positive | None = None
    """The longest."""
    suffix_match: Positive | None = None
    """Of suffix matches, the shortest."""
    switch_match: Count | None = None
    """Of drafters that take turns, the shortest match that the last one does not draft behind."""
    switch_score: NotNegative | None = None
    """And the least score."""

    def verified_nodes(self, draft_length: int) -> int:
        """Return the drafted tokens that the target verifies in a round."""
        return draft_length if self.tree_nodes is None else self.tree_nodes


@dataclass(frozen=True)
class Gains(Entry):
    """What a drafter gains over the stock draft, paired over prompts."""

    mean_acceptance_length: Estimate
    """Replayed."""
    decoded_mean_acceptance_length: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class ReplayedLength(Entry):
    """τ by replay, and whether it agrees with the decoder's."""

    mean_acceptance_length: Estimate
    agrees: bool | None


@dataclass(frozen=True)
class RunCategory(Entry):
    """A run's figures of one category."""

    prompts: Positive
    mean_acceptance_length: Estimate
    speedup: Estimate
    """Of batches that hold the category alone."""


@dataclass(frozen=True)
class Run(Entry):
    """One drafter, decoded with one draft length, temperature and batch size."""

    proposer: ProposerEntry
    draft_length: Count
    """γ; of what has a tree of its own the depth of the tree; 0 of a server that drafts nothing."""
    rule: Literal["exact"]
    temperature: Temperature
    batch_size: Positive
    """Of a server, requests under way at once."""
    counts: Counts | None
    """Integers that add up over prompts, ranks and runs; the names are vLLM's. Null where a server gives means."""
    alpha: Estimate | None
    """Replayed; of a tree under sampling its first token's; of a server, accepted ÷ tried positions."""
    draft_acceptance_rate: Estimate
    mean_acceptance_length: Estimate
    """τ, bonus tokens included."""
    acceptance_per_position: Sequence[Share | None]
    conditional_acceptance: Sequence[Share | None]
    speedup: Estimate
    """Over plain decoding."""
    predicted_speedup: Estimate | None
    """Of these batches, with the forwards over their prompts, as `speedup`; null where costs are unknown."""
    tokens_per_second: Speed
    gain_over_baseline_draft: Gains | None
    """Null without a stock draft at this draft length."""
    replay: ReplayedLength | None
    """Null where replay does not apply: trees under sampling."""
    lossless: Certificate
    by_category: Mapping[str, RunCategory]
    repeated_ngram_share: Share | None
    sources: Mapping[str, Counts] | None = None
    """Where drafters take turns, the counts of each one's rounds, by name."""
    speedup_over: Mapping[str, Estimate] | None = None
    """And over each other drafter in this setting, at the draft length with which that one is fastest."""
    predicted_speedup_without_prompt: Estimate | None = None
    """Of these batches, their prompts left aside: what long texts come to."""

    @property
    def setting(self) -> tuple[str, int, int, float]:
        """The drafter's name, draft length, batch size and temperature, which no two runs share."""
        return self.proposer.name, self.draft_length, self.batch_size, self.temperature


@dataclass(frozen=True)
class CurveCategory(Entry):
    """A curve's figures of one category."""

    prompts: Positive
    alpha: Estimate
    mean_acceptance_length: ByNumber[Estimate]


@dataclass(frozen=True)
class Curve(Entry):
    """What replay says of one drafter, temperature and verifier at every draft length, without decoding."""

    proposer: ProposerEntry
    temperature: Temperature
    verifier: Verifier
    alpha: Estimate
    mean_acceptance_length: ByNumber[Estimate]
    acceptance_per_position: Sequence[Estimate]
    """At the greatest draft length."""
    conditional_acceptance: Sequence[Estimate]
    by_category: Mapping[str, CurveCategory]
    predicted_speedup: ByNumber[ByNumber[Estimate]]
    """By batch size, then draft length, prompts left aside; empty where costs are unknown."""
    break_even_alpha: ByNumber[ByNumber[Share | None]]
    """By batch size, then draft length: the α from which it pays; null where none does, and of trees and n-grams."""
    predicted_speedup_with_prompt: ByNumber[ByNumber[Estimate]] = field(default_factory=dict)
    """With the forwards over the prompts, of the replayed texts at their lengths: what a measured speed-up is of."""

    @property
    def predictions(self) -> Mapping[int, Mapping[int, Estimate]]:
        """The predictions that measured speed-ups are compared with, by batch size, then draft length."""
        return self.predicted_speedup_with_prompt or self.predicted_speedup


@dataclass(frozen=True)
class LoadRange(Entry):
    """Batch sizes at which one draft length pays."""

    first: Positive
    last: Positive
    draft_length: Count
    """0: plain decoding is faster."""


@dataclass(frozen=True)
class Goodput(Entry):
    """Predicted tokens a second of all texts that are decoded together, prompts left aside."""

    plain: AboveZero
    drafting: AboveZero
    """With the draft length of this batch size; where that is 0, the best that drafting would bring."""


@dataclass(frozen=True)
class ByLoad(Entry):
    """Which draft length a server should take at which load, by costs and replay, over all temperatures alike."""

    proposer: Name
    temperatures: Some[Temperature]
    ranges: Some[LoadRange]
    """From one text at a time to the most that were measured, without gaps."""
    goodput: ByNumber[Goodput]
    """By batch size."""


@dataclass(frozen=True)
class Comparison(Entry):
    """Two drafters on the same texts, paired over prompts; positive where `proposer` is ahead of `other`."""

    temperature: Temperature
    verifier: Verifier
    draft_length: Positive
    proposer: Name
    other: Name
    mean_acceptance_length: Estimate
    alpha: Estimate
    more_prompts: Count | None
    """How many more would tell them apart; 0: told apart; null: equal, or too nearly so."""


@dataclass(frozen=True)
class TokenAcceptance(Entry):
    """A token of a text, and how likely it would have been accepted."""

    text: str
    acceptance: Share


@dataclass(frozen=True)
class TextAcceptance(Entry):
    """A text, token by token."""

    category: str | None
    prompt: str
    tokens: Sequence[TokenAcceptance]


@dataclass(frozen=True)
class RejectedToken(Entry):
    """A token, how often it was seen, and how often it is expected to be rejected."""

    text: str
    seen: Positive
    rejected: NotNegative


@dataclass(frozen=True)
class Rejections(Entry):
    """Where one drafter's tokens are rejected."""

    temperature: Temperature
    proposer: Name
    texts: Sequence[TextAcceptance]
    tokens: Sequence[RejectedToken]
    """By expected rejections, most first."""


@dataclass(frozen=True)
class TreePicture(Entry):
    """A picture of the tree that a drafter drafts."""

    proposer: Name
    svg: Annotated[str, Says(pattern=r"^<svg\b[\s\S]*</svg>\s*$")]


@dataclass(frozen=True)
class GatePart(Entry):
    """One of the things that a gate asks for."""

    what: Annotated[str, Says(minLength=1)]
    passed: bool


@dataclass(frozen=True)
class Gate(Entry):
    """What was asked for, and whether it was reached."""

    min_speedup: float | None
    min_gain: float | None
    confidence: Annotated[float, Says(exclusiveMinimum=0, exclusiveMaximum=1)]
    passed: bool
    failures: Sequence[str]
    min_alpha: float | None = None
    parts: Sequence[GatePart] = ()
    """Each thing that was asked for, of the drafter and γ that are recommended or would be; all must pass."""


@dataclass(frozen=True)
class SettingVerdict(Entry):
    """Whether drafting pays at one temperature and batch size, and the drafter and γ that are best there."""

    temperature: Temperature
    batch_size: Positive
    """Of a server, requests under way at once."""
    go: bool
    reason: Annotated[str, Says(minLength=1)]
    proposer: Name | None = None
    draft_length: Count | None = None
    speedup: Estimate | None = None
    """As `Recommendation.measured_speedup`."""
    decides: bool = True
    """Whether the recommendation and the gate are about this setting."""

    @property
    def setting(self) -> tuple[str | None, int | None, int | None, float | None]:
        """The setting of the run, as `Run.setting`."""
        return self.proposer, self.draft_length, self.batch_size, self.temperature


@dataclass(frozen=True)
class Recommendation(Entry):
    """What to deploy, and why: one drafter with one γ for all settings that decide."""

    go: bool
    reason: Annotated[str, Says(minLength=1)]
    proposer: Name | None = None
    draft_length: Count | None = None
    batch_size: Positive | None = None
    temperature: Temperature | None = None
    predicted_speedup: Estimate | None = None
    measured_speedup: Estimate | None = None
    """Of the best of several drafters and γ that of prompts which did not choose it; the intervals of all runs hold at
    once."""
    judged: str | None = None
    """How it was judged, in a sentence; null of a server and where nothing was."""
    settings: Sequence[SettingVerdict] = ()
    """A verdict for each temperature and batch size; nothing where there is nothing to decide."""

    @property
    def setting(self) -> tuple[str | None, int | None, int | None, float | None]:
        """The setting of the run that is recommended, as `Run.setting`."""
        return self.proposer, self.draft_length, self.batch_size, self.temperature


@dataclass(frozen=True)
class Failure(Entry):
    """A part of the work that failed."""

    what: Annotated[str, Says(minLength=1)]
    error: Annotated[str, Says(minLength=1)]
    exit_code: Literal[1, 2]
    """2: the input is to blame, or memory ran out; 1: draftsmith is."""


@dataclass(frozen=True)
class Report(Entry):
    """What `draftsmith measure` leaves in report.json."""

    schema: Literal["draftsmith.report/1"]
    environment: Environment
    target: Target
    prompts: Prompts
    baseline: Baseline | None
    """Null of a server without another to compare it with."""
    runs: Some[Run]
    curves: Sequence[Curve]
    comparisons: Sequence[Comparison]
    costs: Costs | None
    planner_check: PlannerCheck | None
    """Null where costs are unknown."""
    memory: Memory | None
    """Null of a server."""
    rejections: Rejections | None
    """Null where nothing was replayed."""
    trees: Sequence[TreePicture]
    gate: Gate | None
    """Null where none was asked for."""
    recommendation: Recommendation
    failures: Sequence[Failure] = ()
    """What failed: the report is partial then, and no GO."""
    server: Serving | None = None
    """Of a server that was measured from outside."""
    by_load: Sequence[ByLoad] = ()
    """Draft lengths for a server; nothing where costs are unknown."""

    @property
    def verdict(self) -> str:
        """GO; without a gate GO IN PART, in some settings; NO-GO; MEASURED, of a server with nothing to decide."""
        if self.recommendation.go:
            return "GO"
        if self.gate is None and any(verdict.go for verdict in self.recommendation.settings):
            return "GO IN PART"
        decided = self.gate is not None or self.baseline is not None or self.failures
        return "NO-GO" if decided else "MEASURED"

    def winners(self) -> set[tuple[str | None, int | None, int | None, float | None]]:
        """Return the settings of the runs that are a GO, as `Run.setting`."""
        chosen = self.recommendation
        of_settings = {verdict.setting for verdict in chosen.settings if verdict.go}
        return of_settings or ({chosen.setting} if chosen.go else set())

    def plain_runs(self) -> Sequence[PlainRun]:
        """Return plain decoding's runs; none of a server without another to compare it with."""
        return () if self.baseline is None else self.baseline.by_temperature

    def proposers(self) -> dict[str, ProposerEntry]:
        """Return the drafters by name, in order."""
        of_curves = {curve.proposer.name: curve.proposer for curve in self.curves}
        return of_curves | {run.proposer.name: run.proposer for run in self.runs}
