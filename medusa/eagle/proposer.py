"""EAGLE-3 heads as a drafter: one layer, with a cache of its own, that sees the target's features.

Place i holds token i + 1 beside a state of token i (`medusa.eagle.heads`): a text of T tokens, of which the target has
not seen the last, has T − 1 places with features, and the last of them gives the first drafted token's logits. Drafted
tokens lie behind it, each beside what the layer gave for its parent. Once verified, accepted places are fed again, now
beside the target's features, into the same slots: no key that the layer made of its own states stays.

Shape suffixes: B rows, L places, F nodes fed together, N nodes fed so far, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.decode.cache import Places, padded
from draftsmith.decode.cache.attention import in_groups
from draftsmith.decode.cache.features import collected
from draftsmith.decode.cache.kernels import fused_attention
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.proposers.draft_tree import DynamicTree, TreeProposer
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start, replay_by_start_ranks
from draftsmith.decode.replay.ranks import MOST_RANKS, TextRanks
from draftsmith.decode.replay.texts import Distributions, WrittenText
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Tree
from draftsmith.medusa.eagle.heads import EagleConfig, EagleHeads
from draftsmith.medusa.eagle.replay import eagle_acceptance, eagle_ranks
from draftsmith.medusa.seen import KeysValues


class EagleModel(PreTrainedModel):
    """The heads in the form of a causal LM, for `CachedModel`: their layer is its only one.

    In place of logits it gives what the heads give, (B, L, 2H): the next step's states, and what the head sees.
    """

    config_class = EagleConfig

    def __init__(self, heads: EagleHeads):
        super().__init__(heads.config)
        self.heads = heads
        self.embed: nn.Module | None = None  # the target's

    def draft_for(self, target: PreTrainedModel) -> None:
        """See the embeddings of this target.

        Raises:
            InputError: heads of another width, vocabulary or depth.
        """
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
        """Take a step, and keep the keys and values of these places.

        Args:
            input_ids: the tokens behind these places, (B, L) int64.
            states: of the tokens at these places, (B, L, H).
            position_ids: (B or 1, L) int64.
            past_key_values: the cache.
            attention_mask: additive, (B or 1, 1, L, S).
            use_cache: always.
            logits_to_keep: return so many last places alone, or these places; 0 for all.
            output_hidden_states: never.
        """

        def attend(queries: Tensor, own: KeysValues) -> Tensor:
            seen = KeysValues(*past_key_values.update(own.keys, own.values, 0))
            causal = attention_mask is None and queries.shape[2] > 1  # one place sees all that are kept
            if causal:
                return fused_attention(queries, *seen, is_causal=True)
            return in_groups(queries, *seen, attention_mask)

        assert self.embed is not None
        embeddings = self.embed(input_ids).to(states.device, states.dtype)
        step = self.heads(embeddings, states, position_ids, attend=attend)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=torch.cat([step.states, step.hidden], dim=-1)[:, kept])


class EagleProposer(TreeProposer, DraftModelProposer):
    """Drafts chains or trees with EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840, section 3).

    The first round of a text has no features to draft from: it drafts nothing, and emits the token that the prompt's
    forward gives.

    Args:
        heads: of this target.
        tree: None drafts chains; a `Tree` has one shape for every round, whose siblings are the most likely tokens at
            T=0 and drawn without replacement under sampling; a `DynamicTree` grows (EAGLE-2, arXiv 2406.16858).
        greedy: draft the most likely tokens under sampling too: see `DraftModelProposer`.
    """

    _without = 1

    def __init__(self, heads: EagleHeads, tree: Tree | DynamicTree | None = None, greedy: bool = False):
        self.heads, self.tree, self.greedy, self.stop = heads.eval(), tree, greedy, None
        self._layer = EagleModel(heads).eval()
        self.draft_model: PreTrainedModel = self._layer
        self.wants_features = heads.layer_ids

    def with_tree(self, tree: Tree) -> Self:
        """Return the same heads with another tree."""
        return type(self)(self.heads, tree)

    def ranks(
        self, target: PreTrainedModel, sequence: Tensor, prompt_length: int, hidden_NH: Tensor | None = None
    ) -> TextRanks:
        """Return the ranks of a text's tokens among the heads' logits."""
        text = WrittenText(sequence, prompt_length, len(sequence) - prompt_length)
        return eagle_ranks(target, self.heads, text, Sampler.of(0), [MOST_RANKS] * self.depth)

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache and no features.

        Raises:
            InputError: heads that do not fit the target, or a tree with more siblings than they know tokens.
        """
        if task.target is None:
            raise InputError("eagle: expected the target that the heads were trained on, found none")
        self._layer.draft_for(task.target)
        self._block = max(task.draft_length, task.round_length) + 1  # places that a round gives features to at most
        largest = super().start(task)
        vocabulary, widest = self.heads.config.draft_vocab_size, self._widest(task.draft_length)
        if widest > vocabulary:
            raise InputError(
                f"tree: expected at most {vocabulary} siblings, as many as the heads have tokens, found {widest}"
            )
        self._states: list[Tensor] = []  # of each row, (L, H): fused, and not fed yet
        return largest

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row; nothing in a text's first round."""
        if not self._states:
            return [Proposal(contexts[0].new_zeros(0), None, Tree.chain(0)) for _ in contexts]
        return super().propose(contexts, draft_lengths)

    @torch.inference_mode()
    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Fuse the features of what stands; the next draft feeds it, over what was drafted."""
        heads = self.heads
        places = [outcome.features for outcome in outcomes if outcome.features is not None]
        assert len(places) == len(outcomes), "the target's features"
        fused_BLH = heads.fuse(pad_sequence(places, batch_first=True).to(heads.device, heads.dtype))
        states = []
        for row, outcome in enumerate(outcomes):
            parts = [self._states[row]] if self._states else []
            if outcome.prompt_features is not None:
                parts.append(heads.fuse(outcome.prompt_features.to(heads.device, heads.dtype)))
            parts.append(fused_BLH[row, : len(places[row])])
            states.append(torch.cat([part for part in parts if len(part)]) if len(parts) > 1 else parts[0])
        self._states = states

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows alone."""
        super().select(rows)
        self._states = [self._states[row] for row in rows]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse drafts that grow, and under sampling trees, whose siblings' draws are not known."""
        return super().replay_refusal(do_sample and not (isinstance(self.tree, Tree) and self.tree.is_chain))

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay chains, and at T=0 trees of one shape: see `draftsmith.medusa.eagle.replay`."""
        target, heads, depth, sampler = task.target, self.heads, task.draft_length, task.sampler
        assert target is not None
        heads.check_fits(target)
        tree = self.tree.pruned(depth)[0] if isinstance(self.tree, Tree) else Tree.chain(depth)
        if distributions is not None:
            each = [
                eagle_acceptance(target, heads, text, sampler, p_NV, tree.depth, self.greedy)
                for text, p_NV in zip(texts, distributions, strict=True)
            ]
            overlaps = [common_NK[:, 0][drafted_NK[:, 0]] for _, common_NK, drafted_NK in each]
            return replay_by_start(texts, [a_NK for a_NK, _, _ in each], overlaps, first=1)
        # Behind the tree the most likely tokens, for servers that draft chains.
        widths, chains = [*tree.widths, *[1] * (depth - tree.depth)], self.tree is None
        ranks = [eagle_ranks(target, heads, text, sampler, widths, chains) for text in texts]
        return replay_by_start_ranks(ranks, tree, [r.agreement for r in ranks])

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first step's distribution of each token: what is drafted in a round that begins with that token.

        It sees the target's features up to the token before the last. A text's second token, which no step drafts,
        has a flat one: the test asks only that q is known from the tokens before.
        """
        heads = self.heads

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            with collected(target, heads.layer_ids) as features:
                target.get_decoder()(input_ids=ids_BT[:, :-1], use_cache=False)
            embed: Any = target.get_input_embeddings()
            embeddings, seen = (part.to(heads.device, heads.dtype) for part in (embed(ids_BT[:, 1:]), features.pop()))
            places = torch.arange(ids_BT.shape[1] - 1, device=heads.device)[None]
            hidden_BLH = heads(embeddings, heads.fuse(seen), places).hidden
            for start in range(1, ids_BT.shape[1], columns):
                at, rows = wanted_BT[:, start : start + columns].T.nonzero(as_tuple=True)
                at = at + start
                logits = heads.widened(heads.head(hidden_BLH[rows, (at - 2).clamp(min=0)]))
                logits = logits.masked_fill((at < 2)[:, None], 0.0)  # the first place has seen that token
                pairs = [] if sampler.context_free else zip(rows, at, strict=True)
                contexts = [ids_BT[row, :place] for row, place in pairs]
                yield sampler.probabilities(logits, contexts) if len(at) else logits

        return distributions

    def _widest(self, draft_length: int) -> int:
        """Return the most siblings of a draft."""
        if isinstance(self.tree, DynamicTree):
            return self.tree.width
        return 1 if self.tree is None else max(map(len, self.tree.pruned(draft_length)[0].children))

    def _begin(self, task: DraftTask, block: int) -> None:
        super()._begin(task, max(block, self._block))

    def _feed_texts(self, contexts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the places that have features now; return the logits after each text, (B, 1, V).

        Rows that have fewer are padded: what lies behind their own is overwritten. At most a block of places goes in at
        once, for there is no room for more behind the longest text: several where rounds drafted nothing.
        """
        if self._model.is_empty:
            self._prefill(contexts)
        lacking = [len(states_LH) for states_LH in self._states]
        width = min(max(lacking), self._block)
        last_BH: Tensor | None = None
        for first in range(0, max(lacking), width):
            own = [min(first, count) for count in lacking]  # a row that has no more goes on behind its text
            tokens = [c[len(c) - count + at :][:width] for c, count, at in zip(contexts, lacking, own, strict=True)]
            states = [s[at : at + width] for s, at in zip(self._states, own, strict=True)]
            starts = [end - count + at for end, count, at in zip(self._lengths.host, lacking, own, strict=True)]
            given = self._model.feed(padded(tokens, width), starts, further={"states": _stacked(states, width)})
            ends = [count - 1 - first for count in lacking]
            if len(set(ends)) == 1 and 0 <= ends[0] < width:
                last_BH = given[:, ends[0]]
                continue
            places = torch.tensor(ends, device=given.device)
            here = given.take_along_dim(places.clamp(0, width - 1)[:, None, None], dim=1)[:, 0]
            inside = (places >= 0) & (places < width)
            last_BH = here if last_BH is None else here.where(inside[:, None], last_BH)
        assert last_BH is not None
        self._states = [states_LH[:0] for states_LH in self._states]
        logits, self._seen = self._read(last_BH[:, None])
        return logits

    def _can_draft_in_programs(self) -> bool:
        """As of draft models, where one program drafts all."""
        whole = self._task.fixed_length or self.tree is not None
        return super()._can_draft_in_programs() and whole and self._task.draft_length <= self._steps

    def _draft_in_programs(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """As of draft models, where all places that have features go in at once."""
        if not self._model.is_empty and max(map(len, self._states)) > self._block:
            return self._draft_by_steps(texts, draft_lengths)
        return super()._draft_in_programs(texts, draft_lengths)

    def _unfed_block(self, texts: Sequence[Tensor]) -> tuple[Tensor, Places, Tensor, dict[str, Tensor]]:
        """Return the places that have features now."""
        if self._model.is_empty:
            self._prefill(texts)
        lacking, device = [len(states_LH) for states_LH in self._states], texts[0].device
        width = max(lacking)
        tokens = padded([text[len(text) - count :] for text, count in zip(texts, lacking, strict=True)], width)
        states = _stacked(self._states, width)
        starts = Places([end - count for end, count in zip(self._lengths.host, lacking, strict=True)], device)
        self._states = [states_LH[:0] for states_LH in self._states]
        return tokens, starts, torch.tensor(lacking, device=device) - 1, {"states": states}

    def _columns(self, block: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return all columns: rows end at different ones."""
        return torch.arange(block.shape[1], device=block.device), ends

    def _prefill(self, contexts: Sequence[Tensor]) -> None:
        """Feed all places of the first texts but the last one, which every row feeds at its own."""
        longest = max(map(len, self._states)) - 1
        if longest:
            tokens = padded([context[1:-1] for context in contexts], longest)
            states = _stacked([states_LH[:-1] for states_LH in self._states], longest)
            self._model.prefill(tokens, further={"states": states})
        self._states = [states_LH[-1:] for states_LH in self._states]

    def _feed_nodes(self, tokens: Tensor, behind: int, visible: Tensor | None, depth: int) -> Tensor:
        """Feed nodes beside what the layer gave for their parents: see `DraftModelProposer`."""
        starts, count = self._lengths + behind, tokens.shape[1]
        if visible is None:
            given = self._model.feed(tokens, starts, further={"states": self._seen})
            logits, self._seen = self._read(given)
            return logits
        visible = visible.to(tokens.device)
        # Of a node's ancestors the last one fed is its parent; 0 is the text's last place.
        order_N = torch.arange(1, behind + 1, device=tokens.device)
        parents_F = (visible[..., :behind] * order_N).amax(-1) if behind else torch.zeros_like(visible[..., 0]).long()
        states_BFH = self._seen.take_along_dim(parents_F.expand(len(tokens), count)[..., None], dim=1)
        depths = torch.full((count,), depth - 1 - behind, device=tokens.device)
        given = self._model.feed(tokens, starts, visible=visible, depths=depths, further={"states": states_BFH})
        logits, states_BFH = self._read(given)
        self._seen = torch.cat([self._seen, states_BFH], dim=1)
        return logits

    def _read(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, (B, F, V), and the states of what the layer gave, (B, F, 2H)."""
        states_BFH, hidden_BFH = given.chunk(2, dim=-1)
        return self._aligned(self.heads.widened(self.heads.lm_head(hidden_BFH))), states_BFH


def _stacked(rows: Sequence[Tensor], width: int) -> Tensor:
    """Return rows of at most `width` states together, (B, width, H), with zeros behind them."""
    return torch.stack([nn.functional.pad(states, (0, 0, 0, width - len(states))) for states in rows])
