"""Checks of `draftsmith doctor` for EAGLE-3 heads: their files, their target, a run that trains them."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.decode.draft_models.searched_tree import searched_tree
from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.decode.errors import InputError, at_most
from draftsmith.medusa.checks import shape, trained_on, unfit
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import TREE, EagleHeads
from draftsmith.medusa.eagle.initial import beginning, new_heads
from draftsmith.medusa.seen import rope_of
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.findings import Finding
from draftsmith.train.kinds.parts import SEARCH, Part, Side, load_part
from draftsmith.train.kinds.quantities import count

WIDE, RATES = 1024, (1e-5, 1e-3)
"""From this hidden size on, learning rates of AdamW that are usual; the embedded target's heads learn at 1e-2."""


def inspect(spec: DrafterSpec) -> tuple[Part | None, Finding]:
    """Load heads without their weights, and say what they are; None where they do not load."""
    remedy = "give what draftsmith.medusa.eagle wrote; draftsmith export --import-from DIR reads other formats"

    def described(model: EagleHeads) -> str:
        return f"EAGLE-3 heads, features after layers {', '.join(map(str, model.layer_ids))}"

    return load_part(spec, _empty, described, remedy, lambda model: model.cached_numbers)


def _empty(path: str) -> EagleHeads:
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


def compare(target: Side, heads: Part) -> Finding:
    """Check whether EAGLE-3 heads fit the target, their tree them, and how long a text they read."""
    name, config = "eagle heads", heads.model.config
    remedy = "take heads of this target, or train them: draftsmith eagle --target TARGET"
    try:
        tree = searched_tree(config, TREE)
    except InputError as error:
        return Finding("error", name, str(error), SEARCH)
    wrong = unfit(name, "eagle", target, heads, tree, config.draft_vocab_size, remedy)
    if wrong is not None:
        return wrong
    text = f"made for this target's hidden size {config.target_hidden_size} and {config.vocab_size} logits; draft "
    text += "chains" if tree is None else shape(tree)
    if config.draft_vocab_size < config.vocab_size:
        text += f" of {config.draft_vocab_size} tokens"
    text += trained_on(target, heads)
    most = config.max_position_embeddings
    if target.positions is not None and most < target.positions:
        text += f"; they read {most} positions, the target {target.positions}"
        return Finding("warning", name, text, f"keep prompt and text within {most} tokens")
    return Finding("ok", name, text)


def check_run(target: Side, config: EagleTrainingConfig) -> tuple[str, list[Finding]]:
    """Return in words what a run trains, and further findings.

    Args:
        target: without weights.
        config: of the run.

    Raises:
        InputError: heads that cannot begin on this target.
    """
    findings = []
    if config.heads is not None:
        heads = EagleHeads.without_weights(config.heads)
        heads.check_fits(target.model)
        begun, theta = "", heads.config.rope_parameters["rope_theta"]
        expected = rope_of(target.model.config.get_text_config())["rope_theta"]
        if theta != expected:
            text = f"heads to go on from turn by a rope_theta of {theta:g}, the target's last layer by {expected:g}"
            findings.append(Finding("warning", "rope theta", text, "begin new ones: leave out heads"))
    else:
        tokens = config.draft_vocabulary
        at_most(token_count(target.tokenizer, target.config)).check("draft_vocabulary", tokens or 0)
        kept = None if tokens is None else torch.arange(tokens)
        with torch.device("meta"):
            heads = new_heads(config, target.model, kept)
        begun = f", {beginning(config, heads, target.model)[1]}"
    if config.training.learning_rate is not None:
        findings.append(learning_rate(config.training.learning_rate, heads.config.hidden_size))
    text = f"heads of {count(heads.num_parameters())} parameters, features after layers "
    return text + f"{', '.join(map(str, heads.layer_ids))}, {config.num_steps} steps{begun}", findings


def learning_rate(rate: float, width: int) -> Finding:
    """Compare the rate with those that work for heads of this width."""
    name, text = "learning rate", f"{rate:g} for heads {width} wide"
    if width < WIDE:
        return Finding("ok", name, f"{text}: narrow ones take up to 1e-2")
    least, most = RATES
    if least <= rate <= most:
        return Finding("ok", name, text)
    return Finding("warning", name, text, f"heads this wide are trained at {least:g} to {most:g}, most at 5e-5 to 1e-4")
