"""What tests start ends with them, however they end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from coordinating import wait_until

SUPPORT = Path(__file__).parents[1] / "support"
COMMAND = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
TESTS = f"""
import sys, time
sys.path.insert(0, {str(SUPPORT)!r})
import fated
fated.end_with_make()
fated.start([sys.executable, "-c", {COMMAND!r}], sys.stdout.buffer, {{}})
time.sleep(600)
"""


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("ended", ["tests", "make"])
def test_what_a_test_started_ends_with_it(number, ended, tmp_path):
    (tmp_path / "tests.py").write_text(TESTS)
    (tmp_path / "Makefile").write_text(f"all:\n\t@X=1 {sys.executable} tests.py\n")
    # As a make of its own, though these tests may be run by another one.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = subprocess.Popen(["make"], cwd=tmp_path, env=alone, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert make.stdout is not None
    last = psutil.Process(int(make.stdout.readline()))  # the command's own child
    started = [last, *(p for p in last.parents() if p.pid != make.pid and make.pid in (q.pid for q in p.parents()))]
    (tests,) = [p for p in started if "tests.py" in p.cmdline()]
    assert len(started) >= 4  # it, the command, what stands between, the tests
    psutil.Process(make.pid if ended == "make" else tests.pid).send_signal(number)
    wait_until(lambda: gone(started), 60)
    make.wait(30)
    make.stdout.close()
