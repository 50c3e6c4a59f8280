"""Programs that a second process makes: they are on disk for the first one, and a failure there costs nothing."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from draftsmith.decode.cache import program
from draftsmith.scripts import programs
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair
from draftsmith.train.models import load_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(program.FOLDER, str(tmp_path / "programs"))
    return tmp_path / "programs"


def order_of(target: str, **fields) -> programs.Order:
    return programs.Order(target, "float32", torch.get_num_threads(), False, **fields)


def test_another_process_compiles_what_is_then_read(pair_dirs, monkeypatch):
    target, draft = map(str, pair_dirs)
    specs, options = drafter_specs([draft], [2]), {"do_sample": False}
    pair = load_pair(target, load_tokenizer(target), specs)
    with programs.compile_meanwhile(order_of(target, drafters=specs, options=[options])):
        pass
    assert not programs.needs_compiling(pair.target)
    monkeypatch.setattr(program, "_write", lambda *_: pytest.fail("compiled again"))
    programs.decode_briefly(pair, pair.drafter, options)


def test_two_processes_share_out_what_drafters_need(pair_dirs, monkeypatch):
    target, draft = map(str, pair_dirs)
    specs = drafter_specs([draft, "prompt_lookup"], [2])
    pair = load_pair(target, load_tokenizer(target), specs)
    options = [{"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0}]
    here, there, missing = [], [], [False]

    def decode(pair, drafter, options):
        if not program.may_compile() and missing[0]:
            raise program.NotCompiled("compiled: expected a program")
        if program.may_compile():
            here.append(options)

    monkeypatch.setattr(programs, "decode_briefly", decode)
    monkeypatch.setattr(programs, "compile_meanwhile", lambda order: there.append(order) or nullcontext())
    programs.compile_side_by_side(pair, order_of(target), specs, options)  # all of it is on disk
    missing[0] = True
    with monkeypatch.context() as changed:
        changed.setattr(programs, "SMALL", 0)
        programs.compile_side_by_side(pair, order_of(target), specs, options)
    with program.nothing_compiled():
        programs.compile_side_by_side(pair, order_of(target), specs, options)
    assert here == there == []
    programs.compile_side_by_side(pair, order_of(target), specs, options)
    assert here == options[:1] and there[0].options == options[1:] and there[0].drafters == specs[:1]


def test_an_order_that_fails_is_left_to_the_first_process(tmp_path, folder):
    with programs.compile_meanwhile(order_of(str(tmp_path / "nowhere"))):
        pass
    assert not folder.exists()


def test_no_process_is_started_where_nothing_may_be_compiled(monkeypatch):
    monkeypatch.setattr(programs.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with program.nothing_compiled(), programs.compile_meanwhile(order_of("target")):
        pass


def test_what_the_other_process_started_ends_with_it_and_leaves_no_folder(tmp_path, monkeypatch):
    child = """
import subprocess, sys, tempfile, time
from pathlib import Path
from draftsmith.train.job.processes import terminable
with terminable(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    compiler = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    (Path(sys.argv[1]) / "compiler").write_text(str(compiler.pid))
    time.sleep(60)
"""
    popen = programs.subprocess.Popen
    command = [sys.executable, "-c", child, str(tmp_path)]
    monkeypatch.setattr(programs.subprocess, "Popen", lambda _, **options: popen(command, **options))
    with pytest.raises(RuntimeError, match="out of memory"), programs.compile_meanwhile(order_of("target")):
        while not (tmp_path / "compiler").exists() or not (compiler := (tmp_path / "compiler").read_text()):
            time.sleep(0.05)
        raise RuntimeError("out of memory")
    stat = Path("/proc", compiler, "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert [path.name for path in tmp_path.iterdir()] == ["compiler"]


def test_a_block_that_fails_ends_the_other_process(monkeypatch):
    started = []
    popen = programs.subprocess.Popen

    def sleeping(command, **options):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(programs.subprocess, "Popen", sleeping)
    with pytest.raises(RuntimeError, match="out of memory"), programs.compile_meanwhile(order_of("target")):
        raise RuntimeError("out of memory")
    assert started[0].returncode is not None and started[0].returncode < 0
