"""Whole drafts as programs: all forwards and choices of a chain, or of a tree of one shape, in one call.

Shape suffixes: B rows, K nodes of a draft or tokens of a block, P parents, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decode import sampling, tree
from draftsmith.decode.cache.forward import Axes, BlockForward, Forward
from draftsmith.decode.proposers import draft_tree
from draftsmith.decode.proposers.draft_tree import LogitsAfter, StaticDraft, choose, support_size
from draftsmith.decode.sampling import uniforms
from draftsmith.decode.tree import ROOT, Level, Tree

MOST_LAYERS = 16
"""Layers that the steps of a program have together at most: each takes a second to compile."""


class DraftForward(Forward):
    """Drafts a tree of one shape for each row; subclasses say what the logits are.

    Args:
        model: the drafter.
        shape: the tree.
        vocab_size: V.
        drawn: draw tokens; else they are the most likely ones.
        key: what else sets it apart: see `Forward`.
    """

    sources = tuple(inspect.getfile(module) for module in (sampling, tree, draft_tree))

    def __init__(self, model: nn.Module, shape: Tree, vocab_size: int, drawn: bool, key: tuple[Any, ...] = ()):
        super().__init__(model, (shape.parents, vocab_size, drawn, *key))
        self.tree, self.vocab_size, self.drawn = shape, vocab_size, drawn
        for level in shape.levels(torch.device("cpu")):
            for field in fields(Level):
                if isinstance(index := getattr(level, field.name), Tensor):
                    self.register_buffer(f"{field.name}_{level.depth}", index.clone(), persistent=False)

    @property
    def title(self) -> str:
        """What is compiled, for whoever waits."""
        what = f"{len(self.tree)} steps" if self.tree.is_chain else f"a tree of {len(self.tree)}"
        return f"{what} of {type(self.model).__name__}{', drawn' if self.drawn else ''}"

    def axes_of_draws(self) -> list[dict[int, str]]:
        """Return the axes of `draws`."""
        return [{}, {0: "b"}] if self.drawn else []

    def levels(self) -> list[Level]:
        """Return the depths of the tree, indexed by buffers of this module."""
        given = []
        for level in self.tree.levels(torch.device("cpu")):
            named = {field.name: f"{field.name}_{level.depth}" for field in fields(Level)}
            given.append(
                replace(level, **{name: getattr(self, own) for name, own in named.items() if own in self._buffers})
            )
        return given

    def choose(self, last: Tensor, logits_after: LogitsAfter, draws: Sequence[Tensor]) -> list[Tensor]:
        """Choose the tokens of all nodes.

        Args:
            last: each text's last token, (B, 1) int64.
            logits_after: the drafter.
            draws: the temperature, (), and uniform numbers, see `draws_of`; nothing where tokens are not drawn.

        Returns:
            What `draft_of` reads.
        """
        spent = 0

        def scores_after(level: Level, tokens: Tensor) -> Tensor:
            logits = logits_after(level, tokens)
            scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
            return scores / draws[0] if self.drawn else scores

        def given(level: Level, numbers: int, dtype: torch.dtype) -> Tensor:
            nonlocal spent
            spent += (count := numbers * len(level.parents))
            return draws[1][:, spent - count : spent]

        levels = self.levels()
        tokens = levels[0].children.new_zeros(last.shape[0], len(self.tree))
        drafted = choose(self.tree, levels, tokens, scores_after, given if self.drawn else None)
        behind = drafted.siblings or (() if drafted.probabilities is None else (drafted.probabilities,))
        return [torch.cat([last, drafted.tokens], 1), *behind]


def draft_of(outputs: Sequence[Tensor]) -> StaticDraft:
    """Return the draft of what a `DraftForward` gives."""
    block, *behind = outputs
    tokens = block[:, 1:]
    if len(behind) == 3:
        return StaticDraft(tokens, siblings=(behind[0], behind[1], behind[2]), block=block)
    return StaticDraft(tokens, behind[0] if behind else None, block=block)


def draws_of(
    shape: Tree,
    vocab_size: int,
    temperature: Tensor | None,
    generators: Sequence[torch.Generator | None],
    draft_lengths: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    """Return what a `DraftForward` draws with: the rows spend the numbers that `draft_static_tree` spends.

    Args:
        shape: the tree.
        vocab_size: V.
        temperature: (); None where tokens are not drawn.
        generators: the rows' sources of randomness.
        draft_lengths: nothing is drawn deeper.
        device: where they go.

    Returns:
        The temperature, and numbers of all depths, (B, R): one float64 a step in a chain, M float32 a parent in a tree.
    """
    if temperature is None:
        return []
    levels, dtype = shape.levels(torch.device("cpu")), torch.float64 if shape.is_chain else torch.float32
    numbers = [1 if shape.is_chain else len(level.parents) * support_size(level, vocab_size) for level in levels]
    counts = [sum(numbers[:k]) for k in draft_lengths]
    drawn = uniforms(generators, counts, dtype, device)
    if missing := sum(numbers) - drawn.shape[1]:
        drawn = nn.functional.pad(drawn, (0, missing), value=1.0)
    return [temperature, drawn]


Read = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""What a model gives at places, (B, P, …) → logits, (B, P, V), and what the next forward sees of them, if anything."""


class ModelDraftForward(DraftForward):
    """Drafts with a causal LM over its cache.

    Args:
        block: the model's forward.
        shape: the tree.
        vocab_size: V.
        drawn: see `DraftForward`.
        read: reads what the model gives.
    """

    def __init__(self, block: BlockForward, shape: Tree, vocab_size: int, drawn: bool, read: Read):
        super().__init__(block.model, shape, vocab_size, drawn, (block.key, read.__qualname__))
        self._block, self._read = [block], read  # in a list: its model is not another one

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the axes of each input that vary."""
        *_, extras, cached = inputs
        first: tuple[Axes, ...] = {0: "b", 1: "k"}, {0: "b"}, {0: "n"}, {}, {0: "l"}, {0: "b"}, {0: "b"}
        return *first, self.axes_of_draws(), *self._block[0].axes_behind(extras, cached)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        slots_N: Tensor,
        last: Tensor,
        kept: Tensor,
        at: Tensor,
        ends: Tensor,
        draws: list[Tensor],
        extras: list[Tensor],
        cached: list[Tensor],
    ) -> list[Tensor]:
        """Feed what the cache lacks of each text, and draft behind it.

        Args:
            tokens: (B, K) int64.
            starts: see `BlockForward`.
            slots_N: see there.
            last: see there.
            kept: the columns whose logits are computed, (L,) int64.
            at: the place of each row's last token among those, (B,) int64.
            ends: and among its K, (B,) int64.
            draws: see `DraftForward.choose`.
            extras: see `BlockForward`.
            cached: see there.

        Returns:
            See `DraftForward.choose`.
        """
        (block,), (rows, k) = self._block, tokens.shape
        windows, order_K = extras[len(block.further) :], torch.arange(k, device=tokens.device)
        causal, depths = (order_K[:, None] >= order_K).expand(rows, k, k), order_K.expand(rows, k)
        given = block(tokens, starts, slots_N, last, causal, depths, kept, extras, cached)[0]
        logits, seen = self._read(given.gather(1, at[:, None, None].expand(rows, 1, given.shape[-1])))
        behind, fed = starts + ends + 1, [ROOT]

        def logits_after(level: Level, drafted: Tensor) -> Tensor:
            nonlocal seen
            if not level.depth:
                return logits
            before, count = len(fed) - 1, len(level.parents)
            above = [fed.index(self.tree.parents[node]) for node in level.parents]
            fed.extend(level.parents)
            given = block(
                drafted.index_select(1, level.fed),
                behind + before,
                slots_N,
                last,
                level.visible.expand(rows, -1, -1),
                (slots_N[:1] + (level.depth - 1 - before)).expand(rows, count),
                torch.arange(count, device=tokens.device),
                [*([] if seen is None else [torch.stack([seen[:, place] for place in above], 1)]), *windows],
                cached,
            )[0]
            new, states = self._read(given)
            if seen is not None and states is not None:
                seen = torch.cat([seen, states], 1)
            return new

        return self.choose(tokens.gather(1, ends[:, None]), logits_after, draws)
