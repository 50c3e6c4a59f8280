"""The report on a server: its runs, what is demanded of them, and how they were measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from draftsmith.decode import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.certificate import Certificate, unchecked
from draftsmith.decode.measurement.intervals import LEAST, Estimate, confidence_of_each, format_estimate
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.scripts.measure.build import build_report, by_group
from draftsmith.scripts.measure.estimates import Observation, Observations
from draftsmith.scripts.measure.server import estimates
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.expectation import Expectation, reconcile_settings
from draftsmith.scripts.measure.server.observe import Observed
from draftsmith.scripts.measure.state import Method, categories_of
from draftsmith.scripts.measure.verdict import SPEEDUP, bounds_of, judge, level_words
from draftsmith.scripts.report import types as report
from draftsmith.scripts.report.entries import Counted, Latency, Reconciliation, Role, ServedBy, Serving
from draftsmith.scripts.report.types import Setting
from draftsmith.train.provenance import environment

TOGETHER = (
    "the server counts all requests together, so that τ and α have no interval over prompts, and `--min-alpha` cannot "
    "pass; vLLM counts each answer with `--per-request-spec-decode-metrics summary`, SGLang each that is asked for by "
    "tokens (`--target`), and since 0.5.19 chats"
)


def server_report(observed: Observed, expectation: Expectation | None = None) -> report.Report:
    """Return the report of the finished settings; a value that a server does not tell is None.

    Raise InputError if the server drafted nothing, or does not say how many tokens it drafts per round.
    """
    config = observed.config
    accepted = {setting: estimates.acceptance(observed, setting) for setting in observed.blocks}
    _require_drafts(observed, list(accepted.values()))
    indices = categories_of([entry.prompt for entry in observed.prompts])
    runs, observations = list[report.Run](), dict[tuple[float, int, Method], Observation]()
    for setting, figures in accepted.items():
        own = estimates.observation(observed, setting, "server")
        plain = None
        if config.baseline_server is not None:
            plain = observations[*setting, Method()] = estimates.observation(observed, setting, "baseline_server")
        runs.append(_run(observed, setting, figures, own, plain))
        observations[*setting, Method(*runs[-1].key[:2])] = own
    reconciliations = reconcile_settings(expectation, observed, accepted)
    failures = []
    if observed.failure is not None and observed.failed is not None:
        temperature, concurrency = observed.failed
        failures = [report.Failure(f"T = {temperature:g}, {concurrency} at once", str(observed.failure), exit_code=1)]
    return build_report(
        runs,
        observations,
        _verdict(config, runs, observations, accepted, reconciliations),
        failures,
        environment=report.Environment(**environment(None)),
        target=report.Target(observed.servers["server"].model, None, None, config.filters()),
        prompts=report.Prompts(
            config.prompts, len(observed.prompts), None, {name: len(of) for name, of in indices.items()}
        ),
        server=_serving(observed, accepted, reconciliations),
    )


def _verdict(
    config: MeasureServerConfig,
    runs: Sequence[report.Run],
    observations: Observations,
    accepted: Mapping[Setting, estimates.Acceptance],
    reconciliations: Sequence[Reconciliation],
) -> tuple[report.Gate | None, report.Recommendation]:
    """Return the gate, None if not asked for, and the recommendation.

    A setting passes by the lower ends of its intervals: the speed-up over the baseline server above `min_speedup` (1
    without that gate), and α above `min_alpha`. The counts must be those that a report expects: all `reconciliations`
    must agree. Without a baseline server and without a gate there is nothing to decide.
    """
    gate = None
    if config.min_speedup is not None or config.min_alpha is not None or reconciliations:
        gate = report.Gate(config.min_speedup, None, config.confidence, min_alpha=config.min_alpha)
    if gate is None and config.baseline_server is None:
        return None, report.Recommendation(
            False,
            "Nothing to decide: neither a baseline server nor a gate was given. The figures below are acceptance and "
            "latency alone.",
        )
    level, least, alpha = confidence_of_each(config.confidence, len(runs)), config.min_speedup or 1.0, config.min_alpha

    def slow(run: report.Run) -> list[str]:
        return _below("the speed-up", replace(run.speedup, ci95=bounds_of(run, observations, level)), least, level, run)

    def accepts_less(run: report.Run) -> list[str]:
        return _below("α", accepted[run.setting].alpha(level), alpha or 0.0, level, run)

    def other_text(run: report.Run) -> list[str]:
        departs = run.lossless.passed is False
        return [f"the text is not the baseline server's, {_where(run)}: {run.lossless.reason}"] if departs else []

    def other_counts(run: report.Run) -> list[str]:
        entries = [entry for entry in reconciliations if (entry.temperature, entry.concurrency) == run.setting]
        return [_departs(entry) for entry in entries if not entry.agrees]

    demands: dict[str, Callable[[report.Run], list[str]]] = {}
    if config.baseline_server is not None:
        demands[f"{SPEEDUP} {least:g}"] = slow
    if alpha is not None:
        demands[f"α above {alpha:g}"] = accepts_less
    if config.baseline_server is not None:
        demands["the baseline server's text"] = other_text
    if reconciliations:
        demands[f"the counts that {config.expect} expects"] = other_counts

    def say(run: report.Run, faster: Estimate, where: str) -> str:
        if faster.value is not None:
            where += level_words(config.confidence)
            times = format_estimate(faster, spread="interval")
            return f"The server writes {times} times as fast as the baseline server ({where})"
        if alpha is None:
            exact = all(entry.exact for entry in reconciliations)
            counted = "to the integer" if exact else "within intervals"
            return f"The server counts what {config.expect} expects, {counted} ({where})"
        value = f"above {alpha:g}"
        if run.alpha is not None and run.alpha.value is not None:
            value = format_estimate(run.alpha, spread="interval")
        return f"Acceptance holds: α is {value} ({where})"

    return judge(runs, observations, demands, gate, config.confidence, say, "{} at once")


def _where(run: report.Run) -> str:
    return f"at T = {run.temperature:g}, {run.batch_size} at once"


def _departs(entry: Reconciliation) -> str:
    cause = f"; {entry.causes[0].name}: {entry.causes[0].evidence}" if entry.causes else ""
    where = f"T = {entry.temperature:g}, {entry.concurrency} at once"
    return f"the server departs from {entry.report} at {where}{cause}"


def _below(what: str, estimate: Estimate, least: float, confidence: float, run: report.Run) -> list[str]:
    """Return why an estimate's lower end does not exceed a bound, in one sentence or none."""
    level, where = f"{100 * confidence:.4g}% confidence", _where(run)
    if estimate.value is None and estimate.ci95 is None:
        return [f"{what} is not known {where}: see the warnings"]
    if estimate.ci95 is None:
        if estimate.n >= LEAST:
            return [f"{what} has no interval {where}: see the warnings"]
        return [f"{what} {where} has {estimate.n} prompts or turns, too few for {level}, which needs {LEAST}"]
    low, high = estimate.ci95
    if low > least:
        return []
    value = "in" if estimate.value is None else f"{estimate.value:.2f}"
    return [f"{what} must exceed {least:g} with {level}, and is {value} [{low:.2f}, {high:.2f}] {where}"]


def _require_drafts(observed: Observed, accepted: Sequence[estimates.Acceptance]) -> None:
    url = observed.servers["server"].client.url
    for setting in accepted:
        if observed.config.draft_length == 0:
            if setting.total.num_drafts:
                raise InputError(f"draft_length: expected a server that drafts nothing at {url}, found drafts")
        elif not setting.total.num_drafts:
            hint = "SGLang counts chats since 0.5.19, and all with metrics; others with --target"
            raise InputError(f"server: expected one that speculates at {url}, found none that counts a draft ({hint})")
        elif not setting.total.num_draft_tokens:
            raise InputError("draft_length: expected γ, for the server does not count what it drafts, found none")


def _run(
    observed: Observed, setting: Setting, accepted: estimates.Acceptance, own: Observation, plain: Observation | None
) -> report.Run:
    config, total, length = observed.config, accepted.total, accepted.draft_length
    if config.draft_length == 0:
        length = 0
    elif length is None:  # of drafts that differ
        length = max(1, round(total.num_draft_tokens / total.num_drafts))
    counts = _counts(total, sum(own.tokens))
    equal = not accepted.tree and total.num_draft_tokens == length * total.num_drafts
    if not equal:
        counts = replace(counts, num_draft_tokens_per_pos=(), num_reached_per_pos=())  # not known
    prompts = [entry.prompt for entry in observed.prompts]
    asked, method = frozenset(range(len(prompts))), observed.servers["server"].engine.method
    return report.Run(
        proposer=report.ProposerEntry(config.drafter or (method or "drafter").lower(), "server", None, None, None),
        draft_length=length,
        temperature=setting[0],
        batch_size=setting[1],
        counts=counts,
        alpha=accepted.alpha(),
        draft_acceptance_rate=accepted.draft_acceptance_rate(),
        mean_acceptance_length=accepted.mean_acceptance_length(),
        acceptance_per_position=[*total.acceptance_per_position()],
        conditional_acceptance=counts.conditional_acceptance() if equal else [],
        speedup=own.speedup(plain),
        tokens_per_second=own.speed(),
        lossless=_compared(observed, setting),
        by_category=by_group(categories_of(prompts), asked, own, plain, accepted.mean_acceptance_length),
        repeated_ngram_share=own.repeated(),
    )


def _counts(total: ServerCounts, tokens: int) -> Counts:
    """Return the server's counts, as those of drafts that all had γ tokens."""
    drafts = int(total.num_drafts)
    # vLLM lists the first position even if nothing was drafted.
    per_pos = tuple(map(int, total.num_accepted_tokens_per_pos)) if drafts else ()
    return Counts(
        num_drafts=drafts,
        num_draft_tokens=int(total.num_draft_tokens),
        num_accepted_tokens=int(total.num_accepted_tokens),
        num_accepted_tokens_per_pos=per_pos,
        num_draft_tokens_per_pos=(drafts,) * len(per_pos),
        num_reached_per_pos=(drafts, *per_pos)[: len(per_pos)],
        num_emitted_tokens=tokens,
    )


def _compared(observed: Observed, setting: Setting) -> Certificate:
    """Compare the texts of T=0 with the baseline server's; of two that differ, neither is known to be right."""
    if observed.config.baseline_server is None:
        return unchecked("there is no baseline server to compare texts with; `draftsmith certify --server` tests them")
    if setting[0] > 0:
        return unchecked("sampled texts differ by chance; `draftsmith certify --server` tests their distribution")
    answers = {role: observed.records(setting, role) for role in observed.servers}
    with_ids = all(record.token_ids is not None for records in answers.values() for record in records)
    texts: dict[Role, dict[int, object]] = {
        role: {record.prompt: record.token_ids if with_ids else record.text or "" for record in records}
        for role, records in answers.items()
    }
    same = sum(texts["baseline_server"][index] == text for index, text in texts["server"].items())
    if same == len(observed.prompts):
        return Certificate(identical=True, prompts_identical=same, near_ties=0, departures=0, passed=True)
    return replace(
        unchecked(
            f"{same} of {len(observed.prompts)} texts are the baseline server's; whether the others part at ties is "
            "not seen from outside: `draftsmith certify --server` audits them"
        ),
        prompts_identical=same,
    )


def _serving(
    observed: Observed, accepted: dict[Setting, estimates.Acceptance], reconciliations: Sequence[Reconciliation]
) -> Serving:
    config = observed.config
    servers = [
        ServedBy(role, server.client.url, server.engine.kind, server.engine.version, server.model)
        for role, server in observed.servers.items()
    ]
    counted, latencies = [], []
    for setting, figures in accepted.items():
        generated = [block.generated_tokens for block in observed.blocks[setting]["server"]]
        counted.append(
            Counted(
                *setting,
                source=figures.source,
                completion_tokens=sum(record.tokens for record in observed.records(setting, "server")),
                generated_tokens=None if None in generated else sum(count or 0 for count in generated),
            )
        )
        for role in observed.servers:
            records = observed.records(setting, role)
            times: list[Sequence[float | None]] = [
                [r.first for r in records],
                [estimates.token_seconds(r) for r in records],
                [r.ended for r in records],
            ]
            latencies.append(Latency(role, *setting, *map(estimates.percentiles, times)))
    return Serving(
        servers=servers,
        prompts_as="text" if config.target is None else "tokens",
        warm_up=config.warm_up,
        counted=counted,
        latencies=latencies,
        warnings=warnings_of(observed, accepted),
        reconciliations=reconciliations,
    )


def warnings_of(observed: Observed, accepted: Mapping[Setting, estimates.Acceptance]) -> list[str]:
    """Return one sentence for each warning, in the order of the settings."""
    warnings = []
    for setting, figures in accepted.items():
        where = f"T = {setting[0]:g}, {setting[1]} at once"
        warnings += [f"{where}: {sentence}" for sentence in _unknown(observed, setting, figures)]
        for role in observed.servers:
            warnings += [f"{where}: {sentence}" for sentence in _disturbed(observed, setting, role)]
        if "baseline_server" in observed.servers:
            drafted = sum(block.counters.num_drafts for block in observed.blocks[setting]["baseline_server"])
            drafted += sum(
                record.counts.num_drafts
                for record in observed.records(setting, "baseline_server")
                if record.counts is not None
            )
            if drafted:
                warnings.append(f"{where}: the baseline server drafts too, so that the speed-up is over its drafter.")
    return warnings + _by_load(accepted)


def _unknown(observed: Observed, setting: Setting, figures: estimates.Acceptance) -> list[str]:
    """Return sentences on the figures that the counts do not tell."""
    if not figures.total.num_drafts:
        return []
    sentences = [f"{TOGETHER}."] if figures.source == "counters" else []
    if figures.steps is None and estimates.written_by_us(observed.blocks[setting]["server"]):
        records = observed.records(setting, "server")
        sentences.append(
            f"{figures.total.num_drafts:,} drafts for {sum(record.tokens for record in records):,} tokens in "
            f"{len(records)} answers are not counted as vLLM 0.32 and SGLang 0.5 count, so that τ and α are not known."
        )
    elif figures.tree:
        sentences.append("the server drafts trees, so α is not known.")
    elif figures.steps is not None and not figures.steps.tried:
        sentences.append("drafts had different lengths, or no counts by position, so that α is not known.")
    return sentences


def _by_load(accepted: Mapping[Setting, estimates.Acceptance]) -> list[str]:
    """Return where α differs beyond chance between numbers of requests at once, a sign of a server's mistake.

    Two 95 % intervals of one α are apart in fewer than one case of a hundred.
    """
    sentences = []
    for (first, first_figures), (second, second_figures) in combinations(accepted.items(), 2):
        alphas = first_figures.alpha(), second_figures.alpha()
        bounds = [alpha.ci95 for alpha in alphas if alpha.ci95 is not None]
        if first[0] == second[0] and len(bounds) == 2 and max(b[0] for b in bounds) > min(b[1] for b in bounds):
            values = [format_estimate(alpha, spread="interval") for alpha in alphas]
            sentences.append(
                f"T = {first[0]:g}: α is {values[0]} at {first[1]} at once and {values[1]} at {second[1]}. What a "
                "server accepts should not depend on its load: have it tested by `draftsmith certify --server`."
            )
    return sentences


def _disturbed(observed: Observed, setting: Setting, role: Role) -> list[str]:
    """Return signs that others used a server meanwhile."""
    blocks, name, sentences = observed.blocks[setting][role], role.replace("_", " "), []
    if any(block.busy for block in blocks):
        sentences.append(f"others' requests were under way on the {name} when a turn began or ended.")
    if not estimates.written_by_us(blocks):
        written = sum(record.tokens for block in blocks for record in block.records)
        generated = sum(block.generated_tokens or 0 for block in blocks)
        sentences.append(
            f"the {name} wrote {generated:,} tokens; {written:,} were ours, so that its counters tell nothing."
        )
    return sentences
