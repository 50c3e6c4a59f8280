"""A block drafter as a proposer: one forward in each round, and a walk along its guesses.

Slot i of the cache holds token i's keys and values, which are maps of the target's features. In a text of T tokens the
target has not seen the last one, the anchor. Its block is in the slots from T − 1 on; keys and values of the target's
features overwrite it later.

Shape suffixes: B rows, L positions, K guesses, S slots, H hidden, V vocabulary, D tokens that are drafted.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.attention import in_groups
from draftsmith.decode.cache.forward import BlockForward
from draftsmith.decode.cache.layers import Axes
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Proposal
from draftsmith.decode.proposers.draft_forward import DraftForward, make_draws, read_draft
from draftsmith.decode.proposers.draft_tree import LogitsAfter, draft_static_tree
from draftsmith.decode.replay.starts import LogitsOfRounds
from draftsmith.decode.replay.texts import Distributions, WrittenText
from draftsmith.decode.sampling import Sampler, align_vocabulary
from draftsmith.decode.tree import Level, Tree
from draftsmith.medusa.block.blocks import logits_of_blocks
from draftsmith.medusa.block.heads import HEADS
from draftsmith.medusa.block.model import Attend, BlockConfig, BlockDrafter
from draftsmith.medusa.on_features import FeatureProposer, StateFeeder, most_positions
from draftsmith.medusa.target_states import KeysValues
from draftsmith.train.losses.output_head import OutputHead, head_of


class BlockModel(PreTrainedModel):
    """The drafter in the form of a causal LM, for `CachedModel`: it is fed either features of a text, or a block."""

    config_class = BlockConfig

    def __init__(self, drafter: BlockDrafter):
        super().__init__(drafter.config)
        self.drafter = drafter
        self.embed: nn.Module | None = None  # the target's, as are the rows of its head
        self.rows: Tensor | None
        self.bias: Tensor | None
        for name in ("rows", "bias"):
            self.register_buffer(name, None, persistent=False)
        self._head = OutputHead(torch.empty(0))
        self._source: tuple[Any, ...] = ()

    def draft_for(self, target: PreTrainedModel) -> None:
        """Use this target's embeddings and head from here on, or raise an InputError if it does not fit."""
        self.drafter.check_fits(target)
        weight = head_of(target).weight
        version = 0 if weight.is_inference() else weight._version
        identity = weight, (weight.data_ptr(), version, self.drafter.device)
        # `_source` holds the weight itself, so that no other target's weight can get its address.
        if self._source and self._source[0] is weight and self._source[1] == identity[1]:
            return  # the compiled programs have these very rows
        self.embed, self._head = target.get_input_embeddings(), self.drafter.head_for(target).to(self.drafter.device)
        self.rows, self.bias, self._source = self._head.weight.detach(), self._head.bias, identity

    @property
    def head(self) -> OutputHead:
        """The target's head of the drafted tokens, with this module's tensors."""
        assert self.rows is not None
        return replace(self._head, weight=self.rows, bias=self.bias)

    def logits_after(self, tree: Tree, hidden_BSH: Tensor, ends_B2: Tensor, vocab_size: int) -> LogitsAfter:
        """Return the function that drafts a tree from a block's states, after the texts' last two tokens."""
        head, fed = self.drafter.side_head, list[int]()
        hidden_BKH, anchors_B1 = self.drafter.guessing(hidden_BSH), ends_B2[:, 1:]
        state, silent = None if head is None else head.begin(hidden_BSH), self.config.silent
        if state is not None:
            if silent:  # a head with a state sees each slot, also one that guesses nothing
                _, state = head.step(state, hidden_BSH[:, 0], self._read(ends_B2[:, 0]), 0)
            state = state[:, None]  # (B, P, *), of the last level's parents, `fed`

        def logits_after(level: Level, tokens: Tensor) -> Tensor:
            nonlocal state
            # A head sees each parent, and at the first level the anchor.
            before_BP = anchors_B1 if not level.depth else tokens.index_select(1, level.fed)
            hidden_BPH = hidden_BKH[:, level.depth, None].expand(-1, before_BP.shape[1], -1)
            if state is not None and level.depth:  # a node continues from its parent's state
                state = torch.stack([state[:, fed.index(tree.parents[node])] for node in level.parents], 1)
            fed[:] = level.parents
            side = None
            if head is not None:
                side, state = head.step(state, hidden_BPH, self._read(before_BP), silent + level.depth)
            logits_BPD = self.drafter.logits(hidden_BPH, side, self.head)
            return align_vocabulary(self.drafter.widened(logits_BPD), vocab_size)

        return logits_after

    def _read(self, before: Tensor) -> Tensor:
        assert self.embed is not None
        return self.drafter.read(before, self.embed)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        features: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Return the output head's inputs for the slots of blocks, (B, S, H); with `features` extend the cache.

        A block's `input_ids` are (B, S), the anchor first. `features`, (B, L, F), are the target's of a text's
        positions, whose `input_ids` only count by their shape. The mask is additive, (B or 1, 1, S, …), or one for each
        kind of layer.
        """
        if features is not None:
            states = self.drafter.fuse(features)
            for layer, own in enumerate(self.drafter.context(states, position_ids)):
                past_key_values.update(own.keys, own.values, layer)
            return SimpleNamespace(logits=states[:, -1:])

        def attend(layer: int) -> Attend:
            mask = attention_mask
            if isinstance(mask, Mapping):
                mask = mask[self.config.layer_types[layer]]

            def attended(queries: Tensor, own: KeysValues) -> Tensor:
                keys_values = KeysValues(*past_key_values.update(own.keys, own.values, layer))
                return in_groups(queries, *keys_values, mask)

            return attended

        assert self.embed is not None
        # Only the anchors count: all other slots hold masks.
        block = self.drafter.block(input_ids[:, 0], self.embed)
        positions = position_ids.expand(block.shape[0], -1)
        return SimpleNamespace(logits=self.drafter(block, positions, attend))


class BlockDraftForward(DraftForward):
    """The forward that feeds the features that the cache lacks, and drafts a block after them.

    `over_text` is a `BlockModel`'s forward over features.
    """

    sources = tuple(inspect.getfile(cls) for cls in (BlockModel, BlockDrafter, *HEADS))

    def __init__(self, over_text: BlockForward, shape: Tree, vocab_size: int, drawn: bool):
        model: Any = over_text.model
        head = model.head
        super().__init__(model, shape, vocab_size, drawn, (over_text.key, head.scale, head.softcap))
        block = BlockForward(model, (), (), [True] * model.config.num_hidden_layers)
        self._forwards = [over_text, block]  # in a list, their models are no submodules
        self._slots = model.config.block_size

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the dynamic axes of each input."""
        *_, extras, _ = inputs
        first: tuple[Axes, ...] = {0: "b", 1: "k"}, {0: "b"}, {0: "n"}, {}, {0: "b"}, {0: "b"}
        return *first, self.axes_of_draws(), *self._forwards[0].trailing_axes(extras)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        slots_N: Tensor,
        last: Tensor,
        ends_B2: Tensor,
        lacking: Tensor,
        draws: list[Tensor],
        extras: list[Tensor],
        cached: list[Tensor],
    ) -> list[Tensor]:
        """Feed each row's `lacking` features, in `extras`, to slots from `starts` on, and draft after the `ends_B2`.

        These are the texts' last two tokens. The values of `tokens`, (B, L), are ignored. The other arguments are those
        of `BlockForward` and `choose`.
        """
        over_text, block = self._forwards
        (rows, count), model = tokens.shape, cast(BlockModel, self.model)
        order_L, order_S = (torch.arange(size, device=tokens.device) for size in (count, self._slots))
        # The mask of the fed states; their outputs are not used, only their keys and values.
        causal = (order_L[:, None] >= order_L).expand(rows, count, count)
        over_text(tokens, starts, slots_N, last, causal, order_L.expand(rows, count), order_L[:1], extras, cached)
        # The block comes after each row's own states: padding after shorter rows is overwritten or invisible.
        hidden_BSH = block(
            ends_B2[:, 1:].expand(rows, self._slots),
            starts + lacking,
            slots_N,
            last,
            model.drafter.seen_slots(tokens.device).expand(rows, -1, -1),
            order_S.expand(rows, self._slots),
            order_S,
            extras[len(over_text.further) :],  # the positions of all slots, where layers have a window
            cached,
        )[0]
        logits_after = model.logits_after(self.tree, hidden_BSH, ends_B2, self.vocab_size)
        return self.choose(ends_B2[:, 1:], logits_after, draws)


class BlockProposer(FeatureProposer):
    """A proposer of chains or trees from a block drafter: see `draftsmith.medusa.block.model`.

    Each guess is drawn from its slot's distribution, which a head may change by the tokens drafted before it: nodes of
    the same depth in a tree differ by these alone.

    Args:
        tree: None drafts chains. A `Tree` has one shape for every round; its siblings are the most likely tokens at
            T=0, and drawn without replacement under sampling.

    Raises:
        InputError: a tree deeper than a block, or wider than the candidates of a head that chooses.
    """

    at_once = True

    def __init__(self, drafter: BlockDrafter, tree: Tree | None = None, greedy: bool = False):
        self._block = BlockModel(drafter)
        super().__init__(drafter, self._block, tree, greedy)
        self.longest = self.most_steps
        if tree is not None and tree.depth > self.most_steps:
            raise InputError(f"tree: expected at most the block's depth {self.most_steps}, found {tree.depth}")
        most = drafter.side_head and drafter.side_head.candidates
        if tree is not None and most is not None and (widest := max(map(len, tree.children))) > most:
            raise InputError(f"tree: expected at most {most} siblings, the candidates of a guess, found {widest}")

    def most_fed(self, task: DraftTask) -> int:
        """Return the most positions that are fed at once."""
        return max(self.heads.config.block_size, most_positions(task))

    def make_feeder(self, task: DraftTask, block: int) -> StateFeeder:
        """Return what feeds the drafter, with all forwards in programs or none: one program feeds states and block."""
        # The last blocks reach beyond the length limit. Positions cut there would change all of a block's guesses.
        longest = task.max_length + self.heads.config.block_size
        return StateFeeder(self.draft_model, replace(task, compiled=self.in_programs, max_length=longest), block, block)

    @cached_property
    def most_steps(self) -> int:
        """The number of guesses: none takes a forward."""
        return self.heads.config.guesses

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes down to this depth, or the length of a chain."""
        return super().nodes(min(draft_length, self.most_steps))

    def logits_of(self, target: PreTrainedModel, text: WrittenText, depth: int) -> LogitsOfRounds:
        """Return the logits of the blocks of all rounds: see `draftsmith.medusa.block.blocks`."""
        return logits_of_blocks(target, self.heads, text)

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return None, because a guess depends on where its block begins."""
        return None

    def draft(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft with one forward over a block."""
        lengths = [min(k, self.most_steps) for k in draft_lengths]
        ends_B2 = torch.stack([text[-2:].expand(2) for text in texts])  # a text of one token counts twice
        if self.in_programs:
            return self._draft_in_program(texts, ends_B2, lengths)
        self.feeder.feed_unfed(texts)
        slots = self.heads.config.block_size
        hidden_BSH = self.feeder.model.feed(
            ends_B2[:, 1:].expand(-1, slots), self.feeder.lengths, visible=self.heads.seen_slots(ends_B2.device)
        )
        tree, drawn = self.shape(max(lengths)), self.draws and (self.tree is None or self.task.draw_siblings)
        logits_after = self._block.logits_after(tree, hidden_BSH, ends_B2, self.task.vocab_size)
        return draft_static_tree(
            tree, self.samplers, texts, lengths, self.generators, drawn, self.wants_confidence, logits_after
        )

    def _draft_in_program(
        self, texts: Sequence[Tensor], ends_B2: Tensor, draft_lengths: Sequence[int]
    ) -> list[Proposal]:
        """Feed the features that the cache lacks, and draft, in one call."""
        feeder, task, drawn = self.feeder, self.task, self.draws
        if feeder.model.is_empty or max(map(len, feeder.unfed)) > feeder.width:
            feeder.feed_unfed(texts, but=1)
        # One program for each tree and each kind of draw; `compute` compiles it at its first use.
        shape = self.shape(min(task.draft_length, self.most_steps))
        lacking = [len(states) for states in feeder.unfed]
        tokens, slots, further = feeder.take_block(texts)
        draws = make_draws(shape, task.vocab_size, self.temperature, self.generators, draft_lengths, ends_B2.device)
        outputs = feeder.model.compute(
            (shape.parents, drawn),
            lambda forward: BlockDraftForward(forward, shape, task.vocab_size, drawn),
            tokens,
            slots,
            max(lacking) + self.heads.config.block_size,
            [ends_B2, torch.tensor(lacking, device=ends_B2.device), draws],
            further,
        )
        return read_draft(outputs).drafts(shape, draft_lengths)
