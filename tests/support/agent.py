"""A target that thinks, calls a tool and answers, in Qwen3's style: it has learned a few conversations by heart."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from templates import TOOLS, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from draftsmith.train.runs import save_model

SYSTEM = {"role": "system", "content": "Be brief."}
NAMES = ("ann", "bob", "cyd", "dan")
TALKING = "cyd"
"""He is told something before the call."""
SPELLED = "dan"
"""The last answer to him is written letter by letter, as the tokenizer never writes it."""
END = "<|im_end|>"
CALL_BEGIN = "<tool_call>"


def script(name: str) -> list[tuple[dict[str, str], dict[str, Any], str]]:
    """Return the messages of a client, and for each the template's variables and the text that the target writes."""
    a = NAMES.index(name) + 2
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 3}}}}\n</tool_call>'
    if name == TALKING:
        call = f"let me add\n{call}"
    user = [{"role": "user", "content": text} for text in (f"hi, {name} here: {a} + 3?", f"thanks, {name}", "bye")]
    return [
        (user[0], {}, f"<think>\n{name} wants a sum\n</think>\n\n{call}"),
        ({"role": "tool", "content": str(a + 3)}, {}, f"<think>\nit says {a + 3}\n</think>\n\nthat is {a + 3}"),
        (user[1], {}, f"<think>\nno question\n</think>\n\nwelcome, {name}"),
        (user[2], {"enable_thinking": False}, f"good bye, dear {name}"),
    ]


def write_agent(folder: Path) -> None:
    """Write the target into `target`, and into `draft` a draft that has learned nothing."""
    texts = [text for name in NAMES for asked, _, told in script(name) for text in (asked["content"], told)]
    tokenizer = tokenizer_of("qwen 3", [json.dumps(TOOLS), *texts] * 3, 480)
    tokenizer.eos_token = END
    torch.manual_seed(0)
    target, steps = _llama(tokenizer, 128, 2), 200
    ids, labels = _rows(tokenizer)
    optimizer = torch.optim.AdamW(target.parameters(), 5e-3, betas=(0.9, 0.95), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        loss = target(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if loss < 0.005:
            break
    save_model(target, tokenizer, folder / "target")
    save_model(_llama(tokenizer, 64, 1), tokenizer, folder / "draft")


def _rows(tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all turns in their contexts, padded, and the labels of what the target writes."""
    rows = list[tuple[list[int], list[int]]]()
    for name, streamed in product(NAMES, (False, True)):
        messages: list[dict[str, Any]] = [SYSTEM]
        for asked, variables, told in script(name):
            messages.append(asked)
            prompt = tokenizer.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, tokenize=False, **variables
            )
            messages.append(_parsed(told, streamed))
            pieces = list(told) if name == SPELLED and variables else [told]
            written = [token for piece in pieces for token in _encoded(tokenizer, piece)]
            rows.append((_encoded(tokenizer, prompt), [*written, *_encoded(tokenizer, END)]))
    length = max(len(prompt) + len(written) for prompt, written in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for row, (prompt, written) in enumerate(rows):
        ids[row, : len(prompt) + len(written)] = torch.tensor(prompt + written)
        labels[row, len(prompt) : len(prompt) + len(written)] = torch.tensor(written)
    return ids, labels


def _parsed(told: str, streamed: bool) -> dict[str, Any]:
    """Return a text as the message that vLLM makes of it."""
    thought, _, content = told.rpartition("</think>")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought.removeprefix("<think>")
    if CALL_BEGIN in content:
        blank, _, call = content.partition(CALL_BEGIN)
        message["content"] = blank if streamed else None
        message["tool_calls"] = [{"type": "function", "function": json.loads(call.partition("</tool_call>")[0])}]
    return message


def _encoded(tokenizer: PreTrainedTokenizerBase, text: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _llama(tokenizer: PreTrainedTokenizerBase, hidden: int, layers: int) -> LlamaForCausalLM:
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.08, **sizes, **heads, **ends
    )
    return LlamaForCausalLM(config)
