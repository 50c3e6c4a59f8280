"""Drafters next to those of the speculators library: logits, loss, gradients, and files both ways."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.theirs import DEPTHS, LOSS_MASK, MASK_TOKEN, PROMPT, TWINS, Twin, vocabulary_of
from pipelines import TrainingArguments, write_completions
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.decode.cache.features import collect_features
from draftsmith.medusa.block.__main__ import train_block
from draftsmith.medusa.block.blocks import Anchors, block_states, tokens_before
from draftsmith.medusa.block.config import BlockTrainingConfig
from draftsmith.medusa.block.heads import foreign_names
from draftsmith.medusa.block.model import BlockDrafter
from draftsmith.medusa.eagle.__main__ import train_heads
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.formats.importing import our_name
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.scripts import cli
from draftsmith.train import launch
from draftsmith.train.data.examples import training_examples
from draftsmith.train.losses.positions import IGNORED
from draftsmith.train.models import load_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-oracle" / "bin" / "python"
TARGET = ROOT / "assets" / "tiny-target"
EXACT = 1e-5
"""What numbers may differ by, over the largest of their tensor: float32 sums in another order."""
LABELS = (
    "auto_map",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "rope_theta",
    "speculators_version",
    "transformers_version",
)
"""Fields of configs that change no number: names, versions, and the rotation's base for version 4 of transformers."""
pytestmark = pytest.mark.oracle


def run(*arguments: object) -> None:
    """Run the library in its own environment."""
    assert PYTHON.exists(), "no speculators library: run `make oracle`"
    command = [str(PYTHON), str(ROOT / "tests" / "oracle" / "theirs.py"), *map(str, arguments)]
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, env={**os.environ, **quiet})
    assert done.returncode == 0, done.stderr[-4000:]


def export(*arguments: object) -> None:
    assert cli.main(["export", "--target", str(TARGET), *map(str, arguments)]) == 0


@pytest.fixture(scope="session")
def target() -> Any:
    return load_model(str(TARGET), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's drafters, and what it computes with them."""
    folder = tmp_path_factory.mktemp("theirs")
    run("make", TARGET, folder)
    return folder


@pytest.fixture(scope="session")
def imported(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's drafters in our format."""
    folder = tmp_path_factory.mktemp("imported")
    for name in TWINS:
        export("--import_from", theirs / name, "--output", folder / name)
    return folder


@pytest.fixture(scope="session")
def exported(target: Any, theirs: Path, imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters that we made (`made`), exported (`out`), with the imported ones (`back`), and what the library reads."""
    folder = tmp_path_factory.mktemp("exported")
    for name, twin in TWINS.items():
        torch.manual_seed(1)
        ours = of_target(target, twin, load_file(theirs / f"{name}.safetensors")["ids"])
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        ours.config.base_model_name_or_path = str(TARGET)
        ours.save_pretrained(folder / "made" / name)
        for source, output in ((folder / "made", "out"), (imported, "back")):
            export("--drafter", source / name, "--format", "speculators", "--output", folder / output / name)
    run("read", TARGET, folder / "out", folder / "back")
    return folder


def of_target(target: Any, twin: Twin, ids: Tensor) -> Any:
    """Return a drafter of ours with the twin's shape."""
    tokens = vocabulary_of(twin, ids, target.config.vocab_size)
    fields = twin.shape | {"token_map": tokens["t2d"].nonzero()[:, 0] if tokens else None}
    fields |= {"sliding_window": twin.window} if twin.window else {}
    if not twin.is_block:
        return EagleHeads.of_target(target, layer_ids=DEPTHS, **fields)
    depths = [depth - 1 for depth in DEPTHS]
    return BlockDrafter.of_target(target, MASK_TOKEN, layers=twin.layers, layer_ids=depths, **fields)


def loaded(twin: Twin, folder: Path) -> Any:
    return (BlockDrafter if twin.is_block else EagleHeads).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(twin: Twin, drafter: Any, target: Any, found: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield our logits and the library's, of the same guesses."""
    ids = found["ids"]
    with collect_features(target, drafter.layer_ids) as features:
        target(ids)
    embed, positions = target.get_input_embeddings(), torch.arange(ids.shape[1])[None]
    if not twin.is_block:
        inputs = embed(ids[:, 1:]), features[0][:, :-1], positions[:, :-1]
        for k, step in enumerate(drafter.unroll(*inputs, twin.training["num_steps"])):
            # Step k of the last k rounds has no token to see. The library's window begins at step 0's for all steps.
            rounds = twin.window - k if twin.narrow and k else step.shape[1]
            yield drafter.head(step)[0, :rounds], found[f"{twin.logits}.{k}"][:rounds]
        return
    anchors, config = found["anchors"][None], drafter.config
    context = drafter.context(drafter.fuse(features[0]), positions)
    hidden = block_states(drafter, embed, context, Anchors.at(anchors, ids, positions))
    states = drafter.head_states(hidden, tokens_before(drafter, ids, None, anchors), embed)
    head = drafter.head_for(target)
    ours, plain = drafter.whole_head(head)(states)[0], head(drafter.guessing(hidden))[0]
    # The library's window is of positions before the anchor, for all slots.
    blocks = anchors[0] <= (twin.window - config.block_size if twin.narrow else len(ids[0]))

    def theirs(name: str) -> Tensor:
        return found[name].unflatten(0, (-1, config.block_size))[blocks, config.silent :]

    if "candidate_logits.0" in found:  # of a few tokens, which it chooses among
        yield ours[blocks].gather(-1, theirs("training_candidate_ids.0")), theirs("candidate_logits.0")
        ours = plain
    yield ours[blocks], theirs(f"{twin.logits}.0")


def relative_error(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors over the largest expected number."""
    return float((values - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def same_logits(twin: Twin, folder: Path, target: Any, output: Path) -> None:
    pairs = list(logits_of(twin, loaded(twin, folder), target, load_file(output)))
    assert all(ours.shape == logits.shape for ours, logits in pairs)
    assert max(relative_error(ours, logits) for ours, logits in pairs) < EXACT


@pytest.mark.parametrize("name", TWINS)
def test_logits_of_their_drafters(target, theirs, imported, name):
    same_logits(TWINS[name], imported / name, target, theirs / f"{name}.safetensors")


@pytest.mark.parametrize("name", TWINS)
def test_logits_of_ours_in_their_library(target, exported, name):
    same_logits(TWINS[name], exported / "made" / name, target, exported / "out" / f"{name}.safetensors")


def positions_of(twin: Twin, found: dict[str, Tensor], count: int) -> list[Tensor]:
    """Return the `positions` of a batch in which each guess is learned where the library learns it, and nowhere else.

    Block drafters learn all guesses after the drawn anchors. EAGLE-3 learns every step's guess of the token after each
    position of the mask, also in rounds that begin in the prompt.
    """
    if twin.is_block:
        return [found["anchors"] - 1] * count
    at = LOSS_MASK[0].nonzero()[:, 0]
    return [at - 1 - k for k in range(count)]


@pytest.mark.parametrize("name", [name for name, twin in TWINS.items() if not twin.narrow])
def test_loss_and_gradients(theirs, imported, tmp_path, monkeypatch, name):
    monkeypatch.setattr(launch, "run_training", lambda *_: None)
    found, twin = load_file(theirs / f"{name}.safetensors"), TWINS[name]
    text = found["ids"][0].tolist()
    sample = {"id": "a", "input_ids": text, "labels": [IGNORED] * PROMPT + text[PROMPT:]}
    data = write_completions(tmp_path / "data", [sample])
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    options = {"heads": str(imported / name), "target": str(TARGET), "target_dtype": "float32"} | twin.training
    options |= {"training": arguments, "completions": [data], "any_target": True}
    trainer: Any = (
        train_block(BlockTrainingConfig(anchors=len(text), **options))
        if twin.is_block
        else train_heads(EagleTrainingConfig(**options))
    )
    samples = [trainer.data_collator(list(training_examples([data])))]
    ((batch,), _) = trainer.get_batch_samples(iter(samples), 1, torch.device("cpu"))
    batch["positions"] = [batch["positions"][0], *positions_of(twin, found, trainer.count)]
    loss = trainer.compute_loss(trainer.heads, batch, num_items_in_batch=found["count"][0])
    loss.backward()
    frozen = () if twin.is_block else ("lm_head.weight",)  # the library's EAGLE-3 keeps the target's
    name_of = {ours: name for name, ours in foreign_names().items()}
    named: Callable[[str], str] = (lambda key: name_of.get(key, key)) if twin.is_block else our_name
    gradients = {key: value.grad for key, value in trainer.heads.named_parameters() if key not in frozen}
    expected = {named(key.removeprefix("grad.")): value for key, value in found.items() if key.startswith("grad.")}
    assert gradients.keys() == expected.keys()
    errors = {key: relative_error(gradients[key], value) for key, value in expected.items()}
    errors["loss"] = relative_error(loss.detach(), found["loss"])
    assert {key: error for key, error in errors.items() if not error < EXACT} == {}


@pytest.mark.parametrize("name", TWINS)
def test_their_files_come_back_to_the_bit(theirs, imported, exported, name):
    stored, written = (load_file(folder / name / "model.safetensors") for folder in (theirs, exported / "back"))
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], tensor) for key, tensor in written.items())
    # Their library means the same by both configs, and ours is that of a drafter that we make.
    before, after = (fields(folder / f"{name}.json") for folder in (theirs, exported / "back"))
    before["speculators_config"]["verifier"]["architectures"] = []
    if not TWINS[name].is_block:  # our heads do not say how many tokens a server drafts: 4, while nothing is said
        before["speculators_config"]["proposal_methods"] = after["speculators_config"]["proposal_methods"]
    if TWINS[name].window is None:  # a size and a direction without a layer that has them
        before["transformer_layer_config"]["sliding_window"] = None
        before |= {"sliding_window_non_causal": True} if TWINS[name].is_block else {}
    assert before == after
    assert fields(imported / name / "config.json") == fields(exported / "made" / name / "config.json")


def fields(path: Path) -> dict[str, Any]:
    """Return a config without the fields of `LABELS`, at all depths."""

    def kept(value: Any) -> Any:
        return {k: kept(v) for k, v in value.items() if k not in LABELS} if isinstance(value, dict) else value

    return kept(json.loads(path.read_text("utf-8")))
