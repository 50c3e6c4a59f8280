"""Acceptance of EAGLE-3 heads from text that the target wrote: one forward of it, and K unrolled steps of the heads.

Of the text's tokens x_0 … x_{N−1}, behind a prompt of P tokens, a round from s ≥ 1 begins at place P + s − 2: the last
that has the target's features, beside token x_{s−1}. Its step j guesses x_{s+j}, from what the steps before gave beside
x_s … x_{s+j−1}: a drafted token counts only where those before it were accepted, and then they are the text's own. So
the unrolled steps (`medusa.eagle.unrolled`) are what the decoder computes, for all rounds at once.

Shape suffixes: N tokens of the text, T tokens with the prompt, K steps, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import collected, decoder_of
from draftsmith.decode.replay.starts import LogitsAt
from draftsmith.decode.replay.texts import WrittenText, fixed_packing
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.unrolled import unrolled


def logits_of_steps(target: PreTrainedModel, heads: EagleHeads, text: WrittenText, depth: int) -> LogitsAt:
    """Return the heads' logits by step and start, from one forward of the target and K steps over the text.

    Args:
        target: the model that wrote it.
        heads: of this target.
        text: what it wrote.
        depth: K.
    """
    if len(text) < 2:  # nothing is drafted
        return lambda step, first, end: torch.empty(0)
    ids_1T = text.sequence[None].to(target.device)
    # The last place that guesses a token of the text is that of its last but two.
    with collected(target, heads.layer_ids) as features, fixed_packing(False):
        decoder_of(target)(input_ids=ids_1T[:, :-2], use_cache=False)
    embed: Any = target.get_input_embeddings()
    embeddings, places = embed(ids_1T[:, 1:-1]), torch.arange(ids_1T.shape[1] - 2, device=heads.device)[None]
    embeddings, seen = (part.to(heads.device, heads.dtype) for part in (embeddings, features.pop()))
    steps = unrolled(heads, embeddings, seen, places, min(depth, len(text) - 1))
    hidden = [step.hidden[0] for step in steps]

    def logits_at(step: int, first: int, end: int) -> Tensor:
        begin = text.prompt_length - 2
        return heads.widened(heads.head(hidden[step][begin + first : begin + end]))

    return logits_at
