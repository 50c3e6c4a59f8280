"""Tests of losslessness: identity with plain decoding at T=0, and a distribution test for sampled text.

Let a token x be drawn from p, and u = F(x⁻) + U p(x) a random point of its step of the cumulative distribution. Then u
is uniform on (0, 1) and independent of everything before x (Rosenblatt 1952; for discrete laws Smith 1985; as a test of
forecasts Diebold, Gunther and Tay 1998). One sequence of numbers therefore tests the distributions of all contexts, at
any vocabulary; counting would need every context many times.

Shape suffixes: B texts, T tokens of a text, C columns of a block, N tokens under test, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from draftsmith.decode.autoregressive import autoregressive_generate
from draftsmith.decode.cache import pad_right
from draftsmith.decode.counts import Counts
from draftsmith.decode.errors import InputError
from draftsmith.decode.generation import DecodeOutput, generate_arguments
from draftsmith.decode.measurement.uniformity import (
    BINS,
    PAIR_BINS,
    ChiSquare,
    bins,
    independence,
    transform,
    uniformity,
)
from draftsmith.decode.progress import phase
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.replay.texts import Distributions, model_distributions
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.speculative import speculative_generate

Text = tuple[Tensor, int]  # A text's tokens (T,) int64, and the length of its prompt, at least 1
ENTRIES = 2**25  # logits held at a time; the tensors computed from them take a few times their memory
MOST_NAMED = 16
PLACES_SEED = 2**31
"""An offset from the seeds of the texts: a number that chose a token is no longer random given that token."""


@dataclass(frozen=True)
class DistributionTest:
    """The result of the test. For a correct decoder `p_value` is below x with probability at most x."""

    num_tokens: int
    p_value: float  # the smallest p-value times the number of tests (Bonferroni); 0 where a token had probability zero
    tests: dict[str, ChiSquare]
    num_impossible: int  # tokens to which the target gives probability zero
    impossible: tuple[tuple[int, int], ...]  # the first 16 impossible tokens: (text, index of the token in it)

    @property
    def combined(self) -> float:
        """The p-value of the tests alone, regardless of impossible tokens."""
        return min(1.0, len(self.tests) * min(test.p_value for test in self.tests.values()))

    def worst(self) -> str:
        """Describe the worst of the tests, for a message."""
        name, test = min(self.tests.items(), key=lambda item: item[1].p_value)
        ruled_out = f"; {self.num_impossible} tokens that it rules out" if self.num_impossible else ""
        return f"the tokens' distribution is not the target's: {name}, {test}, p = {test.p_value:.2g}{ruled_out}"


def plain_texts(
    target: PreTrainedModel, prompts: Iterable[Tensor], batch_size: int = 1, **generate_kwargs: Any
) -> list[Tensor]:
    """Decode prompts (T,) at T=0 plainly, `batch_size` together, and return the texts, prompts included."""
    decode = partial(autoregressive_generate, target, do_sample=False)
    batches = _batched(prompts, batch_size, "plain decoding")
    return [text for batch in batches for (text, _), _ in _decode(decode, batch, **generate_kwargs)]


def speculative_texts(
    target: PreTrainedModel, proposer: Proposer, prompts: Iterable[Tensor], batch_size: int = 1, **generate_kwargs: Any
) -> list[Tensor]:
    """Decode prompts as `plain_texts` does, but speculatively, with arguments of `speculative_generate`."""
    decode = partial(speculative_generate, target, proposer, do_sample=False)
    batches = _batched(prompts, batch_size, "speculative decoding")
    return [text for batch in batches for (text, _), _ in _decode(decode, batch, **generate_kwargs)]


def sample_texts(
    target: PreTrainedModel,
    proposer: Proposer,
    prompts: Sequence[Tensor],
    num_tokens: int,
    draft_length: int = 4,
    batch_size: int = 8,
    **generate_kwargs: Any,
) -> tuple[list[Text], Counts]:
    """Sample texts until they hold at least `num_tokens` new tokens, cycling through the prompts, (T,) int64 each.

    Every text has its own seed, and texts are taken in order up to the first that suffices, so that the texts do not
    depend on the batch size. `generate_kwargs` override the generation config.
    """
    texts: list[Text] = []
    counts = Counts()
    decode = partial(speculative_generate, target, proposer)
    options: dict[str, Any] = {"do_sample": True, "draft_length": draft_length} | generate_kwargs
    with phase("sampled texts", num_tokens, "tokens") as sampled:
        cycled = cycle(prompts)
        while batch := list(islice(cycled, batch_size)):
            for text, text_counts in _decode(decode, batch, seed=len(texts), **options):
                texts.append(text)
                counts += text_counts
                sampled.advance(text_counts.num_emitted_tokens)
                if counts.num_emitted_tokens >= num_tokens:  # later texts of the batch are dropped
                    return texts, counts
    raise InputError("prompts: expected at least one to sample from, found none")


def prepared_sampler(target: PreTrainedModel, **generate_kwargs: Any) -> Sampler:
    """Return the sampler that `generate` prepares from these arguments and the target's generation config."""

    def prepared(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Sampler:
        return Sampler(logits_processor, bool(generation_config.do_sample))

    prompt = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    generate: Any = target.generate
    arguments = generate_arguments(target, prompt, None, **({"max_new_tokens": 1} | generate_kwargs))
    return generate(custom_generate=prepared, **arguments)


@torch.inference_mode()
def distribution_test(
    target: PreTrainedModel,
    texts: Iterable[Text],
    sampler: Sampler,
    drafter: Distributions | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> DistributionTest:
    """Test whether texts, each without tokens after its end of sequence, were drawn from the target under a sampler.

    The vocabulary is ordered in each context by token id, by p and, given the drafter's q, by q − p: a distribution
    that leans towards the drafter, the usual fault of speculative sampling, then shows at one end. The numbers of each
    ordering are tested for uniformity, and successive ones for independence; pairs overlap, which the statistic of the
    contingency table allows for (Billingsley 1961, section 5).

    A token of probability zero fails the test. Test in float32: in half precision, rounding lets top-k and top-p rule
    out tokens here that the decoder kept.

    Raises:
        InputError: T=0, a text without a prompt, or fewer than 20 tokens for each cell of the table of pairs.
    """
    if not sampler.do_sample:
        raise InputError("sampler: expected sampling, found T=0, where texts are compared token for token")
    generator = torch.Generator().manual_seed(PLACES_SEED + seed)
    size = target.config.get_text_config().vocab_size
    orders = ["id", "p"] if drafter is None else ["id", "p", "q − p"]
    law_tests = _LawTests(orders)
    for batch in _batched(texts, batch_size, "test of the law"):
        ids_BT, wanted_BT = _aligned(batch)
        wanted_TB = wanted_BT.T.cpu()
        columns = max(1, ENTRIES // (len(batch) * size))
        u_KTB = torch.zeros(len(orders), *wanted_TB.shape, dtype=torch.float64)
        places_BT = torch.zeros(wanted_BT.shape, dtype=torch.float64)
        # Drawn text by text, so that the points do not depend on the batch size.
        places_BT[wanted_TB.T] = torch.rand(int(wanted_BT.sum()), generator=generator, dtype=torch.float64)
        # Distributions come in blocks of columns: (B, T, V) would not fit into memory.
        q_blocks = repeat(None) if drafter is None else drafter(ids_BT, wanted_BT, columns)
        p_blocks = model_distributions(target, sampler)(ids_BT, wanted_BT, columns)
        for start, p_NV, q_NV in zip(range(1, ids_BT.shape[1], columns), p_blocks, q_blocks, strict=False):
            block_CB, chosen_CB = wanted_BT[:, start : start + columns].T, wanted_TB[start : start + columns]
            tokens_N = ids_BT[:, start : start + columns].T[block_CB]
            if not len(tokens_N):
                continue
            keys = [torch.arange(p_NV.shape[1], device=p_NV.device).expand_as(p_NV), p_NV]
            keys += [] if q_NV is None else [q_NV - p_NV]
            places_N = places_BT[:, start : start + columns].T[chosen_CB].to(p_NV.device)
            for k, key_NV in enumerate(keys):
                u_KTB[k, start : start + columns][chosen_CB] = transform(p_NV, key_NV, tokens_N, places_N).cpu()
            law_tests.add_impossible((p_NV.gather(1, tokens_N[:, None])[:, 0] == 0).cpu(), chosen_CB, start)
        law_tests.add(u_KTB, wanted_TB)
    return law_tests.result()


class _LawTests:
    """The tests of all numbers for each of K orders of the vocabulary, and the tokens of probability zero."""

    def __init__(self, orders: Sequence[str]):
        self._orders = orders
        self._uniform = torch.zeros(len(orders), BINS, dtype=torch.long)
        self._successive = torch.zeros(len(orders), PAIR_BINS**2, dtype=torch.long)
        self._num_tokens = self._num_impossible = self.num_texts = 0
        self._impossible: list[tuple[int, int]] = []

    def add_impossible(self, ruled_out_N: Tensor, chosen_CB: Tensor, start: int) -> None:
        """Add impossible tokens in the columns from `start` on of the batch that is added next."""
        self._num_impossible += int(ruled_out_N.sum())
        for column, text in chosen_CB.nonzero()[ruled_out_N][: MOST_NAMED - len(self._impossible)].tolist():
            self._impossible.append((self.num_texts + text, start + column))

    def add(self, u_KTB: Tensor, wanted_TB: Tensor) -> None:
        """Add a batch's numbers."""
        both_TB = wanted_TB[:-1] & wanted_TB[1:]
        for k, u_TB in enumerate(u_KTB):
            self._uniform[k] += bins(u_TB[wanted_TB], BINS).bincount(minlength=BINS)
            cells = bins(u_TB[:-1][both_TB], PAIR_BINS) * PAIR_BINS + bins(u_TB[1:][both_TB], PAIR_BINS)
            self._successive[k] += cells.bincount(minlength=PAIR_BINS**2)
        self._num_tokens += int(wanted_TB.sum())
        self.num_texts += wanted_TB.shape[1]

    def result(self) -> DistributionTest:
        """Return the tests; raise InputError if there are too few tokens."""
        if self._num_tokens < 20 * PAIR_BINS**2:
            raise InputError(f"texts: expected at least {20 * PAIR_BINS**2} tokens, found {self._num_tokens}")
        tests: dict[str, ChiSquare] = {}
        for k, order in enumerate(self._orders):
            tests[f"uniform by {order}"] = uniformity(self._uniform[k])
            tests[f"independent by {order}"] = independence(self._successive[k].view(PAIR_BINS, PAIR_BINS))
        result = DistributionTest(self._num_tokens, 0.0, tests, self._num_impossible, tuple(self._impossible))
        return result if self._num_impossible else replace(result, p_value=result.combined)


Item = TypeVar("Item")


def _batched(items: Iterable[Item], size: int, title: str) -> Iterator[list[Item]]:
    """Yield batches of texts, in a phase that counts them."""
    iterator = iter(items)
    with phase(title, len(items) if isinstance(items, Sized) else None, "texts") as opened:
        while batch := list(islice(iterator, size)):
            yield batch
            opened.advance(len(batch))


def _decode(
    decode: Callable[..., DecodeOutput], prompts: list[Tensor], **options: Any
) -> Iterator[tuple[Text, Counts]]:
    """Decode prompts together; yield each text, without padding, and its counts."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
    mask = (torch.arange(width, device=ids.device) >= width - lengths[:, None]).long()
    out = decode(ids, mask, **({"pad_token_id": 0} | options))
    for sequence, prompt, counts in zip(out.sequences, prompts, out.row_counts, strict=True):
        yield (sequence[width - len(prompt) : width + counts.num_emitted_tokens], len(prompt)), counts


def _aligned(texts: list[Text]) -> tuple[Tensor, Tensor]:
    """Pad texts on the right; return them and a mask of the tokens under test, both (B, T)."""
    for _, prompt_length in texts:
        if prompt_length < 1:
            raise InputError(f"prompt_length: expected at least 1, found {prompt_length}")
    ids = pad_right([text for text, _ in texts], max(len(text) for text, _ in texts))
    first, end = (
        torch.tensor(ends, device=ids.device)[:, None]
        for ends in ([prompt_length for _, prompt_length in texts], [len(text) for text, _ in texts])
    )
    columns = torch.arange(ids.shape[1], device=ids.device)
    return ids, (columns >= first) & (columns < end)
