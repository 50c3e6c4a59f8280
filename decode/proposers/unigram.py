"""The floor: drafts that know nothing of the context but how often tokens occur."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Proposal, StatelessProposer
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start
from draftsmith.decode.replay.rounds import overlap
from draftsmith.decode.replay.texts import WrittenText
from draftsmith.decode.sampling import draw
from draftsmith.decode.tree import Tree


class BlindProposer(StatelessProposer):
    """Guesses from unigram frequencies alone: what any drafter has to beat.

    At T=0 it drafts the most frequent token again and again (of equals the one with the smallest id). Under sampling
    it draws each token from the frequencies, and q is exactly them: they are not warped as p is.

    Args:
        frequencies: (V,) relative frequencies or counts, not negative; a shorter vector is filled up with zeros, as a
            padded head needs. The row's text so far, prompt included, is counted if None.

    Raises:
        InputError: not such a vector, all of it zero, or in `start` one that is wider than the target's vocabulary.
    """

    def __init__(self, frequencies: Tensor | None = None):
        if frequencies is not None:
            if frequencies.ndim != 1:
                raise InputError(f"frequencies: expected a vector (V,), found shape {tuple(frequencies.shape)}")
            if not bool(torch.isfinite(frequencies).all()) or bool((frequencies < 0).any()) or not frequencies.any():
                raise InputError("frequencies: expected finite values ≥ 0, not all zero, found others")
        self.frequencies = frequencies

    def start(self, task: DraftTask) -> int:
        """Keep the task and each row's generator."""
        if self.frequencies is not None and len(self.frequencies) > task.vocab_size:
            raise InputError(f"frequencies: expected at most V = {task.vocab_size}, found {len(self.frequencies)}")
        self._generators = list(task.generators)
        return super().start(task)

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain of the draft length for each row."""
        drafts = []
        for context, k, generator in zip(contexts, draft_lengths, self._generators, strict=True):
            if k == 0:
                drafts.append(Proposal(context[:0], None, Tree.chain(0)))
                continue
            q = self._distribution(context)
            confidence = q.max().expand(k)
            if self.task.sampler.do_sample:
                tokens = torch.cat([draw(q, generator) for _ in range(k)])
                drafts.append(Proposal(tokens, q.expand(k, -1), Tree.chain(k), confidence))
            else:
                drafts.append(Proposal(q.argmax(0, keepdim=True).repeat(k), None, Tree.chain(k), confidence))
        return drafts

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay certain drafts at T=0, and under sampling those drawn from the frequencies at the round's start."""
        if distributions is None:
            return super().replay(task, texts, distributions)
        self.start(task)
        acceptance, overlaps = [], []
        for text, p in zip(texts, distributions, strict=True):
            n = len(text)
            q = torch.stack([self._distribution(text.sequence[: text.prompt_length + start]) for start in range(n)]).to(
                p
            )
            offsets = torch.arange(task.draft_length, device=p.device)
            places = torch.arange(n, device=p.device)[:, None] + offsets
            tokens = text.tokens[places.clamp(max=n - 1)]
            p_x = p[places.clamp(max=n - 1), tokens].clamp(min=torch.finfo(p.dtype).tiny)
            acceptance.append((q.gather(1, tokens) / p_x).clamp(max=1.0).where(places < n, 0.0))
            overlaps.append(overlap(p, q))
        return replay_by_start(texts, acceptance, overlaps)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the generators of the rows that are left."""
        self._generators = [self._generators[row] for row in rows]

    def _distribution(self, context: Tensor) -> Tensor:
        """Return q, (V,) float64: in float32 it would not sum to 1, and be another than is drawn from."""
        size = self.task.vocab_size
        if self.frequencies is None:
            counts = torch.bincount(context, minlength=size)
        else:
            counts = self.frequencies.to(context.device)
            counts = torch.nn.functional.pad(counts, (0, size - len(counts)))
        return counts.double() / counts.sum(dtype=torch.float64)
