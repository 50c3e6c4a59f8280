"""CUDA graphs of programs, with a stand-in for the GPU that repeats the call: what is copied, kept and forgotten."""

import pytest
import torch
from programs import Untraced

from draftsmith.decode import autoregressive_generate, speculative_generate
from draftsmith.decode.cache import graphs, program
from draftsmith.decode.proposers.draft_model import DraftModelProposer


def repeated(call):
    """Repeats a call on the addresses that it was captured with."""
    outputs = call()

    def replay():
        for output, new in zip(outputs, call(), strict=True):
            output.copy_(new)

    return replay, outputs


def write(inputs):
    tokens, starts, cache = inputs
    cache[:, starts : starts + len(tokens)] = tokens
    return [cache.sum(-1)]


def test_a_graph_reads_the_inputs_of_each_call_and_writes_to_the_caches_themselves():
    captured = []
    graph = graphs.Graphs(write, [False, False, True], lambda call: captured.append(call) or repeated(call))
    cache, sums = torch.zeros(1, 8), []
    for at in range(4):
        sums.append(graph([torch.full((2,), 1.0 + at), torch.tensor(2 * at), cache])[0])
    assert cache.tolist() == [[1, 1, 2, 2, 3, 3, 4, 4]]
    assert [each.item() for each in sums] == [2, 6, 12, 20], "an output belongs to its caller"
    assert len(captured) == 1
    graph([torch.ones(2), torch.tensor(0), torch.zeros(1, 8)])  # a cache elsewhere
    graph([torch.ones(3), torch.tensor(0), cache])  # another shape
    assert len(captured) == 3
    graph.clear()
    graph([torch.ones(2), torch.tensor(0), cache])
    assert len(captured) == 4


def test_the_oldest_graphs_are_forgotten(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    captured = []
    graph = graphs.Graphs(write, [False, False, True], lambda call: captured.append(call) or repeated(call))
    cache = torch.zeros(1, 8)
    for size in (1, 2, 3, 1):
        graph([torch.ones(size), torch.tensor(0), cache])
    assert len(captured) == 4


class Graphed(Untraced):
    """An untraced program whose calls are repeated as graphs."""

    def __init__(self, model, forward, example, weights):
        super().__init__(model, forward, example, weights)
        self._counts = [len(given) if isinstance(given, list) else None for given in example]
        stays = ["s" in axes.values() for axes in program.flatten(forward.axes(example))]
        self._graphs = graphs.Graphs(self._nested, stays, repeated)

    def _nested(self, flat):
        rest = iter(flat)
        nested = [next(rest) if count is None else [next(rest) for _ in range(count)] for count in self._counts]
        return self._forward(*nested)

    def _run(self, *inputs):
        return self._graphs(program.flatten(inputs))


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_texts_are_the_same(target, draft, monkeypatch, temperature):
    prompts = torch.randint(3, target.config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": temperature > 0, "max_new_tokens": 40, "eos_token_id": None}
    texts = {}
    for name in (Untraced, Graphed):
        monkeypatch.setattr(program, "Program", name)
        monkeypatch.setattr(program, "_PROGRAMS", type(program._PROGRAMS)())
        monkeypatch.setattr("draftsmith.decode.rules.judged._PROGRAMS", {})
        written = [
            autoregressive_generate(target, prompts, compiled=True, **options),
            speculative_generate(target, DraftModelProposer(draft), prompts, compiled=True, **options),
        ]
        texts[name] = [each.sequences.tolist() for each in written]
    assert texts[Graphed] == texts[Untraced]


def test_graphs_are_off_unless_asked_for(monkeypatch):
    assert not graphs.enabled(torch.device("cuda"))
    monkeypatch.setenv(graphs.FLAG, "1")
    assert graphs.enabled(torch.device("cuda")) and not graphs.enabled(torch.device("cpu"))
