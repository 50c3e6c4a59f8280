"""Medusa heads as a drafter: one matrix product for each head on the target's hidden states, and no other model.

Shape suffixes: B rows, P parents, K nodes drafted, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache import own_positions
from draftsmith.decode.cache.program import Program, Programs
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, last_tokens
from draftsmith.decode.proposers.draft_forward import DraftForward, make_draws, read_draft
from draftsmith.decode.proposers.draft_tree import TreeProposer, draft_static_tree
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_start, replay_by_start_ranks
from draftsmith.decode.replay.ranks import TextRanks
from draftsmith.decode.replay.texts import AtTokens, Distributions, WrittenText, lengths_to_read
from draftsmith.decode.sampling import Sampler
from draftsmith.decode.tree import Level, Tree
from draftsmith.medusa.heads.model import MedusaHeads, check_depth
from draftsmith.medusa.heads.replay import replay_heads, replay_ranks
from draftsmith.train.losses.output_head import last_hidden


class HeadsModel(nn.Module):
    """Heads, and the target's embeddings, which Hydra heads see."""

    def __init__(self, heads: MedusaHeads, embed: nn.Module):
        super().__init__()
        self.heads, self._target_embed = heads, [embed]  # in a list, it is no submodule
        self.embed = embed if heads.config.hydra else None
        self.train(heads.training)

    @property
    def target_embed(self) -> nn.Module:
        """The target's embeddings."""
        return self._target_embed[0]

    def logits(self, level: Level, hidden: Tensor, last: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits after the parents of a level, (B, P, V), or (B, 1, V) if they are the same for all.

        `hidden`, (B, H), is the target's after the token before the `last`, (B, 1); `tokens`, (B, K), were drafted.
        """
        if self.embed is None:  # a Medusa head does not see drafted tokens
            return self.heads.logits(level.depth, hidden)[:, None]
        parents = len(level.parents)
        # A Hydra head sees its whole path: the last token, then the drafted ones.
        paths = last[:, None].expand(-1, parents, 1)
        if level.depth:
            paths = torch.cat([paths, tokens[:, level.paths]], -1)
        states = hidden[:, None].expand(-1, parents, -1)
        return self.heads.logits(level.depth, states, self.embed(paths).to(hidden))


class HeadsForward(DraftForward):
    """The forward that drafts a tree of one shape with heads; arguments as in `DraftForward`."""

    def __init__(self, model: HeadsModel, shape: Tree, vocab_size: int, drawn: bool):
        super().__init__(model, shape, vocab_size, drawn, (model.heads.config.to_json_string(),))

    @property
    def title(self) -> str:
        """A name for this program while it is compiled."""
        return f"{self.tree.depth} Medusa heads{', drawn' if self.drawn else ''}"

    def axes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the dynamic axes of each input."""
        return {0: "b"}, {0: "b"}, self.axes_of_draws()

    def forward(self, hidden: Tensor, last: Tensor, draws: list[Tensor]) -> list[Tensor]:
        """Draft for each row; arguments as in `HeadsModel.logits` and `DraftForward.choose`."""
        model: Any = self.model
        return self.choose(last, lambda level, tokens: model.logits(level, hidden, last, tokens), draws)


class MedusaProposer(TreeProposer):
    """A proposer of chains or trees from the hidden state of the last round (Cai et al. 2024, section 2.1).

    At T=0 siblings are a head's most likely tokens; under sampling they are drawn from the head's distribution without
    replacement, so that the exact rule stays lossless. The first round of a text has no hidden state to draft from: it
    drafts nothing, and emits the token that the prompt's forward gives.

    Args:
        tree: cut to the draft length; by default the tree of the heads' config, or a chain of all heads.

    Raises:
        InputError: a tree that is deeper than the number of heads.
    """

    wants_hidden = True

    def __init__(self, heads: MedusaHeads, tree: Tree | None = None):
        self.heads = heads.eval()
        self.tree: Tree = check_depth(heads.tree if tree is None else tree, heads.config.num_heads)
        self._model: HeadsModel | None = None  # its programs are reused for all texts

    @property
    def depth(self) -> int:
        """The number of heads."""
        return self.heads.config.num_heads

    def with_tree(self, tree: Tree) -> Self:
        """Return the same heads with another tree."""
        return type(self)(self.heads, tree)

    def ranks(
        self, target: PreTrainedModel, sequence: Tensor, prompt_length: int, hidden_NH: Tensor | None = None
    ) -> TextRanks:
        """Return the ranks of a text's tokens among the heads' logits."""
        return replay_ranks(target, self.heads, sequence, prompt_length, hidden_NH=hidden_NH)

    def start(self, task: DraftTask) -> int:
        """Begin with no hidden states."""
        if task.target is None:
            raise InputError("medusa: expected the target that the heads were trained on, found none")
        self.heads.check_fits(task.target)
        embed: Any = task.target.get_input_embeddings()
        if self._model is None or self._model.target_embed is not embed:
            self._model = HeadsModel(self.heads, embed)  # a new target needs new programs
        self._task, self._generators, self._samplers = task, list(task.generators), list(task.samplers)
        tree, _ = self.tree.pruned(task.draft_length)
        widest = max(map(len, tree.children))
        if widest > self.heads.config.truncated_vocab_size:
            raise InputError(
                f"tree: expected at most {self.heads.config.truncated_vocab_size} siblings, as many as the heads have "
                f"tokens, found {widest}"
            )
        self._hidden: Tensor | None = None  # (B, H), after the first round
        sampler, drawn = task.sampler, task.sampler.do_sample and task.draw_siblings
        self._temperature = None
        if drawn and sampler.temperature is not None:
            self._temperature = torch.tensor(sampler.temperature, dtype=torch.float64, device=self.heads.device)
        # Programs draft if all rows are sampled the same way, and no rule looks at drafts on the way.
        self._in_programs = task.compiled and task.draw_siblings and not task.row_samplers
        self._in_programs &= sampler.temperature is not None
        if self._in_programs:
            self._programs, self._device, self._dtype = Programs.of(self._model), self.heads.device, self.heads.dtype
            self._program: Program | None = None
        return len(tree)

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes down to this depth."""
        return len(self.tree.pruned(draft_length)[0])

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft for each row; nothing in a text's first round."""
        if self._hidden is None or max(draft_lengths) < 1:
            return [Proposal(contexts[0].new_zeros(0), None, Tree.chain(0))] * len(contexts)
        if self._in_programs:
            return self._draft_in_program(contexts, draft_lengths, self._hidden)
        return self._draft_by_steps(contexts, draft_lengths, self._hidden)

    @torch.inference_mode()
    def _draft_by_steps(
        self, contexts: Sequence[Tensor], draft_lengths: Sequence[int], hidden: Tensor
    ) -> list[Proposal]:
        empty = Proposal(contexts[0].new_zeros(0), None, Tree.chain(0))
        drafts = [empty] * len(contexts)
        rows = [row for row, k in enumerate(draft_lengths) if k > 0]  # rows may have no room left for a draft
        lengths, task = [draft_lengths[row] for row in rows], self._task
        hidden = hidden if len(rows) == len(contexts) else hidden[rows]
        hidden = hidden.to(self.heads.device, self.heads.dtype)
        tree, _ = self.tree.pruned(max(lengths))
        texts = [contexts[row] for row in rows]
        last, model = last_tokens(texts, 1), self._model
        assert model is not None
        proposals = draft_static_tree(
            tree,
            [self._samplers[row] for row in rows],
            texts,
            lengths,
            [self._generators[row] for row in rows],
            drawn=task.sampler.do_sample and task.draw_siblings,
            confidence=not task.draw_siblings,  # a lossy rule may ask for it
            logits_after=lambda level, tokens: model.logits(level, hidden, last, tokens),
        )
        if len(rows) == len(contexts):
            return proposals
        for row, draft in zip(rows, proposals, strict=True):
            drafts[row] = draft
        return drafts

    def _draft_in_program(
        self, contexts: Sequence[Tensor], draft_lengths: Sequence[int], hidden_BH: Tensor
    ) -> list[Proposal]:
        task, device = self._task, self._device
        tree, _ = self.tree.pruned(task.draft_length)
        draws = make_draws(tree, task.vocab_size, self._temperature, self._generators, draft_lengths, device)
        last = last_tokens(contexts, 1).to(device)
        inputs = [hidden_BH.to(device, self._dtype).contiguous(), last, draws]
        if self._program is None:
            assert self._model is not None
            forward = HeadsForward(self._model, tree, task.vocab_size, bool(draws))
            self._program = self._programs.get(forward, inputs)
        return read_draft(self._program(*inputs)).drafts(tree, draft_lengths)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the hidden state of the last token that was fed and accepted."""
        states = []
        for outcome in outcomes:
            assert outcome.hidden is not None
            # Row 0 is the text's last token, and row i + 1 node i of the tree.
            states.append(outcome.hidden[outcome.path[-1] + 1 if outcome.path else 0])
        self._hidden = torch.stack(states) if len(states) > 1 else states[0][None]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if self._hidden is not None:
            self._hidden = self._hidden[rows]
        self._generators = [self._generators[row] for row in rows]
        self._samplers = [self._samplers[row] for row in rows]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse trees under sampling: the draws of their siblings are not known."""
        if do_sample and not self.tree.is_chain:
            return "replay: expected a chain under sampling, found a tree: decode with it"
        return None

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay trees at T=0, and chains at any temperature: see `draftsmith.medusa.heads.replay`."""
        target, heads = task.target, self.heads
        assert target is not None
        heads.check_fits(target)
        if distributions is None:
            widths = [*self.tree.widths, *[1] * (heads.config.num_heads - self.tree.depth)]
            ranks = [
                replay_ranks(target, heads, t.sequence, t.prompt_length, task.sampler, widths, t.limit) for t in texts
            ]
            return replay_by_start_ranks(ranks, self.tree, [r.agreement for r in ranks])
        chains = [
            replay_heads(target, heads, t.sequence, t.prompt_length, task.sampler, t.limit, p)
            for t, p in zip(texts, distributions, strict=True)
        ]
        overlaps = [chain.overlap[:, 0][chain.drafted[:, 0]] for chain in chains]
        depth = self.tree.depth
        return replay_by_start(texts, [chain.acceptance[:, :depth] for chain in chains], overlaps, first=1)

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the first head's distribution of each token, in a round that begins with that token.

        The head sees the hidden state from which the target predicted the token before. A text's second token, which no
        head drafts, gets the first one's: the test of losslessness only needs a q that depends on earlier tokens.
        """
        heads = self.heads

        def distributions(ids_BT: Tensor, wanted_BT: Tensor, columns: int) -> Iterator[Tensor]:
            positions = own_positions(target, lengths_to_read(wanted_BT), ids_BT)
            hidden_BTH = last_hidden(target, input_ids=ids_BT, **positions).to(heads.device, heads.dtype)
            embed: Any = target.get_input_embeddings()
            for start in range(1, ids_BT.shape[1], columns):
                indices, rows = wanted_BT[:, start : start + columns].T.nonzero(as_tuple=True)
                indices = indices + start
                before = embed(ids_BT[rows, indices - 1])[:, None].to(hidden_BTH)  # Hydra heads see it
                logits = heads.logits(0, hidden_BTH[rows, (indices - 2).clamp(min=0)], before)
                pairs = [] if sampler.context_free else zip(rows, indices, strict=True)
                contexts = [ids_BT[row, :index] for row, index in pairs]
                yield sampler.probabilities(logits, contexts) if len(rows) else logits

        return distributions
