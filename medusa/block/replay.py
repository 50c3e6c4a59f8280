"""Acceptance of a block drafter from text that the target wrote: one forward of it, and the blocks of all rounds.

Of the text's tokens x_0 … x_{N−1}, behind a prompt of P tokens, a round from s ≥ 1 has the anchor x_{s−1}, at place
P + s − 1, and its guess j is of x_{s+j}: see `medusa.block.blocks`.

Shape suffixes: N tokens of the text, T tokens with the prompt, C anchors of a chunk, K guesses, H hidden.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collected, decoder_of
from draftsmith.decode.replay.starts import LogitsAt
from draftsmith.decode.replay.texts import WrittenText, fixed_packing
from draftsmith.medusa.block.blocks import Anchors, anchors_at_once, block_states
from draftsmith.medusa.block.model import BlockDrafter


def logits_of_blocks(target: PreTrainedModel, drafter: BlockDrafter, text: WrittenText) -> LogitsAt:
    """Return the drafter's logits by guess and start, from one forward of the target and the blocks of all rounds.

    Args:
        target: the model that wrote it.
        drafter: of this target.
        text: what it wrote.
    """
    if len(text) < 2:  # nothing is drafted
        return lambda guess, first, end: torch.empty(0)
    ids_1T = text.sequence[None].to(target.device)
    # The last anchor that drafts a token of the text is its last but one, whose own features no block sees.
    with collected(target, drafter.layer_ids) as features, fixed_packing(False):
        decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
    home, embed = drafter.device, target.get_input_embeddings()
    states_1TH, ids_T = drafter.fuse(features.pop().to(home, drafter.dtype)), ids_1T[0].to(home)
    places = states_1TH.shape[1]
    context = drafter.context(states_1TH, torch.arange(places, device=home)[None])
    rounds_N = torch.arange(text.prompt_length, len(ids_T) - 1, device=home)
    hidden_NKH = torch.cat(
        [
            block_states(drafter, embed, context, Anchors(at[None], ids_T[at][None], at[None]))[0]
            for at in rounds_N.split(anchors_at_once(places, drafter.config.block_size))
        ]
    )
    head = drafter.head_for(target).to(home)

    def logits_at(guess: int, first: int, end: int) -> Tensor:
        begin = text.prompt_length - 1 + guess  # of the token before the guessed one
        return drafter.widened(
            drafter.logits(hidden_NKH[first - 1 : end - 1, guess], ids_T[begin + first : begin + end], head)
        )

    return logits_at
