"""llama.cpp's converter, for tokenizers too that it has no name for: python -P gguf_driver.py FOLDER [its arguments].

A new one is written under the name of the family by whose rule it splits words, if one of `RULES` is its own.
"""

import json
import runpy
import sys
from typing import Any


def words(letters: str, numbers: str) -> dict[str, Any]:
    """Return the step that splits text into words of letters, numbers, marks and spaces, as Llama 3 and Qwen do."""
    marks = rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    expression = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}|{marks}"
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
RULES: dict[str, tuple[list[Any], list[Any], bool, bool]] = {
    "gpt-2": ([None], [BYTES | {"use_regex": True}], False, False),
    "llama-bpe": ([None], [words(r"\p{L}", r"\p{N}{1,3}"), BYTES], True, False),
    "qwen2": ([None, {"type": "NFC"}], [words(r"\p{L}", r"\p{N}"), BYTES], False, False),
    "qwen35": ([None, {"type": "NFC"}], [words(r"[\p{L}\p{M}]", r"\p{N}"), BYTES], False, False),
    "gemma4": ([{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}], [AT_SPACES], False, True),
}


def name_of(steps: Any) -> str:
    """Return the rule of a tokenizer.json: normalizers, splits, whether words skip merges, and bytes are tokens."""
    first, model = steps["pre_tokenizer"] or {}, steps["model"]
    splits = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in first.get("pretokenizers", [first])]
    found = (splits, bool(model.get("ignore_merges")), bool(model.get("byte_fallback")))
    names = [name for name, (before, *rest) in RULES.items() if steps["normalizer"] in before and (*rest,) == found]
    return names[0] if names else sys.exit(f"a tokenizer that splits words by none of the rules of {', '.join(RULES)}")


def main(folder: str) -> None:
    """Convert as the arguments say."""
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    from conversion import base, llama, qwen  # type: ignore[import-not-found]

    known, listed = base.TextModel.get_vocab_base_pre, base.TextModel.get_vocab_base
    extra, scaled = qwen.DFlashModel.generate_extra_tensors, llama.LlamaModel.generate_extra_tensors

    def named(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return name_of(json.loads(tokenizer.backend_tokenizer.to_str()))

    def vocabulary(model: Any) -> Any:
        # Multimodal families have added tokens after the model's last row, and Gemma's bytes are tokens.
        size, file = model.hparams.get("vocab_size"), model.dir_model / "tokenizer.json"
        if size is None or not file.is_file():
            return listed(model)
        steps = json.loads(file.read_text(encoding="utf-8"))
        model.hparams["vocab_size"] = max(size, *(token["id"] + 1 for token in steps["added_tokens"]))
        tokens, kinds, name = listed(model)
        model.hparams["vocab_size"] = size
        if steps["model"].get("byte_fallback"):
            kinds = [6 if token[:3] == "<0x" else kind for token, kind in zip(tokens, kinds, strict=True)]
        return tokens[:size], kinds[:size], name

    # Block drafters are read as Qwen's layers, and theirs have no factors for Llama 3's rotation.
    qwen.DFlashModel.generate_extra_tensors = lambda model: [*extra(model), *scaled(model)]
    base.TextModel.get_vocab_base_pre, base.TextModel.get_vocab_base = named, vocabulary
    runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv.pop(1))
