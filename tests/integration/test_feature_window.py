"""A cache of features that is written while it is read: what is learned from it, and how much of it is there."""

import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pipelines import (
    LAST_BITS,
    block_configured,
    configured,
    eagle_configured,
    furthest,
    heads_configured,
    history,
)
from process_jobs import eagled
from processes import forked
from safetensors.torch import load_file

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as distill
from draftsmith.medusa import __main__ as medusa
from draftsmith.medusa.block import __main__ as block
from draftsmith.medusa.eagle import __main__ as eagle
from draftsmith.train.data.mapped import Texts, map_completions
from draftsmith.train.job.processes import Processes
from draftsmith.train.models import load_model
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache
from draftsmith.train.teacher.feature_reader import find_features
from draftsmith.train.teacher.feature_shards import FeatureShards, Layout, LiveTeacher
from draftsmith.train.teacher.window import READER, Order, WindowReader
from draftsmith.train.teacher.window_writer import WindowWriter

WINDOW = 4e-4
"""Gigabytes: some eight steps."""
TRAINING = {
    **{"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2},
    "train_sampling_strategy": "group_by_length",  # an order that a whole cache is read in, too
}


@pytest.fixture(scope="module")
def shared(pipeline, tmp_path_factory) -> Path:
    """The whole of what is learned from, what is measured on, and the target as it is without its weights."""
    root = tmp_path_factory.mktemp("window")
    for name, texts in {"whole": ("short", "long", "heldout"), "measured": ("heldout",)}.items():
        make_cache(config_of(pipeline, root / name, *texts))
    shutil.copytree(pipeline / "target", root / "target")
    (root / "target" / "model.safetensors").unlink()
    return root


def config_of(pipeline, output: Path, *texts: str, **options: object) -> CacheConfig:
    fields = {"features": True, "layer_ids": [1, 2], "feature_dtype": "float32", "batch_size": 4, "dtype": "float32"}
    return CacheConfig(
        str(pipeline / "target"), [str(pipeline / name) for name in texts], str(output), **fields | options
    )


@contextmanager
def written(pipeline, output: Path, window: float = WINDOW, texts: tuple[str, ...] = ("short", "long")):
    """Write while the block lasts, and see how much is there; the block's run says when it has read all."""
    failed, most, ended = [], [0], threading.Event()

    def write() -> None:
        try:
            make_cache(config_of(pipeline, output, *texts, window=window))
        except InputError as error:
            failed.append(error)

    def watch() -> None:
        while not ended.wait(0.002):
            found = 0
            for file in [*output.glob("*.parquet"), *output.glob(".*.parquet.partial")]:
                try:
                    found += file.stat().st_size
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], found)

    threads = [threading.Thread(target=each, daemon=True) for each in (write, watch)]
    for thread in threads:
        thread.start()
    while not (output / "target.safetensors").exists():
        assert not failed, failed
        time.sleep(0.01)
    try:
        yield
        threads[0].join(60)
    finally:
        WindowReader(output, None, 0, run="0" * 12, speaks=threads[0].is_alive()).end()
        threads[0].join(60)
        ended.set()
        threads[1].join()
    assert not failed and not threads[0].is_alive(), failed
    assert 0 < most[0] <= window * 1e9
    assert {file.name for file in output.iterdir()} == {"manifest.json", "target.safetensors"}


def options_of(pipeline, shared: Path, *caches: Path, **options: object) -> dict[str, object]:
    options = {"heldout": [str(pipeline / "heldout")], "target": str(shared / "target")} | options
    options["training"] = TRAINING | options.get("training", {})
    return options | {"teacher_cache": [str(cache) for cache in caches]}


def trained(pipeline, shared, output: Path, *caches: Path, kind: str = "eagle", **options: object):
    options = options_of(pipeline, shared, *caches, **options)
    if kind == "draft":
        return distill.distill(configured(pipeline, output, **options))
    if kind == "medusa":
        return medusa.train_heads(heads_configured(pipeline, output, **options))
    if kind == "eagle":
        return eagle.train_heads(eagle_configured(pipeline, output, layer_ids=[1, 2], **options))
    return block.train_block(block_configured(pipeline, output, layer_ids=[0, 1], **options))


def wait_for(arrived) -> None:
    end = time.monotonic() + 60
    while not arrived():
        assert time.monotonic() < end
        time.sleep(0.01)


def learned(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in trainer.model.named_parameters()}


CASES = {
    "EAGLE-3, a first look": ("eagle", {}),
    "Medusa heads, a first look": ("medusa", {}),
    "a draft": ("draft", {}),
    "blocks, packed rows, cut texts": ("block", {"packing": True, "max_length": 40}),
    "workers that read ahead": (
        "block",
        {"training": {"dataloader_num_workers": 1, "gradient_accumulation_steps": 2}, "init": "last_layers"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_a_whole_cache_gives(pipeline, shared, tmp_path, case):
    """Step for step, over more than one epoch; and at no time is more there than the window holds."""
    kind, options = CASES[case]
    whole = trained(pipeline, shared, tmp_path / "whole", shared / "whole", kind=kind, **options)
    assert whole.state.epoch > 1
    with written(pipeline, tmp_path / "window"):
        found = trained(
            pipeline, shared, tmp_path / "found", tmp_path / "window", shared / "measured", kind=kind, **options
        )
    assert history(found, "loss") == pytest.approx(history(whole, "loss"), rel=1e-4)
    metric = "eval_mean_acceptance_length"
    assert history(found, metric) == pytest.approx(history(whole, metric), rel=1e-4)
    # Blocks begin with a fit to features, which were computed in other batches.
    assert furthest(learned(found), learned(whole)) < 4 * LAST_BITS


EVALUATED = {"at steps": {}, "at the end": {"eval_strategy": "no", "load_best_model_at_end": False}}


@pytest.mark.parametrize("when", EVALUATED)
def test_held_out_texts_stay_in_the_window(pipeline, shared, tmp_path, when):
    """In the same window as the training texts, whether or not evaluations come before the last step."""
    options = {"training": EVALUATED[when]}
    whole = trained(pipeline, shared, tmp_path / "whole", shared / "whole", **options)
    with written(pipeline, tmp_path / "window", texts=("short", "long", "heldout")):
        found = trained(pipeline, shared, tmp_path / "found", tmp_path / "window", **options)
    metric = "eval_mean_acceptance_length"
    assert history(found, metric) == pytest.approx(history(whole, metric), rel=1e-4) and history(whole, metric)
    assert furthest(learned(found), learned(whole)) < LAST_BITS


def test_a_run_that_goes_back_finds_room(pipeline, shared, tmp_path):
    """Portions of later steps fill the window, and the one that is read now is missing."""
    texts = Texts({"short": map_completions(str(pipeline / "short"), tmp_path)})
    hashes, layout = texts.column("text")[:8], Layout((1, 2), 32, "float32")
    most = int(texts.lengths[:8].max()) * layout.position_bytes + FeatureShards.sample_bytes
    ends = np.arange(1, 9)
    order = Order(hashes, ends, ends, np.full(8, most))
    reader = WindowReader(tmp_path, layout, 4 * most, orders={0: order}, run="f" * 12, speaks=True, _epochs=1, _steps=8)
    reader.at(4)
    shards = FeatureShards(config_of(pipeline, tmp_path, "short", window=1.0), layout)
    model = load_model(pipeline / "target", device="cpu")
    writer = WindowWriter(tmp_path, shards, texts, 4 * most, Processes())
    going = threading.Event()
    thread = threading.Thread(target=writer.serve, args=(LiveTeacher(model, 1), lambda: not going.is_set()))
    thread.start()
    files = [tmp_path / f"{'f' * 12}-0-{portion}.parquet" for portion in range(8)]
    wait_for(lambda: files[6].exists())
    reader.at(0)
    wait_for(files[0].exists)
    going.set()
    thread.join()
    assert writer.largest <= 4 * most


def test_a_text_that_is_read_twice_is_found_where_it_still_is(pipeline, tmp_path, monkeypatch):
    """A worker that reads ahead looks for the portion that is read now, and training leaves it meanwhile."""
    texts = Texts({"short": map_completions(str(pipeline / "short"), tmp_path)})
    hashes, layout = texts.column("text")[[0, 1, 0]], Layout((1, 2), 32, "float32")
    order = Order(hashes, np.arange(1, 4), np.arange(1, 4), np.full(3, 1000))
    reader = WindowReader(tmp_path, layout, 10**6, orders={0: order}, run="f" * 12, speaks=True, _epochs=1, _steps=3)
    reader.at(0)
    shards = FeatureShards(config_of(pipeline, tmp_path, "short", window=1.0), layout)
    writer = WindowWriter(tmp_path, shards, texts, 10**6, Processes())
    *_, later = order.portions("f" * 12, 0)
    writer._write(tmp_path / later.name, later, LiveTeacher(load_model(pipeline / "target", device="cpu"), 1))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waits for what will not be written"))
    assert reader.find(int(hashes[0])) == (tmp_path / later.name, 0)


def test_fewer_states_than_tokens_are_refused(pipeline, shared, tmp_path):
    config = eagle_configured(pipeline, tmp_path, target=str(shared / "target"), teacher_cache=[str(shared / "whole")])
    index = find_features(config.teacher_cache, config, 300)
    row = {"texts": index.texts[:1].tolist(), "labels": [0] * 500}
    with pytest.raises(InputError, match="found a damaged file"):
        index.columns([row], (1, 500))


def test_both_sides_can_be_stopped(pipeline, shared, tmp_path):
    """A run that went on behind step 3 has the last weights of one that did not stop."""
    saving = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
    caches = tmp_path / "window", shared / "measured"
    with written(pipeline, tmp_path / "window"):
        whole = trained(pipeline, shared, tmp_path / "run", *caches, training=saving)
    for name in ("model.safetensors", "checkpoint-6", "draftsmith.json"):  # as if it had ended behind step 3
        (tmp_path / "run" / name).rename(tmp_path / name)
    with written(pipeline, tmp_path / "window", window=2 * WINDOW):
        rest = trained(pipeline, shared, tmp_path / "run", *caches, training=saving)
    assert history(rest, "loss") == pytest.approx(history(whole, "loss"), rel=1e-5)
    assert furthest(load_file(tmp_path / "model.safetensors"), learned(rest)) < LAST_BITS


@pytest.mark.slow
def test_two_processes_read_one_window(pipeline, shared, tmp_path):
    training = TRAINING | {"max_steps": 5}
    run = options_of(pipeline, shared, shared / "whole", layer_ids=[1, 2], training=training)
    (one,) = forked(eagled, pipeline, tmp_path / "one", {"run": run}, strategy="one")
    run = options_of(pipeline, shared, tmp_path / "window", shared / "measured", layer_ids=[1, 2], training=training)
    with written(pipeline, tmp_path / "window"):
        ranks = forked(eagled, pipeline, tmp_path / "two", {"run": run}, strategy="ddp")
    for rank in ranks:
        losses = [[entry["loss"] for entry in each["run"]["log"] if "loss" in entry] for each in (rank, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0]
    saved, expected = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("two", "one"))
    assert furthest(saved, expected) < LAST_BITS


def test_what_cannot_be_is_refused_in_one_line(pipeline, shared, tmp_path):
    make_cache(config_of(pipeline, tmp_path / "held", "short", "long", "heldout"))

    def refused(message: str, *caches: Path, **options: object) -> None:
        with pytest.raises(InputError, match=message):
            trained(pipeline, shared, tmp_path / "out", *caches, **options)

    window = tmp_path / "window"
    threading.Thread(
        target=lambda: make_cache(config_of(pipeline, window, "short", "long", "heldout", window=WINDOW)), daemon=True
    ).start()
    while not (window / "target.safetensors").exists():
        time.sleep(0.01)
    WindowReader(window, None, 0, run="0" * 12, speaks=True).end()
    while (window / READER).exists():
        time.sleep(0.01)

    with pytest.raises(InputError, match="window: expected True, found False"):
        make_cache(config_of(pipeline, window, "short", "long", "heldout"))
    with pytest.raises(InputError, match="window: expected False, found True"):
        make_cache(config_of(pipeline, tmp_path / "held", "short", "long", "heldout", window=WINDOW))

    tiny = tmp_path / "tiny"
    with pytest.raises(InputError, match="window: expected none without features"):
        CacheConfig(str(pipeline / "target"), [str(pipeline / "short")], str(tiny), window=1.0)
    with pytest.raises(InputError, match="free space"):
        make_cache(config_of(pipeline, tiny, "short", "long", window=1e9))
    threading.Thread(
        target=lambda: make_cache(config_of(pipeline, tiny, "short", "long", window=1e-5)), daemon=True
    ).start()
    while not (tiny / "target.safetensors").exists():
        time.sleep(0.01)
    refused("expected a window with room for two steps", tiny, shared / "measured")
    WindowReader(tiny, None, 0, run="0" * 12, speaks=True).end()
