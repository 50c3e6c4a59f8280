"""Repetition in texts, which reveals an acceptance rate earned on endless loops."""

from collections.abc import Iterable, Sequence


def count_repeated_ngrams(ids: Sequence[int], n: int = 4) -> tuple[int, int]:
    """Count a completion's n-grams that occurred earlier in it, and all its max(T − n + 1, 0) n-grams."""
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def repeated_ngram_share(texts: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Return the share, in [0, 1], of n-grams that repeat an earlier one of their text; None without n-grams."""
    counts = [count_repeated_ngrams(ids, n) for ids in texts]
    total = sum(ngrams for _, ngrams in counts)
    return sum(repeated for repeated, _ in counts) / total if total else None
