import subprocess
import sys

import pytest

MANY_SHAPES = """
import sys, torch
from draftsmith.train.job.processes import launched

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def steps(shapes):
    for rows in shapes:
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.randn(rows, 64)).float().mean().backward()

torch.set_num_threads(1)
layer = torch.nn.Linear(64, 64)
with launched():
    steps(range(1, 41))
    before = resident()
    steps(range(41, 121))
    print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_steps_of_ever_new_shapes_do_not_fill_the_memory():
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30e6  # 104 MB where a thousand kernels are kept
