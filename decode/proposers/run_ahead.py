"""A draft model that runs ahead: a second thread drafts on while the target verifies the last draft."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal
from draftsmith.decode.proposers.draft_model import DraftModelProposer
from draftsmith.decode.tree import Tree


class RunAheadProposer(DraftModelProposer):
    """A proposer of chains, as `DraftModelProposer`, that drafts the next chain while the target verifies the present.

    PEARL's post-verify (Liu et al. 2024, "PEARL: Parallel Speculative Decoding with Adaptive Draft Length"), for a
    round loop whose target adds a bonus token after full acceptance. The draft guesses the bonus token, at T=0 by its
    argmax and under sampling by a draw from q, and drafts up to γ tokens after it. If the whole draft is accepted and
    the guess is right, the next draft is ready. Otherwise it is cancelled after the current token, the cache is rolled
    back, and the round drafts as usual. At T=0 acceptance does not change.

    It is lossless. Given the text and its draft x, the guess g and the tokens y after it use random numbers that
    verification never sees; acceptance of x and the bonus token b ~ p use numbers that g and y never saw. So, given
    that x was accepted and b = g, y was drawn from the q that is returned with it. Otherwise the draft is drawn with
    new random numbers: the spent ones did not lead to b, so they are not independent of it. Reuse depends on tokens
    only, never on which thread was faster, so a seed determines the text.

    It saves u·γ draft steps a round if a share u of rounds uses the draft made ahead. It pays only if the draft has a
    processor of its own. Both threads compete for the interpreter's lock, which small models hold most of the time.

    On a CPU it runs in one thread; the target has the caller's (`torch.set_num_threads`). `num_ahead` counts the rounds
    in which the draft ran ahead, and `num_used` those that used its draft.

    Raises:
        InputError: in `start`, several rows or compiled forwards.
    """

    def __init__(self, draft_model: PreTrainedModel):
        super().__init__(draft_model)
        self.num_ahead = self.num_used = 0
        self._ahead: _AheadThread | None = None

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache and a separate random generator, seeded from the row's."""
        self.close()
        if len(task.generators) != 1:
            raise InputError(f"batch: expected one row where the draft runs ahead, found {len(task.generators)}")
        if task.compiled:  # while one thread traces, calls of compiled functions fail in every other
            raise InputError("compiled: expected eager forwards where the draft runs ahead, found compiled ones")
        device = self.draft_model.device
        self._row_generator = task.generators[0]
        self._accepted_length = 0  # the cache may hold this many tokens of the text
        # Copies of the processors, as the target's thread uses them at the same time.
        sampler = task.sampler.on(device)
        largest = super().start(replace(task, sampler=sampler, row_samplers=(), generators=[torch.Generator(device)]))
        self._reseed()
        return largest

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Return the draft made ahead, or draft a chain; then start running ahead of it."""
        (context,), (length,) = contexts, draft_lengths
        text = context.to(self.draft_model.device)
        draft = self._take_over(text, length)
        if draft is None:
            # Roll the cache back to the accepted tokens: what ran ahead was cancelled.
            self.feeder.rewind(self._accepted_length)
            (draft,) = super().propose([text], [length])
            self._accept(draft)
        drafted = torch.cat([text, draft.tokens])
        self._length = len(text)
        # Leave room for the guess, and for the token that the target adds after the next draft.
        count = min(length, self.task.max_length - len(drafted) - 2)
        if count > 0 and len(draft.tokens):
            self._ahead = _AheadThread(self._draft_token, drafted, 1 + count)
            self._ahead.start()
            self.num_ahead += 1
        return [draft.to(context.device)]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Record the accepted length only: the cache belongs to the thread that runs ahead."""
        self._accepted_length = self._length + len(outcomes[0].path)

    def close(self) -> None:
        """Cancel and join the thread that runs ahead, if any; at the end of a text it also ends by itself."""
        if self._ahead is not None:
            self._ahead.settle(None)
            self._ahead.join()
            self._ahead = None

    def _take_over(self, text: Tensor, length: int) -> Proposal | None:
        """Return at most `length` tokens of the draft made ahead; None if there is none for this text."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        parts = ahead.result(int(text[-1]) if self._accepted_length == len(ahead.text) else None)
        if parts is None:
            self._reseed()  # how many random numbers the cancelled thread spent depends on timing
            return None
        self.num_used += 1
        draft = _concatenate(parts[1 : 1 + length], text)
        self.feeder.rewind(len(text) + len(draft.tokens) - 1)
        return draft

    def _draft_token(self, text: Tensor) -> Proposal:
        if not len(self.samplers[0].after(text[: self._length], text[self._length :])):  # drafted tokens ended it
            return Proposal(text[:0], None, Tree.chain(0))
        (draft,) = super().propose([text], [1])
        self._accept(draft)
        return draft

    def _accept(self, draft: Proposal) -> None:
        """Treat a draft as accepted, so that its tokens stay in the cache."""
        super().commit([Outcome(list(range(len(draft.tokens))), draft.tokens[:0])])

    def _reseed(self) -> None:
        if self.task.sampler.do_sample:
            drafts, row = self.generators[0], self._row_generator
            assert drafts is not None
            device = "cpu" if row is None else row.device
            drafts.manual_seed(int(torch.randint(2**63 - 1, (), generator=row, device=device)))


class _AheadThread(threading.Thread):
    """A thread that drafts a guess and a chain after `text`, a token at a time, until it is cancelled."""

    def __init__(self, draft_token: Callable[[Tensor], Proposal], text: Tensor, count: int):
        super().__init__(name="draft-ahead")
        self.text = text
        self._draft_token, self._count = draft_token, count
        self._callers_threads = torch.get_num_threads()
        self._parts: list[Proposal] = []
        self._settled = False
        self._bonus: int | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        # The setting is also the default of threads that start later, so it is restored at the end.
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                self._draft()
        except BaseException as error:
            self._error = error
        finally:
            torch.set_num_threads(self._callers_threads)

    def _draft(self) -> None:
        text = self.text
        while len(self._parts) < self._count and not self._is_useless:
            draft = self._draft_token(text)
            self._parts.append(draft)
            if not len(draft.tokens):  # a drafted token ended the text
                return
            text = torch.cat([text, draft.tokens])

    @property
    def _is_useless(self) -> bool:
        # Set by the other thread; read without a lock, as the only effect of a late read is one more token.
        return self._settled and (self._bonus is None or (bool(self._parts) and self._guess != self._bonus))

    @property
    def _guess(self) -> int | None:
        tokens = self._parts[0].tokens
        return int(tokens[0]) if len(tokens) else None

    def settle(self, bonus: int | None) -> None:
        """Set the token that followed `text`; None if not all of `text` was accepted."""
        self._bonus, self._settled = bonus, True  # in this order: `_settled` is read first

    def result(self, bonus: int | None) -> list[Proposal] | None:
        """Settle, wait, and return the guess and the tokens after it; None if the guess was wrong.

        An exception that ended the thread is raised here.
        """
        self.settle(bonus)
        self.join()
        if self._error is not None:
            raise self._error
        return None if bonus is None or self._guess != bonus else self._parts


def _concatenate(parts: Sequence[Proposal], text: Tensor) -> Proposal:
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
