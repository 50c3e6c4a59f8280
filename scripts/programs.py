"""Compilation in two processes side by side: each compiler uses one core only."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftsmith.decode import speculative_generate
from draftsmith.decode.cache.forward import BlockForward
from draftsmith.decode.cache.program import NotCompiled, may_compile, nothing_compiled, on_disk
from draftsmith.decode.measurement.costs import forward_after_text
from draftsmith.decode.progress import phase
from draftsmith.scripts.pair import load_pair
from draftsmith.train.job.processes import end_session, terminable
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Pair
from draftsmith.train.models import load_tokenizer

SMALL = 10**9
"""The most parameters of a target that is loaded twice."""
PROMPT = list(range(2, 10))
NEW_TOKENS = 12


@dataclass(frozen=True)
class Order:
    """Programs for another process to compile: a target's alone, or its drafters'."""

    target: str
    dtype: str
    threads: int
    trust_remote_code: bool
    drafters: Sequence[DrafterSpec] = ()
    options: Sequence[Mapping[str, Any]] = ()


@contextmanager
def compile_meanwhile(order: Order) -> Iterator[None]:
    """Let another process compile programs while the block compiles others; its failures are ignored."""
    if not may_compile():
        yield
        return
    command = [sys.executable, "-m", "draftsmith.scripts.programs", json.dumps(asdict(order))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
        process.wait()
    finally:
        end_session(process)


def needs_compiling(model: Any) -> bool:
    """Return whether the program of a target's forward is missing on disk."""
    layers = model.config.get_text_config().num_hidden_layers
    return not on_disk(BlockForward(model, (), [], [True] * layers))


def compile_side_by_side(
    pair: Pair, order: Order, drafters: Sequence[DrafterSpec], options: Sequence[Mapping[str, Any]]
) -> None:
    """Compile the drafters' programs on a CPU, half of them in another process, unless the first one is on disk.

    `order` loads the models in the other process; `drafters` are the pair's specs, and `options` the decoder's for
    each.
    """
    if pair.target.device.type != "cpu" or pair.target.num_parameters() > SMALL or not may_compile():
        return
    programs = {
        (_shape(drafter), tuple(drafter.draft_lengths), index): (drafter, spec, decoder_options)
        for drafter, spec in zip(reversed(pair.drafters), reversed(drafters), strict=True)
        for index, decoder_options in enumerate(options)
        if drafter.model is not None
    }
    parts = list(programs.values())
    if len(parts) < 2 or not _must_compile(pair, parts[0][0], parts[0][2]):
        return
    own_parts, other_parts = parts[::2], parts[1::2]
    other_order = Order(
        **vars(order) | {"drafters": [s for _, s, _ in other_parts], "options": [o for _, _, o in other_parts]}
    )
    with phase("compiling in two processes"), compile_meanwhile(other_order):
        for drafter, _, decoder_options in own_parts:
            with suppress(Exception):  # decoding reports what fails
                decode_briefly(pair, drafter, decoder_options)


def _must_compile(pair: Pair, drafter: Drafter, options: Mapping[str, Any]) -> bool:
    try:
        with nothing_compiled():
            decode_briefly(pair, drafter, options)
    except NotCompiled:
        return True
    except Exception:  # decoding reports what fails
        return False
    return False


def _shape(drafter: Drafter) -> str:
    """Return a key that drafters with the same programs share."""
    config = drafter.model.config.to_dict() if drafter.model is not None else {}
    config.pop("_name_or_path", None)
    return json.dumps([type(drafter.proposer).__name__, config], sort_keys=True, default=str)


def decode_briefly(pair: Pair, drafter: Drafter, options: Mapping[str, Any]) -> None:
    """Decode a few tokens compiled, with each draft length."""
    ids = torch.tensor([PROMPT], device=pair.target.device)
    for draft_length in drafter.draft_lengths:
        brief = {**options, "compiled": True, "max_new_tokens": NEW_TOKENS}
        speculative_generate(pair.target, drafter.proposer, ids, draft_length=draft_length, **brief)


def main(argument: str) -> None:
    """Compile an order's programs."""
    order = Order(**json.loads(argument))
    torch.set_num_threads(order.threads)
    specs = [DrafterSpec(**spec) for spec in order.drafters]  # type: ignore[arg-type]
    tokenizer = load_tokenizer(order.target, trust_remote_code=order.trust_remote_code)
    pair = load_pair(order.target, tokenizer, specs, order.dtype, order.trust_remote_code)
    if not specs:
        forward_after_text(pair.target, compiled=True)()
    for drafter, options in zip(pair.drafters, order.options, strict=True):
        with suppress(Exception):
            decode_briefly(pair, drafter, options)


if __name__ == "__main__":
    with terminable():  # a compiler's folder is removed
        main(sys.argv[1])
