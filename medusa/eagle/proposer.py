"""EAGLE-3 heads as a drafter: one layer that sees the target's features, with a cache of its own.

Position i holds token i + 1 and a state of token i (`medusa.eagle.heads`). In a text of T tokens the target has not
seen the last one, so T − 1 positions have features, and the last of them gives the first drafted token's logits.
Drafted tokens follow, each with the layer's output for its parent. After verification, accepted positions are fed again
into the same slots, now with the target's features: no key made from the layer's own states stays.

Shape suffixes: B rows, L positions, F nodes fed together, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache import own_positions
from draftsmith.decode.cache.attention import in_groups
from draftsmith.decode.cache.features import collect_features, decoder_of
from draftsmith.decode.cache.kernels import fused_attention
from draftsmith.decode.proposers.base import DraftTask
from draftsmith.decode.replay.starts import LogitsOfRounds
from draftsmith.decode.replay.texts import Distributions, WrittenText, fixed_packing, lengths_to_read
from draftsmith.decode.sampling import Sampler, align_vocabulary
from draftsmith.decode.tree import Tree
from draftsmith.medusa.eagle.heads import EagleConfig, EagleHeads
from draftsmith.medusa.on_features import FeatureProposer, StepFeeder, most_positions
from draftsmith.medusa.round_attention import windowed_attention
from draftsmith.medusa.target_states import KeysValues


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
        position_ids: Tensor,
        past_key_values: Any,
        states: Tensor | None = None,
        features: Tensor | None = None,
        attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        """Take a step on the next tokens, `input_ids` (B, L), and these positions' states; extend the cache.

        `states` are the heads' own, (B, L, H); otherwise those of the target's `features`, (B, L, F).
        `attention_mask` is additive, (B or 1, 1, L, S), by the kind of the layer. `logits_to_keep` keeps the last
        positions, or those it lists.
        """
        kind, window = self.config.layer_types[0], self.config.window_of(0)
        mask = attention_mask[kind] if isinstance(attention_mask, Mapping) else attention_mask

        def attend(queries: Tensor, own: KeysValues) -> Tensor:
            keys_values = KeysValues(*past_key_values.update(own.keys, own.values, 0))
            # A single position sees all keys that the cache returns: it needs no mask.
            if mask is not None or queries.shape[2] == 1:
                return in_groups(queries, *keys_values, mask)
            if window is not None:
                return windowed_attention(queries, keys_values, window)
            return fused_attention(queries, *keys_values, is_causal=True)

        if features is not None:
            states = self.heads.fuse(features)
        assert self.embed is not None and states is not None
        # A step needs both outputs: the states feed the next step, and the head's inputs give its logits.
        embeddings = self.embed(input_ids).to(states.device, states.dtype)
        step = self.heads(embeddings, states, position_ids, attend=attend)
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=torch.cat([step.states, step.hidden], dim=-1)[:, columns])


class EagleProposer(FeatureProposer):
    """A proposer of chains or trees from EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840, section 3).

    Args:
        tree: None drafts chains. A `Tree` has one shape for every round; its siblings are the most likely tokens at
            T=0, and drawn without replacement under sampling.
    """

    def __init__(self, heads: EagleHeads, tree: Tree | None = None, greedy: bool = False):
        super().__init__(heads, EagleModel(heads), tree, greedy)

    def make_feeder(self, task: DraftTask, block: int) -> "EagleFeeder":
        """Return what feeds the heads."""
        return EagleFeeder(self.draft_model, task, block, most_positions(task))

    def fits_programs(self, task: DraftTask) -> bool:
        """Return whether one program can draft all steps."""
        return super().fits_programs(task) and task.draft_length <= self.most_steps

    def logits_of(self, target: PreTrainedModel, text: WrittenText, depth: int) -> LogitsOfRounds:
        """Return the logits by start and step, from one target forward and the K = `depth` steps of all rounds.

        After a prompt of P tokens, the round from s ≥ 1 drafts x_s, x_{s+1}, … It begins at position P + s − 2, the
        last with features, and also sees the embedding of x_{s−1}. Its step j guesses x_{s+j} after the text's own
        tokens: a drafted token only counts if those before it were accepted.
        """
        if len(text) < 2:  # nothing is drafted
            return lambda first, end: iter(())
        heads, ids_1T, embed = self.heads, text.sequence[None].to(target.device), target.get_input_embeddings()
        # The round that drafts the text's last token begins two positions before it: no later state is needed.
        with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
            decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
        inputs = (part.to(heads.device, heads.dtype) for part in (embed(ids_1T[:, 1:-1]), features.pop()))
        rounds = heads.rounds_of(*inputs, torch.arange(ids_1T.shape[1] - 2, device=heads.device)[None])
        begin = text.prompt_length - 2
        # The later steps of all rounds at once would take K times the memory of the text's states.
        return lambda first, end: (
            heads.widened(heads.head(hidden[0])) for hidden in rounds(begin + first, begin + end, depth)
        )

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first step's distribution of each token, in a round that begins with that token.

        The step sees the target's features up to the token before the last. A text's second token, which no step
        drafts, gets a uniform distribution: the test of losslessness only needs a q that depends on earlier tokens.
        """
        heads = self.heads

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            lengths, order_T = lengths_to_read(wanted_BT), torch.arange(ids_BT.shape[1] - 1, device=heads.device)
            positions = own_positions(target, lengths, ids_BT[:, :-1])
            with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
                # Rows are single texts: the library need not look for packed ones, which would wait for the device.
                decoder_of(target)(input_ids=ids_BT[:, :-1], use_cache=False, **positions)
            embed: Any = target.get_input_embeddings()
            embeddings = embed(ids_BT[:, 1:]).to(heads.device, heads.dtype)
            states = heads.fuse(features.pop().to(heads.device, heads.dtype))
            hidden_BLH = heads(embeddings, states, order_T[None]).hidden
            for start in range(1, ids_BT.shape[1], columns):
                at, rows = wanted_BT[:, start : start + columns].T.nonzero(as_tuple=True)
                at = at + start
                logits = heads.widened(heads.head(hidden_BLH[rows, (at - 2).clamp(min=0)]))
                logits = logits.masked_fill((at < 2)[:, None], 0.0)  # the first position has already seen that token
                pairs = [] if sampler.context_free else zip(rows, at, strict=True)
                contexts = [ids_BT[row, :index] for row, index in pairs]
                yield sampler.probabilities(logits, contexts) if len(at) else logits

        return distributions


class EagleFeeder(StepFeeder):
    """Keeps the heads fed with the target's states, and with their own for drafted tokens."""

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Split the layer's outputs, (B, F, 2H), into logits, (B, F, V), and the next states, (B, F, H)."""
        states_BFH, hidden_BFH = output.chunk(2, dim=-1)
        heads: Any = self.model.model.heads
        return align_vocabulary(heads.widened(heads.lm_head(hidden_BFH)), self.vocab_size), states_BFH
