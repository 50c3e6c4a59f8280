"""Medusa heads: small networks on a target's last hidden state that guess the tokens after the next one.

Medusa (Cai et al. 2024, section 2.1): head k ≥ 1 sees h_t, the hidden state from which the target predicts token t + 1,
and predicts token t + k + 1. Here heads count from 0, so head i predicts token t + 2 + i. Hydra heads (Ankner et al.
2024, section 3) also see the embeddings of the tokens between, t + 1 … t + 1 + i.

Shape suffixes: N positions, H hidden, V the target's vocabulary, D the heads' vocabulary, K heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.errors import HEADS, SIZE, InputError, at_least, finite, more_than, require
from draftsmith.decode.tree import Tree
from draftsmith.medusa.base import DraftingHeads, LMHead, NamedConfig, check_ids
from draftsmith.train.losses.output_head import OutputHead, head_of


class MedusaConfig(NamedConfig):
    """The shape of the heads, in the names that vLLM reads (`model_type` "medusa")."""

    model_type = "medusa"
    architecture = "MedusaModel"

    hidden_size: int = 4096
    """H of the target."""
    vocab_size: int = 32000
    """V, the width of the target's logits."""
    num_heads: int = 4
    """K."""
    num_hidden_layers: int = 1
    """The number of residual blocks in a head; each has its own weights."""
    truncated_vocab_size: int = None  # type: ignore[assignment]
    """D, the heads' vocabulary size; V if None is given."""
    medusa_fc_bias: bool = False
    """Whether the blocks' linear maps have a bias."""
    original_lm_head: bool = False
    """Whether all K heads share one language-model head."""
    lm_head_bias: bool = False
    """Whether language-model heads have a bias, as the target's does."""
    logit_scale: float = 1.0
    """A factor on logits, as in the target."""
    final_logit_softcapping: float | None = None
    """A bound on logits, as in the target."""
    hydra: bool = False
    """Whether a head sees the tokens that were drafted before it."""
    medusa_choices: list[list[int]] | None = None
    """The tree to draft, in Medusa's notation (`Tree.from_choices`); a chain of K if None."""
    base_model_name_or_path: str | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.truncated_vocab_size is None:
            self.truncated_vocab_size = self.vocab_size
        super().__post_init__(**{"architectures": [self.architecture], **kwargs})

    def check(self) -> "MedusaConfig":
        """Return the config, or raise an InputError that names the first impossible field."""
        sizes, depths = ("hidden_size", "vocab_size", "truncated_vocab_size"), ("num_heads", "num_hidden_layers")
        require(self, at_least(1), *sizes, *depths)
        require(self, SIZE, *sizes)
        require(self, HEADS, *depths)
        require(self, finite(more_than(0)), "logit_scale", "final_logit_softcapping")
        if self.truncated_vocab_size > self.vocab_size:
            raise InputError(
                f"truncated_vocab_size: expected at most the vocabulary's {self.vocab_size} tokens, found "
                f"{self.truncated_vocab_size}"
            )
        if self.medusa_choices is not None:
            try:
                tree = Tree.from_choices(self.medusa_choices)
            except TypeError as error:
                raise InputError(f"medusa_choices: expected lists of ranks, found {self.medusa_choices!r}") from error
            check_depth(tree, self.num_heads)
        return self


def check_depth(tree: Tree, num_heads: int) -> Tree:
    """Return the tree if `num_heads` heads can draft it, or raise an InputError."""
    if not 1 <= tree.depth <= num_heads:
        raise InputError(f"tree: expected a depth between 1 and the {num_heads} heads, found {tree.depth}")
    return tree


class MedusaBlock(nn.Module):
    """The residual blocks of one head: h ← h + SiLU(W h), with W zero at first, so that the output begins as h.

    A Hydra head's first W is wider: it sees h and the embeddings of the `seen` tokens before, concatenated.
    """

    def __init__(self, hidden_size: int, layers: int, bias: bool, seen: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size * (1 if layer else 1 + seen), hidden_size, bias=bias) for layer in range(layers)
        )
        for parameter in self.parameters():
            # SiLU(0) = 0: at first a block returns its input.
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return logits, (…, K, V), from the input of the target's head, (…, H); −∞ for tokens that heads cannot draft.

        Hydra heads need the `embeddings` of the next K tokens, (…, K, H).
        """
        for index, layer in enumerate(self.layers):
            # Only the first layer sees the embeddings.
            wide = hidden if index or embeddings is None else torch.cat([hidden, embeddings], dim=-1)
            hidden = hidden + nn.functional.silu(layer(wide))
        return hidden


class MedusaHeads(DraftingHeads):
    """K heads on the target's last hidden state."""

    config_class = MedusaConfig
    title, field, width, tokens = "Medusa heads", "medusa", "hidden_size", "token_map"
    main_input_name = "hidden"
    _no_split_modules = ["MedusaBlock", "LMHead"]  # noqa: RUF012

    def __init__(self, config: MedusaConfig):
        super().__init__(config.check())
        size, count = config.hidden_size, config.num_heads
        self.blocks = nn.ModuleList(
            MedusaBlock(size, config.num_hidden_layers, config.medusa_fc_bias, i + 1 if config.hydra else 0)
            for i in range(count)
        )
        narrow, bias = config.truncated_vocab_size, config.lm_head_bias
        if config.original_lm_head:
            self.lm_head = LMHead(size, narrow, bias=bias)
        else:
            self.lm_heads = nn.ModuleList(LMHead(size, narrow, bias=bias) for _ in range(count))
        self.token_map: Tensor | None
        self.register_buffer("token_map", torch.arange(narrow) if narrow < config.vocab_size else None)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: blocks begin as the identity, and language-model heads are copied or loaded."""

    @classmethod
    def of_target(
        cls, target: PreTrainedModel, num_heads: int = 4, token_map: Tensor | None = None, **shape: Any
    ) -> "MedusaHeads":
        """Return untrained heads for a target: each is a copy of the target's head, and predicts the same.

        Args:
            target: a causal LM; its head may be tied.
            token_map: the target's ids that heads may draft, (D,) int64; all if None.
            **shape: further fields of `MedusaConfig`, such as `num_hidden_layers` or `hydra`.

        Raises:
            InputError: counts below 1, or ids that are out of range or not distinct.
        """
        head = head_of(target)
        vocab_size, hidden_size = head.weight.shape
        if token_map is not None:
            check_ids(token_map, vocab_size, "token_map")
            token_map = None if len(token_map) == vocab_size else token_map.to(head.weight.device)
        config = MedusaConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=num_heads,
            truncated_vocab_size=vocab_size if token_map is None else len(token_map),
            lm_head_bias=head.bias is not None,
            logit_scale=head.scale,
            final_logit_softcapping=head.softcap,
            **shape,
        )
        heads = cls(config)
        with torch.no_grad():
            # The target's own rows: at first every head predicts the next token.
            rows = head if token_map is None else head.of(token_map)
            for lm_head in heads.all_lm_heads:
                lm_head.weight.copy_(rows.weight)
                if rows.bias is not None:
                    lm_head.bias.copy_(rows.bias)
            if heads.token_map is not None and token_map is not None:
                heads.token_map.copy_(token_map)
        return heads

    @property
    def all_lm_heads(self) -> list[LMHead]:
        """The language-model heads: K of them, or one."""
        return [self.lm_head] if self.config.original_lm_head else list(self.lm_heads)  # type: ignore[arg-type]

    @property
    def maps(self) -> list[nn.Module]:
        """The linear maps in a forward of all heads; a shared language-model head is there K times."""
        return [*self.blocks, *(self.lm_head_of(index) for index in range(self.config.num_heads))]

    def lm_head_of(self, index: int) -> LMHead:
        """Return the language-model head of head `index`."""
        return self.all_lm_heads[0 if self.config.original_lm_head else index]

    def inside_lm_heads(self, states: Sequence[Tensor], function: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return `function(states)`, called inside of all language-model heads' nested forwards, with whole weights."""
        if self.config.original_lm_head:
            # One module: one forward is enough.
            return self.lm_head(*states, inside=lambda *states: function(states))  # type: ignore[operator]

        return self._nested(states, function, [])

    def _nested(self, states: Sequence[Tensor], function: Callable[..., Tensor], inner: list[Tensor]) -> Tensor:
        # No closure that calls itself: such a cycle would hold the states until Python's collector runs.
        if len(inner) == len(states):
            return function(inner)
        # Enter the next head's forward inside of this one, until all weights are whole.
        index = len(inner)
        inside = lambda state: self._nested(states, function, [*inner, state])  # noqa: E731
        return self.lm_head_of(index)(states[index], inside=inside)

    def head(self, index: int) -> OutputHead:
        """Return the map from head `index`'s block to logits over the heads' vocabulary, (D, H)."""
        lm_head, config = self.lm_head_of(index), self.config
        return OutputHead(lm_head.weight, lm_head.bias, config.logit_scale, config.final_logit_softcapping)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return logits over the target's vocabulary, (…, K, V); −∞ for tokens that heads cannot draft.

        `hidden`, (…, H), is the input of the target's head. Hydra heads need the `embeddings` of the next K tokens,
        (…, K, H).
        """
        return torch.stack([self.logits(i, hidden, embeddings) for i in range(self.config.num_heads)], dim=-2)

    def logits(self, index: int, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return one head's logits, (…, V); a Hydra head needs the embeddings of the tokens t + 1 … t + 1 + `index`."""
        projected = self.lm_head_of(index)(self.states(index, hidden, embeddings))
        return self.widened(self.head(index).finish(projected))

    def states(self, index: int, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return the inputs of head `index`'s language-model head, (…, H); arguments as in `logits`."""
        return self.blocks[index](hidden, self.block_embeddings(index, embeddings))

    def block_embeddings(self, index: int, embeddings: Tensor | None) -> Tensor | None:
        """Return the embeddings that block `index` sees, (…, (index + 1) · H); None for Medusa heads."""
        if not self.config.hydra:
            return None
        if embeddings is None:
            raise InputError("embeddings: expected those of the tokens before, which Hydra heads see, found none")
        return embeddings[..., : index + 1, :].flatten(-2)

    @property
    def tree(self) -> Tree:
        """The config's tree, or a chain of all heads."""
        choices = self.config.medusa_choices
        return Tree.chain(self.config.num_heads) if choices is None else Tree.from_choices(choices)
