"""Drafts of a small causal LM."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import check_rollback, follows_one_path, positions_of, runs_in_programs
from draftsmith.decode.draft_models.cut_vocabulary import has_whole_head
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import DraftTask, Outcome, Proposal, Proposer
from draftsmith.decode.proposers.draft_forward import (
    MOST_LAYERS,
    ModelDraftForward,
    fed_slots,
    make_draws,
    program_shapes,
    read_draft,
)
from draftsmith.decode.proposers.draft_tree import StaticDraft, draft_static_tree
from draftsmith.decode.proposers.feeder import Feeder, ProgramBlock
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_position, replay_by_ranks
from draftsmith.decode.replay.ranks import NONE, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, overlap
from draftsmith.decode.replay.texts import (
    AtTokens,
    Distributions,
    WrittenText,
    chunks,
    contexts_of,
    fit_positions,
    model_distributions,
    pad_tokens,
    teacher_forced,
)
from draftsmith.decode.sampling import Sampler, align_vocabulary
from draftsmith.decode.tree import ROOT, Level, Tree


class DraftModelProposer(Proposer):
    """A proposer that uses a causal LM with the target's tokenizer (Leviathan et al. 2023; Chen et al. 2023).

    If the padding of the two heads differs, the draft's logits are cut to the target's width, or missing entries get
    probability zero.

    Without a `tree` it drafts chains. A `Tree` is the shape of every draft; its siblings are the most likely tokens at
    T=0, and are drawn without replacement under sampling. `greedy` drafts the
    most likely tokens under sampling too, as vLLM does by default; this is lossless, and a token is accepted with
    probability p(argmax q) instead of Σ_v min(p, q).

    A drafter whose model takes other inputs has a `Feeder` of its own, which `make_feeder` returns. One that drafts in
    another way overrides `draft`. `most_fed`, `most_steps` and `fits_programs` are the other methods that differ.
    """

    def __init__(self, draft_model: PreTrainedModel, tree: Tree | None = None, greedy: bool = False):
        check_rollback(draft_model, "draft model")
        if has_whole_head(draft_model):
            raise InputError(
                "draft model: expected its head cut to the tokens that it learned to draft, found a whole one; "
                "draftsmith.decode.cut_head cuts it"
            )
        if tree is not None and follows_one_path(draft_model.config):
            raise InputError(f"tree: expected a chain, found a tree, which {type(draft_model).__name__} cannot follow")
        self.draft_model, self.tree, self.greedy = draft_model, tree, greedy
        self.positions = positions_of(draft_model.config)

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        self.task, self.generators, self.samplers = task, list(task.generators), list(task.samplers)
        device = self.draft_model.device
        if device != (task.target or self.draft_model).device:
            row_samplers = [sampler.on(device) for sampler in task.row_samplers]
            self.samplers = row_samplers or [task.sampler.on(device)] * len(self.generators)
        temperature = self.samplers[0].temperature if self.draws else None
        self.temperature = (
            None if temperature is None else torch.tensor(temperature, dtype=torch.float64, device=device)
        )
        tree = self.tree and self.tree.pruned(task.draft_length)[0]
        widest = max(map(len, tree.children)) if tree else 0
        if widest > task.vocab_size:
            raise InputError(f"tree: expected at most V = {task.vocab_size} siblings, found {widest}")
        self.in_programs = task.compiled and self.fits_programs(task)
        self.feeder = self.make_feeder(task, self.most_fed(task))
        self._fed: list[list[int]] = []  # for each row of the last draft, each node's slot after the text, or −1
        return self.nodes(task.draft_length)

    def make_feeder(self, task: DraftTask, block: int) -> Feeder:
        """Return what feeds the model with the rows' texts, in blocks of at most `block` tokens."""
        return Feeder(self.draft_model, task, min(task.max_length, self.positions or task.max_length), block)

    def most_fed(self, task: DraftTask) -> int:
        """Return the most tokens that are fed at once after the first texts, and the slots that a draft takes."""
        return max(self.nodes(task.draft_length), task.round_length)

    @cached_property
    def most_steps(self) -> int:
        """The most forwards that one program computes after the texts' own."""
        return max(1, MOST_LAYERS // self.draft_model.config.get_text_config().num_hidden_layers)

    def fits_programs(self, task: DraftTask) -> bool:
        """Return whether programs can draft: rows are alike, and no rule inspects tokens meanwhile."""
        if not runs_in_programs(self.draft_model) or not self.task.draw_siblings:
            return False
        if self.tree is not None and self.tree.pruned(task.draft_length)[0].depth > self.most_steps:
            return False
        sampler = self.samplers[0]  # a program draws all rows with one temperature
        return sampler.temperature is not None and all(other is sampler for other in self.samplers)

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes of the tree down to this depth, or the length of a chain."""
        return draft_length if self.tree is None else len(self.tree.pruned(draft_length)[0])

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row, as far as the draft model has positions."""
        contexts, draft_lengths = self._within(contexts, draft_lengths)
        self.feeder.set_lengths(contexts)
        if max(draft_lengths) < 1:
            self._fed = [[] for _ in contexts]
            return [Proposal(contexts[0].new_zeros(0), None, Tree.chain(0))] * len(contexts)
        home, device = contexts[0].device, self.feeder.device
        if home == device:
            return self.draft(contexts, draft_lengths)
        drafts = self.draft([context.to(device) for context in contexts], draft_lengths)
        return [draft.to(home) for draft in drafts]

    def _within(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[int]]:
        """Return texts cut at the model's last position, and the draft lengths that fit before it."""
        most = self.positions
        # The last drafted token needs no position: it is not fed. A longer row stays in the batch with length 0.
        if most is None or max(map(len, texts)) + max(draft_lengths) <= most + 1:
            return texts, draft_lengths
        lengths = [max(0, min(k, most + 1 - len(text))) for text, k in zip(texts, draft_lengths, strict=True)]
        return [text[: self.feeder.max_length] for text in texts], lengths

    def draft(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft after texts on the draft model's device, at least one token for one of them."""
        if self.in_programs and (block := self.feeder.program_block(texts)) is not None:
            return self._draft_in_programs(block, draft_lengths)
        logits = self.feeder.feed_texts(texts)[:, 0]
        depth = max(draft_lengths)
        tree = Tree.chain(depth) if self.tree is None else self.tree.pruned(depth)[0]
        return self._static_trees(tree, texts, draft_lengths, logits)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the accepted tokens that were fed: all but the last of a path."""
        row_slots = []
        for fed, outcome in zip(self._fed, outcomes, strict=True):
            # Nodes of another drafter, in a hybrid, were not fed here.
            slots = [fed[node] if node < len(fed) else -1 for node in outcome.path]
            row_slots.append(slots[: slots.index(-1)] if -1 in slots else slots)
        self.feeder.keep(row_slots)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows from the cache."""
        self.feeder.select(rows)
        self.generators = [self.generators[row] for row in rows]
        self.samplers = [self.samplers[row] for row in rows]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse trees under sampling."""
        if self.tree is not None and do_sample:
            return "replay: expected chains under sampling, found a tree: decode with it"
        return None

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the draft model's distributions."""
        return model_distributions(self.draft_model, sampler, target.config.get_text_config().vocab_size)

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[AtTokens] | None
    ) -> BatchReplay:
        """Replay chains, and at T=0 trees of one shape: see `draftsmith.decode.measurement.replay`."""
        acceptance, overlaps, ranks = list[Tensor](), list[Tensor](), list[Tensor]()
        drafted, texts = fit_positions(texts, self.positions)
        for index, (text, logits) in enumerate(zip(drafted, teacher_forced(self.draft_model, drafted), strict=True)):
            nothing = text.sequence.new_zeros(0, dtype=torch.float32)  # positions may end before the text begins
            parts = [(nothing, nothing, nothing.to(torch.int16))]
            for first, end in chunks(len(text), task.vocab_size):
                logits_CV = align_vocabulary(logits(first, end), task.vocab_size).to(text.sequence.device)
                scores_CV = task.sampler.scores(logits_CV, contexts_of(text, task.sampler, first, end))
                p_CV = None if distributions is None else distributions[index](first, end)
                parts.append(self._accepted(scores_CV, p_CV, text.tokens[first:end]))
            for whole, chunk in zip((acceptance, overlaps, ranks), zip(*parts, strict=True), strict=True):
                whole.append(torch.cat(chunk))
        if not isinstance(self.tree, Tree):
            return replay_by_position(texts, pad_tokens(acceptance, texts, 0.0), overlaps)
        return replay_by_ranks(texts, pad_tokens(ranks, texts, NONE), self.tree, overlaps)

    def _accepted(self, scores_CV: Tensor, p_CV: Tensor | None, tokens_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a_i, Σ_v min(p, q) and, of a tree, the ranks of some tokens of a text, (C,); p is None at T=0."""
        ranks_C = tokens_C.new_zeros(0, dtype=torch.int16)
        if isinstance(self.tree, Tree):
            ranks_C = ranks_of(scores_CV, tokens_C, max(map(len, self.tree.children)))
        guess_C = scores_CV.argmax(-1)
        agrees_C = (guess_C == tokens_C).to(scores_CV.dtype)
        if p_CV is None:
            return agrees_C, agrees_C, ranks_C
        if self.greedy:  # q is one-hot on a token x: Σ min(p, q) is p(x)
            return agrees_C, p_CV.gather(1, guess_C[:, None])[:, 0], ranks_C
        q_CV = scores_CV.softmax(-1)
        return acceptance_probabilities(p_CV, q_CV, tokens_C), overlap(p_CV, q_CV), ranks_C

    @property
    def draws(self) -> bool:
        """True if tokens are drawn."""
        return self.task.sampler.do_sample and not self.greedy

    @property
    def wants_confidence(self) -> bool:
        """True if drafts hold their confidence."""
        return not self.task.draw_siblings  # lossy rules may read it

    def _draft_in_programs(self, block: ProgramBlock, draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft chains or trees of fixed shape with one program call; a long chain takes one for each few steps."""
        depth = self.task.draft_length
        trees = program_shapes(self.tree, depth, self.most_steps)
        parts: list[StaticDraft] = []
        for shape in trees:
            before = sum(part.tokens.shape[1] for part in parts)
            if parts:
                # The previous part did not feed its last token.
                block = ProgramBlock.ending(parts[-1].tokens[:, -1:], self.feeder.lengths + (before - 1))
            parts.append(self._compute(shape, block, [max(0, min(k - before, shape.depth)) for k in draft_lengths]))
        tree = trees[0] if len(trees) == 1 else Tree.chain(depth)
        whole = parts[0]
        if len(parts) > 1:
            q = [part.probabilities for part in parts if part.probabilities is not None]
            tokens_BK = torch.cat([part.tokens for part in parts], 1)
            whole = StaticDraft(tokens_BK, torch.cat(q, 1) if q else None)
        drafts = whole.drafts(tree, draft_lengths)
        self._fed = [fed_slots(tree, draft.tree.depth) for draft in drafts]
        return drafts

    def _compute(self, shape: Tree, block: ProgramBlock, draft_lengths: Sequence[int]) -> StaticDraft:
        drawn, vocab_size, tokens = self.draws, self.task.vocab_size, block.tokens
        draws = make_draws(shape, vocab_size, self.temperature, self.generators, draft_lengths, tokens.device)
        outputs = self.feeder.model.compute(
            (shape.parents, drawn),
            lambda forward: ModelDraftForward(forward, shape, vocab_size, drawn, self.feeder.read),
            tokens,
            block.slots,
            tokens.shape[1] + len(shape),
            [block.kept, block.at, block.ends, draws],
            block.further,
        )
        return read_draft(outputs)

    def _static_trees(
        self, tree: Tree, contexts: Sequence[Tensor], draft_lengths: Sequence[int], logits: Tensor
    ) -> list[Proposal]:
        """Draft trees of one shape after texts whose next-token logits are given, (B, V)."""
        fed: list[int] = []  # inner nodes, in the order in which they are fed

        def logits_after(level: Level, tokens: Tensor) -> Tensor:
            if level.parents == (ROOT,):
                return logits[:, None]
            offset = len(fed)
            fed.extend(level.parents)
            visible = None if self.tree is None else level.visible
            return self.feeder.feed_nodes(tokens.index_select(1, level.fed), offset, visible, level.depth)

        drawn = self.draws and (self.tree is None or self.task.draw_siblings)
        drafts = draft_static_tree(
            tree, self.samplers, contexts, draft_lengths, self.generators, drawn, self.wants_confidence, logits_after
        )
        slots = {node: slot for slot, node in enumerate(fed)}
        self._fed = [[slots.get(node, -1) for node in tree.pruned(draft.tree.depth)[1]] for draft in drafts]
        return drafts
