"""What a command says of how far it is, and what its models compute while it says nothing."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from draftsmith.decode import progress

LOADING = ("loading", "reading the tokenizer of")


@dataclass
class Heard:
    """What was said, and not."""

    said: set[str] = field(default_factory=set)
    """The titles of the phases, and what else went to standard error."""
    silent: set[str] = field(default_factory=set)
    """The functions that had a model compute while no phase was open."""

    def require(self, *titles: str, trains: bool = False) -> None:
        """Require that phases that begin so were told of, and nothing computed beside any; training has its own bar."""
        missing = [title for title in titles if not any(said.startswith(title) for said in self.said)]
        assert not missing and (trains or not self.silent), (missing, self.silent, sorted(self.said))


@contextmanager
def listened() -> Iterator[Heard]:
    """Listen to a command that runs in this block, and speaks without waiting."""
    heard, errors = Heard(), io.StringIO()

    def look(module: Any, inputs: Any) -> None:
        if isinstance(module, PreTrainedModel) and module.device.type != "meta" and not progress._reporter._open:
            frames = (frame for frame, _ in walk_stack(None))
            ours = [f.f_code.co_name for f in frames if f.f_globals.get("__name__", "").startswith("draftsmith.")]
            heard.silent.add(" < ".join(ours))

    hook = register_module_forward_pre_hook(look)
    try:
        with redirect_stderr(errors), progress.reporting(every=0, bars=False):
            yield heard
    finally:
        hook.remove()
        heard.said |= {line.split(":")[0] for line in errors.getvalue().splitlines()}
