"""Tests that two decoders write texts of one distribution, from their texts alone.

Texts of one prompt from two decoders with the same distribution are exchangeable. The share of shuffles of their
authors that look at least as different as the data is therefore an exact p-value, for any number of texts and any
comparison (Gretton et al. 2012, "A kernel two-sample test", with permutations within each prompt).

Shape suffixes: P shuffles, M texts of a prompt from both decoders.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int]
Floats = NDArray[np.float64]
SHUFFLES_AT_A_TIME = 2048
GRAMS = (1, 2)


@dataclass(frozen=True)
class TwoSamples:
    """One comparison."""

    statistic: float
    """The resemblance within decoders less that between them, summed over prompts, in standard deviations of the
    shuffles."""
    p_value: float

    def __str__(self) -> str:
        return f"{self.statistic:.3g} standard deviations from what shuffled texts show"


def two_sample_test(
    first: Sequence[Sequence[Tokens]], second: Sequence[Sequence[Tokens]], level: float, seed: int = 0
) -> TwoSamples:
    """Compare two decoders' completions, given by prompt, by their beginnings and n-grams together.

    `level` is the smallest p-value that must be possible; there are ten times as many shuffles as that takes.
    """
    kernels = (_beginnings(texts) + _grams(texts) for texts in ([*a, *b] for a, b in zip(first, second, strict=True)))
    return _permuted(kernels, [len(a) for a in first], int(np.ceil(10 / level)), seed)


def _permuted(kernels: Iterable[Floats], sizes: Sequence[int], shuffles: int, seed: int) -> TwoSamples:
    """Return the test of resemblances (M, M); the first `sizes[i]` texts of prompt i are the first decoder's."""
    generator = np.random.default_rng(seed)
    shuffled = np.zeros(shuffles)
    observed = 0.0
    for kernel, size in zip(kernels, sizes, strict=True):
        rest = len(kernel) - size
        if not size or not rest:
            continue
        signs = np.concatenate([np.full(size, 1 / size), np.full(rest, -1 / rest)])
        np.fill_diagonal(kernel, 0.0)  # a text resembles itself whoever wrote it
        observed += float(signs @ kernel @ signs)
        for start in range(0, shuffles, SHUFFLES_AT_A_TIME):
            count = min(SHUFFLES_AT_A_TIME, shuffles - start)
            signs_PM = generator.permuted(np.broadcast_to(signs, (count, len(signs))), axis=1)
            shuffled[start : start + count] += ((signs_PM @ kernel) * signs_PM).sum(-1)
    spread = float(shuffled.std())
    # The tolerance counts shuffles that differ by rounding alone as equal.
    as_different = int((shuffled >= observed - 1e-9 * max(abs(observed), spread)).sum())
    statistic = (observed - float(shuffled.mean())) / spread if spread > 0 else 0.0
    return TwoSamples(statistic, (1 + as_different) / (1 + shuffles))


def _beginnings(texts: Sequence[Tokens]) -> Floats:
    """Return the length of each two texts' common beginning ÷ the longest text's, (M, M)."""
    longest = max(map(len, texts), default=0)
    ids_MT = np.array([[*text, *[-1 - i] * (longest - len(text))] for i, text in enumerate(texts)], dtype=np.int64)
    common_MM = [np.logical_and.accumulate(ids_MT == ids_T, axis=-1).sum(-1) for ids_T in ids_MT]
    return np.array(common_MM, dtype=np.float64) / max(longest, 1)


def _grams(texts: Sequence[Tokens]) -> Floats:
    """Return the cosine similarity of each two texts' counts of unigrams and bigrams, (M, M)."""
    counts = [Counter(tuple(text[i : i + n]) for n in GRAMS for i in range(len(text) - n + 1)) for text in texts]
    columns = {gram: i for i, gram in enumerate({gram: None for count in counts for gram in count})}
    table = np.zeros((len(texts), len(columns)))
    for row, count in zip(table, counts, strict=True):
        for gram, times in count.items():
            row[columns[gram]] = times
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return table @ table.T
