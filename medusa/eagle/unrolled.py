"""The K steps of all rounds at once: the outputs of heads if each position begins a round (EAGLE-3, section 3.2).

A round that begins at position s knows the target's features of positions up to s. Its step 0 is the layer at position
s, as in decoding. Its step k is the layer at position s + k, on the state of step k − 1 and the embedding of the text's
next token. It attends to the keys that step 0 made at the positions up to s, and to those that steps 1 … k of the same
round made, one each. A decoder whose drafts are all accepted computes the same, and so does training: the paper's
training-time test.

Tensors of step k have an entry for each round, not for each position: entry s is the round that begins at s. So all
steps see the keys of step 0 through the same causal mask, and the key of step j is the entry with the same index.

`draftsmith plan` runs these functions on tensors without data.

Shape suffixes: B rows, T positions, S = T − k rounds of a step, N chosen positions, K steps, F features, H hidden.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collect_features, decoder_of
from draftsmith.decode.cache.kernels import computing_dtype
from draftsmith.decode.replay.starts import LogitsOfRounds
from draftsmith.decode.replay.texts import WrittenText, fixed_packing
from draftsmith.medusa.eagle.heads import EagleHeads, Step
from draftsmith.medusa.round_attention import Rounds, same_text
from draftsmith.medusa.target_states import TargetStates
from draftsmith.train.job.flops import Work


def logits_of_steps(target: PreTrainedModel, heads: EagleHeads, text: WrittenText, depth: int) -> LogitsOfRounds:
    """Return the heads' logits by start and step for replay, from one target forward and K = `depth` steps.

    After a prompt of P tokens, the round from s ≥ 1 begins at position P + s − 2, the last one with features, and sees
    the embedding of x_{s−1}. Its step j guesses x_{s+j} from the text's own tokens, because a draft only counts if
    those before it were accepted.
    """
    if len(text) < 2:  # nothing is drafted
        return lambda first, end: iter(())
    ids_1T = text.sequence[None].to(target.device)
    # The last position that guesses a token of the text is at its last token but two.
    with collect_features(target, heads.layer_ids) as features, fixed_packing(False):
        decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
    embed: Any = target.get_input_embeddings()
    embeddings, positions = embed(ids_1T[:, 1:-1]), torch.arange(ids_1T.shape[1] - 2, device=heads.device)[None]
    embeddings, features_BTF = (part.to(heads.device, heads.dtype) for part in (embeddings, features.pop()))
    rounds, begin = UnrolledRounds(heads, embeddings, features_BTF, positions), text.prompt_length - 2

    def logits_of(first: int, end: int) -> Iterator[Tensor]:
        # The later steps of all rounds at once would take K times the memory of the text's states.
        for step in rounds.steps(begin + first, begin + end, depth):
            yield heads.widened(heads.head(step.hidden[0]))

    return logits_of


class UnrolledRounds:
    """The rounds that begin at every position: their step 0, and the later steps of some of them at a time.

    Arguments are those of `unroll`.
    """

    def __init__(
        self,
        heads: EagleHeads,
        embeddings_BTH: Tensor,
        features_BTF: Tensor,
        positions_BT: Tensor,
        texts_BT: Tensor | None = None,
    ):
        self.heads, self.embeddings, self.positions = heads, embeddings_BTH, positions_BT
        self.query_heads: int = heads.config.num_attention_heads
        self.rounds = Rounds(None if texts_BT is None else same_text(texts_BT), heads.config.window_of(0))
        attend = self.rounds.after([], self.query_heads)
        self.first = heads.step(embeddings_BTH, heads.fuse(features_BTF), positions_BT, attend)

    def steps(self, begin: int, end: int, num_steps: int) -> Iterator[Step]:
        """Yield the steps of the rounds that begin at some positions; later steps of the last rounds are left out."""
        first, length = self.first, self.embeddings.shape[1]
        step = Step(first.states[:, begin:end], first.hidden[:, begin:end], first.own)
        yield step
        seen = [first.own]
        for k in range(1, num_steps):
            last = max(begin, min(end, length - k))
            attend = self.rounds.after(seen, self.query_heads, first=begin)
            inputs = self.embeddings[:, begin + k : last + k], step.states[:, : last - begin]
            step = self.heads.step(*inputs, self.positions[:, begin + k : last + k], attend)
            seen.append(step.own)
            yield step


def unroll(
    heads: EagleHeads,
    embeddings_BTH: Tensor,
    features_BTF: Tensor,
    positions_BT: Tensor,
    num_steps: int,
    texts_BT: Tensor | None = None,
) -> list[Step]:
    """Return the steps 0 … K − 1 of the rounds that begin at every position, (B, T − k, H) each.

    Entry s of step k is at position s + k: it has seen the text up to token s + k + 1 and guesses token s + k + 2. It
    is meaningless if position s + k belongs to another text, or to padding.

    Args:
        embeddings_BTH: the target's embeddings of the next tokens.
        features_BTF: the target's features of the tokens at these positions.
        positions_BT: the index of each position within its text, int64.
        texts_BT: in packed rows a number for each text, such as (positions_BT == 0).cumsum(1).
    """
    rounds = UnrolledRounds(heads, embeddings_BTH, features_BTF, positions_BT, texts_BT)
    return list(rounds.steps(0, embeddings_BTH.shape[1], num_steps))


def states_of_steps(
    heads: EagleHeads, target_states: TargetStates, position_ids: Tensor | None, indices_N: Tensor, num_steps: int
) -> list[Tensor]:
    """Return each step's inputs of the head at positions c of the flat batch, (N, H); undefined if it learns nothing.

    Step k guesses token c + 1, in the round that begins at c − 1 − k. In packed rows `position_ids`, (B, T), are the
    positions; without them each row is one text.
    """
    rows, length = target_states.hidden.shape[:2]
    positions_BT = position_ids
    if positions_BT is None:
        positions_BT = torch.arange(length, device=indices_N.device).expand(rows, length)
    positions_BS = positions_BT[:, :-1]  # the last position of a row has no next token
    dtype = computing_dtype(heads.fc.weight)  # with a long context the features are the largest tensor
    steps = unroll(
        heads,
        target_states.embeddings[:, 1:].to(dtype),
        target_states.features[:, :-1].to(dtype),
        positions_BS,
        num_steps,
        None if position_ids is None else (positions_BS == 0).cumsum(1),
    )
    row_N, column_N = indices_N // length, indices_N % length
    return [
        # A batch of short rows may have no round of this length, and nothing to learn from it.
        (step if step.hidden.shape[1] else steps[0]).hidden[row_N, (column_N - 1 - k).clamp(min=0)]
        for k, step in enumerate(steps)
    ]


def work_of_steps(heads: EagleHeads, num_steps: int) -> Work:
    """Return the arithmetic of K steps: a layer and a head in each, and one fusion of the features."""
    attention = heads.midlayer.self_attn
    return Work(
        Work.of_maps(*[heads.midlayer] * num_steps, heads.fc).head,
        Work.of_maps(*[heads.lm_head] * num_steps).head,
        2 * attention.q_proj.out_features * num_steps,
    )
