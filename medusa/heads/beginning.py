"""The scale of new heads: copies of the target's head, made less sure by what they guess on a few texts.

The target's head is made for the next token, and heads guess those behind it: on SmolLM2-135M copies begin at 6.6 to
7.0 nats from the target, at half the size at 4.7 to 4.9, where a uniform distribution is 6.2 away.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.data.first_look import SCALES, Text, chosen_once, losses_of_scales, say_once, stacked
from draftsmith.train.losses.cut_vocabulary import CutVocabulary
from draftsmith.train.losses.output_head import last_hidden
from draftsmith.train.losses.positions import IGNORED


@torch.no_grad()
def quieten(
    heads: MedusaHeads, target: PreTrainedModel, texts: Sequence[Text], tokens: int, sharded: bool = False
) -> None:
    """Multiply each language-model head by the number that makes its loss on some texts the least.

    One forward of the target on at most eight texts; the same numbers on all processes. One line says them.

    Args:
        heads: new, each with the target's head.
        target: theirs.
        texts: what to look at.
        tokens: of the tokenizer; the target's head may have more rows.
        sharded: whether its forward takes all processes.
    """
    count = heads.config.num_heads

    def look() -> tuple[list[float], list[float], list[float]]:
        head = heads.head(0)
        hidden = [
            last_hidden(target, input_ids=text.ids_T[None].to(target.device))[0].to(head.weight.device)
            for text in texts
        ]
        # Head i guesses the token 2 + i further: what is 1 further is the target's.
        hidden_NH, labels_NK = stacked(texts, hidden, 1 + count)
        if heads.token_map is None:
            head = head.cut(tokens)
        else:
            cut = CutVocabulary(heads.token_map, heads.config.vocab_size)
            labels_NK = torch.where(labels_NK == IGNORED, IGNORED, cut.labels(labels_NK.clamp(min=0)))
        losses_SK = losses_of_scales(hidden_NH, head, labels_NK[:, 1:])
        if heads.config.original_lm_head:
            losses_SK = losses_SK.mean(1, keepdim=True)
        best = losses_SK.min(0)
        return [SCALES[place] for place in best.indices.tolist()], best.values.tolist(), losses_SK[0].tolist()

    found = chosen_once(look, together=sharded)
    for lm_head, scale in zip(heads.all_lm_heads, found[0], strict=True):
        lm_head.weight.mul_(scale)
    numbers, losses, plain = (", ".join(f"{value:.3g}" for value in values) for values in found)
    say_once(f"init: the target's head × {numbers}: losses begin at {losses} ({plain} without)")
