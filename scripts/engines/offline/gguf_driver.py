"""llama.cpp's converter, for tokenizers too that it has no name for.

    python -P gguf_driver.py FOLDER [its own arguments]

The converter knows a tokenizer by its tokens of one text. A new one that splits words as GPT-2's does, and changes
nothing before, is written under GPT-2's name; others are refused, as llama.cpp would split their text otherwise.
"""

import json
import runpy
import sys
from typing import Any

GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def main(folder: str) -> None:
    """Convert as the arguments say."""
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    from conversion import base  # type: ignore[import-not-found]

    known = base.TextModel.get_vocab_base_pre

    def named(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            steps = json.loads(tokenizer.backend_tokenizer.to_str())
            split = {name: (steps["pre_tokenizer"] or {}).get(name) for name in GPT2}
            if split != GPT2 or steps["normalizer"] is not None:
                sys.exit("a tokenizer that llama.cpp has no name for, and that does not split words as GPT-2's")
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = named
    runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    path = sys.argv.pop(1)
    main(path)
