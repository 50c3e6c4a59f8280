"""Logits to distributions, and draws from them, for target, draft and residual alike.

Shape suffixes: K positions, V vocabulary, T context tokens.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# These read the scores alone, so that all positions of a block are warped in one call. Any other processor (penalties,
# bans, minimum length) may read the tokens before its position, drafted ones included.
CONTEXT_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# From more entries than LARGE, draws choose a BLOCK of entries first, and cuts are made among the LIKELIEST ones.
LARGE, BLOCK, LIKELIEST = 2**14, 512, 1024
# The library's sums of float32 probabilities were off by 3e-5 at most.
TOP_P_ROUNDING = 1e-4
# The roundings by which a sum may fall short of top-p and still count as reaching it.
ROUNDINGS = 4


@dataclass(frozen=True)
class Sampler:
    """The map from logits to a distribution: the processors that `generate` prepared, then softmax (argmax at T=0)."""

    processors: LogitsProcessorList
    do_sample: bool
    ends: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    """The library's criteria by which texts end, also within a draft."""

    @cached_property
    def context_free(self) -> bool:
        """True if no processor reads the tokens before its position."""
        return all(isinstance(p, CONTEXT_FREE) for p in self.processors)

    @cached_property
    def asks_user(self) -> bool:
        """True if a processor is the user's code."""
        return any(map(is_users, self.processors))

    @cached_property
    def temperature(self) -> float | None:
        """T where nothing else changes the logits, 1 at T=0; None where there are other processors."""
        if not self.processors:
            return 1.0
        (first, *others) = self.processors
        return first.temperature if type(first) is TemperatureLogitsWarper and not others else None

    @classmethod
    def of(
        cls,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
    ) -> "Sampler":
        """Return the sampler of these settings (see `Sampling`), as `generate` would prepare it."""
        processors = LogitsProcessorList()
        if repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
        if no_repeat_ngram_size:
            processors.append(NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
        if temperature not in (0, 1):
            processors.append(TemperatureLogitsWarper(temperature))
        if temperature > 0 and top_k:
            processors.append(TopKLogitsWarper(top_k))
        if temperature > 0 and top_p < 1:
            processors.append(TopPLogitsWarper(top_p))
        if temperature > 0 and min_p:
            processors.append(MinPLogitsWarper(min_p))
        return cls(processors, do_sample=temperature > 0)

    def on(self, device: torch.device) -> "Sampler":
        """Return a copy whose processors hold their tensors on a device, for a draft model on another device."""
        copies = LogitsProcessorList()
        for processor in self.processors:
            moved = copy.copy(processor)
            vars(moved).update({name: v.to(device) for name, v in vars(moved).items() if isinstance(v, Tensor)})
            copies.append(moved)
        return replace(self, processors=copies)

    def after(self, text: Tensor, path: Tensor, score: Tensor | float = 0.0) -> Tensor:
        """Return a text and the drafted tokens after it, the context of the next token.

        It is empty where the target can't write that, because a token ended the text or the last one's `score` is −∞.
        The user's code, such as a grammar, may know no answer there, and `scores` doesn't ask it.
        """
        if not self.asks_user:
            return torch.cat([text, path])
        texts = [torch.cat([text, path[:n]]) for n in range(len(path) + 1)]
        if len(text) and float(score) > -math.inf and not any(bool(self.ends(t[None], None)) for t in texts[1:]):
            return texts[-1]
        return text[:0]

    def scores(self, logits_KV: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Return processed logits, (K, V), in at least float32; `logits_KV` is never written to.

        `contexts` are the tokens before each position, K of (T_j,) int64; a `context_free` sampler needs none. After an
        empty one (see `after`) the logits stay as they are.
        """
        scores_KV = logits_KV if logits_KV.dtype in (torch.float32, torch.float64) else logits_KV.float()
        if not self.processors:
            return scores_KV
        if scores_KV is logits_KV:
            scores_KV = logits_KV.clone()
        if self.context_free:
            return self._process(None, scores_KV)
        rows = zip(contexts, scores_KV.split(1), strict=True)
        return torch.cat([self._process(t[None, :], row_1V) if len(t) else row_1V for t, row_1V in rows])

    def _process(self, ids: Tensor | None, scores: Tensor) -> Tensor:
        # The list's own call would look up every processor's signature each time.
        processors: Any = self.processors  # annotated for LongTensor, which no tensor's static type is
        queue = list(processors)
        while queue:
            processor = queue.pop(0)
            large = type(processor) in (TopKLogitsWarper, TopPLogitsWarper) and scores.shape[-1] > LARGE
            if large and scores.device.type == "cpu":
                scores = _cut(processor, scores)
            elif large and queue and _are_top_k_top_p(processor, queue[0]):
                scores = top_k_top_p(scores, processor.top_k, queue.pop(0).top_p, processor.filter_value)
            else:
                scores = processor(ids, scores)
        return scores

    def probabilities(self, logits_KV: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Return the distributions, (K, V); at T=0 they are one-hot on the argmax, not a sharpened softmax."""
        scores_KV = self.scores(logits_KV, contexts)
        if self.do_sample:
            return scores_KV.softmax(-1)
        return torch.nn.functional.one_hot(scores_KV.argmax(-1), scores_KV.shape[-1]).to(scores_KV.dtype)


def is_users(processor: Any) -> bool:
    """Return whether a processor is the user's own code, or calls it."""
    library = type(processor).__module__.startswith("transformers.")
    return not library or isinstance(processor, PrefixConstrainedLogitsProcessor)


def _are_top_k_top_p(first: Any, second: Any) -> bool:
    """Return whether `top_k_top_p` can replace two successive processors."""
    return (
        type(first) is TopKLogitsWarper
        and type(second) is TopPLogitsWarper
        and second.min_tokens_to_keep == 1
        and second.filter_value == first.filter_value
    )


def _cut(processor: Any, scores_KV: Tensor) -> Tensor:
    """Apply top-k or top-p in place, bit for bit as the library does, reading only the likeliest tokens."""
    # The cut of top-p is nearly always among the likeliest. The library decides rows whose cut lies further down, has
    # equal tokens on both sides (it keeps those at k), or is within the library's own rounding.
    top_k = isinstance(processor, TopKLogitsWarper)
    size = processor.top_k + 1 if top_k else LIKELIEST
    if size > LIKELIEST:
        return cast(Tensor, processor(None, scores_KV))
    values_KM, places_KM = scores_KV.topk(size)
    # How many are kept, and whether the library has to decide it.
    if top_k:
        kept_K1 = torch.full_like(places_KM[:, :1], size - 1)
        unsure_K1 = torch.zeros_like(kept_K1, dtype=torch.bool)
    else:
        # After top-k all finite scores may be among the likeliest: then their sum is enough.
        support = values_KM if bool((values_KM[:, -1] == -torch.inf).all()) else scores_KV
        p_KM = (values_KM.double() - support.logsumexp(-1, keepdim=True).double()).exp()
        likelier_KM = p_KM.cumsum(-1) - p_KM
        kept_K1 = (likelier_KM < processor.top_p).sum(-1, keepdim=True).clamp(processor.min_tokens_to_keep, size)
        unsure_K1 = ~((likelier_KM - processor.top_p).abs() > TOP_P_ROUNDING).all(-1, keepdim=True)
    next_K1 = values_KM.gather(1, kept_K1.clamp(max=size - 1))
    unsure_K1 |= ~(values_KM.gather(1, kept_K1 - 1) > next_K1)
    library = processor(None, scores_KV[unsure_K1[:, 0]]) if bool(unsure_K1.any()) else None
    cut_KM = values_KM.masked_fill_(torch.arange(size) >= kept_K1, processor.filter_value)
    scores_KV.fill_(processor.filter_value).scatter_(1, places_KM, cut_KM)
    if library is not None:
        scores_KV[unsure_K1[:, 0]] = library
    return scores_KV


def top_k_top_p(scores_KV: Tensor, top_k: int, top_p: float, filter_value: float = -torch.inf) -> Tensor:
    """Return scores, (K, V), with `filter_value` for all that top-k ≥ 1, and then top-p in [0, 1], leave out.

    Equal to the library's `TopKLogitsWarper` and `TopPLogitsWarper` in turn, but it sorts k scores, not the vocabulary,
    and nothing waits for the device. Differentiable. All scores equal to the k-th pass top-k, often many in half
    precision, and top-p counts all that passed. Of equal scores at the cut of top-p the first ones pass; the library
    lets any pass.
    """
    values_Kk = scores_KV.detach().topk(min(top_k, scores_KV.shape[-1])).values
    least_K1 = values_Kk[:, -1:]
    if top_p >= 1:
        return scores_KV.masked_fill(scores_KV < least_K1, filter_value)
    # Others that equal the k-th score pass top-k, too. Their mass adds to top-p's sum, in units of the first k's sum.
    p_Kk = values_Kk.softmax(-1)
    least_p_K1, others_K1 = p_Kk[:, -1:], (scores_KV >= least_K1).sum(-1, keepdim=True) - p_Kk.shape[-1]
    top_p *= 1 - ROUNDINGS * torch.finfo(p_Kk.dtype).eps
    wanted_K1 = top_p * others_K1 * least_p_K1 + top_p
    last_K1 = (p_Kk.cumsum(-1, dtype=torch.float64) < wanted_K1).sum(-1, keepdim=True).clamp(max=p_Kk.shape[-1] - 1)
    # Where even the first k's whole sum falls short, some of the others are kept as well.
    kept_others_K1 = ((wanted_K1 - 1) / least_p_K1).ceil().clamp(min=0)
    cut_K1 = values_Kk.gather(1, last_K1)
    higher_K1, equal_KV = (values_Kk > cut_K1).sum(-1, keepdim=True), scores_KV == cut_K1
    too_many_KV = equal_KV.cumsum(-1, dtype=torch.int32) > last_K1 + 1 + kept_others_K1 - higher_K1
    return scores_KV.masked_fill(torch.where(equal_KV, too_many_KV, scores_KV < cut_K1), filter_value)


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the greatest score, (…, V) → (…): the first of equal ones, or the first NaN."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # Torch's own reads one score at a time on a CPU: at V = 152k it takes ten times as long as numpy's.
    return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))


def scores_of_rows(samplers: Sequence[Sampler], logits_BV: Tensor, contexts: Sequence[Tensor]) -> Tensor:
    """Return each row's logits, (B, V), processed by its sampler; `contexts` are B of (T_b,), see `Sampler.scores`."""
    first = samplers[0]
    if all(sampler is first for sampler in samplers):
        return first.scores(logits_BV, contexts)
    rows = zip(samplers, logits_BV.split(1), contexts, strict=True)
    return torch.cat([sampler.scores(logits_1V, [context]) for sampler, logits_1V, context in rows])


def draw(p_V: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token, (1,) int64, from a distribution (V,), normalised or not."""
    # Inverting the cumulative distribution takes one random number. `torch.multinomial` takes V, which was a third of
    # a sampling round's time outside the forwards.
    cumulative = p_V.cumsum(0, dtype=torch.float64)
    # The generator may be on another device than the draft model.
    device = p_V.device if generator is None else generator.device
    u = torch.rand(1, generator=generator, device=device, dtype=torch.float64).to(p_V.device) * cumulative[-1]
    # The first entry beyond u; a token of probability zero adds nothing and is never chosen.
    return torch.searchsorted(cumulative, u, right=True).clamp_(max=len(p_V) - 1)


def uniforms(
    generators: Sequence[torch.Generator | None], counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers uniform on [0, 1), (B, max(counts)), `counts[i]` by row i's generator and then ones."""
    # A row takes the random numbers that it would take alone. With the ones after them nothing is accepted.
    most = max(counts)
    rows = []
    for generator, count in zip(generators, counts, strict=True):
        home = device if generator is None else generator.device
        row = torch.rand(count, generator=generator, device=home, dtype=dtype)
        rows.append(row if count == most else torch.nn.functional.pad(row, (0, most - count), value=1.0))
    return (torch.stack(rows) if len(rows) > 1 else rows[0][None]).to(device)


def draw_rows(p_BV: Tensor, u_B: Tensor) -> Tensor:
    """Draw one token, (B,) int64, from each distribution (B, V), normalised or not, at float64 u_B in [0, 1)."""
    size = p_BV.shape[-1]
    whole = size - size % BLOCK
    if size < LARGE:
        cumulative = p_BV.cumsum(-1, dtype=torch.float64)
        return _entries(cumulative, u_B[:, None] * cumulative[:, -1:])[:, 0]
    # First choose a block of tokens, then one of its tokens: the cumulative sum over a large vocabulary takes memory.
    blocks_BN = p_BV[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < size:
        blocks_BN = torch.cat([blocks_BN, p_BV[:, whole:].sum(-1, keepdim=True)], -1)
    cumulative = blocks_BN.cumsum(-1, dtype=torch.float64)
    beyond_B1 = u_B[:, None] * cumulative[:, -1:]
    block_B1 = _entries(cumulative, beyond_B1)
    # The place of u within the block, as a share of the block's mass, in [0, 1).
    into_B1 = 1.0 - (cumulative.gather(1, block_B1) - beyond_B1) / blocks_BN.gather(1, block_B1)
    places_BM = block_B1 * BLOCK + torch.arange(BLOCK, device=p_BV.device)
    p_BM = p_BV.gather(1, places_BM.clamp(max=size - 1)).where(places_BM < size, 0.0)
    cumulative = p_BM.cumsum(-1, dtype=torch.float64)
    beyond_B1 = into_B1.clamp_(0.0, 1.0 - 2**-53) * cumulative[:, -1:]
    return (block_B1 * BLOCK + _entries(cumulative, beyond_B1))[:, 0]


def _entries(cumulative_BV: Tensor, beyond_B1: Tensor) -> Tensor:
    """Return the first entry beyond a number, (B, 1); one of probability zero adds nothing and is never chosen."""
    return torch.searchsorted(cumulative_BV, beyond_B1, right=True).clamp_(max=cumulative_BV.shape[-1] - 1)


def draw_siblings(q_BFM: Tensor, u_BPM: Tensor, count: int) -> Tensor:
    """Draw `count` ≤ M siblings a parent without replacement, for all P parents of a depth at once.

    The draw is a race: token v arrives after a time −log(u_v)/q(v), exponential with rate q(v), and the order of
    arrivals is such a sequence of draws (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").
    `q_BFM` are distributions on M tokens, one for each parent (F = P) or one for all (F = 1). Returns indices of the
    M tokens, (B, P, count), in the order of the draws; tokens with q = 0 come last.
    """
    # The greatest rate ÷ exponential is the first arrival.
    return (q_BFM / -u_BPM.log()).topk(count).indices


def align_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut logits (…, V') to the target's V entries, or pad them with −∞: padding is never proposed."""
    if logits.shape[-1] < vocab_size:
        return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))
    return logits[..., :vocab_size]
