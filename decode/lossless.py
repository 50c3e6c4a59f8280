"""Is the output's law the target's? A distribution test for sampled text, for any vocabulary and any prompts.

Whatever was written before, a token x that has law p given it, cut at a random point of its own step of the cumulative
distribution, u = F(x⁻) + U p(x), is uniform on (0, 1) and independent of all that went before (Rosenblatt 1952; for
discrete laws Smith 1985). So one sequence of numbers tests the laws of all contexts at once, where counting would need
every context many times. Shape suffixes: N tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.sampling import Law, align_vocabulary, prefixes

Drafter = Callable[[Tensor, int], Tensor]
"""(text (T,), prompt length) → q of the T − prompt length tokens after it, (N, V): what a drafter would say there."""

BINS = 50
PAIR_BINS = 10


@dataclass(frozen=True)
class LawTest:
    """What the test says of some texts. A right decoder's `p_value` is below x with probability at most x."""

    num_tokens: int
    p_value: float
    """The least of `tests` times their number (Bonferroni); 0 where a token had probability zero."""
    tests: dict[str, float]
    """The p-value of each statistic."""
    num_impossible: int
    """Tokens that the target's law rules out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON types."""
        return asdict(self)


@torch.inference_mode()
def law_test(
    target: PreTrainedModel,
    texts: Iterable[tuple[Tensor, int]],
    law: Law,
    drafter: Drafter | None = None,
    seed: int = 0,
) -> LawTest:
    """Test whether texts were drawn from the target under a law.

    The vocabulary is ordered in each context, by token id, by p, and by q − p where a drafter is given: what leans
    towards the drafter, as most mistakes of speculative sampling do, then shows at one end. Each ordering's numbers are
    tested for uniformity, and successive ones for independence.

    Args:
        target: the model.
        texts: (tokens (T,) int64, prompt length ≥ 1), nothing behind an end-of-sequence token.
        law: the warping that they were sampled under.
        drafter: tells q, for power alone; see `model_drafter`.
        seed: of the random points.

    Raises:
        InputError: a law at T=0, a text without a prompt, or fewer than 20 tokens for each of the bins.
    """
    if not law.do_sample:
        raise InputError("law: expected sampling, found T=0, where texts are compared token for token")
    generator = torch.Generator().manual_seed(seed)
    names = ["id", "p"] if drafter is None else ["id", "p", "q − p"]
    numbers: dict[str, list[Tensor]] = {name: [] for name in names}
    impossible = 0
    for text, prompt_length in texts:
        if not prompt_length >= 1:
            raise InputError(f"prompt_length: expected at least 1, found {prompt_length}")
        tokens = text[prompt_length:]
        if not len(tokens):
            continue
        logits = target(input_ids=text[None, :-1], use_cache=False).logits[0, prompt_length - 1 :]
        p = law.probabilities(logits, prefixes(text[:-1], len(tokens)))
        impossible += int((p.gather(1, tokens[:, None]) == 0).sum())
        places = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(p.device)
        keys = {"id": torch.arange(p.shape[1], device=p.device).expand_as(p), "p": p}
        if drafter is not None:
            keys["q − p"] = drafter(text, prompt_length) - p
        for name, key in keys.items():
            numbers[name].append(_transform(p, key, tokens, places).cpu())
    count = sum(len(part) for part in numbers["id"])
    if count < 20 * PAIR_BINS**2:
        raise InputError(f"texts: expected at least {20 * PAIR_BINS**2} tokens, found {count}")
    tests = {}
    for name, parts in numbers.items():
        u = torch.cat(parts)
        tests[f"uniform by {name}"] = float(chisquare(_bins(u, BINS).bincount(minlength=BINS).numpy()).pvalue)
        # Within texts: the next text has nothing to do with the end of this one.
        first, second = (_bins(torch.cat([part[cut] for part in parts]), PAIR_BINS) for cut in (_ALL_BUT_LAST, _REST))
        table = (first * PAIR_BINS + second).bincount(minlength=PAIR_BINS**2).view(PAIR_BINS, PAIR_BINS)
        tests[f"independent by {name}"] = float(chi2_contingency(table.numpy()).pvalue)
    p_value = 0.0 if impossible else min(1.0, len(tests) * min(tests.values()))
    return LawTest(count, p_value, tests, impossible)


def model_drafter(draft: PreTrainedModel, law: Law, vocab_size: int) -> Drafter:
    """Return what a draft model says, under the law, as wide as the target's vocabulary."""

    def drafter(text: Tensor, prompt_length: int) -> Tensor:
        logits = draft(input_ids=text[None, :-1], use_cache=False).logits[0, prompt_length - 1 :]
        contexts = prefixes(text[:-1], len(text) - prompt_length)
        return law.probabilities(align_vocabulary(logits, vocab_size), contexts)

    return drafter


_ALL_BUT_LAST, _REST = slice(None, -1), slice(1, None)


def _transform(p: Tensor, key: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Return F(x⁻) + U p(x) where the vocabulary is ordered by `key`, equal ones by id, (N,)."""
    order = key.argsort(dim=-1, stable=True)
    cumulative = p.double().gather(1, order).cumsum(-1)
    # Laws are taken in float32: normalised, the last step ends at 1.
    cumulative = cumulative / cumulative[:, -1:]
    place = (order == tokens[:, None]).long().argmax(-1, keepdim=True)
    upper = cumulative.gather(1, place)[:, 0]
    lower = torch.where(place[:, 0] > 0, cumulative.gather(1, (place - 1).clamp(min=0))[:, 0], 0.0)
    return lower + places * (upper - lower)


def _bins(u: Tensor, count: int) -> Tensor:
    return (u * count).long().clamp(max=count - 1)
