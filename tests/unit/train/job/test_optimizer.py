import copy

import pytest
import torch
from torch import nn

from draftsmith.train.job import optimizer
from draftsmith.train.job.optimizer import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonal_keeps_the_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = u.T @ made @ vh.T
    assert torch.allclose(kept, kept.diagonal().diag(), atol=1e-4)
    assert kept.diagonal().min() > 0.6 and kept.diagonal().max() < 1.3


def test_float32_steps_are_those_of_the_library_but_for_its_rounding(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ours = nn.ParameterList([torch.randn(shape, generator=generator) for shape in ((8, 24), (24, 8))])
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    made, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    monkeypatch.setattr(optimizer, "has_fast", lambda dtype, device: False)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        made.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=0.01)
        assert torch.equal(made.state[one]["momentum_buffer"], reference.state[other]["momentum_buffer"])
