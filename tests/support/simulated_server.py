"""A server that speculates by a known law, in the shapes of vLLM 0.32 or SGLang 0.5: what it counts is known exactly.

Shapes of vLLM, in `vllm/`: `entrypoints/openai/completion/serving.py`, `entrypoints/generate/base/protocol.py`
(`SpeculativeDecodingMetrics`), `v1/metrics/loggers.py`. Of SGLang, in `python/sglang/srt/`:
`managers/tokenizer_manager.py` and `managers/tokenizer_manager_components/spec_decoding_meta.py` (`meta_info`),
`entrypoints/http_server.py` (`/server_info`), `entrypoints/openai/serving_chat.py` (what a streamed chat refuses) and
`observability/metrics_collector.py`.
"""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from local_server import LocalHandler, LocalServer

MODEL = "simulated"


def gauge(name: str, value: float) -> list[str]:
    return [f"# TYPE {name} gauge", f"{name} {value}"]


def counter(name: str, value: int | dict[str, int]) -> list[str]:
    by_labels = value if isinstance(value, dict) else {"": value}
    return [f"# TYPE {name} counter", *(f"{name}_total{labels} {count}" for labels, count in by_labels.items())]


@dataclass
class Simulated:
    """A server and its law: each drafted token is accepted with probability `alpha`, up to the first that is not."""

    kind: str = "vllm"
    alpha: float = 0.6
    draft_length: int = 4
    """0: it decodes plainly."""
    has_drafter: bool = False
    """Whether a vLLM with a draft length of 0 counts, as one whose table says 0: drafts, none of them."""
    step_seconds: float = 0.0
    counts_answers: bool = False
    """vLLM's `--per-request-spec-decode-metrics summary`, and chats of SGLang since 0.5.19."""
    merges: bool = False
    """Whether two steps of a text come in one part, as under load."""
    verify_calls: bool = True
    """Of newer versions of SGLang."""
    metrics: bool = True
    longest: int = 512
    dies_after: int | None = None
    """Answers, after which it breaks off every other."""
    others: int = 0
    """Tokens that it writes for others with each answer."""
    beyond_end: bool = True
    """Whether it counts what is accepted beyond the end of a text, as vLLM does."""
    steps: list[int] = field(default_factory=list)
    """Accepted tokens of every step as it counts them, all requests together."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of the texts that each of them emitted."""
    drafts: int = 0
    generated: int = 0
    requests: int = 0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def text(self, prompt: Any, length: int) -> tuple[list[list[int]], list[int]]:
        """Write a text that depends on the prompt alone, in steps: the prompt's, then a verified draft each.

        Returns the steps, and what each that verified a draft counts as accepted.
        """
        law = random.Random(json.dumps(prompt))
        tokens = [law.randrange(5, 900) for _ in range(length)]
        steps, counted, at = [tokens[:1]], list[int](), 1
        law = random.Random(json.dumps([prompt, "accepted"]))
        while at < length:
            accepted = 0
            while accepted < self.draft_length and law.random() < self.alpha:
                accepted += 1
            steps.append(tokens[at : at + accepted + 1])
            at += accepted + 1
            if self.draft_length:
                counted.append(accepted if self.beyond_end else min(accepted, len(steps[-1])))
        with self.lock:
            self.steps += counted
            self.emitted += [len(step) for step in steps[1:]]
            self.generated += length + self.others
            self.requests += 1
        return steps, counted

    def page(self) -> str:
        """Return what `/metrics` says."""
        steps, last = self.steps, self.steps[-40:]
        if self.kind == "sglang":
            lines = gauge("sglang:num_running_reqs", 0) + counter("sglang:generation_tokens", self.generated)
            lines += gauge("sglang:spec_accept_length", 1 + sum(last) / len(last) if last else 0.0)
            lines += counter("sglang:spec_verify_calls", len(steps)) if self.verify_calls else []
            return "\n".join(lines) + "\n"
        lines = gauge("vllm:num_requests_running", 0) + counter("vllm:generation_tokens", self.generated)
        if self.draft_length or self.has_drafter:
            counts = {
                "drafts": len(steps) if self.draft_length else 0,
                "draft_tokens": len(steps) * self.draft_length,
                "accepted_tokens": sum(steps),
            }
            for name, value in counts.items():
                lines += counter(f"vllm:spec_decode_num_{name}", value)
            positions = range(max(1, self.draft_length))
            per_pos = {f'{{position="{i}"}}': sum(step > i for step in steps) for i in positions}
            lines += counter("vllm:spec_decode_num_accepted_tokens_per_pos", per_pos)
        return "\n".join(lines) + "\n"

    def parts(self, steps: list[list[int]]) -> list[list[int]]:
        """Return the parts that an answer comes in."""
        if not self.merges:
            return steps
        return [steps[0], *([*chain(*steps[i : i + 2])] for i in range(1, len(steps), 2))]

    def counted(self, steps: list[list[int]], accepted: list[int]) -> dict[str, Any]:
        histogram = [accepted.count(j) for j in range(self.draft_length + 1)]
        return {
            "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
            "draft_acceptance_rate": sum(accepted) / (self.draft_length * len(accepted)),
            "acceptance_histogram": histogram,
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": self.draft_length * len(accepted),
            "num_spec_tokens": self.draft_length,
        }

    def verified(self, accepted: list[int]) -> dict[str, Any]:
        histogram = [accepted.count(j) for j in range(max(accepted) + 1)]  # grows as far as it must
        return {
            "spec_verify_ct": len(accepted),
            "spec_num_proposed_drafts": self.draft_length * len(accepted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_correct_drafts_histogram": histogram,
        }

    def answers(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        """Give the parts of one answer."""
        native = path == "/generate"
        prompt = body.get("input_ids") or body.get("prompt") or body.get("text") or body.get("messages")
        length = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        steps, accepted = self.text(prompt, length)
        written: list[int] = []
        for i, part in enumerate(self.parts(steps)):
            time.sleep(self.step_seconds)
            written += part
            last = len(written) == length
            if native:
                meta: dict[str, Any] = {
                    "id": "1",
                    "finish_reason": {"type": "length", "length": length} if last else None,
                    "prompt_tokens": 3,
                    "completion_tokens": len(written),
                }
                if last and accepted:
                    meta |= self.verified(accepted) | {"spec_accept_length": length / len(accepted)}
                yield {"text": " ".join(map(str, written)), "output_ids": list(written), "meta_info": meta}
                continue
            words = " ".join(map(str, part)) + " "
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            choice |= {"delta": {"content": words}} if "messages" in body else {"text": words}
            if body.get("return_token_ids"):
                choice |= {"token_ids": part} | ({"prompt_token_ids": [1, 2, 3]} if i == 0 else {})
            yield {"id": "1", "model": MODEL, "choices": [choice]}
        if not native:
            usage = {"prompt_tokens": 3, "completion_tokens": length, "total_tokens": length + 3}
            ending: dict[str, Any] = {"id": "1", "model": MODEL, "choices": [], "usage": usage}
            if self.kind == "sglang":
                if self.counts_answers and accepted and body.get("return_spec_tokens_details"):
                    own = {"spec_tokens_details": self.verified(accepted)}
                    yield {"id": "1", "model": MODEL, "choices": [], "usage": None, "sglext": own}
            elif self.counts_answers and accepted:
                ending["metrics"] = {"speculative_decoding": self.counted(steps, accepted)}
            yield ending
        yield "[DONE]"

    def info(self) -> dict[str, Any]:
        """Return SGLang's `/server_info`."""
        return {
            "version": "0.5.9",
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": self.draft_length,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": self.draft_length + 1,
            "internal_states": [{"avg_spec_accept_length": 1 + sum(self.steps) / max(len(self.steps), 1)}],
        }


class Handler(LocalHandler):
    """Answers as the server's `simulated` says."""

    server: Any

    def do_GET(self):
        simulated: Simulated = self.server.simulated
        known: dict[str, Any] = {
            "/v1/models": {"data": [{"id": MODEL, "max_model_len": simulated.longest}]},
            "/metrics": simulated.page() if simulated.metrics and self.path == "/metrics" else None,
            "/version": {"version": "0.32.0"} if simulated.kind == "vllm" else None,
            "/server_info": simulated.info() if simulated.kind == "sglang" else None,
        }
        found = known.get(self.path)
        if found is None:
            self._send(404, b'{"detail":"Not Found"}')
        else:
            self._send(200, found.encode() if isinstance(found, str) else json.dumps(found).encode())

    def do_POST(self):
        simulated: Simulated = self.server.simulated
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with simulated.lock:
            simulated.asked.append((self.path, body))
            dead = simulated.dies_after is not None and len(simulated.asked) > simulated.dies_after
            simulated.busy += 1
            simulated.busiest = max(simulated.busiest, simulated.busy)
        try:
            if dead:
                self.close_connection = True
                return
            if simulated.kind == "sglang" and "messages" in body and body.get("return_token_ids"):
                self._send(400, b'{"message":"return_token_ids is not supported with streaming"}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for part in simulated.answers(self.path, body):
                data = part if isinstance(part, str) else json.dumps(part)
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()
        finally:
            with simulated.lock:
                simulated.busy -= 1

    def _send(self, status: int, data: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)


@contextmanager
def simulated_server(**law: Any) -> Iterator[Simulated]:
    """Start one on this machine, and end it."""
    simulated = Simulated(**law)
    http = LocalServer(("127.0.0.1", 0), Handler)
    http.simulated = simulated  # type: ignore[attr-defined]
    simulated.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield simulated
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
