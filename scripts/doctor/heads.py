"""What `draftsmith doctor` checks of heads: whether their files are whole, and whether they fit the target."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.decode.draft_models.searched_tree import searched_tree
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, at_most
from draftsmith.decode.tree import Tree
from draftsmith.medusa import MedusaHeads
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import TREE, EagleHeads, rope_of
from draftsmith.medusa.eagle.initial import beginning, new_heads
from draftsmith.medusa.heads.model import MedusaConfig
from draftsmith.train.checkpoint import reading
from draftsmith.train.cli import parse_config
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import (
    Pair,
    Part,
    Side,
    by_dtype,
    checkpoint,
    count,
    counted,
    load_side,
    other_tensors,
)

WIDE, RATES = 1024, (1e-5, 1e-3)
"""From this hidden size on, learning rates of AdamW that are usual; the embedded target's heads learn at 1e-2."""
SEARCH = "search one that they can draft: draftsmith medusa-tree"


def load_pair(
    target: str, draft: str | None, medusa: str | None, eagle: str | None, trust_remote_code: bool = False
) -> tuple[Pair, list[Finding]]:
    """Load what was given without its weights; what does not load is an error among the findings."""
    loaded: dict[str, tuple[Any, Finding]] = {"target": load_side("target", target, trust_remote_code)}
    if draft is not None:
        loaded["draft"] = load_side("draft", draft, trust_remote_code)
    if medusa is not None:
        loaded["heads"] = load_medusa(medusa)
    if eagle is not None:
        loaded["eagle"] = load_eagle(eagle)
    return Pair(**{name: part for name, (part, _) in loaded.items()}), [finding for _, finding in loaded.values()]


def load_medusa(path: str) -> tuple[Part | None, Finding]:
    """Load Medusa heads without their weights, and say what they are; None where they do not load."""
    remedy = "give what draftsmith.medusa wrote; draftsmith export --import-from DIR reads other formats"

    def described(model: MedusaHeads) -> str:
        config = model.config
        return f"{counted(config.num_heads, 'head')}, {counted(config.num_hidden_layers, 'block')} each"

    return _load("medusa", path, _empty_medusa, described, remedy)


def load_eagle(path: str) -> tuple[Part | None, Finding]:
    """Load EAGLE-3 heads without their weights, and say what they are; None where they do not load."""
    remedy = "give what draftsmith.medusa.eagle wrote; draftsmith export --import-from DIR reads other formats"

    def described(model: EagleHeads) -> str:
        return f"EAGLE-3 heads, features after layers {', '.join(map(str, model.layer_ids))}"

    return _load("eagle", path, _empty_eagle, described, remedy)


def _load(
    role: str, path: str, empty: Callable[[str], Any], described: Callable[[Any], str], remedy: str
) -> tuple[Part | None, Finding]:
    try:
        model = empty(path)
    except InputError as error:
        text = str(error).removeprefix(f"{role}: ")
        if text.startswith("tree: "):
            remedy = f"{SEARCH} --heads DIR"
        return None, Finding("error", role, text, remedy)
    text = f"{described(model)}, {count(model.num_parameters())} parameters"
    tensors, finding = checkpoint(role, path, text)
    if finding.state != "error" and tensors:
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = {name: shape for name, (_, shape) in tensors.items()}
        differing = sorted(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name))
        if differing:  # loaders skip names they do not know, and fill what is missing with random numbers
            finding = other_tensors(role, text, expected, stored, differing, remedy)
    return Part(role, path, model, by_dtype(tensors)), finding


def _empty_medusa(path: str) -> MedusaHeads:
    directory = Path(path)
    if not (directory / "config.json").is_file() and (directory.exists() or path.count("/") != 1):  # no hub id
        raise InputError(f"medusa: expected a directory of Medusa heads with config.json, found none in {path}")
    with reading("medusa", f"Medusa heads in {path}"):
        config = MedusaConfig.from_pretrained(path)
    with torch.device("meta"):
        return MedusaHeads(config)


def _empty_eagle(path: str) -> EagleHeads:
    """Return the heads with no data but for the tokens that they know."""
    model = EagleHeads.without_weights(path)
    if model.d2t is None:
        return model
    known: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as weights:
                known |= {name: weights.get_tensor(name) for name in {"d2t", "t2d"} & set(weights.keys())}
        except (SafetensorError, OSError):
            return model  # its checkpoint's finding says so
    if all(name in known and known[name].shape == getattr(model, name).shape for name in ("d2t", "t2d")):
        model.d2t, model.t2d = known["d2t"], known["t2d"]
        model.check_tokens()
    return model


def check_medusa(target: Side, heads: Part) -> Finding:
    """Check whether Medusa heads fit the target, and their tree them."""
    name, config, model = "heads", heads.model.config, heads.model
    remedy = "take heads of this target, or train them: accelerate launch -m draftsmith.medusa --target TARGET"
    tree = model.tree
    if (wrong := _fits(name, target, heads, tree, config.truncated_vocab_size, remedy)) is not None:
        return wrong
    shape = f"a chain of {len(tree)}" if config.medusa_choices is None else _shape(tree)
    text = f"made for this target's hidden size {config.hidden_size} and {config.vocab_size} logits; draft {shape}"
    text += _base(target, heads)
    if tree.depth < config.num_heads:
        return Finding(
            "warning",
            name,
            f"{text}; {config.num_heads - tree.depth} of {config.num_heads} heads lie deeper and are not used",
            "search a deeper tree (draftsmith medusa-tree --heads DIR), or train fewer heads",
        )
    return Finding("ok", name, text)


def check_eagle(target: Side, heads: Part) -> Finding:
    """Check whether EAGLE-3 heads fit the target, their tree them, and how long a text they read."""
    name, config = "eagle heads", heads.model.config
    remedy = "take heads of this target, or train them: draftsmith eagle --target TARGET"
    try:
        tree = searched_tree(config, TREE)
    except InputError as error:
        return Finding("error", name, str(error), f"{SEARCH} --eagle DIR")
    if (wrong := _fits(name, target, heads, tree, config.draft_vocab_size, remedy)) is not None:
        return wrong
    text = f"made for this target's hidden size {config.target_hidden_size} and {config.vocab_size} logits; draft "
    text += "chains" if tree is None else _shape(tree)
    if config.draft_vocab_size < config.vocab_size:
        text += f" of {config.draft_vocab_size} tokens"
    text += _base(target, heads)
    most = config.max_position_embeddings
    if target.positions is not None and most < target.positions:
        text += f"; they read {most} positions, the target {target.positions}"
        return Finding("warning", name, text, f"keep prompt and text within {most} tokens")
    return Finding("ok", name, text)


def _fits(name: str, target: Side, heads: Part, tree: Tree | None, tokens: int, remedy: str) -> Finding | None:
    """Return what is wrong with heads for this target, or with their tree; None if nothing is."""
    try:
        heads.model.check_fits(target.model)
    except InputError as error:
        return Finding("error", name, str(error).removeprefix(f"{heads.role}: "), remedy)
    widest = 0 if tree is None else max(map(len, tree.children))
    if widest <= tokens:
        return None
    text = f"tree: expected at most {tokens} siblings, as many as the heads have tokens, found {widest}"
    return Finding("error", name, text, f"{SEARCH} --{'heads' if heads.role == 'medusa' else heads.role} DIR")


def _shape(tree: Tree) -> str:
    return f"a tree of {len(tree)}, {tree.depth} deep"


def _base(target: Side, heads: Part) -> str:
    """Say on which target heads were trained, where that is another by its path."""
    base = heads.model.config.base_model_name_or_path
    return f"; trained on {base}, which should be the same model" if base and Path(base) != Path(target.path) else ""


def check_run(target: Side, file: str) -> Iterator[Finding]:
    """Check the config of a training run of EAGLE-3 heads against the target that they are to draft for.

    Args:
        target: without weights.
        file: what `draftsmith eagle --config` reads.
    """
    name = "eagle run"
    try:
        # The machine that checks need not be the one that trains: bf16 without this asks for a GPU here.
        config = parse_config(EagleTrainingConfig, ["--config", file, "--training.use_cpu", "true"])
        if config.heads is not None:
            heads = EagleHeads.without_weights(config.heads)
            heads.check_fits(target.model)
            begun, theta = "", heads.config.rope_parameters["rope_theta"]
            expected = rope_of(target.model.config.get_text_config())["rope_theta"]
            if theta != expected:
                text = f"heads to go on from turn by a rope_theta of {theta:g}, the target's last layer by {expected:g}"
                yield Finding("warning", "rope theta", text, "begin new ones: leave out heads")
        else:
            tokens = config.draft_vocabulary
            at_most(token_count(target.tokenizer, target.config)).check("draft_vocabulary", tokens or 0)
            kept = None if tokens is None else torch.arange(tokens)
            with torch.device("meta"):
                heads = new_heads(config, target.model, kept)
            begun = f", {beginning(config, heads, target.model)[1]}"
    except InputError as error:
        yield Finding("error", name, str(error).removeprefix("eagle: "), f"mend {file}")
        return
    text = f"heads of {count(heads.num_parameters())} parameters, features after layers "
    text += f"{', '.join(map(str, heads.layer_ids))}, {config.num_steps} steps{begun}"
    if Path(config.target) == Path(target.path):
        yield Finding("ok", name, text)
    else:
        yield Finding("warning", name, f"{text}; its target is {config.target}", "give the one that the heads are for")
    if config.training.learning_rate is not None:
        yield learning_rate(config.training.learning_rate, heads.config.hidden_size)


def learning_rate(rate: float, width: int) -> Finding:
    """Compare the rate with those that work for heads of this width."""
    name, text = "learning rate", f"{rate:g} for heads {width} wide"
    if width < WIDE:
        return Finding("ok", name, f"{text}: narrow ones take up to 1e-2")
    least, most = RATES
    if least <= rate <= most:
        return Finding("ok", name, text)
    return Finding("warning", name, text, f"heads this wide are trained at {least:g} to {most:g}, most at 5e-5 to 1e-4")
