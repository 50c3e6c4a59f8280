"""EAGLE-3 heads as a drafter: one layer that sees the target's features, with a cache of its own.

Place i holds token i + 1 and a state of token i (`medusa.eagle.heads`). In a text of T tokens the target has not seen
the last one, so T − 1 places have features, and the last of them gives the first drafted token's logits. Drafted tokens
follow, each with the layer's output for its parent. After verification, accepted places are fed again into the same
slots, now with the target's features: no key made from the layer's own states stays.

Shape suffixes: B rows, L places, F nodes fed together, N nodes fed so far, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache import Places, own_positions, padded
from draftsmith.decode.cache.attention import in_groups
from draftsmith.decode.cache.features import collected, decoder_of
from draftsmith.decode.cache.kernels import fused_attention
from draftsmith.decode.proposers.base import DraftTask, Proposal
from draftsmith.decode.proposers.draft_tree import DynamicTree
from draftsmith.decode.replay.starts import LogitsAt
from draftsmith.decode.replay.texts import Distributions, WrittenText, fixed_packing, lengths_of
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa.eagle.heads import EagleConfig, EagleHeads
from draftsmith.medusa.eagle.unrolled import logits_of_steps
from draftsmith.medusa.on_features import FeatureProposer, stacked
from draftsmith.medusa.seen import KeysValues


class EagleModel(PreTrainedModel):
    """The heads in the form of a causal LM, for `CachedModel`: their layer is its only one.

    In place of logits it returns the heads' outputs, (B, L, 2H): the next step's states, and the head's inputs.
    """

    config_class = EagleConfig

    def __init__(self, heads: EagleHeads):
        super().__init__(heads.config)
        self.heads = heads
        self.embed: nn.Module | None = None  # the target's

    def draft_for(self, target: PreTrainedModel) -> None:
        """Use this target's embeddings from here on, or raise an InputError if it does not fit."""
        self.heads.check_fits(target)
        self.embed = target.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Take a step on the next tokens, `input_ids` (B, L), and these places' states, (B, L, H); extend the cache.

        `attention_mask` is additive, (B or 1, 1, L, S). `logits_to_keep` keeps the last places, or those it lists.
        """

        def attend(queries: Tensor, own: KeysValues) -> Tensor:
            keys_values = KeysValues(*past_key_values.update(own.keys, own.values, 0))
            # A single place sees all keys in the cache: it needs no mask.
            if attention_mask is None and queries.shape[2] > 1:
                return fused_attention(queries, *keys_values, is_causal=True)
            return in_groups(queries, *keys_values, attention_mask)

        assert self.embed is not None
        # A step needs both outputs: the states feed the next step, and the head's inputs give its logits.
        embeddings = self.embed(input_ids).to(states.device, states.dtype)
        step = self.heads(embeddings, states, position_ids, attend=attend)
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=torch.cat([step.states, step.hidden], dim=-1)[:, columns])


class EagleProposer(FeatureProposer):
    """A proposer of chains or trees from EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840, section 3).

    Args:
        heads: EAGLE-3 heads of the target.
        tree: None drafts chains. A `Tree` has one shape for every round; its siblings are the most likely tokens at
            T=0, and drawn without replacement under sampling. A `DynamicTree` grows (EAGLE-2, arXiv 2406.16858).
        greedy: draft the most likely tokens under sampling too: see `DraftModelProposer`.
    """

    def __init__(self, heads: EagleHeads, tree: Tree | DynamicTree | None = None, greedy: bool = False):
        super().__init__(heads, EagleModel(heads), tree, greedy)

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache and no features."""
        self.fit(task)
        self._block = max(task.draft_length, task.round_length) + 1  # the most places that a round gives features to
        return super().start(task)

    def logits_at(self, target: PreTrainedModel, text: WrittenText, depth: int) -> LogitsAt:
        """Return the logits of K unrolled steps: see `draftsmith.medusa.eagle.unrolled`."""
        return logits_of_steps(target, self.heads, text, depth)

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first step's distribution of each token, in a round that begins with that token.

        The step sees the target's features up to the token before the last. A text's second token, which no step
        drafts, gets a uniform distribution: the test of losslessness only needs a q that depends on earlier tokens.
        """
        heads = self.heads

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            lengths, places_T = lengths_of(wanted_BT), torch.arange(ids_BT.shape[1] - 1, device=heads.device)
            positions = own_positions(target, lengths, ids_BT[:, :-1])
            with collected(target, heads.layer_ids) as features, fixed_packing(False):
                # Rows are single texts: the library need not look for packed ones, which would wait for the device.
                decoder_of(target)(input_ids=ids_BT[:, :-1], use_cache=False, **positions)
            embed: Any = target.get_input_embeddings()
            embeddings = embed(ids_BT[:, 1:]).to(heads.device, heads.dtype)
            places = own_positions(heads, lengths, embeddings[..., 0]).get("position_ids", places_T[None])
            hidden_BLH = heads(embeddings, heads.fuse(features.pop().to(heads.device, heads.dtype)), places).hidden
            for start in range(1, ids_BT.shape[1], columns):
                at, rows = wanted_BT[:, start : start + columns].T.nonzero(as_tuple=True)
                at = at + start
                logits = heads.widened(heads.head(hidden_BLH[rows, (at - 2).clamp(min=0)]))
                logits = logits.masked_fill((at < 2)[:, None], 0.0)  # the first place has already seen that token
                pairs = [] if sampler.context_free else zip(rows, at, strict=True)
                contexts = [ids_BT[row, :place] for row, place in pairs]
                yield sampler.probabilities(logits, contexts) if len(at) else logits

        return distributions

    def _begin(self, task: DraftTask, block: int) -> None:
        super()._begin(task, max(block, self._block))

    def _feed_texts(self, contexts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the places that have features now; return the logits after each text, (B, 1, V).

        Shorter rows are padded; the padding's slots are overwritten later. At most `_block` places are fed at once,
        because no slots beyond that are free after the longest text; rounds without drafts leave several such blocks.
        """
        if self._model.is_empty:
            self._prefill(contexts)
        counts = [len(states_LH) for states_LH in self._states]
        width = min(max(counts), self._block)
        last_BH: Tensor | None = None
        for first in range(0, max(counts), width):
            begins = [min(first, count) for count in counts]  # a finished row continues after its text
            tokens = [c[len(c) - count + at :][:width] for c, count, at in zip(contexts, counts, begins, strict=True)]
            states = [s[at : at + width] for s, at in zip(self._states, begins, strict=True)]
            starts = [end - count + at for end, count, at in zip(self._lengths.host, counts, begins, strict=True)]
            outputs = self._model.feed(padded(tokens, width), starts, further={"states": stacked(states, width)})
            ends = [count - 1 - first for count in counts]
            if len(set(ends)) == 1 and 0 <= ends[0] < width:
                last_BH = outputs[:, ends[0]]
                continue
            # Each row's last place is in one of the blocks: take it from there.
            places = torch.tensor(ends, device=outputs.device)
            here = outputs.take_along_dim(places.clamp(0, width - 1)[:, None, None], dim=1)[:, 0]
            inside = (places >= 0) & (places < width)
            last_BH = here if last_BH is None else here.where(inside[:, None], last_BH)
        assert last_BH is not None
        self._states = [states_LH[:0] for states_LH in self._states]
        logits, self._seen = self._read(last_BH[:, None])
        return logits

    def _can_draft_in_programs(self) -> bool:
        """Return whether one program can draft all steps."""
        one_shape = self._task.fixed_length or self.tree is not None
        return super()._can_draft_in_programs() and one_shape and self._task.draft_length <= self._steps

    def _draft_in_programs(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft in programs if all places that have features fit in one block; else step by step."""
        if not self._model.is_empty and max(map(len, self._states)) > self._block:
            return self._draft_by_steps(texts, draft_lengths)
        return super()._draft_in_programs(texts, draft_lengths)

    def _unfed_block(self, texts: Sequence[Tensor]) -> tuple[Tensor, Places, Tensor, dict[str, Tensor]]:
        """Return the places that have features now, as one block."""
        if self._model.is_empty:
            self._prefill(texts)
        counts, device = [len(states_LH) for states_LH in self._states], texts[0].device
        width = max(counts)
        tokens = padded([text[len(text) - count :] for text, count in zip(texts, counts, strict=True)], width)
        states = stacked(self._states, width)
        starts = Places([end - count for end, count in zip(self._lengths.host, counts, strict=True)], device)
        self._states = [states_LH[:0] for states_LH in self._states]
        return tokens, starts, torch.tensor(counts, device=device) - 1, {"states": states}

    def _columns(self, block: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return all columns, because rows end at different ones."""
        return torch.arange(block.shape[1], device=block.device), ends

    def _prefill(self, contexts: Sequence[Tensor]) -> None:
        """Feed all places of the first texts except the last, which each row feeds at its own slot."""
        longest = max(map(len, self._states)) - 1
        if longest:
            tokens = padded([context[1:-1] for context in contexts], longest)
            states = stacked([states_LH[:-1] for states_LH in self._states], longest)
            self._model.prefill(tokens, further={"states": states})
        self._states = [states_LH[-1:] for states_LH in self._states]

    def _feed_nodes(self, tokens: Tensor, fed: int, visible: Tensor | None, depth: int) -> Tensor:
        """Feed nodes with the layer's outputs for their parents: see `DraftModelProposer`."""
        starts, count = self._lengths + fed, tokens.shape[1]
        if visible is None:
            outputs = self._model.feed(tokens, starts, further={"states": self._seen})
            logits, self._seen = self._read(outputs)
            return logits
        visible = visible.to(tokens.device)
        # A node's parent is the last of its ancestors that was fed; 0 is the text's last place.
        order_N = torch.arange(1, fed + 1, device=tokens.device)
        parents_F = (visible[..., :fed] * order_N).amax(-1) if fed else torch.zeros_like(visible[..., 0]).long()
        states_BFH = self._seen.take_along_dim(parents_F.expand(len(tokens), count)[..., None], dim=1)
        depths = torch.full((count,), depth - 1 - fed, device=tokens.device)
        outputs = self._model.feed(tokens, starts, visible=visible, depths=depths, further={"states": states_BFH})
        logits, states_BFH = self._read(outputs)
        self._seen = torch.cat([self._seen, states_BFH], dim=1)
        return logits

    def _read(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Split the layer's outputs, (B, F, 2H), into logits, (B, F, V), and the next states, (B, F, H)."""
        states_BFH, hidden_BFH = outputs.chunk(2, dim=-1)
        return self._aligned(self.heads.widened(self.heads.lm_head(hidden_BFH))), states_BFH
