# ruff: noqa
# fmt: off
"""A streamed delta with reasoning and content together (several tokens a chunk) must lose neither in the answer's text."""
import contextlib, io, json, os, sys, tempfile, warnings
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
warnings.filterwarnings("ignore")
import torch, transformers
transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar(); torch.set_num_threads(1)
import asyncio, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from draftsmith.train.endpoint.client import Client
TOKENS = [("reasoning_content", w) for w in "one two three four".split()] + [("content", w) for w in "it is 42".split()]

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_POST(self):
        size = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["n_a_chunk"]
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        for at in range(0, len(TOKENS), size):
            delta = {}
            for name, word in TOKENS[at : at + size]:
                delta[name] = delta.get(name, "") + word + " "
            end = "stop" if at + size >= len(TOKENS) else None
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': end}]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()

async def text(size):
    async with Client(f"http://127.0.0.1:{server.server_port}") as client:
        return (await client.complete({"n_a_chunk": size, "messages": []}, "/v1/chat/completions", False)).text

one, *others = [asyncio.run(text(size)) for size in (1, 3, 7)]
server.shutdown()
bad = [each for each in others if each != one]
print(f"wrong: {one!r} becomes {bad[0]!r}" if bad else "right: the same text in chunks of 1, 3 and 7 tokens"); sys.exit(1 if bad else 0)
