"""A server on this machine that answers in the shapes of vLLM and SGLang.

The shapes are those of vLLM's `CompletionResponse` (vllm/entrypoints/openai/completion/protocol.py and serving.py;
https://docs.vllm.ai/en/latest/serving/online_serving/openai_compatible_server/), of SGLang's `CompletionResponse`
(python/sglang/srt/entrypoints/openai/serving_completions.py, pull request 30917).
"""

import json
import threading

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.train.data.generate import PrepareConfig, load_completions, prepare

COUNT = 12
OTHER_END = 77


def usage(prompt: list[int], ids: list[int]) -> dict:
    return {
        "prompt_tokens": len(prompt),
        "total_tokens": len(prompt) + len(ids),
        "completion_tokens": len(ids),
        "prompt_tokens_details": None,
    }


def vllm(body: dict, ids: list[int], reason: str, text: str = "", **choice) -> dict:
    prompt = body["prompt"]
    by_id = ids[-1:] == [OTHER_END]  # the first end-of-sequence id is no stop_reason, the others are
    asked = body.get("return_token_ids")
    default = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": OTHER_END if by_id else None,
        "token_ids": ids if asked else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if asked else None,
    }
    return {
        "id": "cmpl-4f9",
        "object": "text_completion",
        "created": 1760000000,
        "model": body["model"],
        "choices": [default | choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(prompt, ids),
        "kv_transfer_params": None,
    }


def sglang(body: dict, ids: list[int], reason: str, text: str = "") -> dict:
    asked = body.get("return_token_ids")
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "matched_stop": ids[-1] if reason == "stop" else None,
    }
    return {
        "id": "c5f1",
        "object": "text_completion",
        "created": 1760000000,
        "model": body["model"],
        "choices": [choice | ({"token_ids": ids, "prompt_token_ids": body["prompt"]} if asked else {})],
        "usage": usage(body["prompt"], ids) | {"reasoning_tokens": 0},
        "metadata": {"weight_version": "default"},
    }


def older_sglang(body: dict, ids: list[int], reason: str, text: str = "") -> dict:
    return sglang(body | {"return_token_ids": None}, ids, reason, text)


def plain(body: dict, ids: list[int], reason: str, text: str = "") -> dict:
    """OpenAI's shape and nothing else."""
    answer = vllm(body | {"return_token_ids": None}, ids, reason, text)
    for name in ("token_ids", "prompt_token_ids", "stop_reason"):
        del answer["choices"][0][name]
    return answer


class Served:
    """A server: `answer(path, body, number)` gives a status, headers and bytes, or JSON for a plain success."""

    def __init__(self):
        self.requests: list[tuple[str, dict, dict]] = []
        self.models = ["tiny"]
        self.answer = lambda path, body, number: vllm(body, [65, body["stop_token_ids"][0]], "stop")
        self.busy, self.busiest = 0, 0
        self.drips: float | None = None
        """Seconds between the bytes of an answer, which otherwise come together."""
        self.lock = threading.Lock()

    @property
    def asked(self) -> list[dict]:
        return [body for path, _, body in self.requests if not path.endswith("/models")]

    def respond(self, path: str, headers: dict, body: dict) -> tuple[int, dict, bytes]:
        with self.lock:
            self.requests.append((path, headers, body))
            number = len(self.asked)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            if path.endswith("/models"):
                said = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            else:
                said = self.answer(path, body, number)
            return said if isinstance(said, tuple) else (200, {}, json.dumps(said).encode())
        finally:
            with self.lock:
                self.busy -= 1


def rows(config: PrepareConfig) -> list[dict]:
    return load_completions(config.output).to_list()


def refusal(config: PrepareConfig) -> str:
    with pytest.raises(InputError) as error:
        prepare(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def backed(server, generate, shape, tokenizer):
    def answer(path, body, number):
        written, reason = generate(body["prompt"], body["max_tokens"])
        text = tokenizer.decode(written[:-1] if reason == "stop" else written)
        return shape(body, written, reason, text)

    server.answer = answer
