"""A draft model that runs ahead: in a second thread it drafts on while the target verifies its last draft."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.draft_model import DraftModelProposer, Stop
from draftsmith.decode.tree import Tree


class RunAheadProposer(DraftModelProposer):
    """Drafts chains as `DraftModelProposer` does, and the next chain too while the target verifies the present one.

    PEARL's post-verify (Liu et al. 2024, "PEARL: Parallel Speculative Decoding with Adaptive Draft Length"), for a
    round loop whose target adds a token after full acceptance: the draft guesses that bonus token, at T=0 by its
    argmax and under sampling by a draw from q, and drafts up to γ tokens behind it. If the whole draft is
    accepted and the bonus token is the guess, the next draft is there already. Otherwise it is called off after the
    token at hand, the cache is taken back, and the draft is drafted as usual: at T=0 acceptance is what it is without
    running ahead.

    Lossless: given the text and its draft x, guess g and the tokens y behind it are drawn with random numbers that
    verification never sees; acceptance of x and the bonus token b ~ p are drawn with numbers that g and y never saw.
    So given that x was accepted and b = g, y was drawn from the q that is handed over with it, given x and b. What is
    not handed over is drawn anew with new random numbers. Those that were spent may not be used again: they did not
    lead to b, which says something of them. What is handed over depends on tokens alone, never on which thread was
    faster, so that a seed gives one text.

    A gain needs a processor for the draft that the target does not want, and drafts that are accepted whole: a share
    u of rounds that use what was drafted ahead saves u·γ draft steps a round. Two models on one device share it, and
    two threads share the interpreter's lock, which small models hold for most of their time.

    The models may live on two devices. Logits processors are called from both threads at once, the draft's as shallow
    copies.

    Args:
        draft_model: the drafter.
        stop: ends a chain early; see `DraftModelProposer`.
        threads: CPU threads for operations of the draft that runs ahead. The target's are those of the caller's thread
            (`torch.set_num_threads`); more of both than there are cores wait for each other.

    Attributes:
        num_ahead: rounds in which the draft ran ahead, over all texts.
        num_used: rounds that took over what had been drafted ahead, over all texts.

    Raises:
        InputError: `threads` below 1, or in `start` several rows or compiled forwards.
    """

    def __init__(self, draft_model: PreTrainedModel, stop: Stop | None = None, threads: int = 1):
        super().__init__(draft_model, stop=stop)
        if threads < 1:
            raise InputError(f"threads: expected at least 1, found {threads}")
        self.threads = threads
        self.num_ahead = self.num_used = 0
        self._ahead: _Ahead | None = None

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache and a separate stream of random numbers, seeded from the row's."""
        self.close()
        if len(task.generators) != 1:
            raise InputError(f"batch: expected one row where the draft runs ahead, found {len(task.generators)}")
        if task.compiled:  # while one thread traces, calls of compiled functions fail in every other
            raise InputError("compiled: expected eager forwards where the draft runs ahead, found compiled ones")
        device = self.draft_model.device
        self._row_generator = task.generators[0]
        self._stands = 0  # tokens of the text that the cache may hold
        # Copies of the processors, for the target's thread uses them at the same time.
        sampler = task.sampler.on(device)
        largest = super().start(replace(task, sampler=sampler, row_samplers=(), generators=[torch.Generator(device)]))
        self._reseed()
        return largest

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Hand over what was drafted ahead, or draft a chain, and run ahead of it."""
        (context,), (length,) = contexts, draft_lengths
        text = context.to(self.draft_model.device)
        draft = self._take_over(text, length)
        if draft is None:
            self._cached = [min(self._cached[0], self._stands)]
            (draft,) = super().propose([text], [length])
            self._accept(draft)
        drafted = torch.cat([text, draft.tokens])
        self._length = len(text)
        # The guess and a token that the target adds after the next draft are not drafted.
        count = min(length, self._task.max_length - len(drafted) - 2)
        if count > 0 and len(draft.tokens):
            self._ahead = _Ahead(self._draft_token, drafted, 1 + count, self.threads)
            self._ahead.start()
            self.num_ahead += 1
        return [draft.to(context.device)]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Note what was accepted; the cache belongs to the thread that runs ahead."""
        self._stands = self._length + len(outcomes[0].path)

    def close(self) -> None:
        """Call off what runs ahead, if anything does; at the end of a text it also ends by itself."""
        if self._ahead is not None:
            self._ahead.settle(None)
            self._ahead.join()
            self._ahead = None

    def _take_over(self, text: Tensor, length: int) -> Proposal | None:
        """Return the draft of at most `length` tokens that is there already; None if none was made for this text."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        parts = ahead.result(int(text[-1]) if self._stands == len(ahead.text) else None)
        if parts is None:
            self._reseed()  # the clock says how many random numbers were spent before it was called off
            return None
        self.num_used += 1
        draft = _joined(parts[1 : 1 + length], text)
        self._cached = [min(self._cached[0], len(text) + len(draft.tokens) - 1)]
        return draft

    def _draft_token(self, text: Tensor) -> Proposal:
        (draft,) = super().propose([text], [1])
        self._accept(draft)
        return draft

    def _accept(self, draft: Proposal) -> None:
        """Count a draft as part of the text."""
        super().commit([Outcome(list(range(len(draft.tokens))), draft.tokens[:0])])

    def _reseed(self) -> None:
        if self._task.sampler.do_sample:
            drafts, row = self._generators[0], self._row_generator
            assert drafts is not None
            device = "cpu" if row is None else row.device
            drafts.manual_seed(int(torch.randint(2**63 - 1, (), generator=row, device=device)))


class _Ahead(threading.Thread):
    """Drafts a guess and a chain behind `text`, a token at a time, unless it is called off between two of them."""

    def __init__(self, draft_token: Callable[[Tensor], Proposal], text: Tensor, count: int, threads: int):
        super().__init__(name="draft-ahead")
        self.text = text
        self._draft_token, self._count, self._threads = draft_token, count, threads
        self._callers_threads = torch.get_num_threads()
        self._parts: list[Proposal] = []
        self._settled = False
        self._bonus: int | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        # Also what threads begin with that torch has not seen yet: it is put back.
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._draft()
        except BaseException as error:
            self._error = error
        finally:
            torch.set_num_threads(self._callers_threads)

    def _draft(self) -> None:
        text = self.text
        while len(self._parts) < self._count and not self._in_vain:
            draft = self._draft_token(text)
            self._parts.append(draft)
            if not len(draft.tokens):  # the drafter is not sure enough
                return
            text = torch.cat([text, draft.tokens])

    @property
    def _in_vain(self) -> bool:
        return self._settled and (self._bonus is None or (bool(self._parts) and self._guess != self._bonus))

    @property
    def _guess(self) -> int | None:
        tokens = self._parts[0].tokens
        return int(tokens[0]) if len(tokens) else None

    def settle(self, bonus: int | None) -> None:
        """Say which token followed `text`; None where that text came to nothing."""
        self._bonus, self._settled = bonus, True

    def result(self, bonus: int | None) -> list[Proposal] | None:
        """Settle, wait, and return the guess and the tokens drafted behind it; None if it was not the guess.

        Raises:
            BaseException: what ended the thread.
        """
        self.settle(bonus)
        self.join()
        if self._error is not None:
            raise self._error
        return None if bonus is None or self._guess != bonus else self._parts


def _joined(parts: Sequence[Proposal], text: Tensor) -> Proposal:
    """Put drafts of one token at most behind each other."""
    parts = [part for part in parts if len(part.tokens)]
    if not parts:
        return Proposal(text[:0], None, Tree.chain(0))
    distributions = [part.probabilities for part in parts if part.probabilities is not None]
    confidences = [part.confidence for part in parts if part.confidence is not None]
    return Proposal(
        torch.cat([part.tokens for part in parts]),
        torch.cat(distributions) if distributions else None,
        Tree.chain(len(parts)),
        torch.cat(confidences) if confidences else None,
    )
