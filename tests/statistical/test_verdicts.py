"""How often verdicts are wrong, on simulated data; the figures of the documentation are of more data sets."""

from draftsmith.scripts.bench.gate import BenchGateConfig, counts
from draftsmith.scripts.bench.gate.speedups import gate_figures


def test_the_gate_says_go_of_what_does_not_pay_in_few_cases():
    """Half of the error goes to either side: at most 2.5 % are wrong, and of 200 more than 10 with probability 1 %."""
    config = BenchGateConfig(simulations=200, settings=[12], prompts=[16])
    false, power, winner = (table["16 prompts, 12 settings"] for table in gate_figures(config).values())
    assert false["at once"] <= 0.05 < false["by each alone"]
    assert false["by halves"] <= 0.05
    assert 0.5 < power["1.3× at once"] <= power["1.3× alone"]
    assert winner["its own figure"] > 1.27
    assert abs(winner["by prompts that did not choose it"] - 1.2) < 0.015


def test_a_server_that_does_as_expected_is_seldom_said_to_depart(monkeypatch):
    """1 % is stated: of 40 more than 2 alarms have a probability of 0.8 %."""
    monkeypatch.setattr(counts, "PROMPTS", (8,))
    monkeypatch.setattr(counts, "GAMMAS", (3,))
    (table,) = counts.alarm_figures(BenchGateConfig(simulations=40)).values()
    assert len(table) == 2 and all(row["false alarms"] <= 0.05 for row in table.values())
    assert any(row["0.2 less accepted is seen"] > 0 for row in table.values())
