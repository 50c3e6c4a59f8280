"""Whose sampled text is tested without being asked for: the winner of each setting, then the next best."""

from contextlib import nullcontext
from types import SimpleNamespace

from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.scripts.measure import certify
from draftsmith.scripts.measure.certify import UNTESTED, certify_recommended
from draftsmith.scripts.measure.state import Method
from draftsmith.scripts.report.types import Recommendation, SettingVerdict

DRAFT, COPIES, HEADS = Method("draft", 4), Method("suffix", 3), Method("heads", 2)


def test_the_law_of_each_settings_winner_is_tested(monkeypatch):
    """At T = 0.5 the draft wins, at T = 1 copies do, whose text departs: then the heads are the next."""
    lossless = {(t, rows, method): UNTESTED for t in (0.5, 1.0) for rows in (1, 8) for method in (DRAFT, COPIES, HEADS)}
    tested = []

    def recommend(measured):
        at_one = HEADS if measured.lossless[1.0, 1, COPIES].passed is False else COPIES
        winners = {0.5: DRAFT, 1.0: at_one}
        verdicts = [
            SettingVerdict(t, rows, True, "fast", method.drafter, method.draft_length)
            for t, method in winners.items()
            for rows in (1, 8)
        ]
        return Recommendation(False, "none for all", "draft", 4, settings=verdicts)

    def certified(measured, temperature, method, unfinished):
        tested.append((temperature, method))
        return Certificate(p_value=0.5, tokens=2000, passed=method != COPIES)

    monkeypatch.setattr(certify, "recommend", recommend)
    monkeypatch.setattr(certify, "_tested", certified)
    certify_recommended(SimpleNamespace(lossless=lossless), SimpleNamespace(attempt=lambda what: nullcontext()))
    assert tested == [(0.5, DRAFT), (1.0, COPIES), (1.0, HEADS)]
    # A test at one temperature is for all batch sizes there, and for no other temperature.
    assert {key for key, of in lossless.items() if of != UNTESTED} == {
        (t, rows, method) for t, method in tested for rows in (1, 8)
    }
