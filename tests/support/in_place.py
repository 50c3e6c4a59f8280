"""A script that production starts as a process of its own, run in this one: starting one takes seconds."""

import runpy
import subprocess
import sys
import traceback

import pytest

from draftsmith.medusa.block.formats import writing as block
from draftsmith.medusa.eagle.formats import writing as eagle
from draftsmith.medusa.heads.formats import writing as heads


def in_place(command: list[str], **_) -> subprocess.CompletedProcess:
    """Run what a fresh process would, in this one."""
    script, *arguments = command[2:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            return subprocess.CompletedProcess(command, 1, "", traceback.format_exc())
    return subprocess.CompletedProcess(command, 0, "", "")


def read_in_place(patch: pytest.MonkeyPatch) -> None:
    """Read exported files by the readers' functions, without a process each."""
    for writing in (block, eagle, heads):
        patch.setattr(writing, "run_reader", lambda readers, *given: readers.logits(*given))
