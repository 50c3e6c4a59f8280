"""A target's MTP layers as a drafter of chains.

One layer drafts again and again: it is fed with the target's states, then with its own for drafted tokens, whose keys
the target's states overwrite later. Several layers are fed with one block of positions in turn: see `LayersFeeder`.

Shape suffixes: B rows, W positions of a block, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import Slots, pad_right
from draftsmith.decode.cache.features import collect_features, decoder_of
from draftsmith.decode.proposers.base import DraftTask, Proposal
from draftsmith.decode.replay.starts import LogitsOfRounds
from draftsmith.decode.replay.texts import Distributions, WrittenText, fixed_packing
from draftsmith.decode.sampling import Sampler, align_vocabulary
from draftsmith.medusa.mtp.heads import MtpHeads
from draftsmith.medusa.on_features import FeatureProposer, StateFeeder, StepFeeder, most_positions, pad_rows


class MtpProposer(FeatureProposer):
    """A proposer of chains from the MTP layers of a target (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

    Several layers draft at most one token each. `greedy` drafts the most likely tokens under sampling too: see
    `DraftModelProposer`.
    """

    def __init__(self, heads: MtpHeads, greedy: bool = False):
        super().__init__(heads, heads, None, greedy)
        self.longest = len(heads.layers) if len(heads.layers) > 1 else None

    def start(self, task: DraftTask) -> int:
        """Begin with empty caches."""
        self.heads.step = 0
        return super().start(task)

    def fits_programs(self, task: DraftTask) -> bool:
        """Return False: the library's layers run eagerly."""
        return False

    def make_feeder(self, task: DraftTask, block: int) -> StateFeeder:
        """Return what feeds the layers."""
        eager, most = replace(task, compiled=False), most_positions(task)
        if self.longest is None:
            return LayerFeeder(self.draft_model, eager, block, most)
        steps = min(task.draft_length, self.longest)
        return LayersFeeder(self.draft_model, eager, max(block, most) + steps, most + steps, steps)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row; nothing in a text's first round."""
        most = self.longest or max(draft_lengths)
        return super().propose(contexts, [min(k, most) for k in draft_lengths])

    def draft(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft after texts, at least one token for one of them."""
        drafts = super().draft(texts, draft_lengths)
        if isinstance(self.feeder, LayersFeeder):
            self.feeder.finish()
        return drafts

    def logits_of(self, target: PreTrainedModel, text: WrittenText, depth: int) -> LogitsOfRounds:
        """Return the logits by start and step, from one target forward and the steps of all rounds at once.

        After a prompt of P tokens, the round from s ≥ 1 drafts x_s, x_{s+1}, … It begins at position P + s − 2, the
        last with a state, and also sees x_{s−1}. Its step j guesses x_{s+j} after the text's own tokens.
        """
        if len(text) < 2:  # nothing is drafted
            return lambda first, end: iter(())
        heads, ids_1T = self.heads, text.sequence[None].to(target.device)
        # The round that drafts the text's last token begins two positions before it: no later state is needed.
        with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
            decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
            states = heads.fuse(features.pop().to(heads.device, heads.dtype))
            order = torch.arange(ids_1T.shape[1] - 2, device=heads.device)[None]
            embeddings, begin = heads.embed(ids_1T[:, 1:-1]), text.prompt_length - 2
            if self.longest is None:
                rounds = heads.rounds_of(embeddings, states, order)
                return lambda first, end: (
                    self._aligned(heads.head(step[0])) for step in rounds(begin + first, begin + end, depth)
                )
            steps = heads.unroll(embeddings, states, order, min(depth, len(text) - 1))
        return lambda first, end: (self._aligned(heads.head(step[0, begin + first : begin + end])) for step in steps)

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first step's distribution of each token, in a round that begins with that token.

        A text's second token, which no step drafts, gets a uniform distribution.
        """

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            # A row at a time: rows of other lengths need no mask then.
            hidden, heads = [], self.heads
            for ids_T, wanted_T in zip(ids_BT, wanted_BT, strict=True):
                ids_1T = ids_T[None, : int(wanted_T.nonzero().amax()) + 1] if wanted_T.any() else ids_T[None, :2]
                with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
                    decoder_of(target)(input_ids=ids_1T[:, :-1], use_cache=False)
                    states = heads.fuse(features.pop().to(heads.device, heads.dtype))
                    order = torch.arange(ids_1T.shape[1] - 1, device=heads.device)[None]
                    hidden.append(heads.unroll(heads.embed(ids_1T[:, 1:]), states, order, 1)[0][0])
            for start in range(1, ids_BT.shape[1], columns):
                at, rows = wanted_BT[:, start : start + columns].T.nonzero(as_tuple=True)
                at = at + start
                chosen = [hidden[row][max(place - 2, 0)] for row, place in zip(rows.tolist(), at.tolist(), strict=True)]
                logits = self._aligned(heads.head(torch.stack(chosen) if chosen else hidden[0][:0]))
                logits = logits.masked_fill((at < 2)[:, None].to(logits.device), 0.0)
                pairs = [] if sampler.context_free else zip(rows, at, strict=True)
                contexts = [ids_BT[row, :place] for row, place in pairs]
                yield sampler.probabilities(logits, contexts) if len(at) else logits

        return distributions

    def _aligned(self, logits: Tensor) -> Tensor:
        return align_vocabulary(logits, self.heads.config.vocab_size)


class LayerFeeder(StepFeeder):
    """Keeps one layer fed with the target's states, and with its own for drafted tokens."""

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of outputs, (B, F, V), and the outputs, which are the next step's states."""
        heads: MtpHeads = self.model.model  # type: ignore[assignment]
        return align_vocabulary(heads.head(output), self.vocab_size), output


class LayersFeeder(StateFeeder):
    """Feeds K layers in turn with the same positions of the texts, and with each layer's outputs the next one.

    Layer k sees token i + 1 + k at position i. In a round from T tokens the last K − 1 positions see drafted tokens in
    some layers. So they stay unfed: the next round feeds them again, with the text's tokens.
    """

    def __init__(self, model: PreTrainedModel, task: DraftTask, block: int, width: int, steps: int):
        super().__init__(model, task, block, width)
        self.steps, self.fed = steps, 0  # K, and how many layers have the last block

    def feed_texts(self, texts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the first layer with the positions that have states now; return its logits after each text, (B, 1, V).

        Positions that see only tokens of the text in all layers are fed to all of them first, if there are many.
        """
        again = self.steps - 1
        if self.model.is_empty or max(map(len, self.unfed)) > self.width:
            self._settle(texts, [max(0, len(features_LF) - max(1, again)) for features_LF in self.unfed])
        self.tokens, self.slots, further = self.block_from(texts, 0, max(map(len, self.unfed)))
        self.ends = torch.tensor([len(features_LF) for features_LF in self.unfed], device=self.device)[:, None] - 1
        self.unfed = [features_LF[max(0, len(features_LF) - again) :] for features_LF in self.unfed]
        self.states, self.fed = self._heads.fuse(further["features"]), 0
        return self._feed_next()

    def feed_nodes(self, tokens: Tensor, offset: int, visible: Tensor | None, depth: int) -> Tensor:
        """Feed the next layer with the block and the drafted tokens, (B, 1); return its logits, (B, 1, V)."""
        # Each position sees the token after the one that it saw in the layer before; the last one, the new token.
        self.tokens = torch.nn.functional.pad(self.tokens[:, 1:], (0, 1)).scatter(1, self.ends, tokens)
        return self._feed_next()

    def finish(self) -> None:
        """Feed the layers that drafted nothing, so that all layers have the same positions."""
        while self.fed < self.steps:
            # Any token will do for the last position, which will be fed again.
            self.feed_nodes(self.tokens.take_along_dim(self.ends, dim=1), self.fed, None, 0)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows."""
        super().select(rows)
        self.states = None

    def _feed_next(self) -> Tensor:
        assert self.states is not None
        self.states = self._feed_layer(self.fed, self.tokens, self.slots, self.states)
        self.fed += 1
        last_B1H = self.states.take_along_dim(self.ends[..., None], dim=1)
        return align_vocabulary(self._heads.head(last_B1H), self.vocab_size)

    def _settle(self, texts: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Feed all layers with the first unfed positions of each row, `counts`, whose tokens are all the text's."""
        whole, most = self.model.is_empty, max(counts)
        block = most if whole else self.width
        for first in range(0, most, max(1, block)):
            width = min(block, most - first)
            # A row with fewer positions gets padding, whose slots it overwrites later.
            at = [min(first, count) for count in counts]
            rows = [s[i:count][:width] for s, i, count in zip(self.unfed, at, counts, strict=True)]
            starts = [end - len(s) + i for end, s, i in zip(self.lengths.host, self.unfed, at, strict=True)]
            states, slots = self._heads.fuse(pad_rows(rows, width)), Slots(starts, self.device)
            for layer in range(self.steps):
                parts = zip(texts, starts, rows, strict=True)
                tokens = [text[start + 1 + layer :][: len(row)] for text, start, row in parts]
                states = self._feed_layer(layer, pad_right(tokens, width), slots, states, whole)
        self.unfed = [features_LF[count:] for features_LF, count in zip(self.unfed, counts, strict=True)]

    def _feed_layer(self, layer: int, tokens: Tensor, slots: Slots, states: Tensor, whole: bool = False) -> Tensor:
        self._heads.step, further = layer, {"states": states}
        if whole:
            return self.model.prefill(tokens, tokens.shape[1], further)
        return self.model.feed(tokens, slots, further=further)

    @property
    def _heads(self) -> MtpHeads:
        return self.model.model  # type: ignore[return-value]
