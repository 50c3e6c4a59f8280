"""A draft model with another tokenizer, whose ids are renumbered or whose text is re-encoded."""

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
    """A proposer that uses a causal LM with another tokenizer than the target's.

    If the tokenizers differ only in ids (see `matching_ids`), it `renumbers` ids: the draft model becomes one over the
    target's ids, and drafts chains and trees at any temperature, as in `DraftModelProposer`. Otherwise the target's
    text is encoded for the draft, which continues greedily, and its text is encoded as the target's tokens (universal
    assisted decoding, Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
    Heterogeneous Vocabularies", section 3.1). A mistake in the mapping costs acceptance, but the output is the
    target's.

    Raises:
        InputError: a tree where text is re-encoded; in `start`, sampling there.
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
        # Re-encoding drafts only chains at T=0: under sampling a one-hot draft x would be lossless too, but accepted
        # with probability p(x) instead of Σ min(p, q).
        elif tree is not None:
            raise InputError("tree: expected a chain from a draft whose text has to be re-encoded, found a tree")
        else:
            self._drafter = ReencodingProposer(draft_model, draft_tokenizer, target_tokenizer, stop)
        self.positions = self._drafter.positions

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        return self._drafter.start(task)

    def nodes(self, draft_length: int) -> int:
        """Return the greatest number of tokens of a draft of this depth."""
        return self._drafter.nodes(draft_length)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row."""
        return self._drafter.propose(contexts, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the accepted tokens."""
        self._drafter.commit(outcomes)

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._drafter.select(rows)
