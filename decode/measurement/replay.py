"""Replay: acceptance on text that the target wrote, by one teacher-forced forward of each model, without decoding.

Replay is the Rao-Blackwellised decoder: it has the same means with less variance, for every draft length and any number
of drafters (`draftsmith.decode.replay.rounds` has the sums). At T=0 its counts equal the decoder's exactly.

Shape suffixes: B texts, N tokens of a text, T tokens with the prompt, V vocabulary.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
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
from draftsmith.decode.measurement.authorship import Authorship, readmit_ties
from draftsmith.decode.measurement.intervals import Estimate, ratio, ratios
from draftsmith.decode.progress import phase
from draftsmith.decode.proposers.base import DraftTask, Proposer
from draftsmith.decode.replay.batch_replay import BatchReplay, Stretches
from draftsmith.decode.replay.texts import (
    AtTokens,
    WrittenText,
    chunks,
    contexts_of,
    keep_last,
    teacher_forced,
    tokens_at_a_time,
)
from draftsmith.decode.sampling import Sampler

Key = TypeVar("Key", bound=Hashable)  # the caller's key of a drafter


@dataclass(frozen=True)
class TextReplay:
    """One text's acceptance by one drafter."""

    counts: dict[int, Ratios]  # the expected counts of a decoder, by draft length
    overlap: float  # Σ over contexts of Σ_v min(p, q)
    contexts: int
    acceptance: tuple[float, ...]
    """For each token, the probability that a round that starts there accepts it; 0 where nothing is drafted."""
    rounds: np.ndarray | None = None
    """For each start, the probability that the round accepts its j-th draft after accepting those before it, (N, γ);
    None for trees, or if not requested."""
    drafted: np.ndarray | None = None
    """The drafted tokens of each such round, (N,), for copies and drafters that take turns; None where always γ."""
    stretches: Stretches | None = None  # None if not requested, or not known of the drafter

    @property
    def sizes(self) -> dict[int, np.ndarray]:
        """The expected rounds by draft length, then drafter and number of drafted tokens, (S, K + 1)."""
        return {} if self.stretches is None else {k: x.sum(-1) for k, x in self.stretches.rounds.items()}

    def within(self, labels: Sequence[int]) -> "TextReplay | None":
        """Return the sums over stretches with these numbers, without positions; None if the text has no such token."""
        if self.stretches is None or not len((kept := self.stretches.within(labels)).labels):
            return None
        counts = {}
        for k, rounds in kept.rounds.items():
            drafted = float((rounds.sum((0, 2)) * np.arange(rounds.shape[1])).sum())
            started, accepted = float(rounds.sum()), float(kept.accepted[k].sum())
            counts[k] = Ratios(started, drafted, accepted, (), (), (), num_emitted_tokens=float(kept.tokens.sum()))
        return TextReplay(counts, float(kept.overlap.sum()), int(kept.contexts.sum()), (), stretches=kept)


@dataclass(frozen=True)
class Replay:
    """The replay of one drafter; every figure has a 95 % interval over prompts."""

    texts: list[TextReplay] = field(repr=False)  # the replay of each sequence, in order
    biased: bool = False
    """True if the texts were not checked to be the target's: the figures may then be wrong by any amount."""
    num_ties: int = 0
    """Tokens that top-k or top-p cut off here through rounding, but not when written (`authorship.readmit_ties`)."""

    @cached_property
    def draft_lengths(self) -> list[int]:
        """The replayed draft lengths."""
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
    def acceptance_per_position(self) -> dict[int, list[Estimate]]:
        """For each draft length and position, rounds that accepted it ÷ rounds that drafted it."""
        return self._by_position("num_draft_tokens_per_pos")

    @cached_property
    def conditional_acceptance(self) -> dict[int, list[Estimate]]:
        """For each draft length and position, the acceptance given that all earlier positions were accepted."""
        return self._by_position("num_reached_per_pos")

    def tokens_and_rounds(self, draft_length: int) -> tuple[list[float], list[float]]:
        """Return each text's tokens and expected rounds, whose sums' ratio is τ."""
        counts = [text.counts[draft_length] for text in self.texts]
        return [c.num_emitted_tokens for c in counts], [c.num_drafts for c in counts]

    def overlaps_and_contexts(self) -> tuple[list[float], list[int]]:
        """Return each text's summed overlap and its contexts, whose sums' ratio is α."""
        return [text.overlap for text in self.texts], [text.contexts for text in self.texts]

    def within(self, labels: Sequence[int]) -> "Replay":
        """Return the replay of the stretches with these numbers, of the texts that have any."""
        texts = [part for text in self.texts if (part := text.within(labels)) is not None]
        return Replay(texts, self.biased, self.num_ties)

    def _by_position(self, denominator: str) -> dict[int, list[Estimate]]:
        def values(name: str, k: int) -> Iterator[tuple[float, ...]]:
            # One column a position; zeros fill it for short texts, which draft less far.
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
    """Replay a drafter's acceptance on texts that the target wrote, under the temperature and filters of the writing.

    Trees of draft models and heads can be replayed at T=0, chains at any temperature; each γ costs next to nothing.
    Each of several processes (`accelerate launch`) takes a share of the texts; all return the same.

    The sequences are prompts with texts, (T,) int64, without padding. `max_new_tokens` is the limit under which they
    were written, past whose end a decoder still drafts; None takes each text's own length. `allow_biased` replays
    texts that the target does not seem to have written, and marks the result.

    Raises:
        InputError: replay does not apply to the drafter, or the target did not write a text.
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
    stretches: Sequence[np.ndarray] = (),
) -> dict[Key, Replay]:
    """Replay several drafters with one forward of the target; keep `rounds` for γ = `rounds_of`.

    `stretches` number the stretch of each token of each text, (N,), over which `TextReplay.stretches` sums.
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
    indices = range(len(texts))[state.process_index :: state.num_processes]
    shares = [_share(target, proposers, texts, indices, draft_lengths, sampler, allow_biased, rounds_of, stretches)]
    if state.num_processes > 1:
        shares = gather_object(shares)
    for share in shares:
        if share.refusal is not None:
            raise InputError(share.refusal)
    sum((share.authorship for share in shares), Authorship()).judge()
    replays = {index: replay for share in shares for index, replay in share.replays.items()}
    ties = sum(share.ties for share in shares)
    return {key: Replay([replays[index][key] for index in sorted(replays)], allow_biased, ties) for key in proposers}


@dataclass
class _Share(Generic[Key]):
    """The replays of one process."""

    replays: dict[int, dict[Key, TextReplay]] = field(default_factory=dict)
    """Replays by index of the text, then by drafter."""
    authorship: Authorship = field(default_factory=Authorship)
    ties: int = 0  # tokens that were cut off by rounding
    refusal: str | None = None
    """The message for bad input. It is gathered, so that all processes raise it instead of waiting for one another."""


def _share(
    target: PreTrainedModel,
    proposers: Mapping[Key, Proposer],
    texts: Sequence[WrittenText],
    indices: Sequence[int],
    draft_lengths: Sequence[int],
    sampler: Sampler,
    allow_biased: bool,
    rounds_of: int | None,
    stretches: Sequence[np.ndarray],
) -> _Share[Key]:
    """Replay the texts at these indices, in batches that fit into memory."""
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
        with phase("replay", len(indices), "texts") as progress:
            for batch in _batches(texts, indices, vocab_size):
                members = [texts[index] for index in batch]
                labels = [stretches[index] for index in batch] if stretches else []
                distributions = _distributions(target, members, sampler, share, allow_biased)
                replays, computed = {}, dict[int, list[TextReplay]]()
                batches = {name: proposer.replay(task, members, distributions) for name, proposer in proposers.items()}
                for name, replayed in batches.items():
                    # Drafters may share one replay, whose sums are then taken once.
                    if id(replayed) not in computed:
                        sums = replayed.stretches(members, labels, draft_lengths) if labels else None
                        computed[id(replayed)] = _text_replays(replayed, draft_lengths, rounds_of, sums)
                    replays[name] = computed[id(replayed)]
                for i, index in enumerate(batch):
                    share.replays[index] = {name: text_replays[i] for name, text_replays in replays.items()}
                progress.advance(len(batch))
    except InputError as error:
        share.refusal = str(error)
    return share


def _distributions(
    target: PreTrainedModel, texts: Sequence[WrittenText], sampler: Sampler, share: _Share[Key], allow_biased: bool
) -> list[AtTokens] | None:
    """Return p at each text's tokens, None at T=0; raise InputError for texts that the target did not write."""
    if allow_biased and not sampler.do_sample:
        return None
    vocab_size, distributions = target.config.get_text_config().vocab_size, list[AtTokens]()
    for text, logits in zip(texts, teacher_forced(target, texts), strict=True):
        at_tokens, wrong = _checked_distributions(text, logits, sampler, share, allow_biased)
        for first, end in chunks(len(text), vocab_size):
            at_tokens(first, end)
        if not allow_biased:
            share.authorship.conclude(torch.cat(wrong), text.prompt_length, sampler.do_sample)
        distributions.append(at_tokens)
    return distributions if sampler.do_sample else None


def _checked_distributions(
    text: WrittenText, logits: AtTokens, sampler: Sampler, share: _Share[Key], allow_biased: bool
) -> tuple[AtTokens, list[Tensor]]:
    """Return p at a text's tokens, and the list of tokens that cannot be the target's, which the first pass fills."""
    seen, wrong = 0, list[Tensor]()

    def at_tokens(first: int, end: int) -> Tensor:
        nonlocal seen
        logits_CV, contexts = logits(first, end), contexts_of(text, sampler, first, end)
        tokens_C = text.tokens[first:end]
        scores_CV, ties, p_CV = sampler.scores(logits_CV, contexts), 0, None
        if sampler.do_sample:
            ties = readmit_ties(sampler, logits_CV, scores_CV, tokens_C, contexts)
            p_CV = scores_CV.softmax(-1)
        if first == seen:  # later drafters ask again
            seen = end
            share.ties += ties
            if not allow_biased:
                wrong.append(share.authorship.add(tokens_C, logits_CV, scores_CV, p_CV))
        return torch.empty(end - first, 0) if p_CV is None else p_CV

    return keep_last(at_tokens), wrong


def _text_replays(
    replayed: BatchReplay, draft_lengths: Sequence[int], rounds_of: int | None, stretches: Sequence[Stretches] | None
) -> list[TextReplay]:
    """Return one drafter's replay of each text of a batch."""
    counts = {k: replayed.counts(k) for k in draft_lengths}
    rounds = _chain_rounds(replayed, rounds_of) if rounds_of else None
    return [
        TextReplay(
            {k: text_counts[i] for k, text_counts in counts.items()},
            float(overlap.double().sum()),
            len(overlap),
            tuple(acceptance.tolist()),
            None if rounds is None else rounds[i][0],
            None if rounds is None else rounds[i][1],
            None if stretches is None else stretches[i],
        )
        for i, (acceptance, overlap) in enumerate(zip(replayed.acceptance, replayed.overlaps, strict=True))
    ]


def _chain_rounds(replayed: BatchReplay, draft_length: int) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """Return for each text the acceptance of chains at each start, and their numbers of tokens if not γ."""
    if replayed.chains is not None:
        return [(a_NK.cpu().numpy(), None) for a_NK in replayed.chains(draft_length)]
    rounds = [] if replayed.rounds is None else replayed.rounds(draft_length)
    if not rounds or any(int(text_rounds.widths.max()) > 1 for text_rounds in rounds):  # trees
        return None
    return [(text_rounds.acceptance.cpu().numpy(), text_rounds.widths.sum(1).numpy()) for text_rounds in rounds]


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
    """Yield indices of texts of about equal length, in batches whose logits can be held at a time."""
    batch: list[int] = []
    for i in sorted(chosen, key=lambda i: -len(texts[i].sequence)):
        longest = len(texts[batch[0] if batch else i].sequence)
        if batch and (len(batch) + 1) * longest > tokens_at_a_time(vocab_size):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
