"""Trees of one shape, cut to what each row has room for."""

import torch

from draftsmith.decode.proposers.base import stack_tokens
from draftsmith.decode.proposers.draft_tree import draft_static_tree
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree


def test_what_is_fed_of_a_cut_tree_is_its_draft_whatever_the_order_of_its_nodes():
    """Node 1 lies below node 0, node 2 beside it: what is left of a cut tree are not its first nodes."""
    texts, samplers = [torch.zeros(4, dtype=torch.long)] * 2, [Sampler.of(1.0)] * 2
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])[:, None]
    for tree in (Tree((-1, 0, -1)), Tree((-1, -1, 0))):
        drafts = draft_static_tree(tree, samplers, texts, [2, 1], [None] * 2, False, False, lambda level, _: scores)
        assert drafts[1].tokens.tolist() == [2, 1]
        assert torch.equal(stack_tokens(drafts, 3)[1, :2], drafts[1].tokens)
