"""Drafts of a small causal LM."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache import CachedModel, Places, check_rollback, padded, positions_of
from draftsmith.decode.cache.model import SHORT
from draftsmith.decode.draft_models.cut_vocabulary import has_whole_head
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Drafts, DraftTask, Outcome, Proposal, Proposer, ends_of
from draftsmith.decode.proposers.draft_forward import (
    MOST_LAYERS,
    ModelDraftForward,
    draft_of,
    draws_of,
    fed_slots,
    program_shapes,
)
from draftsmith.decode.proposers.draft_tree import DynamicTree, GrowingTree, StaticDraft, draft_static_tree, grow_trees
from draftsmith.decode.replay.batch_replay import BatchReplay, replay_by_position, replay_by_ranks
from draftsmith.decode.replay.ranks import NONE, ranks_of
from draftsmith.decode.replay.rounds import acceptance_probabilities, overlap
from draftsmith.decode.replay.texts import (
    Distributions,
    WrittenText,
    clamp_tokens,
    fit_positions,
    model_distributions,
    pad_tokens,
    teacher_forced,
)
from draftsmith.decode.sampling import Sampler, align_vocabulary, argmax, draw_rows, prefixes, scores_of_rows, uniforms
from draftsmith.decode.tree import ROOT, Level, Tree

Stop = Callable[[Tensor], bool]  # the next token's q, (V,) → whether drafting stops before the token is drawn


def stop_below_confidence(level: float) -> Stop:
    """Return a rule that stops where max q < level."""
    return lambda q: bool(q.max() < level)


def stop_above_entropy(nats: float) -> Stop:
    """Return a rule that stops where the entropy of q exceeds a level in nats."""
    return lambda q: bool(torch.special.entr(q).sum() > nats)


class DraftModelProposer(Proposer):
    """A proposer that uses a causal LM with the target's tokenizer (Leviathan et al. 2023; Chen et al. 2023).

    If the padding of the two heads differs, the draft's logits are cut to the target's width, or missing entries get
    probability zero.

    Without a `tree` it drafts chains, which `stop` may end early. A `Tree` is the shape of every draft; its siblings
    are the most likely tokens at T=0, and are drawn without replacement under sampling. A `DynamicTree` grows anew each
    round. `greedy` drafts the most likely tokens under sampling too, as vLLM does by default; this is lossless, and a
    token is accepted with probability p(argmax q) instead of Σ_v min(p, q).
    """

    _without = 0  # tokens at a text's beginning that have no slot in the cache

    def __init__(
        self,
        draft_model: PreTrainedModel,
        tree: Tree | DynamicTree | None = None,
        stop: Stop | None = None,
        greedy: bool = False,
    ):
        check_rollback(draft_model, "draft model")
        if has_whole_head(draft_model):
            raise InputError(
                "draft model: expected its head cut to the tokens that it learned to draft, found a whole one; "
                "draftsmith.decode.cut_head cuts it"
            )
        if tree is not None and stop is not None:
            raise InputError("stop: expected a chain, whose length it decides, found a tree")
        self.draft_model, self.tree, self.stop, self.greedy = draft_model, tree, stop, greedy
        self.positions = positions_of(draft_model.config)

    def start(self, task: DraftTask) -> int:
        """Begin with an empty cache."""
        block = self.nodes(task.draft_length)
        if isinstance(self.tree, DynamicTree):
            block = self.tree.width + (task.draft_length - 1) * self.tree.width**2  # all candidate nodes
        self._begin(task, max(block, task.round_length))
        return self.nodes(task.draft_length)

    def _begin(self, task: DraftTask, block: int) -> None:
        """Begin with an empty cache for blocks of at most `block` tokens."""
        self._task, self._generators, self._samplers = task, list(task.generators), list(task.samplers)
        # Read once a text: reading a model's device takes longer than a small kernel.
        device = self._device = self.draft_model.device
        if device != (task.target or self.draft_model).device:
            row_samplers = [sampler.on(device) for sampler in task.row_samplers]
            self._samplers = row_samplers or [task.sampler.on(device)] * len(self._generators)
        temperature = self._samplers[0].temperature if self._draws else None
        self._temperature = (
            None if temperature is None else torch.tensor(temperature, dtype=torch.float64, device=device)
        )
        rows, widest = len(self._generators), 0
        if isinstance(self.tree, Tree):
            widest = max(map(len, self.tree.pruned(task.draft_length)[0].children))
        elif isinstance(self.tree, DynamicTree):
            widest = self.tree.width
        if widest > task.vocab_size:
            raise InputError(f"tree: expected at most V = {task.vocab_size} siblings, found {widest}")
        # Heads read the features of the whole text; they draft nothing past their last position.
        self._reach = task.max_length if self._without else min(task.max_length, self.positions or task.max_length)
        self._model = CachedModel(self.draft_model, rows, self._reach, block=block, compiled=task.compiled)
        self._most_together = block + 1  # the greatest width of a block that several rows are fed together
        self._in_programs = self._can_draft_in_programs()
        self._cached = [0] * rows  # the number of each row's tokens in the cache
        self._fed: list[list[int]] = []  # for each row of the last draft, each node's slot after the text, or −1

    def nodes(self, draft_length: int) -> int:
        """Return the number of nodes of the tree down to this depth, or the length of a chain."""
        if isinstance(self.tree, Tree):
            return len(self.tree.pruned(draft_length)[0])
        if isinstance(self.tree, DynamicTree):
            width = self.tree.width
            return min(self.tree.nodes, width + (draft_length - 1) * width**2) if draft_length else 0
        return draft_length

    def propose(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft a chain or a tree for each row, as far as the draft model has positions."""
        contexts, draft_lengths = self._within(contexts, draft_lengths)
        self._lengths = Places([context.shape[0] - self._without for context in contexts], self._device)
        if max(draft_lengths) < 1:
            self._fed = [[] for _ in contexts]
            return [Proposal(contexts[0].new_zeros(0), None, Tree.chain(0))] * len(contexts)
        home = contexts[0].device
        if home == self._device:
            return self._draft(contexts, draft_lengths)
        drafts = self._draft([context.to(self._device) for context in contexts], draft_lengths)
        return [draft.to(home) for draft in drafts]

    def _within(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[int]]:
        """Return texts cut at the model's last position, and the draft lengths that fit before it."""
        most = self.positions
        # The last drafted token needs no position: it is not fed. A longer row stays in the batch with length 0.
        if most is None or max(map(len, texts)) + max(draft_lengths) <= most + 1:
            return texts, draft_lengths
        lengths = [max(0, min(k, most + 1 - len(text))) for text, k in zip(texts, draft_lengths, strict=True)]
        return [text[: self._reach] for text in texts], lengths

    def _draft(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft after texts on the draft model's device, at least one token for one of them."""
        if self._in_programs:
            return self._draft_in_programs(texts, draft_lengths)
        return self._draft_by_steps(texts, draft_lengths)

    def _draft_by_steps(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        logits = self._feed_texts(texts)[:, 0]
        if self.tree is None:
            return self._chains(texts, draft_lengths, logits)
        if isinstance(self.tree, Tree):
            return self._static_trees(self.tree.pruned(max(draft_lengths))[0], texts, draft_lengths, logits)
        return self._dynamic_trees(self.tree, texts, draft_lengths, logits)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the accepted tokens that were fed: all but the last of a path."""
        paths = []
        for row, outcome in enumerate(outcomes):
            fed = self._fed[row]
            # Nodes of another drafter, in a hybrid, were not fed here.
            slots = [fed[node] if node < len(fed) else -1 for node in outcome.path]
            slots = slots[: slots.index(-1)] if -1 in slots else slots
            paths.append([slot + 1 for slot in slots])
            self._cached[row] = min(self._cached[row], self._lengths.host[row]) + len(slots)
        # Chains are in their final slots already; only other paths are moved together.
        if any(path != list(range(1, len(path) + 1)) for path in paths):
            self._model.keep_paths(self._lengths + -1, paths)

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows from the cache."""
        self._model.select(rows)
        self._cached = [self._cached[row] for row in rows]
        self._generators = [self._generators[row] for row in rows]
        self._samplers = [self._samplers[row] for row in rows]

    def replay_refusal(self, do_sample: bool) -> str | None:
        """Refuse drafts that grow or stop early, and trees under sampling."""
        if isinstance(self.tree, DynamicTree) or self.stop is not None:
            return "replay: expected drafts of one shape, found some that grow or stop: decode them"
        if self.tree is not None and do_sample:
            return "replay: expected chains under sampling, found a tree: decode with it"
        return None

    def distributions_after(self, target: PreTrainedModel, sampler: Sampler) -> Distributions | None:
        """Return the draft model's distributions."""
        return model_distributions(self.draft_model, sampler, target.config.get_text_config().vocab_size)

    def replay(
        self, task: DraftTask, texts: Sequence[WrittenText], distributions: Sequence[Tensor] | None
    ) -> BatchReplay:
        """Replay chains, and at T=0 trees of one shape: see `draftsmith.decode.measurement.replay`."""
        sampler, widest = task.sampler, max(map(len, self.tree.children)) if isinstance(self.tree, Tree) else 1
        ranks, acceptance, overlaps = [], [], []
        drafted, texts = fit_positions(texts, self.positions)
        for place, (text, logits) in enumerate(zip(drafted, teacher_forced(self.draft_model, drafted), strict=True)):
            contexts = prefixes(text.sequence[:-1], len(text))
            scores = sampler.scores(align_vocabulary(logits, task.vocab_size).to(text.sequence.device), contexts)
            if self.tree is not None:
                ranks.append(ranks_of(scores, text.tokens, widest))
            guess = scores.argmax(-1)
            agrees = (guess == text.tokens).to(scores.dtype)
            if distributions is None:
                acceptance.append(agrees)
                overlaps.append(agrees)
                continue
            p = distributions[place][: len(text)]
            if self.greedy:  # q is one-hot on a token x: Σ min(p, q) is p(x)
                acceptance.append(agrees)
                overlaps.append(p.gather(1, guess[:, None])[:, 0])
            else:
                q = scores.softmax(-1)
                acceptance.append(acceptance_probabilities(p, q, text.tokens))
                overlaps.append(overlap(p, q))
        if not isinstance(self.tree, Tree):
            return replay_by_position(texts, pad_tokens(acceptance, texts, 0.0), overlaps)
        return replay_by_ranks(texts, pad_tokens(ranks, texts, NONE), self.tree, overlaps)

    def _feed_texts(self, contexts: Sequence[Tensor], masks: Tensor | None = None) -> Tensor:
        """Feed the uncached tokens of each text, then M masks, (M,), if any; return the last logits, (B, 1 + M, V)."""
        contexts, keep = clamp_tokens(self.draft_model, contexts), 1 if masks is None else 1 + len(masks)
        if len(contexts) == 1 and not any(self._cached) and self._model.is_empty:
            logits = self._model.prefill(_append_masks(contexts[0][None, :], masks), keep)
            self._cached = list(self._lengths.host)
            return self._aligned(logits)
        block, places = self._unfed(contexts)
        return self._aligned(self._model.feed(_append_masks(block, masks), places, keep))

    def _unfed(self, contexts: Sequence[Tensor]) -> tuple[Tensor, Places]:
        """Return the last tokens of each text, (B, K), and their slots, after feeding the uncached tokens before them.

        All rows get the same K: a row with fewer uncached tokens is fed its last cached ones again, into their slots.
        """
        lengths, shortest = self._lengths.host, min(self._lengths.host)
        lacking = max(length - cached for length, cached in zip(lengths, self._cached, strict=True))
        if not any(self._cached):
            self._model.prefill_texts(contexts)
            lacking = 1
        # K is limited by the shortest row, which cannot go back before its beginning, and by the tokens that layers
        # with a window still remember. Rows that lack more are fed the excess first.
        together = shortest if len(contexts) == 1 else min(shortest, self._most_together)
        if lacking > together:
            parts = [text[cached:][: lacking - together] for text, cached in zip(contexts, self._cached, strict=True)]
            self._model.feed(padded(parts, lacking - together), self._cached, keep=1)
            lacking = together
        self._cached = list(lengths)
        return ends_of(contexts, lacking), self._lengths + -lacking

    def _aligned(self, logits: Tensor) -> Tensor:
        return align_vocabulary(logits, self._task.vocab_size)

    @property
    def _draws(self) -> bool:
        return self._task.sampler.do_sample and not self.greedy

    @property
    def _wants_confidence(self) -> bool:
        return not self._task.draw_siblings  # lossy rules may read it

    def _chains(self, contexts: Sequence[Tensor], draft_lengths: Sequence[int], logits: Tensor) -> Drafts:
        """Draft all rows a token at a time, and cut each row's draft to its length at the end."""
        samplers, drawn, texts = self._samplers, self._draws, list(contexts)
        lengths, active = list(draft_lengths), [k > 0 for k in draft_lengths]
        tokens: list[Tensor] = []  # of each step, (B,)
        distributions: list[Tensor] = []  # of each step, (B, V)
        if drawn:  # each row's numbers come from its own generator: its draft does not depend on the other rows
            u_BK = uniforms(self._generators, draft_lengths, torch.float64, logits.device)
        for step in range(max(draft_lengths)):
            scores = scores_of_rows(samplers, logits, texts)
            if drawn or self.stop or self._wants_confidence:
                distributions.append(scores.softmax(-1))
            if self.stop is not None:
                for row in range(len(texts)):
                    # The rule sees q, never the token: else acceptance would not be independent of the stop.
                    if active[row] and self.stop(distributions[-1][row]):
                        active[row], lengths[row] = False, step
            tokens.append(draw_rows(distributions[-1], u_BK[:, step]) if drawn else argmax(scores))
            active = [alive and step + 1 < k for alive, k in zip(active, lengths, strict=True)]
            if not any(active):
                break
            fed_B1 = tokens[-1][:, None]
            logits = self._feed_nodes(fed_B1, step, None, step + 1)[:, 0]
            if not samplers[0].context_free:
                texts = [torch.cat([text, token]) for text, token in zip(texts, fed_B1, strict=True)]
        tokens_BK = torch.stack(tokens, 1)
        q_BKV = torch.stack(distributions, 1) if distributions else None
        confidence_BK = q_BKV.amax(-1) if q_BKV is not None and self._wants_confidence else None
        # A row's last token was not fed.
        self._fed = [[*range(k - 1), -1] if k else [] for k in lengths]
        longest = max(lengths)
        q_BKV = q_BKV[:, :longest] if drawn and q_BKV is not None else None
        return Drafts.chains(lengths, tokens_BK[:, :longest], q_BKV, confidence_BK)

    def _can_draft_in_programs(self) -> bool:
        """Return whether programs draft: models run compiled, rows are alike, and no rule inspects tokens meanwhile."""
        task, sampler = self._task, self._samplers[0]
        if not task.compiled or self.stop is not None or self._wants_confidence or isinstance(self.tree, DynamicTree):
            return False
        self._steps = max(1, MOST_LAYERS // self.draft_model.config.get_text_config().num_hidden_layers)
        if self.tree is not None and self.tree.pruned(task.draft_length)[0].depth > self._steps:
            return False
        return sampler.temperature is not None and all(other is sampler for other in self._samplers)

    def _read(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits: see `draft_forward.ReadOutput`."""
        return self._aligned(output), None

    def _draft_in_programs(self, texts: Sequence[Tensor], draft_lengths: Sequence[int]) -> list[Proposal]:
        """Draft chains or trees of fixed shape with one program call; a long chain takes one for each few steps."""
        task, depth = self._task, self._task.draft_length if self._task.fixed_length else max(draft_lengths)
        block, places, ends, extra_inputs = self._unfed_block(texts)
        trees = program_shapes(self.tree, depth, self._steps, task.fixed_length)
        parts: list[StaticDraft] = []
        for shape in trees:
            before = sum(part.tokens.shape[1] for part in parts)
            if parts:
                # The previous part did not feed its last token.
                block, places = parts[-1].tokens[:, -1:], self._lengths + (before - 1)
                ends = torch.zeros_like(ends)
            part_lengths = [max(0, min(k - before, shape.depth)) for k in draft_lengths]
            parts.append(self._compute(shape, block, places, ends, extra_inputs, part_lengths))
        tree = trees[0] if len(trees) == 1 else Tree.chain(depth)
        whole = parts[0]
        if len(parts) > 1:
            q = [part.probabilities for part in parts if part.probabilities is not None]
            whole = StaticDraft(torch.cat([part.tokens for part in parts], 1), torch.cat(q, 1) if q else None)
        self._fed = [fed_slots(tree, k) for k in draft_lengths]
        return whole.drafts(tree, draft_lengths)

    def _unfed_block(self, texts: Sequence[Tensor]) -> tuple[Tensor, Places, Tensor, dict[str, Tensor]]:
        """Return a program's first block: tokens, (B, K), slots, each row's last column, (B,), and extra inputs."""
        texts = clamp_tokens(self.draft_model, texts)
        # Short prompts of one length need no prefill of their own: the program feeds them.
        if not any(self._cached) and self._lengths.alike and len(texts) * len(texts[0]) <= SHORT:
            self._cached = list(self._lengths.host)
            block, places = torch.stack(list(texts)), Places([0] * len(texts), texts[0].device)
        else:
            block, places = self._unfed(texts)
        return block, places, _last_places(*block.shape, block.device), {}

    def _columns(self, block: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of a block whose logits are computed, here the last, and each row's index among them."""
        rows, k = block.shape
        return _last_places(1, k, block.device), _last_places(rows, 1, block.device)

    def _compute(
        self,
        shape: Tree,
        block: Tensor,
        places: Places,
        ends: Tensor,
        extra_inputs: dict[str, Tensor],
        draft_lengths: Sequence[int],
    ) -> StaticDraft:
        drawn, vocab_size = self._draws, self._task.vocab_size
        draws = draws_of(shape, vocab_size, self._temperature, self._generators, draft_lengths, block.device)
        outputs = self._model.compute(
            (shape.parents, drawn),
            lambda forward: ModelDraftForward(forward, shape, vocab_size, drawn, self._read),
            block,
            places,
            block.shape[1] + len(shape),
            [*self._columns(block, ends), ends, draws],
            extra_inputs,
        )
        return draft_of(outputs)

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
            return self._feed_nodes(tokens.index_select(1, level.fed), offset, level.visible, level.depth)

        drawn = self._draws and self._task.draw_siblings
        drafts = draft_static_tree(
            tree, self._samplers, contexts, draft_lengths, self._generators, drawn, self._wants_confidence, logits_after
        )
        slots = {node: slot for slot, node in enumerate(fed)}
        self._fed = [[slots.get(node, -1) for node in tree.pruned(k)[1]] for k in draft_lengths]
        return drafts

    def _dynamic_trees(
        self, shape: DynamicTree, contexts: Sequence[Tensor], draft_lengths: Sequence[int], logits: Tensor
    ) -> list[Proposal]:
        """Grow each row's tree after texts whose next-token logits are given, (B, V)."""
        # All rows feed the same number of nodes at each depth, so that they stay one batch.
        trees = [GrowingTree(context, shape) for context in contexts]
        logits_BFV, last = logits[:, None], max(draft_lengths)
        for depth in range(1, last + 1):
            grow_trees(trees, self._samplers, logits_BFV)
            if depth < last:
                tokens = torch.tensor([tree.choose_frontier() for tree in trees], device=logits.device)
                visible = torch.stack([tree.visible() for tree in trees])
                logits_BFV = self._feed_nodes(tokens, (depth - 1) * shape.width, visible, depth)
        drafts, self._fed = [], []
        for tree, k in zip(trees, draft_lengths, strict=True):
            draft, slots = tree.draft(k)
            drafts.append(draft)
            self._fed.append(slots)
        return drafts

    def _feed_nodes(self, tokens: Tensor, offset: int, visible: Tensor | None, depth: int) -> Tensor:
        """Feed the inner nodes of one depth, (B, F), after `offset` earlier ones; return the logits after them.

        `visible` marks the fed nodes, these included, to which each of them attends, (F, N) or (B, F, N); None in a
        chain.
        """
        starts = self._lengths + offset
        if visible is None:
            return self._aligned(self._model.feed(tokens, starts))
        # A node's position follows from its depth, while slots are numbered through.
        depths = torch.full((tokens.shape[1],), depth - 1 - offset, device=tokens.device)
        return self._aligned(self._model.feed(tokens, starts, visible=visible.to(tokens.device), depths=depths))


def _append_masks(tokens_BT: Tensor, masks: Tensor | None) -> Tensor:
    return tokens_BT if masks is None else torch.cat([tokens_BT, masks.expand(len(tokens_BT), -1)], 1)


@lru_cache(maxsize=256)
def _last_places(rows: int, k: int, device: torch.device) -> Tensor:
    """Return k − 1 for each row, (B,) int64; cached, since creating a tensor costs as much as a small kernel."""
    return torch.full((rows,), k - 1, device=device)
