"""Programs that draft: all forwards and choices of a chain, or of a tree of fixed shape, in one call.

Shape suffixes: B rows, K nodes of a draft or tokens of a block, P parents, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decode import sampling, tree
from draftsmith.decode.cache.forward import BlockForward, Forward
from draftsmith.decode.cache.layers import Axes
from draftsmith.decode.proposers import draft_tree
from draftsmith.decode.proposers.draft_tree import LogitsAfter, StaticDraft, choose, support_size
from draftsmith.decode.sampling import uniforms
from draftsmith.decode.tree import ROOT, Level, Tree

MOST_LAYERS = 16  # the greatest number of layers in all steps of a program: each takes a second to compile


class DraftForward(Forward):
    """The base class of programs that draft a tree of fixed shape for each row; subclasses compute the logits.

    Tokens are drawn if `drawn`, and the most likely ones otherwise. `key` distinguishes programs: see `Forward`.
    """

    sources = tuple(inspect.getfile(module) for module in (sampling, tree, draft_tree))

    def __init__(self, model: nn.Module, shape: Tree, vocab_size: int, drawn: bool, key: tuple[Any, ...] = ()):
        super().__init__(model, (shape.parents, vocab_size, drawn, *key))
        self.tree, self.vocab_size, self.drawn = shape, vocab_size, drawn
        # Indices are buffers: they move with the module, and become part of the program.
        for level in shape.levels(torch.device("cpu")):
            for field in fields(Level):
                if isinstance(index := getattr(level, field.name), Tensor):
                    self.register_buffer(f"{field.name}_{level.depth}", index.clone(), persistent=False)

    @property
    def title(self) -> str:
        """The name that progress messages show while it compiles."""
        draft = f"{len(self.tree)} steps" if self.tree.is_chain else f"a tree of {len(self.tree)}"
        return f"{draft} of {type(self.model).__name__}{', drawn' if self.drawn else ''}"

    def axes_of_draws(self) -> list[dict[int, str]]:
        """Return the axes of `draws` that vary."""
        return [{}, {0: "b"}] if self.drawn else []

    def levels(self) -> list[Level]:
        """Return the tree's levels, with this module's buffers as their tensors."""
        levels = []
        for level in self.tree.levels(torch.device("cpu")):
            names = {field.name: f"{field.name}_{level.depth}" for field in fields(Level)}
            buffers = {name: getattr(self, buffer) for name, buffer in names.items() if buffer in self._buffers}
            levels.append(replace(level, **buffers))
        return levels

    def choose(self, last: Tensor, logits_after: LogitsAfter, draws: Sequence[Tensor]) -> list[Tensor]:
        """Choose the tokens of all nodes, and return the tensors that `read_draft` reads.

        `last` is each text's last token, (B, 1) int64; `draws` is as `make_draws` returns it.
        """
        spent = 0

        def scores_after(level: Level, tokens: Tensor) -> Tensor:
            logits = logits_after(level, tokens)
            # As samplers do: warp in float32 at least.
            scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
            return scores / draws[0] if self.drawn else scores

        def next_uniforms(level: Level, numbers: int, dtype: torch.dtype) -> Tensor:
            nonlocal spent
            spent += (count := numbers * len(level.parents))
            return draws[1][:, spent - count : spent]

        levels = self.levels()
        tokens = levels[0].children.new_zeros(last.shape[0], len(self.tree))
        drafted = choose(self.tree, levels, tokens, scores_after, next_uniforms if self.drawn else None)
        q = drafted.siblings or (() if drafted.probabilities is None else (drafted.probabilities,))
        return [torch.cat([last, drafted.tokens], 1), *q]


def read_draft(outputs: Sequence[Tensor]) -> StaticDraft:
    """Return the draft in the outputs of a `DraftForward`."""
    block, *q = outputs
    tokens = block[:, 1:]
    if len(q) == 3:  # a drawn tree: supports, probabilities and indices
        return StaticDraft(tokens, siblings=(q[0], q[1], q[2]), block=block)
    return StaticDraft(tokens, q[0] if q else None, block=block)


def make_draws(
    shape: Tree,
    vocab_size: int,
    temperature: Tensor | None,
    generators: Sequence[torch.Generator | None],
    draft_lengths: Sequence[int],
    device: torch.device,
) -> list[Tensor]:
    """Return the `draws` of a `DraftForward`: the temperature, (), and uniform numbers for all depths, (B, R).

    A chain takes one float64 a step, a tree M float32 a parent. The result is empty if `temperature` is None: tokens
    are then not drawn.
    """
    if temperature is None:
        return []
    levels, dtype = shape.levels(torch.device("cpu")), torch.float64 if shape.is_chain else torch.float32
    numbers = [1 if shape.is_chain else len(level.parents) * support_size(level, vocab_size) for level in levels]
    # A row spends exactly the numbers that `draft_static_tree` spends on it: those of its own depths.
    counts = [sum(numbers[:k]) for k in draft_lengths]
    drawn = uniforms(generators, counts, dtype, device)
    if missing := sum(numbers) - drawn.shape[1]:
        drawn = nn.functional.pad(drawn, (0, missing), value=1.0)
    return [temperature, drawn]


@lru_cache(maxsize=256)
def fed_slots(tree: Tree, depth: int) -> list[int]:
    """Return the slot after the text to which a program feeds each node down to a depth; −1 for a leaf."""
    inner = [node for level in tree.levels(torch.device("cpu")) if level.depth for node in level.parents]
    slots = {node: slot for slot, node in enumerate(inner)}
    return [slots.get(node, -1) for node in tree.pruned(depth)[1]]


@lru_cache(maxsize=256)
def program_shapes(tree: Tree | None, depth: int, most: int) -> list[Tree]:
    """Return the shapes that consecutive program calls draft: a tree, or chains of at most `most` steps each."""
    if tree is not None:
        return [tree.pruned(depth)[0]]
    return [Tree.chain(min(most, depth - before)) for before in range(0, depth, most)]


ReadOutput = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A model's output at P positions, (B, P, …) → logits, (B, P, V), and states for the next forward, if it takes any."""


class ModelDraftForward(DraftForward):
    """A program that drafts with a causal LM over its cache; `read` interprets the model's output.

    A model with further inputs takes for drafted tokens the `states` that `read` returns.
    """

    def __init__(self, block: BlockForward, shape: Tree, vocab_size: int, drawn: bool, read: ReadOutput):
        super().__init__(block.model, shape, vocab_size, drawn, (block.key, read.__qualname__))
        over_states = block.reading(("states",)) if block.further else block
        self._blocks, self._read = [block, over_states], read  # in a list: submodules would be registered

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the axes of each input that vary."""
        *_, extras, _ = inputs
        first: tuple[Axes, ...] = {0: "b", 1: "k"}, {0: "b"}, {0: "n"}, {}, {0: "l"}, {0: "b"}, {0: "b"}
        return *first, self.axes_of_draws(), *self._blocks[0].trailing_axes(extras)

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
        """Feed the uncached tokens of each text, (B, K) int64, and draft after them: see `DraftForward.choose`.

        `kept` are the columns whose logits are computed, (L,) int64. `at` is the index of each row's last token among
        these, and `ends` among its K tokens, (B,) int64. The other arguments are those of `BlockForward`.
        """
        (block, over_states), (rows, k) = self._blocks, tokens.shape
        windows, order_K = extras[len(block.further) :], torch.arange(k, device=tokens.device)
        causal, depths = (order_K[:, None] >= order_K).expand(rows, k, k), order_K.expand(rows, k)
        output = block(tokens, starts, slots_N, last, causal, depths, kept, extras, cached)[0]
        logits, states = self._read(output.gather(1, at[:, None, None].expand(rows, 1, output.shape[-1])))
        draft_starts, fed = starts + ends + 1, [ROOT]

        # Python unrolls this loop over levels when the program is traced: `fed` is known then, tensors are not.
        def logits_after(level: Level, drafted: Tensor) -> Tensor:
            nonlocal states
            if not level.depth:
                return logits
            before, count = len(fed) - 1, len(level.parents)
            grandparents = [fed.index(self.tree.parents[node]) for node in level.parents]
            fed.extend(level.parents)
            output = over_states(
                drafted.index_select(1, level.fed),
                draft_starts + before,
                slots_N,
                last,
                level.visible.expand(rows, -1, -1),
                # A node's position is that of its depth, while its slot counts all nodes that were fed before it.
                (slots_N[:1] + (level.depth - 1 - before)).expand(rows, count),
                torch.arange(count, device=tokens.device),
                # A node continues from the state that its parent was drafted with.
                [*([] if states is None else [torch.stack([states[:, i] for i in grandparents], 1)]), *windows],
                cached,
            )[0]
            new_logits, new_states = self._read(output)
            if states is not None and new_states is not None:
                states = torch.cat([states, new_states], 1)
            return new_logits

        return self.choose(tokens.gather(1, ends[:, None]), logits_after, draws)
