"""llama.cpp's converter, for tokenizers too that it has no name for.

    python -P gguf_driver.py FOLDER [its own arguments]

The converter knows a tokenizer by its tokens of one text. A new one is written under the name of the family whose rule
it splits words by, if one of `RULES` is its own; others are refused, as llama.cpp would split their text otherwise.
"""

import json
import runpy
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def words(letters: str, numbers: str) -> dict[str, Any]:
    """Return the step that splits text into words of letters, numbers, marks and spaces, as Llama 3 and Qwen do."""
    short = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    long = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}| ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*"
    expression = rf"{short}|{long}|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
NFC, SPACES = {"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
# By name: the normalizers, the steps that split, and whether whole words need no merges and bytes are tokens.
RULES: dict[str, tuple[list[Any], list[Any], bool, bool]] = {
    "gpt-2": ([None], [BYTES | {"use_regex": True}], False, False),
    "llama-bpe": ([None], [words(r"\p{L}", r"\p{N}{1,3}"), BYTES], True, False),
    "qwen2": ([None, NFC], [words(r"\p{L}", r"\p{N}"), BYTES], False, False),
    "qwen35": ([None, NFC], [words(r"[\p{L}\p{M}]", r"\p{N}"), BYTES], False, False),
    "gemma4": ([SPACES], [AT_SPACES], False, True),
}


def name_of(steps: Mapping[str, Any]) -> str | None:
    """Return the name of the rule by which a tokenizer splits, from its tokenizer.json; None if it is no known one."""
    first = steps["pre_tokenizer"] or {}
    splits = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in first.get("pretokenizers", [first])]
    flags = [bool(steps["model"].get(flag)) for flag in ("ignore_merges", "byte_fallback")]
    found = (steps["normalizer"], splits, *flags)
    return next((name for name, (before, *rest) in RULES.items() if found[0] in before and [*found[1:]] == rest), None)


def main(folder: str) -> None:
    """Convert as the arguments say."""
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    from conversion import base, llama, qwen  # type: ignore[import-not-found]

    known, listed = base.TextModel.get_vocab_base_pre, base.TextModel.get_vocab_base
    extra = qwen.DFlashModel.generate_extra_tensors

    def named(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            name = name_of(json.loads(tokenizer.backend_tokenizer.to_str()))
            return name or sys.exit(f"a tokenizer that splits words by none of the rules of {', '.join(RULES)}")

    def vocabulary(model: Any) -> tuple[list[str], list[int], str]:
        # Multimodal families have added tokens after the model's last row, and Gemma's bytes are tokens.
        size, file = model.hparams.get("vocab_size"), model.dir_model / "tokenizer.json"
        if size is None or not file.is_file():
            return listed(model)  # type: ignore[no-any-return]
        steps = json.loads(file.read_text(encoding="utf-8"))
        ids = [*steps["model"]["vocab"].values(), *(token["id"] for token in steps["added_tokens"])]
        model.hparams["vocab_size"] = max(size, max(ids) + 1)
        tokens, kinds, name = listed(model)
        model.hparams["vocab_size"] = size
        if steps["model"].get("byte_fallback"):
            kinds = [6 if token[:3] == "<0x" else kind for token, kind in zip(tokens, kinds, strict=True)]
        return tokens[:size], kinds[:size], name

    def scaled(model: Any) -> Iterator[tuple[str, Any]]:
        # Block drafters are read as Qwen's layers, and theirs have no factors for Llama 3's rotation.
        yield from extra(model)
        yield from llama.LlamaModel.generate_extra_tensors(model)

    qwen.DFlashModel.generate_extra_tensors = scaled
    base.TextModel.get_vocab_base_pre, base.TextModel.get_vocab_base = named, vocabulary
    runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    path = sys.argv.pop(1)
    main(path)
