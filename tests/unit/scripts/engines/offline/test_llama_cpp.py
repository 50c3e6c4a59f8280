"""llama.cpp in a folder: what is refused before it runs, and what its programs say where they fail."""

import sys
from pathlib import Path

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts import cli
from draftsmith.scripts.engines.offline.llama_cpp import LlamaCpp

PATCHED = "get_vocab_base_pre", "get_vocab_base", "generate_extra_tensors"
CONVERTER = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
sys.exit("an unknown tokenizer") if "bad" in sys.argv[1] else out.write_text(" ".join(sys.argv[2:]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of llama.cpp whose converter writes its arguments, and whose quantiser copies them."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "llama"
    (made / "conversion").mkdir(parents=True)
    parts = {"base": "TextModel", "llama": "LlamaModel", "qwen": "DFlashModel"}
    for module, model in {"__init__": "Model", **parts}.items():
        lines = [f"class {model}:", *[f"    {name} = None" for name in PATCHED]]
        (made / "conversion" / f"{module}.py").write_text("\n".join(lines))
    (made / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return made


def program(folder: Path, name: str, lines: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{lines}\n")
    path.chmod(0o755)


def test_files_are_converted_and_quantised(folder, tmp_path):
    LlamaCpp(folder).convert("drafter", tmp_path / "d.gguf", "q8_0", "target")
    words = (tmp_path / "d.gguf").read_text().split()
    assert words[words.index("--outtype") + 1] == "q8_0"
    assert words[words.index("--target-model-dir") + 1] == str(tmp_path / "target")
    copy = "pathlib.Path(sys.argv[2]).write_text(pathlib.Path(sys.argv[1]).read_text() + ' as ' + sys.argv[3])"
    program(folder, "llama-quantize", copy)
    LlamaCpp(folder).convert("drafter", tmp_path / "q.gguf", "q4_0", None)
    assert (tmp_path / "q.gguf").read_text().endswith("--outtype f32 as Q4_0")
    with pytest.raises(InputError, match=r"expected llama.cpp to convert these files, found an unknown tokenizer"):
        LlamaCpp(folder).convert("bad", tmp_path / "b.gguf", "f32", None)
    assert {path.name for path in tmp_path.glob("*.gguf")} == {"d.gguf", "q.gguf"}


def test_refusals(capsys):
    argv = ["export", "--target", "t", "--format", "gguf", "--output", "d.gguf", "--drafter"]
    assert cli.main([*argv, "draft:somewhere", "--quantize", "q3"]) == 2
    assert cli.main([*argv, "prompt_lookup"]) == 2
    first, kind = capsys.readouterr().err.splitlines()
    assert "quantize: expected one of f32, " in first and "expected a drafter that llama.cpp loads with gguf" in kind
