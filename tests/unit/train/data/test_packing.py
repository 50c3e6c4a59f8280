"""Rows of whole samples: what is in them, what a batch of them looks like, and the order that batches are read in."""

import random

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from pipelines import training_data
from torch.utils.data import DataLoader

from draftsmith.decode.errors import InputError
from draftsmith.train.data.examples import CompletionCollator, EpochSampler, TrainingData
from draftsmith.train.data.packing import best_fit_decreasing, pack
from draftsmith.train.losses.positions import IGNORED, LossPositions

LENGTH = 24


def samples(count: int = 40, longest: int = LENGTH, seed: int = 0) -> TrainingData:
    """Samples whose tokens tell them apart, a prompt before each completion; some without a prompt."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        size = generator.randint(2, longest)
        prompt = generator.randint(0, size - 1)
        ids = [generator.randrange(2, 300) for _ in range(size)]
        rows.append({"id": f"s{number}", "input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return training_data(rows)


def taken_apart(packed: TrainingData) -> dict[str, tuple[list[int], list[int]]]:
    """Each sample's tokens and labels, found again by the positions alone."""
    found = {}
    for row in packed:
        starts = [t for t, position in enumerate(row["position_ids"]) if position == 0]
        for name, start, end in zip(row["ids"], starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert row["position_ids"][start:end] == list(range(end - start))
            assert name not in found
            found[name] = (row["input_ids"][start:end], row["labels"][start:end])
    return found


def by_trying_all(sizes: list[int], capacity: int) -> list[int]:
    """The fill of each bin, where every item looks at every bin: the reference."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        room = [row for row, fill in enumerate(bins) if fill + size <= capacity]
        if not room:
            bins.append(0)
            room = [len(bins) - 1]
        bins[max(room, key=lambda row: bins[row])] += size
    return sorted(bins)


def binned(sizes: list[int], capacity: int) -> list[list[int]]:
    order, counts = best_fit_decreasing(sizes, capacity)
    return [part.tolist() for part in np.split(order, counts.cumsum()[:-1])] if len(counts) else []


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_those_of_best_fit_decreasing(seed):
    generator = random.Random(seed)
    capacity = generator.randint(5, 60)
    sizes = [generator.randint(1, capacity) for _ in range(generator.randint(1, 200))]
    bins = binned(sizes, capacity)
    assert sorted(item for row in bins for item in row) == list(range(len(sizes)))
    assert sorted(sum(sizes[item] for item in row) for row in bins) == by_trying_all(sizes, capacity)


def test_rows_hold_whole_samples_each_once():
    dataset = samples()
    packed = pack(dataset, LENGTH)
    assert set(packed[0]) == {"ids", "texts", "input_ids", "labels", "position_ids", "index"}
    assert [row["index"] for row in packed] == list(range(len(packed)))
    assert packed.lengths.tolist() == [len(row["input_ids"]) for row in packed]
    assert all(len(row["input_ids"]) == len(row["labels"]) <= LENGTH for row in packed)
    found = taken_apart(packed)
    assert found.keys() == {sample["id"] for sample in dataset}
    for sample in dataset:
        assert found[sample["id"]] == (sample["input_ids"], [IGNORED, *sample["labels"][1:]])
    assert any(sample["labels"][0] != IGNORED for sample in dataset)  # or the test says nothing of first labels
    tokens = sum(dataset.lengths)
    assert tokens / (len(packed) * LENGTH) > 0.9 > tokens / (len(dataset) * LENGTH)


def test_a_selection_is_packed_as_it_is_ordered():
    dataset = samples().select(np.array([7, 3, 30, 11]))
    packed = pack(dataset, 2 * LENGTH)
    found = taken_apart(packed)
    assert {name: ids for name, (ids, _) in found.items()} == {row["id"]: row["input_ids"] for row in dataset}


def test_a_sample_longer_than_a_row_is_refused_by_name():
    dataset = training_data(
        [{"id": name, "input_ids": [1] * n, "labels": [1] * n} for name, n in (("fits", 8), ("too long", 9))]
    )
    with pytest.raises(
        InputError, match=r"^packing: expected samples of at most 8 tokens, found 9 in sample 'too long'$"
    ):
        pack(dataset, 8)
    assert len(pack(dataset, 9)) == 2


def test_a_packed_batch_has_positions_and_no_mask(tokenizer):
    packed = list(pack(samples(), LENGTH))
    rows = [packed[2], packed[-1], packed[0]]
    batch = CompletionCollator(tokenizer)(rows)
    assert batch.keys() == {"input_ids", "labels", "position_ids", "index", "positions"}
    assert batch["index"].tolist() == [2, len(packed) - 1, 0] and batch["index"].dtype == torch.int64
    width = max(len(row["input_ids"]) for row in rows)
    padding = 0
    for at, row in enumerate(rows):
        size = len(row["input_ids"])
        for name, value in (("input_ids", tokenizer.pad_token_id), ("labels", IGNORED), ("position_ids", 0)):
            assert batch[name].dtype == torch.int64
            assert batch[name][at].tolist() == row[name] + [value] * (width - size)
        padding += width - size
    assert padding > 0


def test_a_batch_of_samples_is_padded_on_the_right_and_needs_no_mask(tokenizer):
    rows = list(samples())[3:6]
    batch = CompletionCollator(tokenizer)(rows)
    assert batch.keys() == {"input_ids", "labels", "index", "positions"}
    assert batch["index"].tolist() == [3, 4, 5]
    width = batch["labels"].shape[1]
    for at, row in enumerate(rows):
        padding = width - len(row["input_ids"])
        assert batch["input_ids"][at].tolist() == row["input_ids"] + [tokenizer.pad_token_id] * padding
        assert batch["labels"][at].tolist() == row["labels"] + [IGNORED] * padding
    bare = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    assert CompletionCollator(tokenizer)(bare).keys() == {"input_ids", "labels", "positions"}


@pytest.mark.parametrize("packed", [False, True])
def test_positions_are_before_the_tokens_to_learn(tokenizer, packed):
    dataset = pack(samples(), LENGTH) if packed else samples()
    batch = CompletionCollator(tokenizer, ahead=2, prompts=True)(list(dataset)[:6])
    rows, width = batch["labels"].shape
    for ahead, flat in enumerate(batch["positions"]):
        expected = [
            row * width + t
            for row in range(rows)
            for t in range(width - 1 - ahead)
            if (batch["labels"][row, t + 1 : t + 2 + ahead] != IGNORED).all()
        ]
        assert flat.tolist() == expected and expected
    taken = LossPositions(batch["positions"][0])
    assert torch.equal(taken.next_tokens(batch["input_ids"]), batch["labels"][:, 1:][batch["labels"][:, 1:] != IGNORED])
    every = LossPositions(batch["text_positions"][0])
    assert set(taken.flat_N.tolist()) < set(every.flat_N.tolist())
    sizes = dataset.lengths[:6].tolist()
    texts = sum(row["position_ids"].count(0) for row in list(dataset)[:6]) if packed else len(sizes)
    assert len(every) == sum(sizes) - texts


def test_rows_are_named_by_their_samples():
    packed = pack(samples(), LENGTH)
    assert packed.sample_ids([1, 3]) == packed[1]["ids"] + packed[3]["ids"]


def test_no_token_is_predicted_from_another_sample(tokenizer):
    """All that a loss reads of a batch: which positions are chosen."""
    dataset = samples()
    packed = pack(dataset, LENGTH)
    batch = CompletionCollator(tokenizer)(list(packed))
    inside = batch["position_ids"][:, 1:] > 0  # the predicted token is not the first of its sample
    chosen = batch["labels"][:, 1:] != IGNORED
    assert not (chosen & ~inside).any()


def padding(dataset: TrainingData, order: list[int], batch_size: int) -> int:
    sizes = [len(dataset[row]["input_ids"]) for row in order]
    batches = [sizes[at : at + batch_size] for at in range(0, len(sizes), batch_size)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def test_a_grouped_epoch_pads_less_than_a_random_one():
    dataset = samples(200)
    for epoch in range(3):
        sampler = EpochSampler(dataset, seed=1, group_size=8)
        sampler.set_epoch(epoch)
        grouped = list(sampler)
        shuffled = random.Random(epoch).sample(range(200), 200)
        assert sorted(grouped) == sorted(shuffled) == list(range(len(sampler)))
        assert padding(dataset, grouped, 8) < 0.4 * padding(dataset, shuffled, 8)


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    dataset = samples(60)

    def order(seed: int, epoch: int, elsewhere: int) -> list[int]:
        torch.manual_seed(elsewhere)
        sampler = EpochSampler(dataset, seed, group_size=4)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0, 5) == order(1, 0, 6)
    assert order(1, 1, 5) == order(1, 1, 6)
    assert order(1, 0, 5) != order(1, 1, 5) != order(9, 1, 5)


def loaders(dataset: TrainingData, processes: int) -> list:
    """What accelerate makes of the data in each of so many processes."""
    made = []
    for rank in range(processes):
        loader = DataLoader(dataset, batch_size=4, collate_fn=lambda rows: [row["index"] for row in rows])
        loader = prepare_data_loader(loader, num_processes=processes, process_index=rank, put_on_device=False)
        loader.set_sampler(EpochSampler(dataset, seed=1, group_size=4))
        made.append(loader)
    return made


@pytest.mark.parametrize("processes", [1, 2])
def test_grouped_epochs_are_shared_out_and_resumed(processes):
    """Generators that have come apart change nothing, nor does a resume in a later epoch."""
    dataset = samples(48)
    epochs = []
    for epoch in (0, 1):
        parts = []
        for rank, loader in enumerate(loaders(dataset, processes)):
            torch.manual_seed(rank)
            loader.set_epoch(epoch)
            parts.append(list(loader))
        seen = [row for part in parts for batch in part for row in batch]
        assert sorted(seen) == list(range(48))
        epochs.append(parts)
    assert epochs[0] != epochs[1]
    for rank, loader in enumerate(loaders(dataset, processes)):
        resumed = skip_first_batches(loader, 2)
        resumed.set_epoch(1)
        assert list(resumed) == epochs[1][rank][2:]
