"""The contents of `report.json`: `scripts.measure` builds it; the table, the page and the summary read it.

The fields are the keys of the file. A missing value is None, null in the file, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal

from draftsmith.decode import Counts
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.scripts.report.entries import (
    AboveZero,
    ByLoad,
    ByNumber,
    Costs,
    Count,
    CurveGroup,
    Entry,
    Forecast,
    Grouping,
    Limited,
    Name,
    NonEmpty,
    NotNegative,
    Positive,
    RunGroup,
    Serving,
    Share,
    Temperature,
)

SCHEMA: Literal["draftsmith.report/1"] = "draftsmith.report/1"
Setting = tuple[float, int]
"""A temperature and a batch size, of a server the requests at once."""
Verifier = Literal["probabilistic", "greedy"]
"""probabilistic: drafts are drawn from q; greedy: they are the drafter's argmax, the default of servers. At T=0 the two
are the same, listed as probabilistic."""


@dataclass(frozen=True)
class Environment(Entry):
    """The machine and the settings of the measurement."""

    python: str
    torch: str
    transformers: str
    device: str | None
    """Null for a server, as are dtype, threads and compiled."""
    cores: Positive | None
    dtype: str | None
    threads: Positive | None
    git_sha: str | None
    compiled: bool | None = None
    """True if forwards ran compiled, also those of plain decoding."""
    timed: str | None = None
    """How often texts were timed, and how many times remain in doubt; null for a server."""
    compilation_seconds: NotNegative | None = None
    """The time of compiling, or of loading compiled programs; null where nothing ran compiled."""


@dataclass(frozen=True)
class Target(Entry):
    """The target; on a server, its path is its name there."""

    path: str
    parameters: Count | None
    dtype: str | None
    filters: Mapping[str, float] | None = None
    """The options that cut its distribution off, by name; null in reports that do not say."""
    left_out: Sequence[str] = ()
    """Settings of its generation config that were not applied."""
    quantization: str | None = None
    """How its weights were quantised, and to how many bits; null for floating point, and on a server."""


@dataclass(frozen=True)
class Prompts(Entry):
    """The prompts: `count` were decoded, or with forecasts replayed; `replayed` is null for a server."""

    path: str
    count: Positive
    replayed: Positive | None
    categories: Mapping[str, Positive]
    """Replayed prompts by category; for a server the decoded ones."""


@dataclass(frozen=True)
class Speed(Estimate, Entry):
    """Tokens per second of the whole run, with its interval and median over batches."""

    median: AboveZero


@dataclass(frozen=True)
class PlainRun(Entry):
    """Plain decoding at one temperature and batch size."""

    temperature: Temperature
    batch_size: Positive
    tokens_per_second: Speed
    repeated_ngram_share: Share | None


@dataclass(frozen=True)
class Baseline(Entry):
    """Plain decoding of the same prompts in the same run."""

    tokens_per_second: Speed
    by_temperature: NonEmpty[PlainRun]


@dataclass(frozen=True)
class ProposerEntry(Entry):
    """A drafter; `bytes` are those of its weights."""

    name: Name
    kind: Annotated[str, Limited(minLength=1)]
    """The name of its kind; `baseline_draft` for the draft to beat, `server` for a server's drafter."""
    path: str | None
    parameters: Count | None
    bytes: Count | None
    heads: Positive | None = None
    tree_nodes: Positive | None = None
    """For a drafter with its own tree, or a chain of several heads, the number of drafted nodes."""
    prompt_lookup_min: Positive | None = None
    """For prompt lookup, the length of the shortest n-gram, and then of the longest."""
    prompt_lookup_max: Positive | None = None
    suffix_match: Positive | None = None
    """For suffix matches, the length of the shortest match."""
    switch_match: Count | None = None
    """For drafters that take turns, the match length from which copies replace the last drafter, and then the score."""
    switch_score: NotNegative | None = None

    def verified_nodes(self, draft_length: int) -> int:
        """Return the number of drafted tokens that the target verifies in a round."""
        return draft_length if self.tree_nodes is None else self.tree_nodes


@dataclass(frozen=True)
class Gains(Entry):
    """The gains of a drafter over the stock draft, paired over prompts; `mean_acceptance_length` is replayed."""

    mean_acceptance_length: Estimate
    decoded_mean_acceptance_length: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class ReplayedLength(Entry):
    """τ by replay, and whether it agrees with τ of the decoder."""

    mean_acceptance_length: Estimate
    agrees: bool | None


@dataclass(frozen=True, kw_only=True)
class Run(Entry):
    """One drafter, decoded with one draft length, temperature and batch size."""

    proposer: ProposerEntry
    draft_length: Count
    """γ; the depth for a drafter with its own tree; 0 for a server that drafts nothing."""
    rule: Literal["exact"] = "exact"
    temperature: Temperature
    batch_size: Positive
    """For a server, the number of concurrent requests."""
    counts: Counts | None = None
    """Integers that add up over prompts, ranks and runs; the names are vLLM's. Null where a server gives means."""
    alpha: Estimate | None = None
    """α by replay; for a server, accepted ÷ tried positions."""
    draft_acceptance_rate: Estimate
    mean_acceptance_length: Estimate
    """τ, bonus tokens included."""
    acceptance_per_position: Sequence[Share | None] = ()
    conditional_acceptance: Sequence[Share | None] = ()
    speedup: Estimate
    """The speed-up over plain decoding: seconds of the decoded texts' rounds, and `shown_length`."""
    predicted_speedup: Estimate | None = None
    """The prediction of `speedup`, including the forwards over these prompts; null without costs or replay."""
    tokens_per_second: Speed
    gain_over_baseline_draft: Gains | None = None
    """Null without a stock draft at this draft length."""
    replay: ReplayedLength | None = None
    """Null where replay does not apply: trees under sampling."""
    lossless: Certificate
    by_category: Mapping[str, RunGroup] = field(default_factory=dict)
    repeated_ngram_share: Share | None = None
    sources: Mapping[str, Counts] | None = None
    """For drafters that take turns, the counts of their rounds, by name."""

    @property
    def shown_length(self) -> Estimate:
        """τ as `speedup` takes it: of all replayed texts, or as decoded where no replay agrees with the decoder."""
        replayed = None if self.replay is None or self.replay.agrees is False else self.replay.mean_acceptance_length
        return replayed or self.mean_acceptance_length

    @property
    def key(self) -> tuple[str, int, int, float]:
        """The drafter's name, draft length, batch size and temperature."""
        return self.proposer.name, self.draft_length, self.batch_size, self.temperature

    @property
    def setting(self) -> Setting:
        """The temperature and the batch size."""
        return self.temperature, self.batch_size


@dataclass(frozen=True)
class Curve(Entry):
    """The replay of one drafter, temperature and verifier by draft length; positions are those of the greatest."""

    proposer: ProposerEntry
    temperature: Temperature
    verifier: Verifier
    alpha: Estimate
    mean_acceptance_length: ByNumber[Estimate]
    acceptance_per_position: Sequence[Estimate]
    conditional_acceptance: Sequence[Estimate]
    by_category: Mapping[str, CurveGroup]
    predicted_speedup: ByNumber[ByNumber[Estimate]] = field(default_factory=dict)
    """The prediction by batch size, then draft length, with the forwards over the replayed texts' prompts, as in a
    measured speed-up; empty where costs are unknown."""
    by_context: Mapping[str, CurveGroup] = field(default_factory=dict)
    """The figures by length of context, prompt included, where there are several; a group's name is the number of
    tokens that it ends before."""

    def groups(self, grouping: Grouping) -> Mapping[str, CurveGroup]:
        """Return the groups of this kind."""
        return self.by_category if grouping == "category" else self.by_context


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


@dataclass(frozen=True)
class GatePart(Entry):
    """One requirement of a gate."""

    what: Annotated[str, Limited(minLength=1)]
    passed: bool


@dataclass(frozen=True)
class Gate(Entry):
    """The requirements, and whether they were met."""

    min_speedup: float | None
    min_gain: float | None
    confidence: Annotated[float, Limited(exclusiveMinimum=0, exclusiveMaximum=1)]
    passed: bool = True
    failures: Sequence[str] = ()
    min_alpha: float | None = None
    parts: Sequence[GatePart] = ()
    """The requirements of the drafter and γ that are recommended or would be; all must pass."""


@dataclass(frozen=True)
class SettingVerdict(Entry):
    """The verdict at one temperature and batch size, with the best drafter and γ there."""

    temperature: Temperature
    batch_size: Positive
    go: bool
    reason: Annotated[str, Limited(minLength=1)]
    proposer: Name | None = None
    draft_length: Count | None = None
    speedup: Estimate | None = None
    """The speed-up as in `Recommendation.measured_speedup`, or with `--costs llama.cpp` its forecast."""
    departs: bool = False
    """True if the text of the best run is not the target's."""

    @property
    def key(self) -> tuple[str | None, int | None, int | None, float | None]:
        """The `Run.key` of the best run."""
        return self.proposer, self.draft_length, self.batch_size, self.temperature


@dataclass(frozen=True)
class Recommendation(Entry):
    """The drafter to deploy, with one γ for all settings, and the reason."""

    go: bool
    reason: Annotated[str, Limited(minLength=1)]
    proposer: Name | None = None
    draft_length: Count | None = None
    batch_size: Positive | None = None
    temperature: Temperature | None = None
    predicted_speedup: Estimate | None = None
    measured_speedup: Estimate | None = None
    """The speed-up on prompts that did not choose among drafters and γ; the intervals of all runs hold together."""
    judged: str | None = None
    """The method of judgement in a sentence; null for a server, and where nothing was judged."""
    settings: Sequence[SettingVerdict] = ()
    """A verdict for each temperature and batch size; empty where nothing is to be decided."""

    @property
    def key(self) -> tuple[str | None, int | None, int | None, float | None]:
        """The `Run.key` of the recommended run."""
        return self.proposer, self.draft_length, self.batch_size, self.temperature


@dataclass(frozen=True)
class Failure(Entry):
    """A failed part of the work."""

    what: Annotated[str, Limited(minLength=1)]
    error: Annotated[str, Limited(minLength=1)]
    exit_code: Literal[1, 2]
    """2: the input is to blame, or memory ran out; 1: draftsmith is."""


@dataclass(frozen=True, kw_only=True)
class Report(Entry):
    """The report.json of `draftsmith measure`."""

    schema: Literal["draftsmith.report/1"] = SCHEMA
    environment: Environment
    target: Target
    prompts: Prompts
    baseline: Baseline | None = None
    """Null for a server without a baseline server, and with forecasts, which have no runs either."""
    runs: Sequence[Run]
    curves: Sequence[Curve] = ()
    comparisons: Sequence[Comparison] = ()
    costs: Costs | None = None
    gate: Gate | None = None
    """Null without requirements."""
    recommendation: Recommendation
    failures: Sequence[Failure] = ()
    """The failed parts; with any, the report is partial and no GO."""
    server: Serving | None = None
    by_load: Sequence[ByLoad] = ()
    """Draft lengths for a server; empty where costs are unknown."""
    forecasts: Sequence[Forecast] = ()
    """Speed-ups in llama.cpp, with `costs: llama.cpp`."""

    @property
    def verdict(self) -> str:
        """GO; GO IN PART, in some settings without a gate; NO-GO; or MEASURED, for a server with nothing to decide."""
        if self.recommendation.go:
            return "GO"
        if self.gate is None and any(verdict.go for verdict in self.recommendation.settings):
            return "GO IN PART"
        decided = self.gate is not None or self.baseline is not None or self.failures or self.forecasts
        return "NO-GO" if decided else "MEASURED"

    def winners(self) -> set[tuple[str | None, int | None, int | None, float | None]]:
        """Return the `Run.key` of each run that is a GO."""
        chosen = self.recommendation
        winners = {verdict.key for verdict in chosen.settings if verdict.go}
        return winners or ({chosen.key} if chosen.go else set())

    def prediction_error(self) -> float | None:
        """Return the median relative error of predicted against measured speed-ups; None without predictions."""
        pairs = [(run.predicted_speedup and run.predicted_speedup.value, run.speedup.value) for run in self.runs]
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs if predicted and measured]
        return median(errors) if errors else None

    def plain_runs(self) -> Sequence[PlainRun]:
        """Return plain decoding's runs; empty for a server without a baseline server."""
        return () if self.baseline is None else self.baseline.by_temperature

    def proposers(self) -> dict[str, ProposerEntry]:
        """Return the drafters by name, in order."""
        curves = {curve.proposer.name: curve.proposer for curve in self.curves}
        return curves | {run.proposer.name: run.proposer for run in self.runs}
