"""A proposer that lies about its draws, for tests that must notice."""

from dataclasses import replace

from draftsmith.decode import DraftModelProposer


class Misreporting(DraftModelProposer):
    """Draws from q and says that it drew from another law, or says what it did not draw.

    `mistake` of the proposer, the context and the draft, returns the fields of the draft that it changes.
    """

    def __init__(self, draft, mistake, **options):
        super().__init__(draft, **options)
        self.mistake = mistake

    def propose(self, contexts, draft_lengths):
        drafts = super().propose(contexts, draft_lengths)
        return [
            d if d.probabilities is None else replace(d, **self.mistake(self, context, d))
            for context, d in zip(contexts, drafts, strict=True)
        ]


def argmax_scored_with_q(proposer, context, draft):
    """The most likely token is proposed, and accepted as if it had been drawn (transformers #47932)."""
    return {"tokens": draft.probabilities.argmax(-1)}
