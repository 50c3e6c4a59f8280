"""The exact rule for a whole batch, with few transfers from the device.

Where processors read earlier tokens, `acceptance` verifies each row alone. Where they read only the scores, chains and
greedy trees take one transfer to the host, and sampled trees one for each depth that is reached.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.decode.cache import pad_right
from draftsmith.decode.cache.forward import NO_TOKEN
from draftsmith.decode.cache.layers import READ_AT_ONCE
from draftsmith.decode.proposers.base import Proposal, stack_probabilities, stack_tokens
from draftsmith.decode.rules.acceptance import Floats, accept_greedy, accept_siblings
from draftsmith.decode.rules.judged import chain_packet, drawn_packet, drawn_tokens, judged_chains
from draftsmith.decode.sampling import Sampler, argmax, draw_rows, scores_of_rows, uniforms
from draftsmith.decode.tree import ROOT

Generator = torch.Generator | None  # a source of randomness; the global one if None


@dataclass(frozen=True)
class Verdict:
    """A rule's judgement of one draft."""

    path: list[int]  # the accepted nodes, from the root's child down
    token: int
    """The token after them: a correction, or the bonus after a leaf. `NO_TOKEN` where the target's logits are NaN."""
    accepted: list[int] | None = None  # the accepted tokens; None where the rule did not read them
    departures: list[tuple[float, bool]] | None = None
    """Lossy rules: for each emitted token TV(its distribution, p), and at T=0 whether it is not the argmax."""


class Processed:
    """The target's distributions for one row's draft, or at T=0 its argmax tokens, each computed when it is read."""

    def __init__(self, sampler: Sampler, logits_KV: Tensor, contexts: Sequence[Tensor]):
        self._sampler, self._logits_KV, self._contexts = sampler, logits_KV, contexts
        self.broken = False  # true if a value that was read is NaN

    def __getitem__(self, index: int) -> Any:
        contexts = list[Tensor]()
        if not self._sampler.context_free:
            text, context = self._contexts[0], self._contexts[index]
            contexts = [self._sampler.after(text, context[len(text) :])]
        scores_V = self._sampler.scores(self._logits_KV[index : index + 1], contexts)[0]
        if self._sampler.do_sample:
            p_V = scores_V.softmax(-1)
            self.broken |= bool(p_V[0].isnan())  # a softmax is NaN everywhere or nowhere
            return p_V
        chosen = argmax(scores_V)
        token, broken = torch.stack([chosen, scores_V[chosen].isnan().to(chosen.dtype)]).tolist()
        self.broken |= bool(broken)
        return token


def next_tokens(
    samplers: Sequence[Sampler],
    logits_BV: Tensor,
    contexts: Sequence[Tensor],
    generators: Sequence[Generator],
    likeliest_BK: Tensor | None,
) -> Tensor:
    """Return the target's token after each context, (B,); `NO_TOKEN` for NaN.

    `likeliest_BK` has the argmax in its last column, where the target ran compiled.
    """
    sampler, temperature = samplers[0], samplers[0].temperature
    if sampler.do_sample:
        u_B = uniforms(generators, [1] * len(contexts), torch.float64, logits_BV.device)[:, 0]
    # A target that ran compiled has its argmax already, and draws by a program where only T changes its logits.
    if likeliest_BK is not None and temperature is not None:
        return drawn_tokens(logits_BV, temperature, u_B) if sampler.do_sample else likeliest_BK[:, -1]
    scores_BV = scores_of_rows(samplers, logits_BV, [] if sampler.context_free else contexts)
    if sampler.do_sample:
        return drawn_packet(scores_BV, u_B)
    tokens_B = argmax(scores_BV)  # the first NaN, if there is one
    return tokens_B.masked_fill(scores_BV.gather(1, tokens_B[:, None])[:, 0].isnan(), NO_TOKEN)


def greedy_verdicts(
    sampler: Sampler, logits: Tensor, proposals: Sequence[Proposal], likeliest: Tensor | None = None
) -> list[Verdict]:
    """Judge drafts at T=0, with the argmax of every position (`likeliest` if known) and the drafts in one transfer."""
    size = logits.shape[1]
    if likeliest is None or sampler.processors:
        scores = sampler.scores(logits.flatten(0, 1), [])
        chosen = argmax(scores)
        # The argmax is the first NaN, if any; no drafted token is `NO_TOKEN`, so nothing is accepted there.
        likeliest = chosen.masked_fill(scores.gather(1, chosen[:, None])[:, 0].isnan(), NO_TOKEN).view(-1, size)
    tokens_BK = stack_tokens(proposals, size - 1)
    if likeliest.device.type in READ_AT_ONCE:
        wanted, drafted = likeliest.tolist(), tokens_BK.tolist()
    else:
        read = torch.cat([likeliest, tokens_BK], 1).tolist()
        wanted, drafted = [row[:size] for row in read], [row[size:] for row in read]
    verdicts = []
    for best, tokens, proposal in zip(wanted, drafted, proposals, strict=True):
        path, token = accept_greedy(best, tokens, proposal.tree)
        verdicts.append(Verdict(path, token, [tokens[node] for node in path]))
    return verdicts


def chain_verdicts(
    sampler: Sampler,
    logits: Tensor,
    proposals: Sequence[Proposal],
    generators: Sequence[Generator],
    compiled: bool = False,
) -> list[Verdict]:
    """Judge chains under sampling on the device, with counts and tokens in one transfer; `compiled` by a program."""
    size, counts = logits.shape[1] - 1, [len(proposal.tokens) for proposal in proposals]
    dtype, device = torch.promote_types(logits.dtype, torch.float32), logits.device
    r = uniforms(generators, counts, dtype, device)
    u = uniforms(generators, [1] * len(counts), torch.float64, device)[:, 0]
    drafted, q = stack_tokens(proposals, size), stack_probabilities(proposals, size)
    if compiled and size and sampler.temperature is not None:
        packet = judged_chains(logits, sampler.temperature, drafted, q, r, u)
    else:
        packet = chain_packet(sampler.scores(logits.flatten(0, 1), []).view(logits.shape), drafted, r, u, q)
    rows = packet.tolist()
    if any(row[3] for row in rows):
        warnings.warn("proposer: q is not a number at some drafted tokens, which are rejected", stacklevel=2)
    return [Verdict(list(range(row[0])), NO_TOKEN if row[2] else row[1], row[4 : 4 + row[0]]) for row in rows]


def tree_verdicts(
    sampler: Sampler, logits: Tensor, proposals: Sequence[Proposal], generators: Sequence[Generator]
) -> list[Verdict]:
    """Judge trees under sampling, with one transfer of p on the siblings' support for each depth that is reached.

    q is never spread over the vocabulary. Either all drafts are deterministic, or all have `siblings`.
    """
    size, counts = logits.shape[1] - 1, [len(proposal.tokens) for proposal in proposals]
    # A row takes the same random numbers, in the same dtype, as it would alone.
    dtype, device = torch.promote_types(logits.dtype, torch.float32), logits.device
    r_BK = uniforms(generators, counts, dtype, device)
    u_B = uniforms(generators, [1] * len(counts), torch.float64, device)[:, 0]
    drafts = _TreeDrafts(proposals, size, r_BK)
    paths: list[list[int]] = [[] for _ in counts]
    # For the last node of each row's path: p, its children's support, and the residual of p there.
    ends: list[tuple[Tensor, Tensor, Floats]] = [(logits[0, 0], drafts.support_BFM[0, 0], np.empty(0))] * len(counts)
    descending = list(range(len(counts)))
    while descending:
        # One depth of all rows that still descend: p on their children's support goes to the host.
        nodes = [(row, paths[row][-1] if paths[row] else ROOT) for row in descending]
        p_AV = sampler.scores(torch.stack([logits[row, node + 1] for row, node in nodes]), []).softmax(-1)
        support_AM = torch.stack([drafts.support_BFM[row, drafts.distribution(row, node)] for row, node in nodes])
        inner = any(drafts.children(row, node) for row, node in nodes)
        p_AM = p_AV.gather(1, support_AM).cpu().numpy() if inner else np.empty((len(nodes), 0))
        descending = []
        for at, (row, node) in enumerate(nodes):
            child, rest_M = drafts.accept(row, node, p_AM[at])
            if child is None:
                ends[row] = p_AV[at], support_AM[at], rest_M
            else:
                paths[row].append(child)
                descending.append(row)
    p_BV, support_BM = torch.stack([p for p, _, _ in ends]), torch.stack([support for _, support, _ in ends])
    rest_BM = torch.from_numpy(np.stack([rest_M for _, _, rest_M in ends])).to(p_BV)
    # The residual never exceeds p, and ∞ leaves p as it is.
    rest_BV = p_BV.scatter_reduce(1, support_BM, rest_BM, "amin")
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
    tokens, broken = torch.stack([draw_rows(rest_BV, u_B), p_BV[:, 0].isnan().long()]).tolist()
    return [
        Verdict(path, NO_TOKEN if broken[row] else tokens[row], [int(drafts.tokens_BK[row, node]) for node in path])
        for row, path in enumerate(paths)
    ]


class _TreeDrafts:
    """A batch's trees of at most K = `size` nodes on the host, with all that nodes are tested with, in one transfer."""

    def __init__(self, proposals: Sequence[Proposal], size: int, r_BK: Tensor):
        self._proposals = proposals
        tokens_BK = stack_tokens(proposals, size)
        parts = [tokens_BK, r_BK]
        drawn = [proposal.siblings for proposal in proposals if proposal.siblings is not None]
        self.support_BFM = tokens_BK[:, None]
        """The tokens that siblings may name, on the device: F distributions' support, or a deterministic draft."""
        if drawn:
            siblings = [proposal.siblings or drawn[0] for proposal in proposals]  # a row without a draft has none
            self.support_BFM, q_BFM = torch.stack([s.support for s in siblings]), torch.stack([s.q for s in siblings])
            parts += [pad_right([s.indices for s in siblings], size), q_BFM.flatten(1)]
        # Float64 holds tokens, indices and probabilities exactly.
        on_host = torch.cat([part.double() for part in parts], 1).cpu().numpy()
        self.tokens_BK, self._r_BK, *indices_and_q = np.split(on_host, [size, 2 * size, 3 * size], 1)
        self._indices_BK: Floats | None = None  # each node's token, as an index of the support
        self._q_BFM: Floats | None = None
        if drawn:
            self._indices_BK, self._q_BFM = indices_and_q[0], indices_and_q[1].reshape(q_BFM.shape)
            if np.isnan(self._q_BFM).any():
                warnings.warn("proposer: q is not a number at some drafted tokens, which are rejected", stacklevel=3)

    def children(self, row: int, node: int) -> tuple[int, ...]:
        """Return the children of a node, or of the root."""
        return self._proposals[row].tree.children[node + 1]

    def distribution(self, row: int, node: int) -> int:
        """Return the index, among the F distributions, of the one that a node's children were drawn from."""
        siblings = self._proposals[row].siblings
        return 0 if siblings is None else siblings.distribution[node + 1]

    def accept(self, row: int, node: int, p_M: Floats) -> tuple[int | None, Floats]:
        """Test a node's children by the target's probabilities of their support; return the accepted child, if any.

        The second result is the residual of p on the support, (M,), ∞ where it is all of p.
        """
        children, rest_M = list(self.children(row, node)), np.full(self.support_BFM.shape[2], np.inf)
        if not children:
            return None, rest_M
        r = self._r_BK[row, children].tolist()
        if self._q_BFM is None or self._indices_BK is None:
            accepted, rest_M[children] = accept_siblings(p_M[children], None, range(len(children)), r)
        else:
            indices = self._indices_BK[row, children].astype(int).tolist()
            accepted, rest_M = accept_siblings(p_M, self._q_BFM[row, self.distribution(row, node)], indices, r)
        return None if accepted is None else children[accepted], rest_M
