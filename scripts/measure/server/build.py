"""From what was observed of a server to the report."""

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
from draftsmith.scripts.measure.server.estimates import (
    Acceptance,
    acceptance,
    by_latency,
    pace,
    percentiles,
    token_seconds,
)
from draftsmith.scripts.measure.server.expectation import Expectation, reconciled
from draftsmith.scripts.measure.server.observe import Observed, Role, Setting
from draftsmith.scripts.measure.server.verdict import judge_server
from draftsmith.scripts.measure.server.warnings import warnings_of
from draftsmith.scripts.measure.verdict import partial
from draftsmith.scripts.report.reconciliation import Reconciliation
from draftsmith.scripts.report.serving_types import Counted, Latency, ServedBy, Serving
from draftsmith.scripts.report.types import (
    SCHEMA,
    Baseline,
    Environment,
    Failure,
    PlainRun,
    Prompts,
    ProposerEntry,
    Report,
    Run,
    RunCategory,
    Target,
)
from draftsmith.scripts.serving.server_steps import NOTHING
from draftsmith.train.provenance import git_sha


def build_report(observed: Observed, expectation: Expectation | None = None) -> Report:
    """Return the report of the settings that were finished, at least one; what a server does not tell is None.

    Intervals are bootstrapped over prompts, those of throughput over turns; comparisons are paired.

    Raises:
        InputError: the server drafted nothing, or does not say how many tokens it drafts a round.
    """
    config = observed.config
    accepted = {setting: acceptance(observed, setting) for setting in observed.blocks}
    _require_drafts(observed, list(accepted.values()))
    runs = [_run(observed, setting, accepted[setting]) for setting in observed.blocks]

    def speedup(setting: Setting, confidence: float) -> Estimate:
        own, other = pace(observed, setting, "server"), pace(observed, setting, "baseline_server")
        faster = own.speedup(other)
        return Estimate(faster.value, own.speedup_interval(other, confidence), faster.n)

    def alpha(setting: Setting, confidence: float) -> Estimate:
        return accepted[setting].steps.alpha(confidence)

    reconciliations = reconciled(expectation, observed, accepted)
    gate, recommendation = judge_server(config, runs, speedup, alpha, reconciliations)
    failures = []
    if observed.failure is not None and observed.failed is not None:
        temperature, concurrency = observed.failed
        failures = [Failure(f"T = {temperature:g}, {concurrency} at once", str(observed.failure), exit_code=1)]
        gate, recommendation = partial(gate, recommendation, failures)
    return Report(
        schema=SCHEMA,
        environment=Environment(
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
        target=Target(observed.models["server"], None, None, config.filters()),
        prompts=Prompts(
            config.prompts,
            count=len(observed.prompts),
            replayed=None,
            categories={name: len(places) for name, places in categories(observed).items()},
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


def categories(observed: Observed) -> dict[str, list[int]]:
    """Return the places of each category's prompts, in order of the names."""
    places: dict[str, list[int]] = {}
    for place, asked in enumerate(observed.prompts):
        if asked.prompt.category is not None:
            places.setdefault(asked.prompt.category, []).append(place)
    return dict(sorted(places.items()))


def _require_drafts(observed: Observed, accepted: Sequence[Acceptance]) -> None:
    for each in accepted:
        if observed.config.draft_length == 0:
            if each.total is not None and each.total.num_drafts:
                raise InputError(
                    f"draft_length: expected a server that drafts nothing at {observed.urls['server']}, found drafts"
                )
            continue
        if each.total is not None and not each.total.num_drafts:
            raise InputError(
                f"server: expected one that speculates at {observed.urls['server']}, found none that counts a draft"
            )
        if each.draft_length is None and _draft_length(observed, each) is None:
            raise InputError("draft_length: expected γ, for the server does not count what it drafts, found none")


def _draft_length(observed: Observed, accepted: Acceptance) -> int | None:
    if observed.config.draft_length is not None:
        return observed.config.draft_length
    return accepted.draft_length or observed.engines["server"].draft_tokens


def _run(observed: Observed, setting: Setting, accepted: Acceptance) -> Run:
    config, (temperature, concurrency) = observed.config, setting
    records, speed = observed.records(setting, "server"), pace(observed, setting, "server")
    method = observed.engines["server"].method
    total, length = accepted.total, _draft_length(observed, accepted)
    drafts = 0 if total is None else int(total.num_drafts)
    # Of no draft there is no position, though vLLM counts the first one.
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
        faster = speed.speedup(pace(observed, setting, "baseline_server"))
    ids = [record.token_ids for record in records if record.token_ids is not None]
    return Run(
        proposer=ProposerEntry(config.drafter or (method or "drafter").lower(), "server", None, None, None),
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
    """Return an estimate for the report; one that is known within bounds alone is a warning."""
    return estimate if estimate.value is not None else replace(estimate, ci95=None)


def _compared(observed: Observed, setting: Setting) -> Certificate:
    """Compare the texts of T=0 with the baseline server's. Where they differ, who is right is not seen from outside."""
    if observed.config.baseline_server is None:
        return unchecked("there is no baseline server to compare texts with; `draftsmith certify --server` tests them")
    if setting[0] > 0:
        return unchecked("sampled texts differ by chance; `draftsmith certify --server` tests their distribution")
    texts: dict[Role, dict[int, object]] = {}
    for role in observed.engines:
        records = observed.records(setting, role)
        with_ids = all(
            record.token_ids is not None for r in observed.engines for record in observed.records(setting, r)
        )
        texts[role] = {record.prompt: record.token_ids if with_ids else _text(record.text) for record in records}
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


def _text(text: str | None) -> str:
    return text or ""


def _by_category(observed: Observed, setting: Setting, accepted: Acceptance) -> dict[str, RunCategory]:
    """Return the figures of each category, where they are known prompt by prompt."""
    found = {}
    for name, places in categories(observed).items():
        chosen, faster = set(places), NOTHING
        if observed.config.baseline_server is not None and by_latency(observed, setting):
            paces = [pace(observed, setting, role, chosen) for role in ("server", "baseline_server")]
            faster = paces[0].speedup(paces[1])
        length = known(accepted.steps.mean_acceptance_length(chosen))
        found[name] = RunCategory(len(places), length, faster)
    return found


def _baseline(observed: Observed) -> Baseline | None:
    if observed.config.baseline_server is None:
        return None
    plain, paces = [], []
    for setting in observed.blocks:
        paces.append(pace(observed, setting, "baseline_server"))
        ids = [record.token_ids for record in observed.records(setting, "baseline_server")]
        share = repeated_ngram_share(each for each in ids if each is not None) if None not in ids else None
        plain.append(PlainRun(*setting, paces[-1].speed(), share))
    whole = type(paces[0])([t for each in paces for t in each.tokens], [s for each in paces for s in each.seconds])
    return Baseline(whole.speed(), plain)


def _serving(
    observed: Observed, accepted: dict[Setting, Acceptance], reconciliations: Sequence[Reconciliation]
) -> Serving:
    config = observed.config
    servers = [
        ServedBy(role, observed.urls[role], engine.kind, engine.version, observed.models[role])
        for role, engine in observed.engines.items()
    ]
    counted, latencies = [], []
    for setting, each in accepted.items():
        blocks = observed.blocks[setting]["server"]
        generated = [block.generated_tokens for block in blocks if block.generated_tokens is not None]
        counted.append(
            Counted(
                *setting,
                source=each.source,
                completion_tokens=sum(record.tokens for record in observed.records(setting, "server")),
                generated_tokens=sum(generated) if len(generated) == len(blocks) else None,
                convention=each.steps.convention(),
                mean_acceptance_length_within=each.steps.length_bounds(),
                alpha_within=each.steps.alpha_bounds(),
            )
        )
        for role in observed.engines:
            records = observed.records(setting, role)
            latencies.append(
                Latency(
                    role,
                    *setting,
                    first_token=percentiles([r.first for r in records if r.first is not None]),
                    token=percentiles([s for r in records if (s := token_seconds(r)) is not None]),
                    request=percentiles([r.ended for r in records]),
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
