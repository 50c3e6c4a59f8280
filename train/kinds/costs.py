"""The costs of a drafter's rounds on this machine, and the acceptance from which drafting pays."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftsmith.decode.measurement.costs import drafting_seconds
from draftsmith.decode.planning.costs import RoundCosts, acceptance_length, verification_costs
from draftsmith.decode.proposers.base import Proposer
from draftsmith.decode.tree import Tree
from draftsmith.train.kinds.findings import Finding

GAMMA = 4
CONTEXT = 64
ROUNDS = 5
SEARCH = "search a smaller tree: draftsmith tree --drafter DIR --nodes N"
HARD = 0.9  # an acceptance rate that few drafts reach


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter whose rounds are timed against forwards of its target."""

    target: PreTrainedModel
    proposer: Proposer
    models: Sequence[PreTrainedModel]  # the models whose positions limit the length of the context
    name: str = "costs"  # the name of the finding
    remedy: str = "take a smaller draft"  # the advice where chains do not pay
    tree: Tree | None = None  # the tree that it drafts in every round; None for chains
    length: int | None = None  # γ of drafters that draft all tokens in one forward; None for one forward a token

    def finding(self, rows: int) -> Finding:
        """Measure rounds of a number of texts; find the α, or for a tree the τ, from which they pay."""
        name = f"{self.name}, B = {rows}"
        if self.tree is not None:
            return self._of_tree(name, rows, self.tree)
        gamma = self.length or GAMMA
        text, verifying, drafting = self._measured(rows, gamma, gamma)
        if self.length is not None:
            text += f"drafting {drafting / verifying[1]:.2f} t(1) a round: "
            return self._worth(name, text, RoundCosts(verifying, 0.0, draft_start=drafting), gamma)
        costs = RoundCosts(verifying, drafting / gamma)
        text += f"drafting c = {costs.draft_step / costs.target[1]:.2f} t(1) a token: "
        return self._worth(name, text, costs, gamma)

    def _worth(self, name: str, text: str, costs: RoundCosts, gamma: int) -> Finding:
        """Find the α from which γ pays."""
        text += f"γ = {gamma} pays"
        alpha = costs.break_even_acceptance(gamma)
        if alpha is None:
            best = costs.speedup(gamma + 1, gamma)
            text += f" at no α, for at α = 1 it is {best:.2f}× as fast"
            return Finding("warning", name, text, f"{self.remedy}, or another --dtype or device")
        text += f" from α = {alpha:.2f} on"
        if alpha > HARD:
            return Finding("warning", name, text, f"few drafts agree that often: {self.remedy}")
        return Finding("ok", name, text)

    def _of_tree(self, name: str, rows: int, tree: Tree) -> Finding:
        text, verifying, drafting = self._measured(rows, tree.depth, len(tree))
        one = verifying[1]
        needed, most = (drafting + verifying[len(tree) + 1]) / one, tree.depth + 1
        text += f"drafting {drafting / one:.2f} t(1): a tree of {len(tree)} pays"
        if needed >= most:
            return Finding("warning", name, f"{text} at no τ: {needed:.2f} is asked, and {most} the most", SEARCH)
        text += f" from τ = {needed:.2f} on, of {most} at most"
        if needed > acceptance_length([HARD] * tree.depth):
            return Finding("warning", name, text, SEARCH)
        return Finding("ok", name, text)

    def _measured(self, rows: int, depth: int, drafted: int) -> tuple[str, dict[int, float], float]:
        """Return a text on the costs of verification, t(1) and t(1 + drafted), and the seconds of a draft."""
        # The context must leave room for the timed rounds.
        limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in self.models]
        room = [limit - ROUNDS - drafted - 2 for limit in limits if limit is not None]
        context = max(1, min([CONTEXT, *room]))
        verifying, drafting = measure(self.target, self.proposer, rows, depth, drafted, context)
        one, block = verifying[1], verifying[1 + drafted]
        text = f"t(1) = {one * 1000:.2f} ms after {context} tokens, t({1 + drafted}) = {block / one:.2f} t(1), "
        return text, verifying, drafting


def measure(
    target: PreTrainedModel, proposer: Proposer, rows: int, depth: int, drafted: int, context: int
) -> tuple[dict[int, float], float]:
    """Return t(1) and t(1 + drafted), and the seconds of a draft, at T=0 after the same context."""
    verifying = verification_costs(target, rows, context, [1, 1 + drafted])
    texts = torch.ones(rows, context + ROUNDS + 2, dtype=torch.long, device=target.device)
    return verifying, drafting_seconds(target, proposer, texts, context, depth, repeats=ROUNDS)[0]
