"""Prices of rounds by the clock of a llama-server."""

import json
from contextlib import contextmanager

import httpx2
import pytest
import torch

from draftsmith.decode.measurement.costs import DraftCosts
from draftsmith.scripts.engines.offline.llama_costs import TURNS, LlamaCosts
from draftsmith.train.kinds.export import Served


class Server:
    """llama-server with a clock of its own: 10 ms a forward, 2 a verified token, 1 and 3 a draft."""

    def __init__(self):
        self.asked, self.started, self.slow = [], [], 1.0

    @contextmanager
    def serve(self, job, threads):
        self.started.append(job)
        speculative = job.speculative or {"num_speculative_tokens": 0, "method": "none"}
        k, copies = speculative["num_speculative_tokens"], speculative["method"] == "ngram-mod"
        # A server that other programs disturb, once, and one that has the machine to itself.
        self.slow = {2: 3.0, 14: 0.3}.get(len(self.started), 1.0)

        def handle(request):
            asked = json.loads(request.content)
            self.asked.append(asked)
            if asked["n_predict"] == 2:
                return httpx2.Response(200, json={"timings": self.clock(2, 0, 0, 40 if copies or not k else 70)})
            tokens = 1 + 8 * (k + 1 if copies else 2 if k else 1)
            draft = 0 if copies or not k else 1 + 3 * k
            seconds = 8 * (10 + 2 * k + draft + asked["temperature"])
            return httpx2.Response(200, json={"timings": self.clock(tokens, tokens - 9, seconds, 0)})

        yield httpx2.Client(base_url="http://server", transport=httpx2.MockTransport(handle))

    def clock(self, tokens, accepted, milliseconds, prompt):
        return {"prompt_ms": prompt, "predicted_n": tokens, "predicted_ms": milliseconds * self.slow,
                "draft_n_accepted": accepted}  # fmt: skip


def test_a_table_has_what_the_servers_clock_says():
    """Forwards from copies, a draft's step and overhead from its rounds, and the median of the turns."""
    server = Server()
    costs = LlamaCosts(server, "t.gguf", torch.tensor([7, 8, 7, 9]), 50, [1], [0.0, 1.0], 64, 2, {"top_k": 40})
    drafters = {"d": {k: Served("d", {"method": "draft-simple", "model": "d.gguf", "num_speculative_tokens": k})
                      for k in (1, 3, 5)}, "copies": dict.fromkeys((2, 7))}  # fmt: skip
    cold, warm = costs.tables(drafters)
    for table, more in ((cold, 0.0), (warm, 0.001)):
        assert table.target_seconds[1] == pytest.approx({k: 0.008 + 0.002 * k + more for k in (1, 2, 3, 4, 5, 6, 7, 8)})
        draft = table.drafters["d"][1]
        assert (draft.step, draft.overhead, draft.prefill) == pytest.approx((0.003, 0.001, 0.03))
        assert table.drafters["copies"] == {1: DraftCosts(0.0, 0.0, 0.0, 0.0)}
        assert table.at("d", 1).round_seconds(4) == pytest.approx(0.010 + 0.008 + 0.013 + more)
    # The texts lie around the context, whose forwards are asked for: from 50 - 64 / 2 tokens on, in whole rounds.
    assert cold.context == 50 and {one["n_predict"] for one in server.asked} == {2, 57, 61, 63, 64}
    assert all((one["samplers"], one["top_k"]) == (["temperature", "top_k"], 40) for one in server.asked)
    # Copies are priced on a text that repeats its likeliest token, drafters on the text.
    repeated = [one for one in server.asked if "logit_bias" in one]
    assert {tuple(one["prompt"]) for one in repeated} == {(7,) * 18} and repeated[0]["logit_bias"][0][0] == 7
    assert {tuple(one["prompt"]) for one in server.asked if "logit_bias" not in one} == {(7, 8, 7, 9) * 4 + (7, 8)}
    assert len(server.started) == TURNS * (1 + 7 + 3)
