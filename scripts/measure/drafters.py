"""The drafters of a measurement: what each is called, what it drafts with, and what it adds to memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import DraftModelProposer, PromptLookupProposer, Proposer
from draftsmith.decode.errors import InputError
from draftsmith.medusa import MedusaHeads, MedusaProposer
from draftsmith.train.models import check_head, check_same_tokenizer, default_device, load_model, load_tokenizer

STOCK = "stock"
"""What the draft to beat is called."""
MEDUSA, LOOKUP = "medusa", "lookup"


@dataclass(frozen=True)
class Drafter:
    """A drafter that is measured."""

    name: str
    """Short and unique."""
    kind: str
    """"draft", "baseline_draft", "medusa" or "prompt_lookup"."""
    path: str | None
    proposer: Proposer
    greedy: Proposer | None
    """A draft model's under sampling, as servers use it by default: with its argmax, for certain."""
    model: PreTrainedModel | None
    """The draft model or the heads."""
    draft_lengths: Sequence[int]
    """γ, at which it is decoded; of heads the depth of their tree."""

    @property
    def nodes(self) -> int | None:
        """Tokens that the target verifies a round beside the last one, where they are not γ: those of a tree."""
        return len(self.proposer.tree) if isinstance(self.proposer, MedusaProposer) else None

    @property
    def weights_bytes(self) -> int:
        """What its weights take."""
        return 0 if self.model is None else sum(p.numel() * p.element_size() for p in self.model.parameters())

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        found = {
            "name": self.name,
            "kind": self.kind,
            "path": self.path,
            "parameters": 0 if self.model is None else self.model.num_parameters(),
            "bytes": self.weights_bytes,
        }
        if isinstance(self.model, MedusaHeads):
            found |= {"heads": self.model.config.num_heads, "tree_nodes": self.nodes}
        return found


def load_drafters(
    target: PreTrainedModel,
    target_path: str,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Sequence[str],
    baseline: str | None,
    medusa: str | None,
    prompt_lookup: bool,
    draft_lengths: Sequence[int],
    dtype: str,
    trust_remote_code: bool,
) -> list[Drafter]:
    """Load what is to be measured; tokenizers and shapes are checked before any weights are read."""
    named = dict(zip(short_names(drafts), drafts, strict=True))
    if baseline is not None:
        named[STOCK] = baseline
    for name, path in named.items():
        field = "baseline_draft" if name == STOCK and baseline is not None else "draft"
        own = load_tokenizer(path, field=field, trust_remote_code=trust_remote_code)
        check_same_tokenizer(tokenizer, own, target_path, path)
    found = []
    for name, path in named.items():
        kind = "baseline_draft" if name == STOCK and baseline is not None else "draft"
        model = load_model(path, field=kind, dtype=dtype, trust_remote_code=trust_remote_code)
        check_head(model, tokenizer, kind)
        greedy = DraftModelProposer(model, greedy=True)
        found.append(Drafter(name, kind, path, DraftModelProposer(model), greedy, model, draft_lengths))
    if medusa is not None:
        heads: Any = MedusaHeads.from_pretrained(medusa, dtype=target.dtype)
        heads.to(default_device())
        heads.check_fits(target)
        proposer = MedusaProposer(heads)
        found.append(Drafter(MEDUSA, "medusa", medusa, proposer, None, heads, [proposer.tree.depth]))
    if prompt_lookup:
        found.append(Drafter(LOOKUP, "prompt_lookup", None, PromptLookupProposer(), None, None, draft_lengths))
    return found


def short_names(paths: Sequence[str]) -> list[str]:
    """Name one draft "draft", and several by the last parts of their paths, as many as tell all drafters apart."""
    if len(paths) == 1:
        return ["draft"]
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    for parts in range(1, 1 + max(map(len, whole), default=0)):
        names = ["/".join(own[-parts:]) for own in whole]
        if len({*names, STOCK, MEDUSA, LOOKUP}) == len(names) + 3:
            return names
    if paths:
        raise InputError(f"draft: expected each draft once, found {', '.join(paths)}")
    return []
