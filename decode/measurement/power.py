"""What a test of uniformity finds: the smallest departure that it sees with a given probability."""

from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from draftsmith.decode.measurement.uniformity import BINS


def detectable(tokens: int, level: float, power: float = 0.9, bins: int = BINS) -> tuple[float, float]:
    """Return the smallest departures that the chi-square test of uniformity finds.

    A share ε of the numbers that all fall into one of B bins adds N ε² (B − 1) to the statistic's expectation, and a
    share ε that moves from one half of them to the other adds 4 N ε²: the statistic is then noncentral chi-square.

    Args:
        tokens: N.
        level: the p-value below which the test fails a text.
        power: with what probability.
        bins: B.

    Returns:
        The share of tokens that would all be unlikely ones; and the total variation of a law that leans one way.
    """
    limit = chi2.isf(level, bins - 1)

    def missing(noncentrality: float) -> float:
        return float(ncx2.sf(limit, bins - 1, noncentrality)) - power

    noncentrality = brentq(missing, 1e-9, 10 * limit + 1000)
    return min(1.0, (noncentrality / (tokens * (bins - 1))) ** 0.5), min(1.0, (noncentrality / (4 * tokens)) ** 0.5)
