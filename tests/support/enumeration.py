"""The law of what the decoder writes, exactly: every outcome of every random number is followed, and none is drawn.

`torch.rand` hands out tickets in place of numbers. Where a ticket is used the outcomes and their probabilities are
known: a token has its share of the distribution, acceptance has min(1, p/q), and an order of siblings has the product
of what each has of the rest. A run takes one outcome and gives the production code a number that stands for it; later
runs take the others. The numbers lie near both ends of their intervals, so that the code's own thresholds are held
against the right ones. A ticket is good once.

A round begins in a state: the text, and what each round before it drafted and accepted. The first run that comes to a
state follows its next round for all runs. The probability of a text is a sum of products along the states.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from draftsmith.decode import Exact, Proposer, sampling, speculative_generate
from draftsmith.decode.rules import Rule

Text = tuple[int, ...]
State = tuple[Text, tuple[Any, ...]]
"""The new tokens, and of each round how many tokens were drafted and which nodes were accepted."""
START: State = ((), ())
TICKET = 2.0**-24  # tickets are multiples of it, which float32 has too
MARGIN = 1e-6  # how near to the ends of an interval its numbers lie, as a share of it
NOTHING = 1e-14  # what has p = q is rejected with a probability that is rounding


@dataclass
class Law:
    """The law of the texts behind one prompt, as far as it was followed."""

    edges: dict[State, dict[State, float]] = field(default_factory=dict)
    """The probabilities of what a round leads to."""
    seen: set[State] = field(default_factory=lambda: {START})
    waiting: list[tuple[State, Text]] = field(default_factory=lambda: [(START, ())])
    """States, with the outcomes before and in their rounds that a run is to repeat before it takes new ones."""

    def texts(self) -> dict[Text, float]:
        """Return the probability of each text."""
        texts: dict[Text, float] = defaultdict(float)
        for (text, _), mass in self.ends().items():
            texts[text] += mass
        return dict(texts)

    def accepted(self) -> float:
        """Return how many of the drafted tokens are accepted."""
        rounds = [(mass, size, len(path)) for (_, way), mass in self.ends().items() for size, path, _ in way]
        return sum(mass * accepted for mass, _, accepted in rounds) / sum(mass * size for mass, size, _ in rounds)

    def ends(self) -> dict[State, float]:
        """Return the probability of each way to write a text to its end."""
        reached: dict[State, float] = defaultdict(float, {START: 1.0})
        for state in sorted(self.edges, key=lambda state: len(state[0])):
            for following, share in self.edges[state].items():
                reached[following] += reached[state] * share
        return {state: mass for state, mass in reached.items() if state not in self.edges}


class Row:
    """A row of a run: it repeats outcomes, then takes the first of each decision, and leaves the others to wait.

    Args:
        law: where its round is noted.
        state: what it is to follow; None for a row that keeps others company.
        script: the outcomes that it repeats.
    """

    def __init__(self, law: Law, state: State | None, script: Text = ()):
        self.law, self.followed, self.script = law, state, script
        self.state, self.taken, self.weight = START, [], 1.0
        self.shares: list[float] = []  # of the last decision
        self.tokens: Callable[[int], int] | None = None  # what its outcomes drew, where it was a draw

    def choose(self, shares: Sequence[float], tokens: Callable[[int], int] | None = None) -> int:
        """Take an outcome; whoever chooses next leaves the others of this one to wait."""
        if self.state == self.followed and len(self.taken) > len(self.script):
            others = [i for i, share in enumerate(self.shares) if share > NOTHING and i != self.taken[-1]]
            self.law.waiting += [(self.state, (*self.taken[:-1], other)) for other in others]
        place = len(self.taken)
        new = next(i for i, share in enumerate(shares) if share > NOTHING)
        self.taken.append(self.script[place] if place < len(self.script) else new)
        self.shares, self.tokens, self.before = list(shares), tokens, self.weight
        self.weight *= shares[self.taken[-1]]
        return self.taken[-1]

    def end_round(self, what: Callable[[int], Any], accepted: Text, ended: Callable[[Text], Text | None]) -> None:
        """Note where the round leads to, by each outcome of the draw that ended it."""
        assert self.tokens is not None, "a round ends with the draw of a token"
        text, history = self.state
        following = {}
        for i, share in enumerate(self.shares):
            if share > NOTHING:
                written = (*text, *accepted, self.tokens(i))
                following[i] = ended(written) or written, (*history, what(self.tokens(i)))
        if self.state == self.followed:
            edges = self.law.edges.setdefault(self.state, defaultdict(float))
            for i, state in following.items():
                edges[state] += self.before * self.shares[i]
                if state in self.law.seen:
                    continue
                self.law.seen.add(state)
                if ended(state[0]) is None:
                    if i == self.taken[-1]:
                        self.followed = state
                    else:
                        self.law.waiting.append((state, (*self.taken[:-1], i)))
        self.state, self.weight, self.shares = following[self.taken[-1]], 1.0, []


class Tickets(Tensor):
    """What `torch.rand` gives. Whatever is made of it is an ordinary tensor, but as a list it decides by itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    oracle: "Oracle"

    def tolist(self) -> list["Number"]:  # type: ignore[override]
        """Return numbers that decide where they are compared."""
        return [Number(self.oracle, ticket) for ticket in super().tolist()]


class Number:
    """A number r on [0, 1) that is compared once, as r · scale < bound."""

    def __init__(self, oracle: "Oracle", ticket: float, scale: float = 1.0):
        self.oracle, self.ticket, self.scale = oracle, ticket, scale

    def __mul__(self, factor: float) -> "Number":
        return Number(self.oracle, self.ticket, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        return self.oracle.accepts(self.ticket, bound / self.scale if self.scale > 0 else float(bound > 0))


class Oracle:
    """Stands in for chance in one run, for these rows."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.owners, self.number = rows, [], None

    def row_of(self, generator: torch.Generator) -> Row:
        """Return the row of a generator: a draft's own is the only row's."""
        return self.rows[generator.initial_seed() if len(self.rows) > 1 else 0]

    def spend(self, ticket: float) -> Row | None:
        """Return whose ticket it is; None for what fills up shorter rows."""
        if ticket == 1.0:
            return None
        place = round(ticket / TICKET) - 1
        row, self.owners[place] = self.owners[place], None
        assert row is not None, "a random number decides twice"
        return row

    def accepts(self, ticket: float, ratio: float) -> bool:
        """Decide whether r < ratio."""
        row, share = self.spend(ticket), min(1.0, ratio)
        assert row is not None, "r behind the end of a draft"
        if not NOTHING < share < 1.0 - NOTHING:
            return share > 0.5  # for certain
        return row.choose([share, 1.0 - share]) == 0

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Let the decoder's modules ask here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tickets, "oracle", self, raising=False)
            patch.setattr(torch, "rand", self._rand(torch.rand))
            # All modules that draw, also the proposer of a new kind.
            ours = [module for name, module in sys.modules.items() if name.startswith("draftsmith.")]
            for module in (module for module in ours if module is not sampling):
                for name in ("draw", "draw_rows", "draw_siblings", "accept_siblings", "accept_exact_chains"):
                    if hasattr(module, name):
                        patch.setattr(module, name, getattr(self, f"_{name}")(getattr(module, name)))
            yield

    def _rand(self, rand: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def tickets(size: int, generator: Any = None, **options: Any) -> Tensor:
            if generator is None:
                return rand(size, **options)
            if self.number is not None:
                number, self.number = self.number, None
                return torch.full((size,), number, **options)
            first = len(self.owners) + 1
            self.owners += [self.row_of(generator)] * size
            assert len(self.owners) * TICKET < 1
            return (torch.arange(first, first + size, dtype=torch.float64) * TICKET).to(**options).as_subclass(Tickets)

        return tickets

    def _draw(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(p_V: Tensor, generator: torch.Generator) -> Tensor:
            def token(number: float) -> int:
                self.number = number
                return int(draw(p_V, generator))

            if not p_V.sum() > 0:  # not numbers: whatever comes is no draw
                return torch.tensor([token(0.5)])
            shares = p_V.double() / p_V.double().sum()
            low, high = _ends(shares)

            @cache  # asked of each outcome again and again
            def tokens(i: int) -> int:
                lowest = token(float(low[i]))
                assert shares[i] < MARGIN or lowest == token(float(high[i]))
                return lowest

            return torch.tensor([tokens(self.row_of(generator).choose(shares.tolist(), tokens))])

        return drawn

    def _draw_rows(self, draw_rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(p_BV: Tensor, u_B: Tensor) -> Tensor:
            size = p_BV.shape[1]
            shares = p_BV.double() / p_BV.double().sum(-1, keepdim=True)
            low, high = (draw_rows(p_BV.repeat_interleave(size, 0), u.flatten()).view(-1, size) for u in _ends(shares))
            assert (low == high)[shares > MARGIN].all(), "the ends of an interval draw two tokens"
            tokens = draw_rows(p_BV, u_B)
            for i, (ticket, row_shares, of) in enumerate(zip(u_B.tolist(), shares.tolist(), low.tolist(), strict=True)):
                row = self.spend(ticket)
                if row is not None and not math.isnan(row_shares[0]):
                    tokens[i] = of[row.choose(row_shares, of.__getitem__)]
            return tokens

        return drawn

    def _draw_siblings(self, draw_siblings: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(q_BFM: Tensor, u_BPM: Tensor, count: int) -> Tensor:
            u_BPM = u_BPM.clone()
            for b, parents in enumerate(u_BPM):
                for f, u_M in enumerate(parents):
                    row = {self.spend(ticket) for ticket in u_M.tolist()}.pop()
                    q_M = q_BFM[b, min(f, q_BFM.shape[1] - 1)].double()
                    if row is not None and not q_M[0].isnan():
                        # Who comes i-th arrives at time i, and all others much later or, where q is zero, never.
                        rest, times = q_M.clone(), torch.full_like(q_M, 100.0)
                        for i in range(min(count, int((q_M > 0).sum()))):
                            place = row.choose((rest / rest.sum()).tolist())
                            rest[place], times[place] = 0.0, i + 1.0
                        u_M.copy_((-times * q_M).exp().where(q_M > 0, 0.5))
            return draw_siblings(q_BFM, u_BPM, count)

        return drawn

    def _accept_siblings(self, accept_siblings: Callable[..., Any]) -> Callable[..., Any]:
        def accepted(p_M: Any, q_M: Any, places: Sequence[int], r: Sequence[float]) -> Any:
            return accept_siblings(p_M, q_M, places, [Number(self, float(ticket)) for ticket in r])

        return accepted

    def _accept_exact_chains(self, accept_exact_chains: Callable[..., Any]) -> Callable[..., Any]:
        def accepted(p: Tensor, q: Tensor | None, drafted: Tensor, r: Tensor, u: Tensor) -> Any:
            r = r.clone()
            p_x = p[:, :-1].gather(-1, drafted[..., None])[..., 0]
            q_x = torch.ones_like(p_x) if q is None else q.gather(-1, drafted[..., None])[..., 0]
            ratios = (p_x / q_x).clamp(max=1.0).where(q_x > 0, 0.0).tolist()
            for b, tickets in enumerate(r.tolist()):
                for k, (ticket, ratio) in enumerate(zip(tickets, ratios[b], strict=True)):
                    if ticket == 1.0:
                        break
                    stands = self.accepts(ticket, ratio)
                    # On its side of the threshold, near it; 0 is as good as any where nothing may pass.
                    r[b, k] = ratio * (1 - MARGIN) if stands else (ratio + (1 - ratio) * MARGIN if ratio else 0.0)
                    if not stands:
                        break
            return accept_exact_chains(p, q, drafted, r, u)

        return accepted


def _ends(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers near the lower and the upper end of each outcome's interval."""
    above = shares.cumsum(-1)
    return above - shares * (1 - MARGIN), above - shares * MARGIN


def enumerated(
    target: PreTrainedModel,
    proposer: Proposer,
    prompts: Sequence[Text],
    length: int,
    width: int = 1,
    draft_length: Any = 2,
    by_row: bool = False,
    company: Sequence[Text] = (),
    hidden: Callable[[Text, int], Any] = lambda path, token: None,
    **options: Any,
) -> list[Law]:
    """Return the law of the texts of `length` new tokens behind each prompt.

    Args:
        target: what decides.
        proposer: what drafts.
        prompts: decoded together.
        length: new tokens.
        width: rows of each prompt in a run: so many outcomes are followed at once.
        draft_length: γ.
        by_row: verify with the eager reference, a row at a time.
        company: prompts of further rows, which take the first outcome of each decision.
        hidden: what a state has beside its text and its rounds, given the path and the token that ended the last.
        options: of `generate`.
    """
    laws = [*(Law() for _ in prompts), *(Law(waiting=[]) for _ in company)]
    eos = options.get("eos_token_id")

    def ended(text: Text) -> Text | None:
        """Return the text up to its end, where it has one."""
        stop = text.index(eos) + 1 if eos in text else length
        return text[:stop] if len(text) >= stop else None

    while any(law.waiting for law in laws):
        rows, texts = [], []
        for law, prompt in zip(laws, (*prompts, *company), strict=True):
            launched = [law.waiting.pop() for _ in range(min(width, len(law.waiting)))]
            rows += [Row(law, *launch) for launch in launched] or [Row(law, None)]
            texts += [prompt] * (len(rows) - len(texts))
        oracle = Oracle(rows)

        class Watched(Exact):
            def verify_batch(self, samplers, logits, contexts, proposals, generators, likeliest=None, oracle=oracle):
                verify = Rule.verify_batch if by_row else Exact.verify_batch
                verdicts = verify(self, samplers, logits, contexts, proposals, generators, likeliest)
                for generator, proposal, verdict in zip(generators, proposals, verdicts, strict=True):
                    accepted = tuple(proposal.tokens[verdict.path].tolist())
                    assert verdict.accepted is None or tuple(verdict.accepted) == accepted
                    what = partial(_round, len(proposal.tokens), tuple(verdict.path), hidden)
                    oracle.row_of(generator).end_round(what, accepted, ended)
                return verdicts

        longest = max(map(len, texts))
        ids = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        with oracle.speaking():
            out = speculative_generate(
                target, proposer, ids, mask, draft_length=draft_length, rule=Watched(), seed=0,
                max_new_tokens=length, do_sample=True, **options,
            )  # fmt: skip
        for row, tokens in zip(rows, out.sequences[:, longest:].tolist(), strict=True):
            assert tuple(tokens[: len(row.state[0])]) == row.state[0]
    return laws[: len(prompts)]


def _round(size: int, path: Text, hidden: Callable[[Text, int], Any], token: int) -> tuple[int, Text, Any]:
    return size, path, hidden(path, token)


def target_law(
    target: PreTrainedModel, prompt: Text, length: int, processors: LogitsProcessorList, eos: int | None
) -> dict[Text, float]:
    """Return the probability of each text: the product of the target's conditionals, by the library alone."""
    texts: dict[Text, float] = {(): 1.0}
    for step in range(length):
        open_texts = [text for text in texts if len(text) == step and (not text or text[-1] != eos)]
        if not open_texts:
            break
        ids = torch.tensor([[*prompt, *text] for text in open_texts])
        scores = processors(ids, target(ids).logits[:, -1].clone())
        for text, p in zip(open_texts, scores.softmax(-1).tolist(), strict=True):
            mass = texts.pop(text)
            texts |= {(*text, token): mass * share for token, share in enumerate(p) if share > 0}
    return texts
