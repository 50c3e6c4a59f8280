"""The frozen target's last hidden states of texts, kept in memory: a text that comes again needs no forward.

Shape suffixes: B rows, T tokens of a row, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.losses.positions import IGNORED


class KeptStates:
    """States by the tokens of their row; trainings of one target may share them.

    They lie where they were computed, and there is no limit: 4 · H bytes a token in float32. Batches are rounded
    otherwise where rows of other lengths stand beside a text, so that two epochs may differ in the last digits.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, inputs: dict[str, Any], states_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the states of a batch, (B, T, H), zeros behind the last token of each text.

        Args:
            inputs: a batch of single samples, as `CompletionCollator` makes it.
            states_of: the target: from tokens, (B, T), to states; called with the rows that are not known.
        """
        ids_BT = inputs["input_ids"]
        # Tokens that pad are those of the last one's kind that nothing is learned of.
        told_BT = (ids_BT != ids_BT[:, -1:]) | (inputs["labels"] != IGNORED)
        places_T = torch.arange(1, ids_BT.shape[1] + 1, device=ids_BT.device)
        lengths = (told_BT * places_T).amax(1).clamp(min=1).tolist()
        keys = [row[:length].cpu().numpy().tobytes() for row, length in zip(ids_BT, lengths, strict=True)]
        new = [place for place, key in enumerate(keys) if key not in self._rows]
        if new:
            longest = max(lengths[place] for place in new)
            computed = states_of(ids_BT[new, :longest])
            for place, states_TH in zip(new, computed, strict=True):
                self._rows[keys[place]] = states_TH[: lengths[place]].clone()
        rows = [self._rows[key] for key in keys]
        states_BTH = rows[0].new_zeros(*ids_BT.shape, rows[0].shape[-1])
        for states_TH, row in zip(states_BTH, rows, strict=True):
            states_TH[: len(row)] = row
        return states_BTH
