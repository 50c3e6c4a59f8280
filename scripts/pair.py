"""A target and its drafters, as every command loads them: checked, in one dtype, and told apart by one set of names."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import (
    BlindProposer,
    DraftModelProposer,
    DynamicTree,
    InputError,
    LookaheadProposer,
    ParallelDraftProposer,
    PromptLookupProposer,
    Proposer,
    RetokenizedProposer,
    Tree,
    early_exit,
)
from draftsmith.decode.draft_models.searched_tree import searched_tree
from draftsmith.decode.progress import phase
from draftsmith.decode.proposers.draft_tree import TreeProposer
from draftsmith.distill.parallel.layout import tree_of
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.medusa.eagle.heads import TREE as EAGLE_TREE
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.proposer import EagleProposer
from draftsmith.train.models import (
    DTYPES,
    check_head,
    check_same_tokenizer,
    load_draft,
    load_model,
    load_tokenizer,
    resolve_dtype,
    vocabulary_size,
)

STOCK = "stock"
"""What the draft to beat is called."""
MEDUSA, EAGLE, PROMPT_LOOKUP, PARALLEL = "medusa", "eagle", "prompt_lookup", "parallel_draft"
MODEL_FREE: dict[str, Callable[[], Proposer]] = {
    "lookahead": LookaheadProposer,
    "unigram": BlindProposer,
}
DRAFTS = ("draft", "baseline_draft")
LOADED = (*DRAFTS, PARALLEL)
"""Causal LMs with a tokenizer of their own; the same one may draft in two ways."""
KINDS = (*LOADED, MEDUSA, EAGLE, PROMPT_LOOKUP, *MODEL_FREE, "early_exit")


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter to load."""

    kind: str
    """One of `KINDS`."""
    path: str | None = None
    """The draft model or the heads: a directory or hub id."""
    name: str | None = None
    """What it is called; its kind if None."""
    draft_lengths: Sequence[int] = (4,)
    """γ, at which it drafts; heads and parallel drafts with a tree of their own draft as deep as it."""
    tree: Tree | DynamicTree | None = None
    """What a draft model, an early exit or EAGLE-3 heads draft; if None a chain, or what the config of a parallel draft
    or of EAGLE-3 heads says."""
    ngrams: tuple[int, int] = (1, 3)
    """The shortest and the longest n-gram that prompt lookup looks for, in tokens."""
    exit_layers: int | None = None
    """The target's layers that draft, of an early exit."""
    retokenize: bool = False
    """Let a draft model have another tokenizer: its text is encoded again."""
    dtype: str | None = None
    """Of a draft model or heads; the target's if None."""


@dataclass(frozen=True)
class Drafter:
    """A drafter that was loaded."""

    name: str
    """Short and unique."""
    kind: str
    """As in `DrafterSpec`."""
    path: str | None
    proposer: Proposer
    greedy: Proposer | None
    """A draft model's under sampling, as servers use it by default: with its argmax, for certain."""
    model: PreTrainedModel | None
    """The draft model or the heads."""
    draft_lengths: Sequence[int]
    """γ, at which it is decoded; of what has a tree of its own its depth."""

    @property
    def tree(self) -> Tree | None:
        """The tree that was searched for it, or the chain of all heads."""
        if not isinstance(self.proposer, TreeProposer) or not isinstance(self.proposer.tree, Tree):
            return None
        return self.proposer.tree

    @property
    def nodes(self) -> int | None:
        """Tokens that the target verifies a round beside the last one, where they are not γ: those of a tree."""
        return None if self.tree is None else len(self.tree)

    @property
    def weights_bytes(self) -> int:
        """What its weights take."""
        return 0 if self.model is None else sum(p.numel() * p.element_size() for p in self.model.parameters())

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        entry = {
            "name": self.name,
            "kind": self.kind,
            "path": self.path,
            "parameters": 0 if self.model is None else self.model.num_parameters(),
            "bytes": self.weights_bytes,
        }
        if isinstance(self.model, MedusaHeads):
            entry["heads"] = self.model.config.num_heads
        if self.tree is not None:
            entry["tree_nodes"] = self.nodes
        if isinstance(self.proposer, PromptLookupProposer):
            entry |= {"prompt_lookup_min": self.proposer.min_ngram, "prompt_lookup_max": self.proposer.max_ngram}
        return entry


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: str
    """The name of the target's dtype, which drafters have too unless they were given their own."""
    drafters: list[Drafter]

    @property
    def proposers(self) -> dict[str, Proposer]:
        """What drafts, by name."""
        return {drafter.name: drafter.proposer for drafter in self.drafters}

    @property
    def drafter(self) -> Drafter:
        """The only drafter."""
        (drafter,) = self.drafters
        return drafter

    def check_positions(self, prompt: int, new_tokens: int) -> None:
        """Require that the longest prompt and its text lie within the positions of the target and the draft models.

        Not every architecture has such a limit; past it, a model that has one writes noise or fails. A draft whose text
        is encoded again has its own count of tokens, and minds its limit itself.

        Args:
            prompt: tokens of the longest.
            new_tokens: of its text at most.

        Raises:
            InputError: names the model and its positions.
        """
        for name, limit in self._positions().items():
            if prompt + new_tokens > limit:
                raise InputError(
                    f"max_new_tokens: expected prompt and text within the {name}'s {limit} positions, found {prompt} + "
                    f"{new_tokens} tokens"
                )

    def holds(self, tokens: int) -> bool:
        """Return whether so many tokens lie within the positions of all models."""
        return tokens <= min(self._positions().values(), default=tokens)

    def _positions(self) -> dict[str, int]:
        """Return the positions of the target and the draft models that have a limit, by name."""
        models = {"target": self.target}
        for drafter in self.drafters:
            recounts = isinstance(drafter.proposer, RetokenizedProposer) and not drafter.proposer.renumbers
            if drafter.kind in (*LOADED, EAGLE) and drafter.model is not None and not recounts:
                models[drafter.name] = drafter.model
        limits = {
            name: getattr(model.config.get_text_config(), "max_position_embeddings", None)
            for name, model in models.items()
        }
        return {name: limit for name, limit in limits.items() if limit is not None}


def load_pair(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[DrafterSpec] = (),
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Pair:
    """Load a target and its drafters; tokenizers are compared before any weights are read.

    The target's generation config is replaced by one that only says where a text ends: `generate` fills what a call
    leaves open from there, and the target's own temperature or penalties are not to creep in.

    Args:
        path: the target's directory or hub id.
        tokenizer: the target's (`load_tokenizer`), which commands have at hand, for prompts are read first.
        drafters: what to load.
        dtype: of all models that have none of their own; "auto" is the target's (`resolve_dtype`).
        trust_remote_code: run model code that repositories ship.

    Raises:
        InputError: models that cannot be loaded or do not fit the target.
    """
    drafts = {str(spec.path): spec for spec in drafters if spec.kind in LOADED}
    tokenizers = {}
    size = vocabulary_size(path, trust_remote_code=trust_remote_code)
    for draft, spec in drafts.items():
        tokenizers[draft] = load_tokenizer(draft, field=spec.kind, trust_remote_code=trust_remote_code)
        if not spec.retokenize:
            check_same_tokenizer(tokenizer, tokenizers[draft], path, draft, vocab_size=size)
    dtype = resolve_dtype(dtype, path, trust_remote_code=trust_remote_code)
    target = load_model(path, field="target", dtype=dtype, trust_remote_code=trust_remote_code)
    check_head(target.config, tokenizer, "target")
    ends = target.generation_config.eos_token_id  # type: ignore[union-attr]
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    models = {}
    for draft, spec in drafts.items():
        own = spec.dtype or dtype
        models[draft] = load_draft(draft, field=spec.kind, dtype=own, trust_remote_code=trust_remote_code)
        own_tokens = spec.retokenize and tokenizers[draft].get_vocab() != tokenizer.get_vocab()
        check_head(models[draft].config, tokenizers[draft], spec.kind, None if own_tokens else target.config)
    pair = Pair(target, tokenizer, dtype, [])
    pair.drafters.extend(_drafter(spec, pair, models, tokenizers) for spec in drafters)
    return pair


def _drafter(
    spec: DrafterSpec,
    pair: Pair,
    models: dict[str, PreTrainedModel],
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> Drafter:
    """Build a drafter; the draft models and their tokenizers are loaded already, by path."""
    target, path, lengths = pair.target, spec.path, spec.draft_lengths
    proposer: Proposer
    greedy: Proposer | None = None
    model: PreTrainedModel | None = None
    if spec.kind == PROMPT_LOOKUP:
        shortest, longest = spec.ngrams
        proposer = PromptLookupProposer(longest, shortest)
    elif spec.kind in MODEL_FREE:
        proposer = MODEL_FREE[spec.kind]()
    elif spec.kind == "early_exit":
        depth, layers = target.config.get_text_config().num_hidden_layers, spec.exit_layers or 0
        if layers > depth:
            raise InputError(f"exit_layers: expected at most the target's {depth} layers, found {layers}")
        proposer = DraftModelProposer(early_exit(target, layers), spec.tree)
    elif spec.kind == "medusa":
        with phase(f"loading {path}"):
            heads: Any = MedusaHeads.from_pretrained(
                str(path), dtype=DTYPES[spec.dtype] if spec.dtype else target.dtype
            )
        model = heads.to(target.device)
        heads.check_fits(target)
        proposer = MedusaProposer(heads)
        lengths = [proposer.tree.depth]
    elif spec.kind == EAGLE:
        with phase(f"loading {path}"):
            eagle: Any = EagleHeads.from_pretrained(str(path), dtype=DTYPES[spec.dtype] if spec.dtype else target.dtype)
        model = eagle.to(target.device)
        eagle.check_fits(target)
        shape = searched_tree(eagle.config, EAGLE_TREE) if spec.tree is None else spec.tree
        proposer = EagleProposer(eagle, shape)
        if shape is None:
            greedy = EagleProposer(eagle, greedy=True)
        elif spec.tree is None and isinstance(shape, Tree):
            lengths = [shape.depth]
    elif spec.kind == PARALLEL:
        model = models[str(path)]
        tree = spec.tree if isinstance(spec.tree, Tree) else tree_of(model.config)
        proposer = ParallelDraftProposer(model, tree)
        if tree is None:
            greedy = ParallelDraftProposer(model, greedy=True)
        elif spec.tree is None:
            lengths = [tree.depth]
        if proposer.longest is not None and max(lengths) > proposer.longest:
            raise InputError(
                f"draft_length: expected at most the {proposer.longest} tokens that {path} was trained to propose, "
                f"found {max(lengths)}"
            )
    else:
        model, tokenizer = models[str(path)], tokenizers[str(path)]
        if spec.retokenize and tokenizer.get_vocab() != pair.tokenizer.get_vocab():
            proposer = RetokenizedProposer(model, tokenizer, pair.tokenizer, spec.tree)
        else:
            proposer, greedy = DraftModelProposer(model, spec.tree), DraftModelProposer(model, greedy=True)
    return Drafter(spec.name or spec.kind, spec.kind, path, proposer, greedy, model, lengths)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts as one batch padded on the left, and its attention mask: (B, T) int64 each."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids, (torch.arange(width, device=device) >= width - lengths[:, None]).long()


def short_names(paths: Sequence[str]) -> list[str]:
    """Name one draft "draft", and several by the last parts of their paths, as many as tell all drafters apart."""
    if len(paths) == 1:
        return ["draft"]
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    for parts in range(1, 1 + max(map(len, whole), default=0)):
        names = ["/".join(path[-parts:]) for path in whole]
        if len({*names, STOCK, MEDUSA, EAGLE, PROMPT_LOOKUP, PARALLEL}) == len(names) + 5:
            return names
    if paths:
        raise InputError(f"draft: expected each draft once, found {', '.join(paths)}")
    return []
