"""Repetition in texts: it unmasks an acceptance rate earned on endless loops."""

from collections.abc import Iterable, Sequence


def count_repeated_ngrams(ids: Sequence[int], n: int = 4) -> tuple[int, int]:
    """Count the n-grams of a completion that already occurred earlier in it.

    Counts of several completions add; divide once, at the end.

    Args:
        ids: the completion's T token ids, without its prompt.
        n: tokens in an n-gram.

    Returns:
        The repeated n-grams and all n-grams: `max(T - n + 1, 0)`, so (0, 0) for a completion shorter than n.
    """
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def repeated_ngram_share(texts: Iterable[Sequence[int]], n: int = 4) -> float | None:
    """Return the share, in [0, 1], of the completions' n-grams that repeat one of the same text; None without any."""
    repeated = total = 0
    for ids in texts:
        of_text = count_repeated_ngrams(ids, n)
        repeated, total = repeated + of_text[0], total + of_text[1]
    return repeated / total if total else None
