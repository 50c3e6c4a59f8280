"""A corpus that every Python installation has: the sources of its standard library.

The embedded target and the stock draft were trained on it, and quickstart takes prompts from it, without a download. A
hash of a module's dotted name decides whether it is held out, so that the split is the same on every machine and Python
version.
"""

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import track
from draftsmith.train.data.chat.templates import encode_plain
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import encode_prompt

# Tests are not library sources. encodings and pydoc_data are generated tables of near-identical lines, which a model
# would learn too well: they would raise its acceptance rate.
EXCLUDED_PARTS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
HELDOUT_ONE_IN = 10
PROMPT_LINES = 8  # the lines of a prompt, starting one before a definition


@dataclass(frozen=True)
class Module:
    """One module of the standard library: its dotted name and its source."""

    name: str
    source: str

    @property
    def heldout(self) -> bool:
        """Return whether the module is in the fixed tenth that no embedded model was trained on."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELDOUT_ONE_IN == 0


@cache
def stdlib_modules(root: Path | None = None) -> list[Module]:
    """Return the modules of the standard library, or of another folder, sorted by name.

    Raises:
        InputError: the folder has no Python sources (some distributions ship a zipped or stripped library).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    modules = sorted(_read(root), key=lambda module: module.name)
    if not modules:
        raise InputError(f"{root}: expected the sources of the Python standard library, found no .py file")
    return modules


def _read(root: Path) -> Iterator[Module]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if EXCLUDED_PARTS.intersection(parts) or parts[0].startswith(("_sysconfigdata", "config-")):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if source.strip():
            yield Module(".".join(part for part in parts if part != "__init__"), source)


def stdlib_prompts(count: int, heldout: bool, seed: int = 0) -> list[dict[str, str]]:
    """Return prompts cut from the standard library: the first lines of up to `count` definitions, nested ones too.

    They come from held-out modules or from all others. A record has `id` (module and line), `prompt` and `category`
    (the top-level package).
    """
    records = []
    for module in stdlib_modules():
        source = module.source.splitlines(keepends=True) if module.heldout == heldout else []
        for number, line in enumerate(source):
            if line.lstrip().startswith(("def ", "class ", "async def ")):
                text = "".join(source[max(number - 1, 0) : number + PROMPT_LINES - 1]).lstrip("\n")
                category = module.name.partition(".")[0]
                records.append({"id": f"{module.name}:{number + 1}", "prompt": text, "category": category})
    return random.Random(seed).sample(records, min(count, len(records)))


def encoded_prompts(
    source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    max_tokens: int,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Return the token ids of the first `limit` prompts of a source, each at most its last `max_tokens`.

    Without a source they come from held-out modules of the standard library, 128 if there is no limit. With
    `vocab_size`, the target's number of logits, the ids are checked against it.
    """
    if source is not None:
        read = track(read_prompts(source, limit=limit), "prompts", "texts")
        return [encode_prompt(prompt, tokenizer, vocab_size=vocab_size, max_tokens=max_tokens) for prompt in read]
    records = stdlib_prompts(limit or 128, heldout=True, seed=1)
    return [encode_plain(tokenizer, record["prompt"])[-max_tokens:] for record in records]


def write_prompts(path: Path, records: Sequence[dict[str, str]]) -> None:
    """Write prompts as jsonl."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
