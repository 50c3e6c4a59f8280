"""Seeded random faults, thrown at bytes, at JSON and at the words of a text file."""

import json
import random
import re
from typing import Any

ODD = [
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1, 0, 0.5, -0.5, 2**31, 2**53 + 1, 2**63, -(2**63), 10**400),
    *("", "text", "7", "../../x", "\u2028", True, False, None, [], {}, [[]], [None], {"": 1}),
]
"""What a value becomes: numbers that no count is, and other kinds."""
WORDS = ["NaN", "+Inf", "-1", "1e400", "3.5", "text", '"', "{", "}", "\x00", "9" * 5000, "\u00b2"]


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return content of any kind with some bytes flipped, cut out, doubled or left out at the end."""
    data = bytearray(content)
    kind = rng.choice(["flip", "flip", "zeros", "cut", "take out", "double"])
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice([1, 4, 64]))
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 3, 20])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        data[at:end] = bytes(end - at)
    elif kind == "cut":
        del data[at:]
    elif kind == "take out":
        del data[at:end]
    else:
        data[at:at] = data[at:end]
    return bytes(data)


def misworded(content: bytes, rng: random.Random) -> bytes:
    """Return a text of which a number, or another word, is another."""
    text = content.decode()
    words = list(re.finditer(r"[^\s{}\"=,:\[\]]+", text))
    word = rng.choice(words)
    return (text[: word.start()] + rng.choice(WORDS) + text[word.end() :]).encode()


def misvalued(content: bytes, rng: random.Random) -> bytes:
    """Return JSON, or a line of JSON lines, of which a value is another, missing, doubled or nested without end."""
    text = content.decode()
    try:
        json.loads(text)
    except ValueError:
        lines = text.split("\n")
        at = rng.choice([place for place, line in enumerate(lines) if line.strip()])
        lines[at] = _misvalued(lines[at], rng)
        return "\n".join(lines).encode()
    return _misvalued(text, rng).encode()


def _misvalued(text: str, rng: random.Random) -> str:
    value: Any = json.loads(text)
    places = list(_places(value))
    if not places:
        return json.dumps(rng.choice(ODD))
    holder, key = rng.choice(places)
    kind = rng.choice(["other", "other", "other", "out", "deep", "twice"])
    if kind == "other":
        holder[key] = rng.choice(ODD)
    elif kind == "out":
        del holder[key]
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == "deep":
        holder[key] = "@"
        depth = rng.choice([50, 500, 50_000])
        return json.dumps(value).replace('"@"', "[" * depth + "]" * depth, 1)
    return json.dumps(value)


def _places(value: Any) -> Any:
    """Give every list or object in a value with each of its keys."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from _places(part)
