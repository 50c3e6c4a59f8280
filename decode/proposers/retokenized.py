"""A draft model with another tokenizer: equal tokens are renumbered, other text is re-encoded."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.proposers.draft_model import DraftModelProposer, Stop
from draftsmith.decode.proposers.draft_tree import DynamicTree
from draftsmith.decode.proposers.reencoded import ReencodingProposer
from draftsmith.decode.proposers.renumbered import matching_ids, renumbered, stand_in
from draftsmith.decode.tree import Tree


class RetokenizedProposer(Proposer):
    """Drafts with a causal LM whose tokenizer is not the target's.

    Where the tokenizers are the same but for the numbers of their tokens (see `matching_ids`), ids are renumbered: the
    draft model becomes one over the target's ids (`renumbered`), and drafts chains and trees as in `DraftModelProposer`
    at any temperature. Elsewhere text is what both have in common: the target's text is encoded for the draft, which
    continues greedily, and its text is encoded as the target's tokens (universal assisted decoding, Timor et al.
    2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
    section 3.1). That is for chains at T=0 alone. Under sampling such a one-hot draft would be lossless too, but of
    little use: x would be accepted with probability p(x) where a draw from q has Σ min(p, q).

    Whichever way, the output is the target's: what decides is whether the draft reads the text as it was trained
    to, so a mistake costs acceptance and nothing else.

    Args:
        draft_model: the drafter.
        draft_tokenizer: its tokenizer.
        target_tokenizer: the target's.
        tree: as in `DraftModelProposer`; None drafts chains.
        stop: ends a chain early, as in `DraftModelProposer`; where text is re-encoded it sees the draft's distribution.

    Attributes:
        renumbers: whether ids are renumbered; text is re-encoded otherwise.

    Raises:
        InputError: a tree where text is re-encoded, or in `start` sampling there.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        draft_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        tree: Tree | DynamicTree | None = None,
        stop: Stop | None = None,
    ):
        ids = matching_ids(draft_tokenizer, target_tokenizer)
        self.renumbers = ids is not None
        self._drafter: Proposer
        if ids is not None:
            view = renumbered(draft_model, ids, stand_in=stand_in(draft_tokenizer))
            self._drafter = DraftModelProposer(view, tree, stop)
        elif tree is not None:
            raise InputError("tree: expected a chain from a draft whose text has to be re-encoded, found a tree")
        else:
            self._drafter = ReencodingProposer(draft_model, draft_tokenizer, target_tokenizer, stop)
        self.positions = self._drafter.positions

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        return self._drafter.start(task)

    def nodes(self, draft_length: int) -> int:
        """Return how many tokens a draft of this depth has."""
        return self._drafter.nodes(draft_length)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row."""
        return self._drafter.propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what was accepted."""
        self._drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        self._drafter.select(rows)
