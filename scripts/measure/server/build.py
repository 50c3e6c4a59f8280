"""The report on a server, built from observations."""

import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

from draftsmith.decode import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.certificate import Certificate, unchecked
from draftsmith.decode.measurement.intervals import Estimate
from draftsmith.decode.repetition import repeated_ngram_share
from draftsmith.scripts.measure.estimates import Pace
from draftsmith.scripts.measure.server import estimates
from draftsmith.scripts.measure.server.expectation import Expectation, reconciled
from draftsmith.scripts.measure.server.observe import Observed, Role, Setting
from draftsmith.scripts.measure.server.verdict import judge_server
from draftsmith.scripts.measure.server.warnings import warnings_of
from draftsmith.scripts.measure.state import categories_of
from draftsmith.scripts.measure.verdict import partial
from draftsmith.scripts.report import types as report
from draftsmith.scripts.report.reconciliation import Reconciliation
from draftsmith.scripts.report.serving_types import Counted, Latency, ServedBy, Serving
from draftsmith.scripts.serving.server_steps import NOTHING
from draftsmith.train.provenance import git_sha


def build_report(observed: Observed, expectation: Expectation | None = None) -> report.Report:
    """Return the report of the finished settings; a value that a server does not tell is None.

    Intervals are bootstrapped over prompts, those of throughput over turns; comparisons are paired. Raise InputError if
    the server drafted nothing, or does not say how many tokens it drafts per round.
    """
    config = observed.config
    accepted = {setting: estimates.acceptance(observed, setting) for setting in observed.blocks}
    _require_drafts(observed, list(accepted.values()))
    runs = [_run(observed, setting, accepted[setting]) for setting in observed.blocks]

    def speedup(setting: Setting, confidence: float) -> Estimate:
        pace, other = estimates.pace(observed, setting, "server"), estimates.pace(observed, setting, "baseline_server")
        return replace(pace.speedup(other), ci95=pace.speedup_interval(other, confidence))

    def alpha(setting: Setting, confidence: float) -> Estimate:
        return accepted[setting].steps.alpha(confidence)

    reconciliations = reconciled(expectation, observed, accepted)
    gate, recommendation = judge_server(config, runs, speedup, alpha, reconciliations)
    failures = []
    if observed.failure is not None and observed.failed is not None:
        temperature, concurrency = observed.failed
        failures = [report.Failure(f"T = {temperature:g}, {concurrency} at once", str(observed.failure), exit_code=1)]
        gate, recommendation = partial(gate, recommendation, failures)
    return report.Report(
        schema=report.SCHEMA,
        environment=report.Environment(
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            device=None,
            cores=os.cpu_count(),
            dtype=None,
            threads=None,
            git_sha=git_sha(),
            compiled=None,
            draft_dtypes=[],
            settings_by=None,
        ),
        target=report.Target(observed.servers["server"].model, None, None, config.filters()),
        prompts=report.Prompts(
            config.prompts,
            count=len(observed.prompts),
            replayed=None,
            categories={name: len(places) for name, places in _categories(observed).items()},
        ),
        baseline=_baseline(observed),
        runs=runs,
        curves=[],
        comparisons=[],
        costs=None,
        planner_check=None,
        memory=None,
        rejections=None,
        trees=[],
        gate=gate,
        recommendation=recommendation,
        failures=failures,
        server=_serving(observed, accepted, reconciliations),
    )


def _categories(observed: Observed) -> dict[str, list[int]]:
    return categories_of([entry.prompt for entry in observed.prompts])


def _require_drafts(observed: Observed, accepted: Sequence[estimates.Acceptance]) -> None:
    url = observed.servers["server"].client.url
    for setting in accepted:
        drafts = None if setting.total is None else setting.total.num_drafts
        if observed.config.draft_length == 0:
            if drafts:
                raise InputError(f"draft_length: expected a server that drafts nothing at {url}, found drafts")
            continue
        if drafts == 0:
            raise InputError(f"server: expected one that speculates at {url}, found none that counts a draft")
        if setting.draft_length is None and _draft_length(observed, setting) is None:
            raise InputError("draft_length: expected γ, for the server does not count what it drafts, found none")


def _draft_length(observed: Observed, accepted: estimates.Acceptance) -> int | None:
    if observed.config.draft_length is not None:
        return observed.config.draft_length
    return accepted.draft_length or observed.servers["server"].engine.draft_tokens


def _run(observed: Observed, setting: Setting, accepted: estimates.Acceptance) -> report.Run:
    config, (temperature, concurrency) = observed.config, setting
    records, speed = observed.records(setting, "server"), estimates.pace(observed, setting, "server")
    method = observed.servers["server"].engine.method
    total, length = accepted.total, _draft_length(observed, accepted)
    drafts = 0 if total is None else int(total.num_drafts)
    # vLLM lists the first position even if nothing was drafted.
    per_pos = () if total is None or not drafts else tuple(map(int, total.num_accepted_tokens_per_pos))
    reached = (drafts, *per_pos)[: len(per_pos)]
    counts = None
    if total is not None:
        counts = Counts(
            num_drafts=drafts,
            num_draft_tokens=int(total.num_draft_tokens),
            num_accepted_tokens=int(total.num_accepted_tokens),
            num_accepted_tokens_per_pos=per_pos,
            num_draft_tokens_per_pos=(drafts,) * len(per_pos) if accepted.one_length else (),
            num_reached_per_pos=reached if accepted.one_length else (),
            num_emitted_tokens=sum(record.tokens for record in records),
        )
    faster = NOTHING
    if config.baseline_server is not None:
        faster = speed.speedup(estimates.pace(observed, setting, "baseline_server"))
    ids = [record.token_ids for record in records if record.token_ids is not None]
    return report.Run(
        proposer=report.ProposerEntry(config.drafter or (method or "drafter").lower(), "server", None, None, None),
        draft_length=1 if length is None else length,
        rule="exact",
        temperature=temperature,
        batch_size=concurrency,
        counts=counts,
        alpha=known(accepted.steps.alpha()),
        draft_acceptance_rate=accepted.draft_acceptance_rate(),
        mean_acceptance_length=known(accepted.steps.mean_acceptance_length()),
        acceptance_per_position=[a / drafts for a in per_pos],
        conditional_acceptance=[a / r if r else None for a, r in zip(per_pos, reached, strict=True)],
        speedup=faster,
        predicted_speedup=None,
        tokens_per_second=speed.speed(),
        gain_over_baseline_draft=None,
        replay=None,
        lossless=_compared(observed, setting),
        by_category=_by_category(observed, setting, accepted),
        repeated_ngram_share=repeated_ngram_share(ids) if len(ids) == len(records) else None,
    )


def known(estimate: Estimate) -> Estimate:
    """Return an estimate for the report; bounds without a value are a warning instead."""
    return estimate if estimate.value is not None else replace(estimate, ci95=None)


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
    same = sum(texts["baseline_server"][place] == text for place, text in texts["server"].items())
    if same == len(observed.prompts):
        return Certificate(identical=True, prompts_identical=same, near_ties=0, departures=0, passed=True)
    return replace(
        unchecked(
            f"{same} of {len(observed.prompts)} texts are the baseline server's; whether the others part at ties is "
            "not seen from outside: `draftsmith certify --server` audits them"
        ),
        prompts_identical=same,
    )


def _by_category(observed: Observed, setting: Setting, accepted: estimates.Acceptance) -> dict[str, report.RunCategory]:
    figures = {}
    for name, places in _categories(observed).items():
        chosen, faster = set(places), NOTHING
        if observed.config.baseline_server is not None and estimates.by_latency(observed, setting):
            paces = [estimates.pace(observed, setting, role, chosen) for role in ("server", "baseline_server")]
            faster = paces[0].speedup(paces[1])
        length = known(accepted.steps.mean_acceptance_length(chosen))
        figures[name] = report.RunCategory(len(places), length, faster)
    return figures


def _baseline(observed: Observed) -> report.Baseline | None:
    if observed.config.baseline_server is None:
        return None
    plain, paces = [], []
    for setting in observed.blocks:
        paces.append(estimates.pace(observed, setting, "baseline_server"))
        ids = [record.token_ids for record in observed.records(setting, "baseline_server")]
        share = repeated_ngram_share(text for text in ids if text is not None) if None not in ids else None
        plain.append(report.PlainRun(*setting, paces[-1].speed(), share))
    whole = Pace([t for pace in paces for t in pace.tokens], [s for pace in paces for s in pace.seconds])
    return report.Baseline(whole.speed(), plain)


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
        blocks = observed.blocks[setting]["server"]
        generated = [block.generated_tokens for block in blocks if block.generated_tokens is not None]
        counted.append(
            Counted(
                *setting,
                source=figures.source,
                completion_tokens=sum(record.tokens for record in observed.records(setting, "server")),
                generated_tokens=sum(generated) if len(generated) == len(blocks) else None,
                convention=figures.steps.convention(),
                mean_acceptance_length_within=figures.steps.length_bounds(),
                alpha_within=figures.steps.alpha_bounds(),
            )
        )
        for role in observed.servers:
            records = observed.records(setting, role)
            latencies.append(
                Latency(
                    role,
                    *setting,
                    first_token=estimates.percentiles([r.first for r in records if r.first is not None]),
                    token=estimates.percentiles(
                        [token_time for r in records if (token_time := estimates.token_seconds(r)) is not None]
                    ),
                    request=estimates.percentiles([r.ended for r in records]),
                )
            )
    return Serving(
        servers=servers,
        prompts_as="text" if config.target is None else "tokens",
        rate=config.rate,
        warm_up=config.warm_up,
        counted=counted,
        latencies=latencies,
        warnings=warnings_of(observed, accepted),
        reconciliations=reconciliations,
    )
