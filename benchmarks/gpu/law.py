"""Whether the road is right on this device: completions, trainings in bfloat16, and the law of every kind's texts.

All on the embedded target, whose drafters train in seconds.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common import ASSETS
from draftsmith.decode.measurement.certificate import certify_greedy, certify_sampled
from draftsmith.decode.measurement.distribution_test import plain_texts, speculative_texts
from draftsmith.scripts.kinds import drafter_specs, recipes
from draftsmith.scripts.pair import load_pair
from draftsmith.train.cli import flags_of
from draftsmith.train.data.corpus import encoded_prompts, stdlib_prompts, write_prompts
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.files import remove
from draftsmith.train.models import load_tokenizer

if TYPE_CHECKING:
    from benchmarks.gpu.cases import Place

TARGET = str(ASSETS / "tiny-target")
CONFIGS = ASSETS.parent / "configs"
FURTHER = "hydra"
"""A field without which a config trains another drafter, whose texts are tested too."""
PACKED = {"packing": True, "max_length": 256}
TRAINED: dict[str, tuple[str, Path, dict[str, Any]]] = {
    f"{command} {file.stem}": (command, file, {} if command == "distill" else PACKED)
    for command in recipes()
    for file in sorted((CONFIGS / command).glob("tiny*.yaml"))
}
"""Trained drafters: the command that trains each, its config for the embedded target, and other fields."""
TRAINED |= {
    f"{name} without {FURTHER}": (command, file, fields | {FURTHER: False})
    for name, (command, file, fields) in TRAINED.items()
    if f"\n{FURTHER}: true" in file.read_text(encoding="utf-8")
}
UNTRAINED = {
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix",
    "lookahead": "lookahead",
    "hybrid": "hybrid:suffix+{folder}/distill-tiny@match=4",
}
DRAFTERS = (*TRAINED, *UNTRAINED)
DRAFT_LENGTH, MAX_NEW_TOKENS = 4, 48
PROMPTS, TOGETHER = 16, 64


def complete(place: "Place") -> tuple[bool, dict[str, Any]]:
    """Let the target complete prompts, for the trainings."""
    count, length = (192, 64) if place.full else (4, 16)
    counts = {}
    for side, heldout, temperature in (("sampled", False, 1.0), ("greedy", False, 0.0), ("heldout", True, 1.0)):
        prompts = place.folder / f"{side}.jsonl"
        write_prompts(prompts, stdlib_prompts(count, heldout=heldout))
        output = place.folder / "completions" / side
        remove(output)  # of an earlier run, which would count as done
        written = PrepareConfig(TARGET, str(prompts), str(output), temperature=temperature, max_new_tokens=length)
        counts[side] = prepare(written).tokens
    return min(counts.values()) > 0, {"tokens": counts}


def directory(name: str, place: "Place") -> Path:
    """Return where a trained drafter lies."""
    return place.folder / name.replace(" ", "-")


def train(name: str, place: "Place") -> tuple[bool, dict[str, Any]]:
    """Train a drafter for a few steps under bfloat16, and see that it learns."""
    command, file, fields = TRAINED[name]
    recipe, data = recipes()[command], place.folder / "completions"
    steps, output = 40 if place.full else 1, directory(name, place)
    remove(output)
    values: dict[str, Any] = {
        "config": file,
        "target": TARGET,
        "completions": [str(data / side) for side in ("sampled", "greedy")],
        "heldout": [str(data / "heldout")],
        "training.output_dir": output,
        "training.max_steps": steps,
        "training.eval_steps": steps,
        "training.save_steps": steps,
        "training.logging_steps": 1,
        "training.bf16": True,
        "training.use_cpu": not place.full,
        "training.report_to": "none",
        **fields,
    }
    if not place.full:
        values["training.per_device_train_batch_size"] = 1
    main_module: Any = import_module(f"{recipe.package}.__main__")
    main_module.main(flags_of(values))
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    facts = {"first_loss": losses[0], "last_loss": losses[-1]}
    return losses[-1] < losses[0] or not place.full, facts


def certify(name: str, dtype: str, place: "Place") -> tuple[bool, dict[str, Any]]:
    """Compare a drafter's texts at T=0 with plain decoding's, and test the law of its sampled ones."""
    text = UNTRAINED.get(name, str(directory(name, place))).format(folder=place.folder)
    tokenizer = load_tokenizer(TARGET)
    pair = load_pair(TARGET, tokenizer, drafter_specs([text], [DRAFT_LENGTH]), dtype)
    (drafter,), target = pair.drafters, pair.target
    count = PROMPTS if place.full else 4
    encoded = encoded_prompts(None, tokenizer, count, MAX_NEW_TOKENS)
    most = None if place.full else 16  # tokens of a prompt
    prompts = [torch.tensor(ids[:most], device=target.device) for ids in encoded]
    lengths: dict[str, Any] = {
        "draft_length": drafter.draft_lengths[0],
        "max_new_tokens": MAX_NEW_TOKENS if place.full else 32,
    }
    plain = plain_texts(target, prompts, batch_size=count, max_new_tokens=lengths["max_new_tokens"])
    drafted = speculative_texts(target, drafter.proposer, prompts, batch_size=count, **lengths)
    new = [
        [text[len(prompt) :].tolist() for text, prompt in zip(texts, prompts, strict=True)]
        for texts in (plain, drafted)
    ]
    greedy = certify_greedy(target, new[0], new[1], prompts)
    exact = greedy.identical if dtype == "float32" else greedy.passed
    facts: dict[str, Any] = {
        "identical": greedy.prompts_identical,
        "near_ties": greedy.near_ties,
        "departures": greedy.departures,
        "reasons": [greedy.reason] if greedy.reason else [],
    }
    if dtype != "float32" and not place.full:  # to save time
        return bool(exact), facts
    tokens = 20_000 if place.full else 2_000
    sampled = certify_sampled(target, drafter.proposer, prompts, tokens, batch_size=TOGETHER, **lengths)
    facts |= {"p_value": sampled.p_value, "tokens": sampled.tokens}
    facts["reasons"] += [sampled.reason] if sampled.reason else []
    return bool(exact and sampled.passed), facts
