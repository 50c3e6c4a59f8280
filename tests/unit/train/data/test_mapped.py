"""Completions as training reads them: what is mapped from disk, which samples are taken, and which are held back."""

import fcntl
import pickle
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pipelines import training_data, write_completions

from draftsmith.decode.errors import InputError
from draftsmith.train.data import mapped
from draftsmith.train.data.examples import EpochSampler, require_disjoint_prompts, split_off, training_examples
from draftsmith.train.data.mapped import Texts, map_completions, text_hash
from draftsmith.train.data.packing import pack
from draftsmith.train.losses.positions import IGNORED


def sample(name: str, prompt: list[int], completion: list[int], *more: list[int]) -> dict:
    """A prompt and its completion; then prompts and completions by turns."""
    ids, labels = [*prompt, *completion], [*[IGNORED] * len(prompt), *completion]
    for at, turn in enumerate(more):
        ids, labels = ids + turn, labels + (turn if at % 2 else [IGNORED] * len(turn))
    return {"id": name, "input_ids": ids, "labels": labels}


def drawn(count: int, seed: int = 0, name: str = "s") -> list[dict]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 12, (count, 4))
    return [
        sample(f"{name}{number}", *(generator.integers(2, 300, size).tolist() for size in row))
        for number, row in enumerate(sizes)
    ]


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr("draftsmith.train.data.examples.logger", SimpleNamespace(warning=lines.append))
    return lines


def content(directory: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((Path(directory) / ".mapped").glob("*.arrow"))}


def test_what_is_mapped_is_what_was_written(tmp_path):
    """Several shards and directories, completions at the beginning, at the end and in turns."""
    one, two = drawn(7), [sample("first", [], [3, 4]), *drawn(5, 1), sample("last", [5], [6], [7, 8])]
    paths = [write_completions(tmp_path / "one", one[:3], one[3:]), write_completions(tmp_path / "two", two)]
    data = training_examples(paths)
    assert len(data) == 14
    for row, expected in zip(data, [*one, *two], strict=True):
        assert {name: row[name] for name in expected} == expected
    assert [row["index"] for row in data] == list(range(14))
    assert data.lengths.tolist() == [len(row["input_ids"]) for row in [*one, *two]]
    assert data.sample_ids([6, 7]) == [f"{paths[0]}: s6", f"{paths[1]}: first"]
    counts = [sum(label != IGNORED for label in row["labels"]) for row in [*one, *two]]
    assert data.texts.loss_tokens().tolist() == counts
    masks = [[int(label != IGNORED) for label in row["labels"]] for row in [*one, *two]]
    hashes = [text_hash(row["input_ids"], mask) for row, mask in zip([*one, *two], masks, strict=True)]
    assert data.texts.column("text").tolist() == hashes
    for cut in (1, 3, 9, 20):
        expected = [sum(label != IGNORED for label in row["labels"][:cut]) for row in [*one, *two]]
        assert data.texts.loss_tokens(cut).tolist() == expected


def test_it_is_written_once_whatever_a_run_chooses(tmp_path, monkeypatch):
    path = write_completions(tmp_path / "c", drawn(5), drawn(5, 1, "t"))
    training_examples([path])
    before = content(path)
    monkeypatch.setattr(mapped, "read_completions", None)
    for max_length in (None, 9):
        assert len(training_examples([path], max_length, 300)) > 1
    assert content(path) == before


def test_what_changed_is_read_again_and_what_a_kill_left_is_removed(tmp_path):
    rows, other = drawn(6), drawn(2, 1, "t")
    path = write_completions(tmp_path / "c", rows[:2], rows[2:4], rows[4:])
    training_examples([path])
    before = content(path)
    (whole,) = before
    (tmp_path / "c" / ".mapped" / f".{whole}.{socket.gethostname()}-1.partial").write_bytes(b"half")
    shutil.copy(
        Path(write_completions(tmp_path / "d", other)) / "shard-00000.parquet", tmp_path / "c/shard-00001.parquet"
    )
    found = [row["id"] for row in training_examples([path])]
    assert found == [row["id"] for row in [*rows[:2], *other, *rows[4:]]]
    assert content(path).keys().isdisjoint(before)
    assert sorted(p.suffix for p in (tmp_path / "c" / ".mapped").iterdir()) == ["", ".arrow"]


def test_one_process_writes_and_the_others_wait(tmp_path):
    path = write_completions(tmp_path / "c", drawn(6))
    (tmp_path / "c" / ".mapped").mkdir()
    found: list[Path] = []
    with (tmp_path / "c" / ".mapped" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(map_completions(path)))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive() and not content(path)
    waiting.join(20)
    assert [file.name for file in found] == list(content(path))


def test_a_directory_that_cannot_be_written_is_mapped_elsewhere(tmp_path):
    path = write_completions(tmp_path / "c", drawn(4))
    (tmp_path / "c" / ".mapped").write_text("in the way")  # as a read-only disk would be, for root too
    with pytest.raises(
        InputError, match=rf"^{path}: expected a place for .mapped, in it or in training.output_dir, found"
    ):
        training_examples([path])
    data = training_examples([path], output=tmp_path / "out")
    assert len(data) == 4 and (tmp_path / "out") in data.texts.files[path].parents


def test_a_damaged_file_is_named(tmp_path):
    path = write_completions(tmp_path / "c", drawn(4))
    file = map_completions(path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=rf"^{file}: expected mapped samples, found no whole file; remove it$"):
        training_examples([path])
    file.unlink()
    with pytest.raises(InputError, match=rf"^{file}: expected mapped samples, found no whole file; remove it$"):
        Texts({path: file})
    assert len(training_examples([path])) == 4


def test_tokens_stay_on_disk_and_other_processes_map_them_anew(tmp_path):
    path = write_completions(tmp_path / "c", drawn(2000))
    data = pack(training_examples([path]), 64)
    tokens = sum(data.lengths)
    assert len(pickle.dumps(data.texts)) < 1000 < tokens
    assert list(pickle.loads(pickle.dumps(data)))[-1] == data[len(data) - 1]
    with pytest.raises(IndexError):
        data[len(data)]


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    path = write_completions(tmp_path / "c", [sample("a", [1], [2]), sample("b", [1, 9], [3])])
    assert len(training_examples([path], vocab_size=10)) == 2
    named = rf"^{path}: expected samples as draftsmith prepare writes them, found token 9 with a vocabulary of 9$"
    with pytest.raises(InputError, match=named):
        training_examples([path], vocab_size=9)


def test_a_sample_twice_is_refused(tmp_path):
    path = write_completions(tmp_path / "c", [sample("a", [1], [2])], [sample("b", [1], [3]), sample("a", [4], [2])])
    with pytest.raises(InputError, match=rf"^{path}: expected each sample once, found 'a' again$"):
        training_examples([path])


def test_samples_longer_than_the_models_read_are_cut_and_counted(tmp_path, said):
    path = write_completions(tmp_path / "c", [sample("long", [1] * 4, [2] * 10), sample("short", [1] * 2, [2] * 3)])
    for most, positions, expected in ((None, 8, 8), (6, 8, 6), (9, 8, 8), (None, 14, 14), (None, None, 14)):
        data = training_examples([path], most, positions=positions)
        assert max(len(row["input_ids"]) for row in data) == expected
        told = "".join(said)
        said.clear()
        cut = f"completions: the {positions} positions of the trained model cut 1 of 2 samples, and with their ends "
        assert (cut in told) == (expected == positions == 8) and ("max_length 6 cuts 1 of 2" in told) == (most == 6)


def test_what_is_cut_is_counted_and_named(tmp_path, said):
    rows = [sample("short", [1, 2], [3]), sample("long", [1] * 4, [2] * 10), sample("longer", [1] * 4, [2] * 16)]
    path = write_completions(tmp_path / "c", rows)
    training_examples([path], 20)
    training_examples([path])
    assert not said
    training_examples([path], 10)
    lost = "2 of 3 samples, and with their ends 14 of 27 tokens to learn from (51.9%)"
    assert said == [f"completions: max_length 10 cuts {lost}: long, longer"]


def test_samples_without_anything_to_learn_are_left_out_and_named(tmp_path, said):
    rows = [sample("none", [1, 2, 3], []), sample("short", [1, 2], [3]), sample("long", [1] * 6, [2])]
    path = write_completions(tmp_path / "c", rows)
    assert [row["id"] for row in training_examples([path])] == ["short", "long"]
    assert said == [f"{path}: 1 of 3 samples have no token to learn from and are left out: none"]
    assert [row["id"] for row in training_examples([path], max_length=4)] == ["short"]
    nothing = write_completions(tmp_path / "d", rows[:1])
    for source, options, found in (
        (nothing, {}, "an empty loss mask in all 1 samples"),
        (path, {"max_length": 2}, "that max_length 2 cuts away those of all 3 samples"),
        (path, {"positions": 1}, "that the 1 positions of .* cut away those of all 3 samples"),
    ):
        with pytest.raises(InputError, match=f"expected tokens to train on, found {found} of {source}: none"):
            training_examples([source], **options)


def prompts_of(data) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"][: row["labels"].count(IGNORED)]) for row in data]


def test_a_share_is_held_back_by_prompts_and_stays_there(tmp_path):
    generator = np.random.default_rng(0)
    rows = [sample(f"{n}", [n % 200 + 2, n % 7, 5], generator.integers(2, 300, 4).tolist()) for n in range(600)]
    grown = training_data(rows)
    for share in (0.02, 0.3):
        train, heldout = split_off(grown, share)
        assert len(train) + len(heldout) == 600
        assert not set(prompts_of(train)) & set(prompts_of(heldout))
        assert 0 < len(set(prompts_of(heldout))) / len(set(prompts_of(grown))) < 2.5 * share
        require_disjoint_prompts(train, heldout)
        before, held_before = split_off(training_data(rows[::-1][:400]), share)  # in another order, and fewer
        assert {row["id"] for row in held_before} <= {row["id"] for row in heldout}
        assert {row["id"] for row in before} <= {row["id"] for row in train}


def test_a_share_of_few_prompts_holds_one_of_them_back():
    train, heldout = split_off(training_data([sample(f"{n}", [n, 2], [3]) for n in range(3, 9)]), 0.001)
    assert (len(train), len(heldout)) == (5, 1)


def test_a_share_that_divides_nothing_is_refused():
    one_prompt = training_data([sample(f"{n}", [1, 2], [n]) for n in range(3, 9)])
    with pytest.raises(InputError, match=r"^heldout: expected a share that divides the 6 .* all of them back$"):
        split_off(one_prompt, 0.001)


def test_texts_without_a_prompt_are_divided_by_what_they_say():
    rows = [sample(f"{n}", [1], [n, n + 1, n + 2]) for n in range(2, 202)]
    train, heldout = split_off(training_data(rows), 0.3)
    assert 20 < len(heldout) < 100 and len(train) + len(heldout) == 200


def test_prompts_on_both_sides_are_refused(tmp_path):
    rows = drawn(20)
    path, other = write_completions(tmp_path / "c", rows), drawn(6, 9, "h")
    train = training_examples([path])
    require_disjoint_prompts(train, training_examples([write_completions(tmp_path / "apart", other)]))
    prompt = rows[4]["input_ids"][: rows[4]["labels"].index(next(x for x in rows[4]["labels"] if x != IGNORED))]
    mixed = write_completions(tmp_path / "mixed", [*other, sample("twin", prompt, [7, 7, 7])])
    with pytest.raises(InputError) as error:
        require_disjoint_prompts(train, training_examples([mixed]))
    assert str(error.value) == (
        f"heldout: expected prompts that are not learned from, found 1 of 7 that are: first {mixed}: twin, which is "
        f"{path}: s4; take them out, or have --heldout 0.02 hold back a share of completions"
    )
    with pytest.raises(InputError, match="found 20 of 20 that are"):
        require_disjoint_prompts(train, training_examples([path]))


def weighted(tmp_path, weights, packing=False, **options):
    counts = (40, 25, 10)
    paths = [write_completions(tmp_path / str(at), drawn(count, at, f"{at}-")) for at, count in enumerate(counts)]
    data = training_examples(paths)
    if packing:
        data = pack(data, 64, by_source=True)
    return data, EpochSampler(data, seed=3, weights=weights, **options)


@pytest.mark.parametrize("options", [{}, {"group_size": 4}], ids=["shuffled", "grouped"])
def test_an_epoch_takes_of_each_directory_what_its_weight_says(tmp_path, options):
    data, sampler = weighted(tmp_path, [1.0, 0.32, 2.5], **options)
    epochs = []
    for epoch in range(20):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        sources = data.texts.source_of(data.members[epochs[-1]])
        assert np.bincount(sources).tolist() == [40, 8, 25] and len(sampler) == 73
        times = np.bincount(epochs[-1], minlength=75)
        assert set(times[:40]) == {1} and set(times[40:65]) == {0, 1} and set(times[65:]) == {2, 3}
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert set(np.concatenate(epochs)) == set(range(75))  # all of the second are seen in the end
    sampler.set_epoch(7)
    assert list(sampler) == epochs[7]
    _, other = weighted(tmp_path, [1.0, 0.32, 2.5], **options)
    other.set_epoch(7)
    assert list(other) == epochs[7]


def test_packed_rows_are_of_one_directory_where_weights_differ(tmp_path):
    data, sampler = weighted(tmp_path, [1.0, 0.5, 1.0], packing=True)
    for row in range(len(data)):
        assert len(set(data.texts.source_of(data.samples([row])))) == 1
    rows = np.bincount(data.source_of_rows)
    assert len(sampler) == rows[0] + round(rows[1] / 2) + rows[2]
    assert sorted(name for row in data for name in row["ids"]) == sorted(
        row["id"] for at, count in enumerate((40, 25, 10)) for row in drawn(count, at, f"{at}-")
    )


def test_the_same_texts_have_the_same_fingerprint(tmp_path):
    rows = drawn(8)
    one, two = (training_examples([write_completions(tmp_path / name, rows)]) for name in "ab")
    fewer = training_examples([write_completions(tmp_path / "c", rows[:7])])
    assert one.fingerprint() == two.fingerprint() != fewer.fingerprint()
    alike = [sample("a", [1, 2], [3]), sample("b", [4, 5], [6])]
    data = training_examples([write_completions(tmp_path / "d", alike)])
    assert data.fingerprint() != data.select(np.array([1, 0])).fingerprint()
    assert one.fingerprint() != pack(one, 64).fingerprint() != one.fingerprint([0.5])
