"""The baseline drafter: tokens from unigram frequencies, without any other context."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.decode.proposers.base import DraftTask, Proposal, StatelessProposer
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start
from draftsmith.decode.replay.rounds import overlap
from draftsmith.decode.replay.texts import AtTokens, WrittenText, chunks
from draftsmith.decode.sampling import draw
from draftsmith.decode.tree import Tree


class BlindProposer(StatelessProposer):
    """A proposer of unigram frequencies, the baseline for all drafters.

    At T=0 it repeats the most frequent token of the row's text so far, prompt included, the first of equals. Under
    sampling it draws each token from the frequencies, which are q: they are not warped as p is.
    """

    def start(self, task: DraftTask) -> int:
        """Begin with new rows."""
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
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay deterministic drafts at T=0; under sampling, those drawn from the frequencies at the round's start."""
        if distributions is None:
            return super().replay(task, texts, distributions)
        self.start(task)
        acceptance, overlaps, k = list[Tensor](), list[Tensor](), task.draft_length
        for text, distribution in zip(texts, distributions, strict=True):
            n, parts = len(text), list[tuple[Tensor, Tensor]]()
            for first, end in chunks(n, task.vocab_size):
                p = distribution(first, min(end + k - 1, n))
                contexts = [text.sequence[: text.prompt_length + start] for start in range(first, end)]
                q = torch.stack([self._distribution(context) for context in contexts]).to(p)
                # All tokens of a round have the q of its start.
                places = torch.arange(end - first, device=p.device)[:, None] + torch.arange(k, device=p.device)
                inside = places.clamp(max=len(p) - 1)
                tokens = text.tokens[first + inside]
                p_x = p[inside, tokens].clamp(min=torch.finfo(p.dtype).tiny)
                accepted = (q.gather(1, tokens) / p_x).clamp(max=1.0).where(places < len(p), 0.0)
                parts.append((accepted, overlap(p[: end - first], q)))
            for whole, of_chunks in zip((acceptance, overlaps), zip(*parts, strict=True), strict=True):
                whole.append(torch.cat(of_chunks))
        return replay_by_start(texts, acceptance, overlaps)

    def select(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._generators = [self._generators[row] for row in rows]

    def _distribution(self, context: Tensor) -> Tensor:
        """Return q, (V,) float64."""
        # In float32 it would not sum to 1, so the returned q and the one that is drawn from would differ.
        counts = torch.bincount(context, minlength=self.task.vocab_size)
        return counts.double() / counts.sum(dtype=torch.float64)
