"""One answer of a server, whole and as a stream of events in every way that servers and networks cut it.

The shapes are those of vLLM 0.32 (`vllm/entrypoints/openai/chat_completion/serving.py` and `completion/serving.py`) and
of SGLang 0.5 (`python/sglang/srt/entrypoints/openai/serving_chat.py`), which sends null fields that vLLM leaves out.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

MODEL = "m"
REASONING = "Zwei Töne? 🎻 no: </thinking> is no tag.\n"
CONTENT = 'So “é” 😀 and </think>, "model": "x",\u2028done.\r\n'
CALLS = [
    {"id": "call-00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich 🌧"}'}},
    {"id": "call-00002", "type": "function", "function": {"name": "mail", "arguments": '{"to": ["a", "b"], "n": 1}'}},
]
COUNTS = {"acceptance_histogram": [3, 0, 2], "num_draft_tokens": 10}


@dataclass(frozen=True)
class Style:
    """A server's way of streaming."""

    at_once: int = 1
    """Tokens in a part."""
    names: tuple[str, ...] = ("reasoning",)
    """The fields that its reasoning is in."""
    nulls: bool = False
    """Whether unset fields are null, as SGLang writes them, or left out."""
    escaped: bool = True
    """Whether JSON is in ASCII."""
    halves: bool = False
    """Whether a part may end within a surrogate pair, as of servers and proxies that cut texts by UTF-16 units."""
    own_end: bool = True
    """Whether the reason of the end comes in a part of its own."""
    ids: bool = True
    line_end: str = "\n"
    noise: bool = False
    """Whether it sends comments, empty deltas, other fields of events, and counts of tokens so far."""


STYLES = {
    "vllm": Style(),
    "several tokens": Style(at_once=3, noise=True),
    "many tokens, both names": Style(at_once=17, names=("reasoning", "reasoning_content"), own_end=False),
    "all at once": Style(at_once=1000, escaped=False),
    "half pairs": Style(halves=True),
    "sglang": Style(names=("reasoning_content",), nulls=True, escaped=False, line_end="\r\n", noise=True),
}


def pieces_of(text: str, halves: bool = False) -> list[tuple[str, str]]:
    """Return a text's tokens as servers with byte-level tokens decode them: what each adds, and how it looks alone.

    A character of several bytes is as many tokens. Alone each is U+FFFD; the text has the character with its last one,
    or with `halves` one half of its pair with each of the last two.
    """
    pieces = []
    for character in text:
        width, units = len(character.encode()), [character]
        if halves and character > "\uffff":
            pair = character.encode("utf-16-be")
            units = [pair[:2].decode("utf-16-be", "surrogatepass"), pair[2:].decode("utf-16-be", "surrogatepass")]
        pieces += [("", "\ufffd")] * (width - len(units))
        pieces += [(unit, character if width == 1 else "\ufffd") for unit in units]
    return pieces


def whole(chat: bool, style: Style) -> dict[str, Any]:
    """Return the answer in one piece."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "tool_calls" if chat else "length"}
    if chat:
        message = {"role": "assistant", "content": CONTENT, "refusal": None, "tool_calls": CALLS}
        choice["message"] = message | dict.fromkeys(style.names, REASONING)
    else:
        choice["text"] = REASONING + CONTENT
    choice |= {"matched_stop": None} if style.nulls else {}
    answer = {"id": "1", "object": "x", "model": MODEL, "choices": [choice], "usage": usage(chat)}
    if style.ids:
        choice["token_ids"] = list(range(len(tokens(chat, style.halves))))
        (answer if chat else choice)["prompt_token_ids"] = [1, 2, 3]
    return answer


def usage(chat: bool) -> dict[str, int]:
    """Return the server's counts of tokens."""
    written = len(tokens(chat))
    return {"prompt_tokens": 3, "completion_tokens": written, "total_tokens": written + 3}


def tokens(chat: bool, halves: bool = False) -> list[tuple[str, str, Any]]:
    """Return the answer's tokens: the field that each belongs to, what it adds, and its text alone.

    The field of a call's token is the call's index; its name comes whole, as one token.
    """
    listed: list[tuple[str, str, Any]] = [("reasoning", *piece) for piece in pieces_of(REASONING, halves)]
    listed += [("content", *piece) for piece in pieces_of(CONTENT, halves)]
    for index, call in enumerate(CALLS if chat else []):
        listed.append((str(index), "", call["function"]["name"]))
        listed += [(str(index), *piece) for piece in pieces_of(call["function"]["arguments"], halves)]
    return listed


def events(chat: bool, style: Style) -> bytes:
    """Return the body of the stream."""
    end, listed = style.line_end, tokens(chat, style.halves)
    blocks = [": connected", "event: ping" + end + "data: {}", "retry: 5"] if style.noise else []
    prompt = {"prompt_token_ids": [1, 2, 3]} if style.ids else {}
    if chat:
        blocks.append(_event(style, {"delta": {"role": "assistant", "content": ""}}, **prompt))
    begun = set[str]()
    for start in range(0, len(listed), style.at_once):
        group = listed[start : start + style.at_once]
        choice: dict[str, Any] = {"token_ids": list(range(start, start + len(group)))} if style.ids else {}
        choice["logprobs"] = {"content": [{"token": alone, "logprob": -0.5} for _, _, alone in group]}
        added = "".join(text for _, text, _ in group)
        choice |= {"delta": dict(_delta(group, style, begun))} if chat else {"text": added}
        blocks.append(_event(style, choice | (prompt if start == 0 and not chat else {})))
        if style.noise and start % 5 == 0:
            blocks += [": keep-alive", _event(style, {"delta": {}} if chat else {"text": ""})]
    reason = "tool_calls" if chat else "length"
    if style.own_end:
        blocks.append(_event(style, ({"delta": {}} if chat else {"text": ""}) | {"finish_reason": reason}))
        if style.noise:
            blocks.append(_event(style, {"delta": {}} if chat else {"text": ""}))
    else:
        blocks[-1] = blocks[-1].replace('"finish_reason": null', f'"finish_reason": "{reason}"')
    last = {"id": "1", "model": MODEL, "choices": [], "usage": usage(chat), "error": None}
    blocks.append("data: " + json.dumps(last | {"metrics": {"speculative_decoding": COUNTS}}))
    return "".join(block + 2 * end for block in [*blocks, "data: [DONE]"]).encode()


def cuts(body: bytes) -> dict[str, list[bytes]]:
    """Return a body in pieces, by how the network cut it."""

    def at(places: Sequence[int]) -> list[bytes]:
        inner = sorted({place for place in places if 0 < place < len(body)})
        return [body[a:b] for a, b in pairwise([0, *inner, len(body)])]

    lines = list(accumulate(len(line) + 1 for line in body.split(b"\n")))
    inside = [place for place in range(len(body)) if body[place] & 0xC0 == 0x80]
    tag = [place + 4 for place in range(len(body)) if body.startswith(b"</think>", place)]
    return {
        "whole": [body],
        "a byte at a time": at(range(len(body))),
        "within characters": at(inside),
        "within lines": at([place - 7 for place in lines]),
        "before line feeds": at([place - 1 for place in lines]),
        "within </think>": at(tag),
        "1000 bytes": at(range(0, len(body), 1000)),
    }


def _event(style: Style, choice: dict[str, Any], **fields: Any) -> str:
    unset = {"logprobs": None, "matched_stop": None} if style.nulls else {}
    part = {"id": "1", "model": MODEL, "choices": [{"index": 0, "finish_reason": None} | unset | choice]} | fields
    so_far: dict[str, Any] = {"usage": {"prompt_tokens": 3, "completion_tokens": 0}} if style.noise else {}
    return "data: " + json.dumps(part | so_far, ensure_ascii=style.escaped)


def _delta(group: Sequence[tuple[str, str, Any]], style: Style, begun: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a delta of some tokens: reasoning, content and calls may be in one."""
    texts: dict[str, str] = {}
    for field, text, _ in group:
        texts[field] = texts.get(field, "") + text
    unset: dict[str, Any] = {"role": None, "content": None, "tool_calls": None} if style.nulls else {}
    yield from unset.items()
    calls = []
    for field, text in texts.items():
        if field == "reasoning":
            yield from dict.fromkeys(style.names, text).items()
        elif field == "content":
            yield "content", text
        else:
            call: dict[str, Any] = {"index": int(field), "function": {"arguments": text}}
            if field not in begun:
                begun.add(field)
                whole_call: dict[str, Any] = CALLS[int(field)]
                call |= {"id": whole_call["id"], "type": "function"}
                call["function"] = {"name": whole_call["function"]["name"], "arguments": text}
            elif style.nulls:
                call |= {"id": None, "type": "function", "function": {"name": None, "arguments": text}}
            calls.append(call)
    if calls:
        yield "tool_calls", calls
