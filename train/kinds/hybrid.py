"""The kind of several drafters that take turns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind

if TYPE_CHECKING:
    from draftsmith.decode.proposers.hybrid import HybridProposer, Switch

AND, AT = "+", "@"
Parse = Callable[[str], tuple[str | None, DrafterKind, str | None]]
"""The parser of a value of `--drafter` into name, kind and argument."""


class Hybrid(DrafterKind):
    """Copies where the switch accepts the match, and a model elsewhere.

    Its argument, such as "hybrid:suffix+runs/draft@match=4,score=0.5,last=2", names the drafters in order, each as in
    `--drafter`. After @ come the switch, and the longest draft of the last drafter.
    """

    name, title, stored = "hybrid", "drafters that take turns", False
    drafts_less = True

    def __init__(self, parse: Parse):
        self._parse = parse

    def members(self, spec: DrafterSpec) -> list[tuple[DrafterKind, DrafterSpec]]:
        """Return kind and spec of each member; raise InputError for a malformed argument."""
        members = []
        for text in self._parts(spec)[0].split(AND):
            _, kind, path = self._parse(text)
            if isinstance(kind, Hybrid):
                raise InputError(f"drafter: expected no hybrid inside of one, found {spec.path}")
            members.append((kind, replace(spec, kind=kind.name, path=path, name=None, tree=None)))
        return members

    def turns(self, spec: DrafterSpec) -> "tuple[Switch, int | None]":
        """Return the switch, and the longest draft of the last drafter."""
        from draftsmith.decode import Switch

        fields: dict[str, Any] = {}
        last = None
        for part in filter(None, self._parts(spec)[1].split(",")):
            name, _, value = part.partition("=")
            try:
                if name == "match":
                    fields[name] = int(value)
                elif name == "last":
                    last = int(value)
                elif name == "score":
                    fields[name] = float(value)
                else:
                    raise ValueError
            except ValueError:
                raise InputError(
                    f"drafter: expected match=TOKENS, score=TOKENS or last=TOKENS after {AT}, found {part}"
                ) from None
        if last is not None and last < 1:
            raise InputError(f"drafter: expected last=TOKENS of at least 1 after {AT}, found {last}")
        return Switch(**fields), last

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Check each member."""
        self.turns(spec)
        for kind, member in self.members(spec):
            kind.check(member, loading)

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load all members."""
        from draftsmith.decode import HybridProposer

        switch, last_length = self.turns(spec)
        *copies, last = [kind.load(member, loading) for kind, member in self.members(spec)]

        def hybrid(proposer: Any) -> "HybridProposer":
            return HybridProposer([*(drafter.proposer for drafter in copies), proposer], switch, last_length)

        return self.drafter(
            spec,
            hybrid(last.proposer),
            greedy=None if last.greedy is None else hybrid(last.greedy),
            model=last.model,
            draft_lengths=last.draft_lengths,
            sources=_distinct([drafter.family.name for drafter in (*copies, last)]),
            figures={"switch_match": switch.match, "switch_score": switch.score},
        )

    def _parts(self, spec: DrafterSpec) -> tuple[str, str]:
        drafters, at, switch = (spec.path or "").rpartition(AT)
        if not at:
            drafters, switch = switch, ""
        if AND not in drafters:
            raise InputError(
                f"drafter: expected {self.name}:FIRST{AND}LAST, drafters with {AND} between them, found "
                f"{self.name}:{spec.path or ''}"
            )
        return drafters, switch


def _distinct(names: Sequence[str]) -> list[str]:
    """Number repeated names, so that they are unique."""
    return [
        name if names.index(name) == index else f"{name} {names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
