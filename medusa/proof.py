"""The proof of exported heads: another process, which knows only the format, computes the same logits."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 1e-5  # relative to the largest logit: float32 sums of a few thousand terms, in another order


def relative_error(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors over the largest expected number."""
    return float((values - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def run_reader(readers: ModuleType, reader: str, directory: Path, inputs_NF: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that a reader computes in a fresh process, (N, K, V), or raise a RuntimeError if it fails.

    `readers` is a module that runs as a file and imports nothing of this package, and `reader` a name in it. Its inputs
    are the target's states and the embeddings of the next tokens, float32.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": inputs_NF, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the file's folder, whose modules could shadow others, out of the path.
        command = [sys.executable, "-P", str(readers.__file__), reader, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {reader}, found: {messages[-1]}")
        return load_file(output)["logits"]
