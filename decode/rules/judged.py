"""Compiled verdicts under sampling: from the target's logits to the host's few numbers in one call.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.decode import sampling
from draftsmith.decode.cache import program as programs
from draftsmith.decode.cache.forward import NO_TOKEN, Forward
from draftsmith.decode.rules import acceptance
from draftsmith.decode.rules.acceptance import accept_exact_chains
from draftsmith.decode.sampling import draw_rows


def chain_packet(
    scores_BKV: Tensor, drafted_BK: Tensor, r_BK: Tensor, u_B: Tensor, q_BKV: Tensor | None = None
) -> Tensor:
    """Return the exact rule's results for chains, (B, 4 + K) int64, from processed logits (B, K + 1, V).

    The columns are the number of accepted tokens, the token after them, 1 where p is NaN there, 1 where q is NaN
    anywhere, and the drafted tokens. See `accept_exact_chains` for the other inputs.
    """
    p_BKV = scores_BKV.softmax(-1)
    count_B, token_B = accept_exact_chains(p_BKV, q_BKV, drafted_BK, r_BK, u_B)
    broken_B = p_BKV[..., 0].gather(1, count_B[:, None])[:, 0].isnan()
    broken_q_B = torch.zeros_like(broken_B) if q_BKV is None else q_BKV[..., 0].isnan().any(-1)
    facts_B4 = torch.stack([count_B, token_B, broken_B.long(), broken_q_B.long()], 1)
    return torch.cat([facts_B4, drafted_BK], 1)


def drawn_packet(scores_BV: Tensor, u_B: Tensor) -> Tensor:
    """Return a token drawn from each row's scores, (B,) int64; `NO_TOKEN` where they are NaN."""
    p_BV = scores_BV.softmax(-1)
    return torch.where(p_BV[:, 0].isnan(), NO_TOKEN, draw_rows(p_BV, u_B))


class CompiledRule(Forward):
    """A function of the target's logits at a temperature, and of other tensors; `axes` are those that vary."""

    sources = tuple(inspect.getfile(module) for module in (sampling, acceptance))

    def __init__(self, function: Callable[..., Tensor], key: tuple[Any, ...], axes: Sequence[Any]):
        super().__init__(nn.Module(), (function.__qualname__, *key))
        self._function, self._axes = function, axes

    @property
    def title(self) -> str:
        """The name of the program in progress messages."""
        return "the rule for sampling"

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the varying axes of each input."""
        logits, *others = self._axes
        return logits, {}, others

    def forward(self, logits: Tensor, temperature: Tensor, others: list[Tensor]) -> list[Tensor]:
        """Return the function's result; the logits are (B, …, V) of any dtype."""
        scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        return [self._function(scores / temperature, *others)]


def judged_chains(
    logits: Tensor, temperature: float, drafted: Tensor, q: Tensor | None, r: Tensor, u: Tensor
) -> Tensor:
    """Return `chain_packet` of logits, (B, K + 1, V), K > 0, at a temperature, computed by a program."""
    chains, drawn = {0: "b", 1: "k"}, [] if q is None else [q]
    axes = {0: "b", 1: "j"}, chains, chains, {0: "b"}, *[chains for _ in drawn]
    return _run(chain_packet, axes, temperature, logits, drafted, r, u, *drawn)


def drawn_tokens(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Return `drawn_packet` of logits, (B, V), at a temperature, computed by a program."""
    return _run(drawn_packet, ({0: "b"}, {0: "b"}), temperature, logits, u)


_PROGRAMS: dict[tuple[Any, ...], programs.Program] = {}


def _run(
    function: Callable[..., Tensor], axes: Sequence[Any], temperature: float, logits: Tensor, *others: Tensor
) -> Tensor:
    device = logits.device
    inputs = [logits.contiguous(), _number(temperature, device), [tensor.contiguous() for tensor in others]]
    dtypes = tuple(tensor.dtype for tensor in (logits, *others))  # drafts may be drawn in another one
    # The key has all that a program is specialised for; everything else is a symbol or an input.
    key = function.__qualname__, logits.shape[-1], dtypes, device, torch.get_num_threads()
    if (program := _PROGRAMS.get(key)) is None:
        judgement = CompiledRule(function, key, axes)
        program = _PROGRAMS[key] = programs.Program(judgement.model, judgement, inputs, {})
    return program(*inputs)[0]


@lru_cache  # a transfer once per temperature, not per round
def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)
