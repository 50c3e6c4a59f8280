"""A script that production starts as a process of its own, run in this one: starting one takes seconds."""

import runpy
import subprocess
import sys
import traceback

import pytest


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
