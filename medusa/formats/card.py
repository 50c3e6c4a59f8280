"""The model card of Medusa heads: what they are, how to load them, what they accept."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.decode.errors import InputError
from draftsmith.medusa.formats.export import check_format, refusal, vllm_command
from draftsmith.medusa.heads import MedusaHeads

FIGURES = ("top_1", "tau_chain", "tau_tree")


def card(heads: MedusaHeads, figures: Mapping[str, Any] | None = None, format: str = "own") -> ModelCard:
    """Return the card of heads; its text is `str(card)`.

    Args:
        heads: whose card it is.
        figures: measured on held-out completions, any of `top_1`, each head's share of tokens that were its most likely
            one, from 0 to 1, head 0 first; `tau_chain` and `tau_tree`, tokens a round of a chain and of the tree.
        format: the one of `FORMATS` that the directory is in.

    Raises:
        InputError: an unknown format or figure, or another number of `top_1` than there are heads.
    """
    check_format(format)
    figures, config = dict(figures or {}), heads.config
    unknown = sorted(figures.keys() - set(FIGURES))
    if unknown:
        raise InputError(f"figures: expected some of {', '.join(FIGURES)}, found {', '.join(unknown)}")
    if len(figures.get("top_1", range(config.num_heads))) != config.num_heads:
        raise InputError(f"figures: expected top_1 of {config.num_heads} heads, found {len(figures['top_1'])}")
    base = config.base_model_name_or_path
    # The hub links the base model, and refuses a name that cannot be one of its own.
    on_hub = bool(base) and not Path(base).exists() and not base.startswith((".", "/", "~")) and base.count("/") <= 1
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name="draftsmith",
        tags=["medusa", "speculative-decoding", *(["hydra"] if config.hydra else [])],
    )
    sections = [_what(heads, base), _here(format), _vllm(heads, base, format), _figures(figures)]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in sections if part) + "\n")


def _what(heads: MedusaHeads, base: str | None) -> str:
    config, name = heads.config, "Hydra" if heads.config.hydra else "Medusa"
    narrow, tree = config.truncated_vocab_size, config.medusa_choices
    paper = (
        "[Hydra](https://arxiv.org/abs/2402.05109)" if config.hydra else "[Medusa](https://arxiv.org/abs/2401.10774)"
    )
    sees = " and the tokens drafted before it" if config.hydra else ""
    rows = {
        "Base model": f"`{base}`" if base else "not recorded",
        "Heads": config.num_heads,
        "Blocks a head": f"{config.num_hidden_layers}, {'with' if config.medusa_fc_bias else 'without'} biases",
        "Language-model head": "one, shared" if config.original_lm_head else "one each",
        "Hidden size": config.hidden_size,
        "Vocabulary": config.vocab_size if narrow == config.vocab_size else f"{narrow} of {config.vocab_size} tokens",
        "Drafts": f"a chain of {config.num_heads} tokens" if tree is None else f"a tree of {len(tree)} tokens",
        "Parameters": f"{heads.num_parameters():,}, {str(heads.dtype).removeprefix('torch.')}",
    }
    return "\n".join(
        [
            f"# {name} heads" + (f" for {base}" if base else ""),
            "",
            f"{paper} heads draft tokens for speculative decoding of their base model, and of no other. Head i sees "
            f"the hidden state that the base model predicts token t + 1 from{sees}, and predicts token t + 2 + i.",
            "",
            _table("", rows.items()),
        ]
    )


def _table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return "\n".join([f"| {title} | |" if title else "| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def _here(format: str) -> str:
    load = (
        "from draftsmith.medusa import MedusaHeads, MedusaProposer\n\n"
        'proposer = MedusaProposer(MedusaHeads.from_pretrained("DIR"))'
        if format == "own"
        else "from draftsmith.medusa import MedusaProposer\n"
        "from draftsmith.medusa.formats.importing import import_heads\n\n"
        f'proposer = MedusaProposer(import_heads("DIR", "{format}"))'
    )
    return f"## Decode here\n\n```python\n{load}\n```"


def _vllm(heads: MedusaHeads, base: str | None, format: str) -> str:
    reason = refusal(heads, "vllm")
    if reason is not None:
        return f"## vLLM\n\nIts format cannot hold {reason}."
    model, count = "DIR" if format == "vllm" else "VLLM", {"num_speculative_tokens": heads.config.num_heads}
    lines = [vllm_command(base or "TARGET", {"method": "medusa", "model": model, **count})]
    if format != "vllm":
        lines.insert(0, f"draftsmith export --heads {'DIR' if format == 'own' else 'OWN'} --format vllm --output VLLM")
    if format not in ("own", "vllm"):
        lines.insert(0, f"draftsmith export --import_from DIR --format {format} --output OWN")
    note = "" if heads.config.medusa_choices is None else "\n\nvLLM drafts a chain of each head's most likely token."
    return "## vLLM\n\n```\n" + "\n".join(lines) + f"\n```{note}"


def _figures(figures: Mapping[str, Any]) -> str:
    rows = [(f"Head {i}, top-1", f"{share:.1%}") for i, share in enumerate(figures.get("top_1", ()))]
    rows += [
        (f"Tokens a round (τ), {shape}", f"{figures[name]:.2f}")
        for name, shape in (("tau_chain", "chain"), ("tau_tree", "tree"))
        if figures.get(name) is not None
    ]
    return f"## Acceptance\n\n{_table('on held-out completions', rows)}" if rows else ""
