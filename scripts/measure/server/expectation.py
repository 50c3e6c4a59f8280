"""`--expect`: the counts that a report expects of the server, and whether the server meets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.intervals import LEAST
from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.validation import ServerMessage, read
from draftsmith.scripts.measure.server.compare import reconcile
from draftsmith.scripts.measure.server.config import MeasureServerConfig
from draftsmith.scripts.measure.server.estimates import Acceptance
from draftsmith.scripts.measure.server.observe import Observed
from draftsmith.scripts.measure.server.pairing import CountedAnswers, ServedSetting, ServedText, texts_of, too_few
from draftsmith.scripts.report.entries import Reconciliation, Role
from draftsmith.scripts.report.rounds import ExpectedText, RoundsSettings, read_rounds
from draftsmith.scripts.report.types import Setting, Verifier
from draftsmith.train.endpoint.client import SentPrompt


@dataclass(frozen=True)
class Expectation:
    """A report's rounds, and the server's drafter and verifier among them."""

    report: str
    settings: RoundsSettings
    texts: list[ExpectedText]
    drafter: str
    verifier: Verifier


def read_expectation(config: MeasureServerConfig) -> Expectation | None:
    """Read the expected rounds, None without `expect`; raise InputError if they are of other settings."""
    if config.expect is None:
        return None
    settings, texts = read_rounds(config.expect)
    fields = {"max_new_tokens": settings.max_new_tokens, "ignore_eos": False, **settings.filters}
    for name, value in fields.items():
        if getattr(config, name) != value:
            raise InputError(
                f"{name}: expected {value}, as in the report that is expected, found {getattr(config, name)}"
            )
    for temperature in config.temperature:
        if temperature not in {text.temperature for text in texts}:
            temperatures = ", ".join(f"{t:g}" for t in sorted({text.temperature for text in texts}))
            raise InputError(
                f"temperature: expected one of the report's, {temperatures or 'none'}, found {temperature:g}"
            )
    measured = [name for name, about in settings.drafters.items() if about.get("kind") != "baseline_draft"]
    drafter = config.drafter or (measured[0] if len(measured) == 1 else _recommended(config.expect)) or ""
    if drafter not in settings.drafters:
        names = ", ".join(settings.drafters)
        raise InputError(f"drafter: expected one of the report's, {names}, found {config.drafter or 'none'}")
    verifier: Verifier = "greedy" if config.expect_verifier == "greedy" else "probabilistic"
    return Expectation(config.expect, settings, texts, drafter, verifier)


class _Chosen(ServerMessage):
    proposer: str | None


class _Report(ServerMessage):
    """The part of the report that is read."""

    recommendation: _Chosen


def _recommended(report: str) -> str | None:
    """Return the drafter that a report recommends; None without a report or a recommendation."""
    location = Path(report)
    try:
        path = location / "report.json" if location.is_dir() else location.with_name("report.json")
        return read(_Report, path, "expect").recommendation.proposer
    except FileNotFoundError:
        return None


def require_known(expectation: Expectation, config: MeasureServerConfig, prompts: Sequence[SentPrompt]) -> None:
    """Raise InputError unless the report has all prompts, and enough for an interval under sampling."""
    ids = [entry.prompt.id for entry in prompts]
    for temperature in config.temperature:
        texts_of(expectation.texts, temperature, ids)
        if temperature > 0 and len(ids) < LEAST:
            raise too_few(len(ids))


def reconcile_settings(
    expectation: Expectation | None, observed: Observed, accepted: Mapping[Setting, Acceptance]
) -> list[Reconciliation]:
    """Compare each measured setting with its expectation; raise InputError where they cannot be compared."""
    if expectation is None:
        return []
    reconciliations = []
    for setting, figures in accepted.items():
        length = figures.draft_length
        if length is None or figures.tree or not figures.total.num_accepted_tokens_per_pos:
            raise InputError("expect: expected a server that counts chains of drafts by position, found another")
        # At T=0 the two verifiers are the same.
        verifier: Verifier = expectation.verifier if setting[0] > 0 else "probabilistic"
        server = observed.servers["server"]
        limit = expectation.settings.max_new_tokens if server.engine.kind == "llama.cpp" else None
        case = ServedSetting(expectation.drafter, verifier, setting[0], length, setting[1], server.length, limit)
        served = [_served(observed, setting, role) for role in observed.servers]
        plain = served[1] if len(served) > 1 else []
        report = expectation.report, expectation.settings, expectation.texts
        reconciliations.append(reconcile(*report, case, served[0], _counted(observed, setting, figures), plain))
    return reconciliations


def _counted(observed: Observed, setting: Setting, figures: Acceptance) -> list[CountedAnswers]:
    """Return the counts of each answer or, where the server does not tell them, of each turn."""
    if figures.source == "answers":
        records = observed.records(setting, "server")
        return [CountedAnswers([index], record.counts or ServerCounts()) for index, record in enumerate(records)]
    counted, first = list[CountedAnswers](), 0
    for block in observed.blocks[setting]["server"]:
        counted.append(CountedAnswers(range(first, first + len(block.records)), block.counters))
        first += len(block.records)
    return counted


def _served(observed: Observed, setting: Setting, role: Role) -> list[ServedText]:
    return [
        ServedText(
            observed.prompts[record.prompt].prompt.id, record.tokens, record.prompt_ids, record.token_ids, record.parts
        )
        for record in observed.records(setting, role)
    ]
