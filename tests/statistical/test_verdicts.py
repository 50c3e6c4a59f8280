"""How often verdicts are wrong, on simulated data; the figures of the documentation are of more data sets."""

from draftsmith.scripts.bench.gate import BenchGateConfig
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
