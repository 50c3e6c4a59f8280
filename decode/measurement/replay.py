"""Replay: acceptance on text that the target wrote, by one teacher-forced forward of each model, without decoding.

The Rao-Blackwellised decoder: the same means from the same text for every draft length and any number of drafters, and
less variance (`draftsmith.decode.replay.rounds` has the sums). At T=0 its counts are the decoder's, integer for
integer.

Shape suffixes: B texts, N tokens of a text, T tokens with the prompt, V vocabulary.
"""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Generic, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.counts import Ratios
from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.authorship import Authorship, readmit
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratios
from draftsmith.decode.progress import phase
from draftsmith.decode.proposers.base import DraftTask, Proposer
from draftsmith.decode.replay.batch_replay import BatchReplay
from draftsmith.decode.replay.texts import WrittenText, teacher_forced
from draftsmith.decode.sampling import Sampler, prefixes

Key = TypeVar("Key", bound=Hashable)
"""What a caller calls a drafter by."""
LOGITS_AT_A_TIME = 2**27
"""Logits of the target that are held at a time, prompts counted in: 512 MiB in float32, at least one text's.

Its distributions take as much, then the drafter's logits in place of the target's, and what is made of one text comes
on top. In float32, with texts of 512 tokens and a chain, replay added to the peak of the process: V = 32k, eight texts
at a time, 0.5 GiB at T=0, 1.1 at T=1, 1.6 with top-p, which sorts; V = 128k, two at a time, 1.4 at T=1.
"""


@dataclass(frozen=True)
class TextReplay:
    """One text's acceptance by one drafter."""

    counts: dict[int, Ratios]
    """By draft length, what a decoder is expected to count."""
    overlap: float
    """Σ over contexts of Σ_v min(p, q)."""
    contexts: int
    """The contexts."""
    acceptance: tuple[float, ...]
    """Of each token, the probability that a round that starts there accepts it; 0 where none drafts."""
    rounds: np.ndarray | None = None
    """Of each token, the probability that a round that starts there accepts its j-th draft, given that it accepted
    those before, (N, γ); None unless it was asked for, and of trees."""
    drafted: np.ndarray | None = None
    """How many tokens such a round drafts, (N,), where that is not γ: of copies, and where drafters take turns."""
    sizes: dict[int, np.ndarray] = field(default_factory=dict)
    """By draft length, see `BatchReplay.sizes`; nothing unless it was asked for."""


@dataclass(frozen=True)
class Replay:
    """What replay says of one drafter; every figure has a 95 % interval over prompts."""

    texts: list[TextReplay] = field(repr=False)
    """In the order of the sequences."""
    biased: bool = False
    """Whether the texts were not checked to be the target's: then the figures may be off by anything."""
    num_ties: int = 0
    """Tokens that top-k or top-p cut off here by rounding, not where they were written: `authorship.readmit`."""

    @cached_property
    def draft_lengths(self) -> list[int]:
        """The draft lengths that were replayed."""
        return list(self.texts[0].counts)

    @cached_property
    def alpha(self) -> Estimate:
        """α = E[Σ_v min(p, q)] over the contexts; at T=0 the rate at which the argmaxes agree."""
        return ratio(*self.overlaps_and_contexts())

    @cached_property
    def mean_acceptance_length(self) -> dict[int, Estimate]:
        """τ for each draft length."""
        return ratios({k: self.tokens_and_rounds(k) for k in self.draft_lengths})

    @cached_property
    def draft_acceptance_rate(self) -> dict[int, Estimate]:
        """Accepted ÷ drafted tokens for each draft length."""
        by_length = {k: [text.counts[k] for text in self.texts] for k in self.draft_lengths}
        return ratios(
            {
                k: ([c.num_accepted_tokens for c in counts], [c.num_draft_tokens for c in counts])
                for k, counts in by_length.items()
            }
        )

    @cached_property
    def acceptance_per_position(self) -> dict[int, list[Estimate]]:
        """For each draft length: of each position, rounds that accepted it ÷ rounds that drafted it."""
        return self._by_position("num_draft_tokens_per_pos")

    @cached_property
    def conditional_acceptance(self) -> dict[int, list[Estimate]]:
        """For each draft length: of each position, its acceptance given that all before it were accepted."""
        return self._by_position("num_reached_per_pos")

    def tokens_and_rounds(self, draft_length: int) -> tuple[list[float], list[float]]:
        """Return each text's tokens and expected rounds, whose sums' ratio is τ."""
        counts = [text.counts[draft_length] for text in self.texts]
        return [c.num_emitted_tokens for c in counts], [c.num_drafts for c in counts]

    def overlaps_and_contexts(self) -> tuple[list[float], list[int]]:
        """Return each text's summed overlap and its contexts, whose sums' ratio is α."""
        return [text.overlap for text in self.texts], [text.contexts for text in self.texts]

    def _by_position(self, denominator: str) -> dict[int, list[Estimate]]:
        def values(name: str, k: int) -> Iterator[tuple[float, ...]]:
            # Of each position, by text; short texts draft less far.
            return zip_longest(*(getattr(text.counts[k], name) for text in self.texts), fillvalue=0.0)

        names = "num_accepted_tokens_per_pos", denominator
        estimates = ratios(
            {
                (k, position): columns
                for k in self.draft_lengths
                for position, columns in enumerate(zip(*(values(name, k) for name in names), strict=True))
            }
        )
        by_length: dict[int, list[Estimate]] = {k: [] for k in self.draft_lengths}
        for (k, _), estimate in estimates.items():
            by_length[k].append(estimate)
        return by_length


def replay_acceptance(
    target: PreTrainedModel,
    proposer: Proposer,
    sequences: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    draft_lengths: Sequence[int] = range(1, 17),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int | None = None,
    allow_biased: bool = False,
) -> Replay:
    """Replay a drafter's acceptance on texts that the target wrote.

    Under several processes (`accelerate launch`) each takes its share of the texts; what they counted is gathered
    before any ratio is taken, and all return the same.

    Args:
        target: the model that wrote the texts.
        proposer: a draft model's, chains at any temperature and a `Tree` at T=0; prompt lookup or another that looks
            at the text alone; heads on the target's states, chains at any temperature and trees at T=0.
        sequences: prompts and texts, (T,) int64 each, without padding.
        prompt_lengths: tokens of each prompt.
        draft_lengths: γ, as many as wanted: they cost next to nothing.
        temperature: what the texts were written under, as are `top_k` and `top_p`; 0 is greedy.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        max_new_tokens: the limit that the texts were written under; each one's own length if None. A decoder drafts
            beyond the end of a text that ended before the limit.
        allow_biased: replay texts that the target does not seem to have written; the result says `biased`.

    Raises:
        InputError: a drafter that replay does not apply to, or a text that the target did not write.
    """
    sampler = Sampler.of(temperature, top_k, top_p)
    replays = replay_drafters(
        target, {"": proposer}, sequences, prompt_lengths, draft_lengths, sampler, max_new_tokens, allow_biased
    )
    return replays[""]


@torch.inference_mode()
def replay_drafters(
    target: PreTrainedModel,
    proposers: Mapping[Key, Proposer],
    sequences: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    draft_lengths: Sequence[int],
    sampler: Sampler,
    max_new_tokens: int | None = None,
    allow_biased: bool = False,
    rounds_of: int | None = None,
    with_sizes: Container[Key] = (),
) -> dict[Key, Replay]:
    """Replay several drafters on the same texts, with one forward of the target for all: see `replay_acceptance`.

    With `rounds_of`, a draft length, each text's `rounds` are kept for it; of the drafters `with_sizes` its `sizes`.
    """
    texts = _checked_texts(target, sequences, prompt_lengths, max_new_tokens)
    if not texts or min(draft_lengths, default=0) < 1:
        raise InputError(
            f"replay: expected texts and draft lengths of at least 1, found {len(texts)} and {list(draft_lengths)}"
        )
    for proposer in proposers.values():
        if refusal := proposer.replay_refusal(sampler.do_sample):
            raise InputError(refusal)
    state = PartialState()
    places = range(len(texts))[state.process_index :: state.num_processes]
    shares = [_share(target, proposers, texts, places, draft_lengths, sampler, allow_biased, rounds_of, with_sizes)]
    if state.num_processes > 1:
        shares = gather_object(shares)
    for share in shares:
        if share.refusal is not None:
            raise InputError(share.refusal)
    sum((share.authorship for share in shares), Authorship()).judge()
    replays = {place: replay for share in shares for place, replay in share.replays.items()}
    ties = sum(share.ties for share in shares)
    return {key: Replay([replays[place][key] for place in sorted(replays)], allow_biased, ties) for key in proposers}


@dataclass
class _Share(Generic[Key]):
    """What one process replayed."""

    replays: dict[int, dict[Key, TextReplay]] = field(default_factory=dict)
    """By a text's place, then by drafter."""
    authorship: Authorship = field(default_factory=Authorship)
    ties: int = 0
    """Tokens that were cut off by rounding."""
    refusal: str | None = None
    """The error message for bad input, so that every process raises it and none waits for the others."""


def _share(
    target: PreTrainedModel,
    proposers: Mapping[Key, Proposer],
    texts: Sequence[WrittenText],
    places: Sequence[int],
    draft_lengths: Sequence[int],
    sampler: Sampler,
    allow_biased: bool,
    rounds_of: int | None,
    with_sizes: Container[Key],
) -> _Share[Key]:
    """Replay the texts at these places, as many at a time as memory allows."""
    share: _Share[Key] = _Share()
    vocab_size = target.config.get_text_config().vocab_size
    task = DraftTask(
        sampler=sampler,
        vocab_size=vocab_size,
        generators=[None],
        max_length=max(text.prompt_length + text.limit for text in texts),
        draft_length=max(draft_lengths),
        draw_siblings=True,
        compiled=False,
        target=target,
    )
    try:
        with phase("replay", len(places), "texts") as progress:
            for batch in _batches(texts, places, vocab_size):
                members = [texts[place] for place in batch]
                distributions = _distributions(target, members, sampler, share, allow_biased)
                replays, known = {}, dict[tuple[int, bool], list[TextReplay]]()  # several may be one and the same
                batches = {name: proposer.replay(task, members, distributions) for name, proposer in proposers.items()}
                for name, replayed in batches.items():
                    if (which := (id(replayed), name in with_sizes)) not in known:
                        sized = members if name in with_sizes else ()
                        known[which] = _text_replays(replayed, draft_lengths, rounds_of, sized)
                    replays[name] = known[which]
                for i, place in enumerate(batch):
                    share.replays[place] = {name: of_texts[i] for name, of_texts in replays.items()}
                progress.advance(len(batch))
    except InputError as error:
        share.refusal = str(error)
    return share


def _distributions(
    target: PreTrainedModel, texts: Sequence[WrittenText], sampler: Sampler, share: _Share[Key], allow_biased: bool
) -> list[Tensor] | None:
    """Return the target's distributions of each text's tokens, (N, V); None at T=0.

    Raises:
        InputError: a text that the target did not write, unless biased replays are allowed.
    """
    distributions: list[Tensor] | None = [] if sampler.do_sample else None
    for text, logits_NV in zip(texts, teacher_forced(target, texts), strict=True):
        contexts = prefixes(text.sequence[:-1], len(text))
        scores_NV, p_NV = sampler.scores(logits_NV, contexts), None
        if distributions is not None:
            share.ties += readmit(sampler, logits_NV, scores_NV, text.tokens, contexts)
            p_NV = scores_NV.softmax(-1)
            distributions.append(p_NV)
        if not allow_biased:
            share.authorship.check(text, logits_NV, scores_NV, p_NV)
    return distributions


def _text_replays(
    replayed: BatchReplay, draft_lengths: Sequence[int], rounds_of: int | None, sized: Sequence[WrittenText]
) -> list[TextReplay]:
    """Return one drafter's replay of each text of a batch, with the sizes of rounds for `sized` texts."""
    counts = {k: replayed.counts(k) for k in draft_lengths}
    rounds = _chain_rounds(replayed, rounds_of) if rounds_of else None
    sizes = {k: replayed.sizes(sized, k) for k in draft_lengths} if sized else {}
    return [
        TextReplay(
            {k: of_texts[i] for k, of_texts in counts.items()},
            float(overlap.double().sum()),
            len(overlap),
            tuple(acceptance.tolist()),
            None if rounds is None else rounds[i][0],
            None if rounds is None else rounds[i][1],
            {k: of_texts[i] for k, of_texts in sizes.items() if of_texts is not None},
        )
        for i, (acceptance, overlap) in enumerate(zip(replayed.acceptance, replayed.overlaps, strict=True))
    ]


def _chain_rounds(replayed: BatchReplay, draft_length: int) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """Return for each text what rounds of chains accept at each start, and how many tokens they draft if not γ."""
    if replayed.chains is not None:
        return [(a_NK.cpu().numpy(), None) for a_NK in replayed.chains(draft_length)]
    rounds = [] if replayed.rounds is None else replayed.rounds(draft_length)
    if not rounds or any(int(each.widths.max()) > 1 for each in rounds):
        return None
    return [(each.acceptance.cpu().numpy(), each.widths.sum(1).numpy()) for each in rounds]


def _checked_texts(
    target: PreTrainedModel, sequences: Sequence[Tensor], prompt_lengths: Sequence[int], limit: int | None
) -> list[WrittenText]:
    texts = []
    for i, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        if sequence.ndim != 1 or not 1 <= length < len(sequence):
            raise InputError(
                f"sequences: expected a prompt and a text in each, found {length} tokens of prompt in shape "
                f"{tuple(sequence.shape)}, text {i}"
            )
        tokens = len(sequence) - length
        if limit is not None and tokens > limit:
            raise InputError(f"sequences: expected at most {limit} new tokens, found {tokens} in text {i}")
        texts.append(WrittenText(sequence.to(target.device), length, tokens if limit is None else limit))
    return texts


def _batches(texts: Sequence[WrittenText], chosen: Sequence[int], vocab_size: int) -> Iterator[list[int]]:
    """Yield places of texts of about one length, as many as their logits allow."""
    batch: list[int] = []
    for i in sorted(chosen, key=lambda i: -len(texts[i].sequence)):
        longest = len(texts[batch[0] if batch else i].sequence)
        if batch and (len(batch) + 1) * longest * vocab_size > LOGITS_AT_A_TIME:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
