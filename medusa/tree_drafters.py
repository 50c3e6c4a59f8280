"""Drafters of trees of one shape, heads and parallel drafts: other trees for them, and ranks, to search one."""

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode import ParallelDraftProposer, Tree
from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.distill.parallel.replay import text_ranks
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.medusa.eagle.replay import eagle_ranks
from draftsmith.medusa.heads.proposer import MedusaProposer
from draftsmith.medusa.heads.replay import replay_ranks

TreeDrafter = MedusaProposer | EagleProposer | ParallelDraftProposer
LONGEST = 8
"""Depth of the trees of a drafter that says nothing: of EAGLE-3 heads, and of some parallel drafts."""


def depth_of(drafter: TreeDrafter) -> int:
    """Return the depth of its deepest tree."""
    if isinstance(drafter, MedusaProposer):
        return drafter.heads.config.num_heads
    return drafter.longest or LONGEST


def with_tree(drafter: TreeDrafter, tree: Tree) -> TreeDrafter:
    """Return the same drafter with another tree."""
    if isinstance(drafter, MedusaProposer):
        return MedusaProposer(drafter.heads, tree)
    if isinstance(drafter, EagleProposer):
        return EagleProposer(drafter.heads, tree)
    return ParallelDraftProposer(drafter.draft_model, tree)


def ranks_in_text(
    target: PreTrainedModel,
    drafter: TreeDrafter,
    sequence: Tensor,
    prompt_length: int,
    hidden_NH: Tensor | None = None,
) -> TextRanks:
    """Return the ranks of a text's tokens among the drafter's logits, which give every tree's counts at T=0.

    Args:
        target: the model that wrote it, at T=0.
        drafter: of this target.
        sequence: prompt and text, (T,) int64.
        prompt_length: tokens of the prompt.
        hidden_NH: what `text_states` returns for the text, where it is known: Medusa heads need it.
    """
    if isinstance(drafter, MedusaProposer):
        return replay_ranks(target, drafter.heads, sequence, prompt_length, hidden_NH=hidden_NH)
    text = WrittenText(sequence, prompt_length, len(sequence) - prompt_length)
    if isinstance(drafter, EagleProposer):
        return eagle_ranks(target, drafter.heads, text, Sampler.of(0), [MOST_RANKS] * depth_of(drafter))
    width, most = target.config.get_text_config().vocab_size, [MOST_RANKS] * depth_of(drafter)
    return text_ranks(drafter.draft_model, text, Sampler.of(0), width, most)[0]
