"""An in-memory cache of the frozen target's last hidden states, so that a repeated text needs no forward.

Shape suffixes: B rows, T tokens of a row, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.losses.positions import IGNORED


class StateCache:
    """States by the tokens of their row, which trainings of one target may share.

    They stay on their device, without a limit: 4 · H bytes a token in float32. Rounding depends on the other rows of a
    batch, so that two epochs may differ in the last digits.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, inputs: dict[str, Any], states_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the states of a batch of single samples, (B, T, H), with zeros after each text.

        `states_of` computes states from tokens, (B, T); it is called with the new rows.
        """
        ids_BT = inputs["input_ids"]
        # Padding repeats the last token without labels. A text that ends so is cut with it: its states are not needed.
        inside_BT = (ids_BT != ids_BT[:, -1:]) | (inputs["labels"] != IGNORED)
        places_T = torch.arange(1, ids_BT.shape[1] + 1, device=ids_BT.device)
        lengths = (inside_BT * places_T).amax(1).clamp(min=1).tolist()
        keys = [row[:length].cpu().numpy().tobytes() for row, length in zip(ids_BT, lengths, strict=True)]
        new = [index for index, key in enumerate(keys) if key not in self._rows]
        if new:
            longest = max(lengths[index] for index in new)
            computed = states_of(ids_BT[new, :longest])
            for index, states_TH in zip(new, computed, strict=True):  # a clone frees the padded batch
                self._rows[keys[index]] = states_TH[: lengths[index]].clone()
        rows = [self._rows[key] for key in keys]
        states_BTH = rows[0].new_zeros(*ids_BT.shape, rows[0].shape[-1])
        for states_TH, row in zip(states_BTH, rows, strict=True):
            states_TH[: len(row)] = row
        return states_BTH
