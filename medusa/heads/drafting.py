"""A draft of Medusa or Hydra heads as one program: all heads, and the choice of tokens between them.

Shape suffixes: B rows, P parents, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decode.proposers.draft_forward import DraftForward
from draftsmith.decode.tree import Level, Tree
from draftsmith.medusa.heads.model import MedusaHeads


class HeadsModel(nn.Module):
    """Heads, and the target's embeddings, which Hydra heads see."""

    def __init__(self, heads: MedusaHeads, embed: nn.Module):
        super().__init__()
        self.heads, self._target_embed = heads, [embed]  # in a list, it is no submodule
        self.embed = embed if heads.config.hydra else None
        self.train(heads.training)

    @property
    def target_embed(self) -> nn.Module:
        """The target's embeddings."""
        return self._target_embed[0]

    def logits(self, level: Level, hidden: Tensor, last: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits after the parents of a depth, (B, P, V), or (B, 1, V) if they are the same for all.

        Args:
            level: the parents.
            hidden: the target's hidden state after the token before the last, (B, H).
            last: the texts' last tokens, (B, 1).
            tokens: the nodes drafted so far, (B, K).
        """
        if self.embed is None:  # a Medusa head does not see drafted tokens
            return self.heads.logits(level.depth, hidden)[:, None]
        parents = len(level.parents)
        paths = last[:, None].expand(-1, parents, 1)
        if level.depth:
            paths = torch.cat([paths, tokens[:, level.paths]], -1)
        states = hidden[:, None].expand(-1, parents, -1)
        return self.heads.logits(level.depth, states, self.embed(paths).to(hidden))


class HeadsForward(DraftForward):
    """Drafts a tree of one shape with heads; arguments as in `DraftForward`."""

    def __init__(self, model: HeadsModel, shape: Tree, vocab_size: int, drawn: bool):
        super().__init__(model, shape, vocab_size, drawn, (model.heads.config.to_json_string(),))

    @property
    def title(self) -> str:
        """A name for this program while it is compiled."""
        return f"{self.tree.depth} Medusa heads{', drawn' if self.drawn else ''}"

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the dynamic axes of each input."""
        return {0: "b"}, {0: "b"}, self.axes_of_draws()

    def forward(self, hidden: Tensor, last: Tensor, draws: list[Tensor]) -> list[Tensor]:
        """Draft for each row; arguments as in `HeadsModel.logits` and `DraftForward.choose`."""
        model: Any = self.model
        return self.choose(last, lambda level, tokens: model.logits(level, hidden, last, tokens), draws)
