"""Parts of the texts that a target writes, thinking, answer and tool calls, by the marks of its own chat template.

A conversation with reasoning and a call is rendered, and what stands around the two is what the target writes there.
No tag is known beforehand. Where the template writes neither, all of a text is the answer.

Templates write whitespace in other places than models do, so that marks are compared without it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.data.chat.masks import dense
from draftsmith.train.data.chat.messages import Message
from draftsmith.train.data.chat.templates import ChatTemplate, Tools, common_length

PARTS = ("answer", "thinking", "tool call")
ANSWER, THINKING, CALL = range(len(PARTS))
ASKED, THOUGHT, ANSWERED, NAME, KEY, VALUE = (f"zq{word}" for word in ("ask", "why", "say", "act", "key", "set"))
TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
USER: Message = {"role": "user", "content": ASKED}
ANSWER_TURN: Message = {"role": "assistant", "content": ANSWERED}
CALL_TURN: Message = {
    "role": "assistant",
    "content": "",
    # Some templates want ids of nine letters and digits.
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}],
}
TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": ANSWERED,
            "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": ASKED}}},
        },
    }
]


@dataclass(frozen=True)
class Mark:
    """The text around one part, without whitespace."""

    part: int
    opening: str
    closing: str | None = None  # None: the part ends with the text
    first_only: bool = False  # whether the opening is too common to count but at the beginning of a text or its rest


class TextParts:
    """The parts of the texts of one target."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]):
        self._tokenizer, self._variables = tokenizer, variables
        self._pieces = dict[int, str]()
        added = tokenizer.added_tokens_decoder  # asked once: it takes milliseconds
        self._special = {token for token, entry in added.items() if entry.special}
        contents = sorted((entry.content for entry in added.values() if entry.content.strip()), key=len, reverse=True)
        self._tag = re.compile("|".join([*map(re.escape, contents), TAG.pattern]))

    @cached_property
    def marks(self) -> list[Mark]:
        """The marks of thinking and calls that the target's template writes; empty without a template."""
        if self._tokenizer.chat_template is None:
            return []
        marks = self._thinking(), self._call()
        return [mark for mark in marks if mark is not None]

    def label(self, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
        """Return the index in `PARTS` of each token of a text, (N,), which follows this prompt."""
        labels = np.full(len(text), ANSWER)
        if not self.marks:
            return labels
        longest = max(len(mark.opening) for mark in self.marks)
        before = "".join(self._piece(token) for token in prompt[-longest:])[-longest:]
        pieces = [self._piece(token) for token in text]
        ends = len(before) + np.cumsum([len(piece) for piece in pieces])
        starts = np.array([len(before), *ends[:-1]])
        for part, begin, end in self._spans(before, "".join(pieces)):
            labels[(begin <= starts) & (begin < ends) & (starts < end)] = part
        return self._joined(labels, text)

    def _spans(self, before: str, written: str) -> list[tuple[int, int, int]]:
        """Return the spans of parts other than the answer, with their beginning and end in `before + written`."""
        whole, spans, at = before + written, list[tuple[int, int, int]](), 0
        while True:
            found = list[tuple[int, Mark]]()
            for mark in self.marks:
                # A generation prompt may open a part, wholly or half.
                first = max(at, len(before) - len(mark.opening))
                place = whole.find(mark.opening, first)
                if place >= 0 and (not mark.first_only or place in (first, max(at, len(before)))):
                    found.append((place, mark))
            if not found:
                return spans
            begin, mark = min(found, key=lambda one: one[0])
            inside = begin + len(mark.opening)
            end = len(whole) if mark.closing is None else whole.find(mark.closing, max(inside, len(before)))
            at = len(whole) if end < 0 else end + len(mark.closing or "")
            spans.append((mark.part, begin, at))

    def _joined(self, labels: np.ndarray, text: Sequence[int]) -> np.ndarray:
        """Give whitespace and ends of texts between parts, which are no answer, to the part before them."""
        at = 0
        for label, run in groupby(labels.tolist()):
            end = at + len(list(run))
            blank = all(token in self._special or not self._piece(token) for token in text[at:end])
            if label == ANSWER and blank and (at or end < len(text)):
                labels[at:end] = labels[at - 1] if at else labels[end]
            at = end
        return labels

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = dense(str(self._tokenizer.decode([token])))
        return self._pieces[token]

    def _thinking(self) -> Mark | None:
        """Return the mark of thinking."""
        with_call = self._rendered(CALL_TURN | {"reasoning_content": THOUGHT})
        for rendered in (self._rendered(ANSWER_TURN | {"reasoning_content": THOUGHT}), with_call):
            if rendered is None or THOUGHT not in rendered[1]:
                continue
            opening, _, rest = rendered[1].partition(THOUGHT)
            tag = self._tag.search(rest)
            closing = dense(rest.partition(ANSWERED)[0] if ANSWERED in rest else rest[: tag.end()] if tag else "")
            if with_call is not None and THOUGHT in with_call[1]:  # what follows is no part of the closing
                closing = closing[: common_length(closing, dense(with_call[1].partition(THOUGHT)[2]))]
            # Where the generation prompt has opened the thinking, its last tag is the opening.
            opened = dense(opening) or self._last_tag(rendered[0])
            return Mark(THINKING, opened, closing, not opening.strip()) if opened and closing else None
        return self._opened_only()

    def _opened_only(self) -> Mark | None:
        """Return the mark of thinking that the generation prompt opens and conversations lose."""
        template = ChatTemplate(self._tokenizer, "template", None, self._variables)
        try:
            opening = self._last_tag(template.render([USER], answer=True))
        except InputError:
            return None
        closing = f"{opening[:1]}/{opening[1:]}"
        return Mark(THINKING, opening, closing, True) if opening and closing in template.source else None

    def _call(self) -> Mark | None:
        """Return the mark of tool calls."""
        rendered, plain = self._rendered(CALL_TURN), self._rendered(ANSWER_TURN)
        if rendered is None or plain is None or NAME not in rendered[1]:
            return None
        before, _, rest = rendered[1].partition(NAME)
        after, end = rest[rest.find(VALUE) + len(VALUE) :], plain[1].partition(ANSWERED)[2]
        known = rendered[0].rpartition(ASKED)[2] + plain[1]  # tags that every turn has do not tell a call
        openings = [tag for tag in self._tag.findall(before) if tag not in known]
        tags = self._tag.findall(after.removesuffix(end))
        closings = [tag for tag in tags if tag not in known and KEY not in tag]
        opening = dense(openings[0] if openings else before)
        first_only = not openings and "<" not in opening
        return Mark(CALL, opening, closings[-1] if closings else None, first_only) if opening else None

    def _rendered(self, turn: Message) -> tuple[str, str] | None:
        """Return what a template writes before an answer and as that answer; None if it does not write all of it."""
        for tools in (TOOLS, None):
            template = ChatTemplate(self._tokenizer, "template", tools, self._variables)
            try:
                template = template.fitted([USER, turn], answer=False)
                prompt, whole = template.render([USER], answer=True), template.render([USER, turn])
            except InputError:
                continue
            shared = common_length(prompt, whole)
            inside = [tag for tag in self._tag.finditer(whole) if tag.start() < shared < tag.end()]
            shared = inside[0].start() if inside else shared  # two tags may begin alike
            return whole[:shared], whole[shared:]
        return None

    def _last_tag(self, text: str) -> str:
        """Return the tag that a text ends with, or nothing."""
        tags = list(self._tag.finditer(text.rstrip()))
        return dense(tags[-1].group()) if tags and tags[-1].end() == len(text.rstrip()) else ""
