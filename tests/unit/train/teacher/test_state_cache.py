import torch

from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.teacher.state_cache import StateCache

PAD = 1


def batch(*texts):
    """Return texts, of which all tokens but the first have labels, as the collator pads them."""
    width = max(map(len, texts))
    rows = [torch.tensor(text + [PAD] * (width - len(text))) for text in texts]
    labels = [torch.tensor([IGNORED, *text[1:], *[IGNORED] * (width - len(text))]) for text in texts]
    return {"input_ids": torch.stack(rows), "labels": torch.stack(labels)}


class Target:
    """Each token's state says how many tokens came up to it, and their sum."""

    def __init__(self):
        self.rows = []

    def __call__(self, ids_BT):
        self.rows += ids_BT.tolist()
        count = torch.arange(1.0, ids_BT.shape[1] + 1).expand(ids_BT.shape)
        return torch.stack([count, ids_BT.cumsum(1).float()], dim=-1)


def test_a_text_that_comes_again_needs_no_forward():
    kept, target = StateCache(), Target()
    a, b, c = [5, 6, 7, 8], [5, 6], [9, PAD, PAD]  # the last one ends in what pads
    first = kept.of(batch(a, b), target)
    assert torch.equal(first[0], Target()(torch.tensor([a]))[0])
    assert torch.equal(first[1, :2], Target()(torch.tensor([b]))[0]) and not first[1, 2:].any()
    again = kept.of(batch(b, c, a), target)
    assert target.rows == [a, [*b, PAD, PAD], c] and len(kept) == 3
    assert torch.equal(again[2], first[0]) and torch.equal(again[0], first[1])
    assert torch.equal(again[1, :3], Target()(torch.tensor([c]))[0])


def test_texts_that_begin_alike_are_told_apart():
    kept, target = StateCache(), Target()
    kept.of(batch([5, 6, 7]), target)
    assert torch.equal(kept.of(batch([5, 6]), target), Target()(torch.tensor([[5, 6]])))
