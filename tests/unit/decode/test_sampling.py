"""Cuts over many tokens are the library's, bit for bit, for less; draws give each token its share."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode.sampling import BLOCK, LARGE, LIKELIEST, Sampler, draw, draw_rows, top_k_top_p

VOCAB = LARGE + 1000


def logits_of(generator: torch.Generator, rows: int = 3) -> torch.Tensor:
    """Sure and flat rows, in full or in half precision, some of them full of ties, some with most tokens ruled out."""

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    logits = torch.randn(rows, VOCAB, generator=generator) * pick(0.0, 0.5, 3.0, 6.0, 12.0)
    logits += pick(0.0, 1.0) * -torch.arange(1, VOCAB + 1).log()
    step = pick(None, None, 0.1, 1.0, 4.0)
    if step is not None:
        logits = (logits / step).round() * step
    left = pick(VOCAB, VOCAB, 1, 7, LIKELIEST, 4000)
    if left < VOCAB:
        logits[:, torch.randperm(VOCAB, generator=generator)[left:]] = -math.inf
    return logits.to(pick(torch.float32, torch.float32, torch.bfloat16, torch.float64))


@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_the_librarys(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    for _ in range(25):
        logits = logits_of(generator)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        top_p = pick(0.0, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.9999, 1.0)
        if pick(False, True):  # where the library's own rounding decides
            sums = scores.sort().values.softmax(-1).cumsum(-1)[0]
            top_p = min(1.0, max(0.0, 1 - float(sums[-int(torch.randint(1, 30, (), generator=generator))])))
        filled = {"filter_value": pick(-math.inf, -math.inf, -1e4), "min_tokens_to_keep": pick(1, 1, 2, 40, LIKELIEST)}
        processors = [TopPLogitsWarper(top_p, **filled)]
        k = pick(None, 1, 5, 50, LIKELIEST, 3000, VOCAB + 5)
        if k is not None:
            kept = processors if pick(False, True, True) else []
            processors = [TopKLogitsWarper(k, filter_value=pick(-math.inf, -math.inf, -1e4)), *kept]
        if pick(False, True):
            processors.insert(0, TemperatureLogitsWarper(pick(0.3, 0.7, 1.5)))
        if pick(False, True):
            processors.append(MinPLogitsWarper(0.05))
        before = logits.clone()
        found = Sampler(LogitsProcessorList(processors), do_sample=True).scores(logits, [])
        assert torch.equal(logits, before)
        assert torch.equal(found, LogitsProcessorList(processors)(None, scores)), processors


@pytest.mark.parametrize("top_p", [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [1, 7, 40, 500])
def test_top_p_among_the_k_is_what_the_library_makes_of_both(top_k, top_p):
    """Without a sort of the vocabulary; with a gradient to what is kept alone."""
    scores = (
        3 * torch.randn(30, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).requires_grad_()
    expected = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = top_k_top_p(scores, top_k, top_p)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.exp().sum(), scores)
    assert torch.equal(gradient > 0, expected.isfinite())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_top_p_is_of_all_that_equal_the_kth(dtype):
    """The library's scores, row for row, with ties at the k-th, at the cut of top-p, everywhere, and tokens ruled out.

    It keeps any of those that are equal at its cut.
    """
    generator = torch.Generator().manual_seed(0)
    beyond = 0
    for top_k, top_p in [(1, 0.5), (3, 0.9), (20, 0.95), (20, 0.5), (20, 1.0), (50, 0.0), (300, 0.8), (5000, 0.99)]:
        logits = torch.randn(200, 3000, generator=generator) * torch.linspace(0.0, 4.0, 200)[:, None]
        logits[::4] = (logits[::4] * 2).round() / 2
        logits[1::4] = (logits[1::4] * 8).round() / 8
        logits[::7, 40:] = -math.inf
        scores = logits.to(dtype).float()
        passed = TopKLogitsWarper(top_k)(None, scores)
        expected = TopPLogitsWarper(top_p)(None, passed) if top_p < 1 else passed
        found = top_k_top_p(scores, top_k, top_p)
        sums = passed.sort().values.double().softmax(-1).cumsum(-1)
        # Elsewhere the library's rounding decides.
        sure = ~((sums - (1 - top_p)).abs() < 1e-5).any(-1) | bool(top_p in (0.0, 1.0))
        assert sure.sum() > 100
        assert torch.equal(found[sure].sort().values, expected[sure].sort().values)
        assert torch.equal(found[found.isfinite()], scores[found.isfinite()])
        beyond += int((expected.isfinite().sum(-1) > top_k).sum())
    assert beyond > 100


def test_of_equal_scores_top_p_keeps_the_first():
    """Of six equal ones top-k = 2 keeps all, and top-p 0.5 three."""
    ties = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert top_k_top_p(ties, 2, 1.0).isfinite().tolist() == [[False, True, True, True, False], [True] * 5]
    equal = torch.zeros(1, 6)
    assert top_k_top_p(equal, 2, 0.5).isfinite().tolist() == [[True, True, True, False, False, False]]
    assert top_k_top_p(equal, 2, 0.0).isfinite().tolist() == [[True, False, False, False, False, False]]


def test_on_other_devices_both_are_cut_at_once():
    """By operators alone that look at no value and sort no vocabulary: on a device that has no values."""
    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    logits = torch.empty(3, VOCAB, device="meta")
    with Seen():
        Sampler.of(0.7, 20, 0.8, min_p=0.1).scores(logits, [])
    assert "aten.topk.default" in names and not [name for name in names if "sort" in name]


def test_numbers_that_are_none_stay_what_the_library_makes_of_them():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 5
    logits[0], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    logits[3, :5] = math.nan
    for processor in (TopPLogitsWarper(0.9), TopKLogitsWarper(3), TopKLogitsWarper(9)):
        found = Sampler(LogitsProcessorList([processor]), do_sample=True).scores(logits, [])
        torch.testing.assert_close(found, processor(None, logits), rtol=0, atol=0, equal_nan=True)


def test_the_whole_vocabulary_is_sorted_only_where_it_must_be(monkeypatch):
    """Of rows that are flat, and of rows whose cut lies between equal scores."""
    sorted_rows = []
    sort = torch.sort

    def watched(scores, **options):
        sorted_rows.append(len(scores))
        return sort(scores, **options)

    monkeypatch.setattr(torch, "sort", watched)
    peaked = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 8
    flat, tied = torch.zeros(2, VOCAB), torch.full((1, VOCAB), -30.0)
    flat[:, 0], tied[:, :4] = 1.0, 0.0
    for logits, top_k, rows in [(peaked, 0, []), (peaked / 8, 50, []), (flat, 0, [2]), (tied, 0, [1])]:
        Sampler.of(0.8, top_k=top_k, top_p=0.6).scores(torch.cat([peaked, logits]), [])
        assert sorted_rows == rows
        sorted_rows.clear()


@pytest.mark.parametrize("size", [7, LARGE - 1, LARGE, LARGE + 1, LARGE + BLOCK, VOCAB])
def test_a_token_is_drawn_by_the_numbers_of_its_interval(monkeypatch, size):
    """Whole blocks without any probability, and the first and the last token without, among them."""
    generator = torch.Generator().manual_seed(size)
    p = (4 * torch.randn(size, generator=generator, dtype=torch.float64)).softmax(-1)
    p[torch.rand(size, generator=generator) < 0.3] = 0.0
    p[[0, -1]] = 0.0
    p[2 * BLOCK : 4 * BLOCK] = 0.0
    above = (p / p.sum()).cumsum(-1)
    tokens = (p > 1e-9).nonzero()[:, 0]
    tokens = tokens[torch.randperm(len(tokens), generator=generator)[:300]]
    for share in (0.001, 0.5, 0.999):
        u = above[tokens] - (1 - share) * p[tokens] / p.sum()
        assert torch.equal(draw_rows(3 * p.expand(len(u), -1), u), tokens)  # p need not sum to 1
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert bool((p[draw_rows(p.expand(2, -1), ends)] > 0).all())
    for number in (u[:1], ends[:1]):
        monkeypatch.setattr(torch, "rand", lambda *size, number=number, **options: number)
        assert torch.equal(draw(p, None), draw_rows(p[None], number))
