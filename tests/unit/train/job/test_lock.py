"""One run at a time in a directory, whatever becomes of the others."""

import multiprocessing
import os
import signal
import socket
import time

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.train.job import lock
from draftsmith.train.job.lock import locked

fork = multiprocessing.get_context("fork")


def holding(directory, held, heir) -> None:
    """Hold the lock, and start what inherits it and outlives this process, if it is asked to."""
    with locked(directory):
        if heir and os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        held.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    started = []

    def start(heir: bool = False):
        held = fork.Event()
        started.append(fork.Process(target=holding, args=(tmp_path, held, heir)))
        started[0].start()
        assert held.wait(20)
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path, holder):
    process = holder()
    begun = r"begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    expected = f"training.output_dir: expected a directory that no other run writes, found one at work in {tmp_path}: "
    with (
        pytest.raises(InputError, match=f"^{expected}process {process.pid} on {socket.gethostname()}, {begun}$"),
        locked(tmp_path, "training.output_dir"),
    ):
        pass
    assert (tmp_path / lock.NAME).is_file()


@pytest.mark.parametrize("heir", [False, True])
def test_a_killed_run_keeps_nobody_out(tmp_path, holder, heir):
    process = holder(heir)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / lock.NAME).is_file()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / lock.NAME).read_text()
    assert not list(tmp_path.iterdir())


def test_the_lock_ends_with_the_block(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "new"):
        raise KeyError
    with locked(tmp_path / "new"):
        pass
    with (
        locked(tmp_path / "new"),
        pytest.raises(InputError, match=f"process {os.getpid()} on"),
        locked(tmp_path / "new"),
    ):
        pass
