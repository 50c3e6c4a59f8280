"""The proof of exported heads: another process, which knows the format alone, computes the same logits."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file, save_file
from torch import Tensor

TOLERANCE = 1e-5  # of the largest logit: float32 sums of a few thousand terms, in another order


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors over the largest of the expected numbers."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def read_apart(readers: ModuleType, reader: str, directory: Path, given_NF: Tensor, embeddings_NKH: Tensor) -> Tensor:
    """Return the logits that a reader computes in a fresh process, (N, K, V).

    Args:
        readers: a module that runs as a file, imports nothing of this package, and knows some readers by their names.
        reader: the name of one.
        directory: holds the exported heads.
        given_NF: what the heads read of the target, float32.
        embeddings_NKH: the embeddings of the tokens behind, float32.

    Raises:
        RuntimeError: it could not read them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, output = Path(scratch) / "inputs.safetensors", Path(scratch) / "output.safetensors"
        save_file({"hidden": given_NF, "embeddings": embeddings_NKH}, inputs)
        # -P keeps the folder of the file, which has other modules, out of the path.
        command = [sys.executable, "-P", str(readers.__file__), reader, str(directory), str(inputs), str(output)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            messages = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"export: expected a fresh process to read {reader}, found: {messages[-1]}")
        return load_file(output)["logits"]
