"""The first loss beside the uniform one."""

import math

import pytest
import torch
from accelerate import Accelerator

from draftsmith.train.job.step_checks import FirstLoss
from draftsmith.train.losses.chunked import chunked_objective
from draftsmith.train.losses.distributions import LiveDistributions
from draftsmith.train.losses.objective import Objective
from draftsmith.train.losses.output_head import OutputHead

ROWS, WIDTH, VOCABULARY = 6, 5, 11


def first_loss(scale: float, name: str) -> tuple[FirstLoss, list[float]]:
    """What a head with weights of this size begins with, in two parts; and the losses of both."""
    torch.manual_seed(0)
    first, losses = FirstLoss(), []
    for _ in range(2):
        head = OutputHead((scale * torch.randn(VOCABULARY, WIDTH)).requires_grad_(True))
        hidden, labels = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (ROWS,))
        teacher = LiveDistributions(torch.randn(ROWS, WIDTH), OutputHead(torch.randn(VOCABULARY, WIDTH)))

        def loss_of(learners, labels=labels, teacher=teacher):
            ((hidden, head),) = learners
            return chunked_objective(Objective({name: 1.0}), hidden, head, teacher, labels)

        loss = first.beside_uniform(loss_of, [(hidden, head)])
        loss.backward()
        assert hidden.grad is not None and hidden.grad.abs().sum() > 0
        losses.append(loss.item())
    return first, losses


def test_a_loss_above_the_uniform_one_is_told_with_both(capsys):
    first, losses = first_loss(30.0, "cross_entropy")
    first.tell(Accelerator(cpu=True), 2 * ROWS, "the cause")
    said = capsys.readouterr().err
    assert f"the first loss is {sum(losses) / 2 / ROWS:.2f}, where {math.log(VOCABULARY):.2f} is that of" in said
    assert f"all {VOCABULARY} tokens" in said and said.strip().endswith("the cause") and said.count("\n") == 1


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "reverse_kl", "tvd"])
def test_weights_near_zero_are_no_worse_than_uniform(name, capsys):
    first_loss(1e-2, name)[0].tell(Accelerator(cpu=True), 2 * ROWS, "the cause")
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_says_nothing(capsys):
    FirstLoss().tell(Accelerator(cpu=True), 1, "the cause")
    assert capsys.readouterr().err == ""
