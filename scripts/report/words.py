"""What page, table and summary say of a run in the same words."""

from draftsmith.scripts.report.types import ByLoad, Run


def turns(run: Run) -> str | None:
    """Say which share of the rounds, and of the tokens that they wrote, each of a run's drafters has.

    Returns:
        None of a drafter that takes turns with no other, and where there were no rounds.
    """
    each = run.sources or {}
    rounds = sum(counts.num_drafts for counts in each.values())
    tokens = sum(counts.num_emitted_tokens for counts in each.values())
    if not rounds or not tokens:
        return None
    words, of = [], (" of rounds", " of tokens")
    for name, counts in each.items():
        rate, share = 100 * counts.num_drafts / rounds, 100 * counts.num_emitted_tokens / tokens
        words.append(f"{name} {rate:.0f} %{of[0]}, {share:.0f} %{of[1]}")
        of = ("", "")  # the first has said what they are of
    return "; ".join(words)


def load_words(load: ByLoad) -> str:
    """Say which draft length pays at which batch size, such as "1 to 4: γ = 3; 5 to 8: do not draft"."""
    parts = []
    for each in load.ranges:
        where = f"{each.first}" if each.first == each.last else f"{each.first} to {each.last}"
        parts.append(f"{where}: " + (f"γ = {each.draft_length}" if each.draft_length else "do not draft"))
    return "; ".join(parts)
