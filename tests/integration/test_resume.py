"""Which checkpoint a job goes on from: on other processes, on disks of each machine's own, and what is refused."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import tiny_llama
from huggingface_hub import HfApi
from pipelines import configured, furthest, weights
from process_jobs import distilled
from processes import forked

from draftsmith.decode.errors import InputError
from draftsmith.distill import __main__ as command
from draftsmith.distill.config import DraftInit
from draftsmith.train.job.resume import RECORD, JobRecord
from draftsmith.train.options import LoraOptions
from draftsmith.train.runs import save_model

STEPS = 8  # of 4 samples out of 20: the second epoch begins at step 6
CHECKPOINT = 6

JOB = JobRecord(
    samples=20,
    data="abc",
    seed=42,
    sampling="random",
    processes=8,
    batch=4,
    accumulation=2,
    strategy="DDP",
    settings={},
)


def training(steps: int, **options) -> dict:
    return {"training": {"max_steps": steps, "save_strategy": "steps", "save_steps": CHECKPOINT} | options}


def losses(found: dict) -> list[float]:
    return [entry["loss"] for entry in found["log"] if "loss" in entry]


@pytest.fixture(scope="module")
def whole(pipeline, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    (found,) = forked(distilled, pipeline, output, {"run": training(STEPS)}, strategy="one")
    return found["run"], weights(output / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then", "parts"), [("one", "ddp", 2), ("fsdp2", "fsdp2", 2)])
def test_another_split_of_the_same_steps_goes_on_with_the_samples_that_are_left(
    pipeline, whole, tmp_path, first, then, parts
):
    forked(distilled, pipeline, tmp_path, {"run": training(CHECKPOINT)}, strategy=first)
    split = {"per_device_train_batch_size": (4 if then == "one" else 2) // parts, "gradient_accumulation_steps": parts}
    ranks = forked(distilled, pipeline, tmp_path, {"run": training(STEPS, **split)}, strategy=then)
    seen = sorted(text for rank in ranks for part in rank["run"]["texts"] for text in part)
    assert seen == sorted(text for step in whole[0]["texts"][CHECKPOINT:] for text in step)
    assert losses(ranks[0]["run"]) == pytest.approx(losses(whole[0]), rel=1e-5)
    assert furthest(weights(tmp_path / "run"), whole[1]) < 1e-5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 19}, "completions: expected 20 samples as in checkpoint-6, found 19 samples"),
        ({"data": "def"}, "completions: expected data abc as in checkpoint-6, found data def"),
        ({"seed": 43}, "training.seed: expected 42 as in checkpoint-6, found 43"),
        ({"strategy": "FSDP"}, "strategy: expected DDP as in checkpoint-6, found FSDP"),
        ({"processes": 4}, "training.gradient_accumulation_steps: expected 4, found 2: steps of checkpoint-6 have 64"),
        ({"batch": 3}, "training.per_device_train_batch_size: expected a divisor of 8, found 3"),
        ({"processes": 5}, "processes: expected a divisor of 64, found 5"),
    ],
)
def test_what_would_see_samples_twice_is_refused_with_what_to_give(tmp_path, changed, message):
    checkpoint = tmp_path / "checkpoint-6"
    checkpoint.mkdir()
    JOB.write(checkpoint)
    replace(JOB, processes=4, accumulation=4).require_resumable(checkpoint)
    replace(JOB, processes=64, batch=1, accumulation=1).require_resumable(checkpoint)
    with pytest.raises(InputError, match=f"^{re.escape(message)}.*; give that, or another training.output_dir"):
        replace(JOB, **changed).require_resumable(checkpoint)


def test_shards_of_zero_want_the_processes_that_wrote_them(tmp_path):
    zero = replace(JOB, strategy="ZeRO-2")
    zero.write(tmp_path)
    zero.require_resumable(tmp_path)
    with pytest.raises(InputError, match=r"^processes: expected 8, over which ZeRO-2 has divided .*, found 4"):
        replace(zero, processes=4, accumulation=4).require_resumable(tmp_path)


def test_a_checkpoint_without_a_record_is_the_users_to_judge(tmp_path):
    JOB.require_resumable(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps({"unknown": 1}))
    JOB.require_resumable(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ((), "training.output_dir: expected a directory that all machines share, found none of rank 0's files"),
        (("1/checkpoint-1",), "training.output_dir: expected the same checkpoints on all machines"),
    ],
)
def test_disks_of_each_machines_own_are_refused(pipeline, tmp_path, kept, message):
    """Where checkpoints are in pieces, or some processes would go on from one and others begin anew."""
    for name in kept:
        (tmp_path / "run" / name).mkdir(parents=True)
    options = training(2, save_strategy="no" if kept else "steps") | {"apart": True}
    with pytest.raises(AssertionError, match=f"InputError: {message}"):
        forked(distilled, pipeline, tmp_path, {"run": options}, strategy="ddp")


def test_weights_on_each_machine_are_refused(pipeline, tmp_path):
    with pytest.raises(InputError, match=r"^training.save_on_each_node: expected false"):
        configured(pipeline, tmp_path, training={"save_on_each_node": True})


def test_the_hub_gets_what_is_on_the_disk_at_the_end_and_once(pipeline, tokenizer, tmp_path, monkeypatch, capsys):
    """Adapters merged, and the rows that are no tokens silenced; of checkpoints nothing."""
    save_model(tiny_llama(0, len(tokenizer) + 13), tokenizer, tmp_path / "padded")
    uploads: list[dict] = []

    def upload_folder(self, *, folder_path, ignore_patterns, **options):
        files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        names = {str(path.relative_to(folder_path)) for path in files}
        ignored = {name for name in names if any(fnmatch(name, pattern) for pattern in ignore_patterns)}
        uploads.append({"names": names - ignored, "state": weights(folder_path)} | options)

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=f"me/{name}"))
    pushed = {"push_to_hub": True, "hub_model_id": "draft", "save_strategy": "steps", "save_steps": 1}
    config = configured(
        pipeline,
        tmp_path / "out",
        target=str(tmp_path / "padded"),
        draft=None,
        init=DraftInit(layers=1, lora=LoraOptions(r=2)),
        training={"max_steps": 2} | pushed,
    )
    assert capsys.readouterr().err == "hub: what is finished is pushed once, at the end, and checkpoints are not\n"
    command.distill(config)
    (upload,) = uploads
    assert upload["repo_id"] == "me/draft" and {"config.json", "model.safetensors"} <= upload["names"]
    assert not [name for name in upload["names"] if "checkpoint" in name or name.startswith(".")]
    assert furthest(upload["state"], weights(tmp_path / "out")) == 0
    assert not [name for name in upload["state"] if "lora" in name]
    rows = upload["state"]["lm_head.weight"][len(tokenizer) :]
    assert len(rows) == 13 and (rows == rows[0]).all()  # the target's own differ
