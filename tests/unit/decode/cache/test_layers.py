"""Layers of the cache: each moves, selects and rewinds its own state."""

import torch

from draftsmith.decode.cache import Places, layers
from draftsmith.decode.cache.layers import Block, Layer, Moves


def filled(rows: int = 2, slots: int = 12) -> Layer:
    """A layer whose keys and values are all different."""
    layer, numbers = Layer(Block(), rows, slots, whole=True), torch.arange(rows * slots * 8.0).view(rows, 2, slots, 4)
    layer.take_from([numbers.clone(), -numbers])
    return layer


def test_moves_on_the_host_are_those_on_the_device(monkeypatch):
    moves = Moves(Places([3, 7], torch.device("cpu")), [[1, 3, 4], [2]], None, torch.arange(12))
    here, there, before = filled(), filled(), filled()
    here.move(moves)
    monkeypatch.setattr(layers, "READ_AT_ONCE", set())
    there.move(moves)
    for moved, as_well, was in zip(here.tensors, there.tensors, before.tensors, strict=True):
        assert torch.equal(moved, as_well)
        assert torch.equal(moved[0, :, 4:7], was[0, :, [4, 6, 7]]) and torch.equal(moved[1, :, 8], was[1, :, 9])


def test_a_saved_row_begins_another_layer_as_it_was():
    layer, other = filled(), Layer(Block(), 2, 12, whole=False)
    other.restore([None, layer.saved(0, 5)])
    layer.select([0])
    for states, copies in zip(layer.tensors, other.tensors, strict=True):
        assert torch.equal(states[0, :, :5], copies[1, :, :5]) and not copies[0].any()
