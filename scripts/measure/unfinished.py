"""Finished work of a run of `measure`, kept on disk until the run ends well, and the run's failures."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from draftsmith.decode.errors import InputError, first_line, lacks_memory
from draftsmith.decode.validation import read
from draftsmith.scripts.measure.config import MeasureConfig
from draftsmith.scripts.report.types import Failure
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.shards import settle_manifest
from draftsmith.train.files import identity, remove, write_atomically
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.provenance import environment

T = TypeVar("T")
SCHEMA, DIRECTORY = "draftsmith.unfinished/1", ".unfinished"
MAY_CHANGE = (*("output", "costs", "min_speedup", "min_gain"), *("confidence", "trust_remote_code"))
"""Settings that do not change what is decoded: the output, what is timed in addition, and the verdict."""
IDENTIFIED = ("target", "prompts", "drafter", "baseline_draft", "dtype", "threads")
"""Settings that name a file, or leave a choice open: the manifest compares the content or the choice itself."""

logger = logging.getLogger(__name__)


class Unfinished:
    """The finished units of work of a run, each a file in a hidden directory of the output, and its failures.

    All that was timed together is one unit, so that no speed-up mixes two processes.
    """

    def __init__(self, config: MeasureConfig):
        self.failures: list[Failure] = []
        self.errors: list[Exception] = []
        self._directory = Path(config.output) / DIRECTORY

    @contextmanager
    def of_run(
        self, config: MeasureConfig, pair: Pair, prompts: Sequence[Prompt], encoded: Sequence[list[int]]
    ) -> Iterator[None]:
        """Begin, or continue an earlier run; after the block remove the files, unless another run may finish a part.

        Raises:
            InputError: the earlier run had other settings, models or prompts.
        """
        settings = {name: v for name, v in asdict(config).items() if name not in (*MAY_CHANGE, *IDENTIFIED)}
        here = environment(pair.target.device, pair.dtype)
        sha, digest = here.pop("git_sha"), hashlib.sha256()
        for prompt, ids in zip(prompts, encoded, strict=True):
            digest.update(json.dumps([prompt.category, ids]).encode())
        models = {"target": config.target} | {
            d.name if d.kind == d.name else f"{d.kind} {d.name}": d.path for d in pair.drafters
        }
        manifest = {
            "schema": SCHEMA,
            "settings": settings | {"drafters": {d.name: d.kind for d in pair.drafters}} | here,
            "prompts": {"path": config.prompts, "sha256": digest.hexdigest(), "count": len(prompts)},
            **{name: {"path": path} | identity(path) for name, path in models.items() if path is not None},
            "versions": {"draftsmith": version("draftsmith"), "git_sha": sha},
        }
        settle_manifest(self._directory, manifest)
        yield
        if not self.failures:
            remove(self._directory)

    @contextmanager
    def attempt(self, part: str) -> Iterator[None]:
        """Record an exception of the block, and continue with the next part. A full disk ends the run."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            is_expected = isinstance(error, InputError) or lacks_memory(error)
            logger.warning("%s failed: %s", part, first_line(error), exc_info=None if is_expected else error)
            self.failures.append(Failure(part, first_line(error), exit_code=2 if is_expected else 1))
            self.errors.append(error.with_traceback(None))  # a traceback would hold the memory that ran out

    def kept(self, kind: type[T], *key: object) -> T | None:
        """Return a finished unit's result, read as `kind`; None if it is not finished, or damaged."""
        try:
            return read(kind, self._path(key))
        except FileNotFoundError:
            return None
        except InputError as error:
            logger.warning("%s; it is done again", error)
            return None

    def keep(self, *key: object, value: Any) -> None:
        """Store a unit's result, in plain JSON types."""
        write_atomically(self._path(key), json.dumps(value))

    def _path(self, key: tuple[object, ...]) -> Path:
        return self._directory / f"{quote('-'.join(map(str, key)), safe='')}.json"
