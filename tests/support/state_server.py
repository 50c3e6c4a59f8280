"""A server of hidden states in this process: what vLLM answers with our middleware, and the faults that it may have.

The shapes are those of vLLM 0.32, which `tests/engine/test_target_states.py` asks.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from local_server import LocalHandler, LocalServer
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.train.files import identity

COMPUTING = threading.Lock()
"""Texts are computed one at a time: servers share a model, and rounding must not depend on who asks."""
Fault = Callable[[Tensor, list[int]], tuple[Tensor, list[int]]]


@dataclass
class StateServer:
    """A target's states after the layers `layer_ids`, with what goes wrong.

    `fault` changes states, (T, n, H), and tokens; `says` replaces what the server says of its target. It gives none
    after `dies_after` answers, until it is `alive` again. `pause` is in seconds, for each answer. It answers for the
    model `name` alone.
    """

    model: PreTrainedModel
    layer_ids: list[int]
    path: str
    fault: Fault | None = None
    says: dict[str, Any] = field(default_factory=dict)
    dies_after: int | None = None
    pause: float = 0.0
    alive: bool = True
    answered: int = 0
    texts: list[tuple[int, ...]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    name: str = "tiny"

    def target(self) -> dict[str, Any]:
        config = self.model.config.get_text_config()
        return {
            "model": self.path,
            "revision": None,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "quantization": None,
            "layer_ids": self.layer_ids,
            "num_hidden_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "max_model_len": 512,
            "files": identity(self.path),
            "commit": None,
            "vllm": "0.32.0",
        } | self.says

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> dict[str, Any] | None:
        ids = body["prompt"]
        time.sleep(self.pause)
        with COMPUTING:
            self.answered += 1
            if self.dies_after is not None and self.answered > self.dies_after:
                self.alive = False
            if not self.alive:
                return None
            self.texts.append(tuple(ids))
            kept = list[Tensor]()
            hooks = [
                layer.register_forward_hook(
                    lambda _m, _i, output: kept.append(output if isinstance(output, Tensor) else output[0])
                )
                for layer in self.model.model.layers
            ]
            logits = self.model(torch.tensor([ids])).logits[0].float()
            for hook in hooks:
                hook.remove()
            embedded = self.model.get_input_embeddings()(torch.tensor([ids]))
            states = torch.stack([[embedded, *kept][layer][0] for layer in self.layer_ids], dim=1)
            tokens = ids
            if self.fault is not None:
                states, tokens = self.fault(states, list(ids))
            name = f"cmpl-{self.answered}.safetensors"
            self.files[name] = save({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)})
        scores = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0].tolist()
        logprobs = [None, *({str(t): {"logprob": s, "rank": 1}} for t, s in zip(ids[1:], scores, strict=True))]
        choice = {"index": 0, "text": "", "prompt_logprobs": logprobs if "prompt_logprobs" in body else None}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": f"/nowhere/{name}"}}


class Handler(LocalHandler):
    state: StateServer

    def do_GET(self) -> None:
        state, name = self.state, self.path.rpartition("/")[2]
        if not state.alive:
            return self.close_connection_now()
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": state.name, "max_model_len": 512}]}).encode())
        elif self.path == "/draftsmith/target":
            self.reply(json.dumps(state.target()).encode())
        else:
            with COMPUTING:
                content = state.files.pop(name, None)
            self.reply(content or b"{}", 200 if content else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.state.complete(body) if self.state.alive else None
        if body["model"] != self.state.name:
            return self.reply(b"{}", 404)
        if answer is None:
            return self.close_connection_now()
        self.reply(json.dumps(answer).encode())

    def close_connection_now(self) -> None:
        self.close_connection = True
        self.connection.close()

    def reply(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(*states: StateServer) -> Iterator[list[StateServer]]:
    """Run servers while the block lasts; their `url`s are set."""
    servers = []
    for state in states:
        server = LocalServer(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
    try:
        yield list(states)
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
