"""Parallel drafts: a causal LM that drafts K tokens in one forward (PARD, An et al. 2025, arXiv 2504.18583).

Behind a text stand K − 1 mask tokens, all the same token. The logits of the text's last token are those of the first
drafted token, as in any causal LM, and those of mask j are of drafted token j + 1. So the same weights also draft one
token at a time.

Many drafts can be computed in one forward, each behind another prefix of the same text: a mask sees the text up to its
anchor, the last token that its draft knows, and the masks of the same draft before it. Shape suffixes: B rows, L
entries of a row, tokens of the text and masks in any order.
"""

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.draft_models.searched_tree import searched_tree
from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree

MASK_TOKEN = "pard_token"
"""The key of a parallel draft's config that names its mask token; vLLM reads it."""
LENGTH = "parallel_length"
"""The key that says how many tokens K the draft was trained to propose in one forward."""
TREE = "parallel_tree"
"""The key that holds the tree that was searched for it, as choices: see `Tree.from_choices`."""


def is_parallel(config: PretrainedConfig) -> bool:
    """Whether a model's config says that it drafts in parallel: it names a mask token."""
    return getattr(config.get_text_config(), MASK_TOKEN, None) is not None


def length_of(config: PretrainedConfig) -> int | None:
    """Return how many tokens a parallel draft was trained to propose in one forward; None where it does not say.

    Raises:
        InputError: the config says something else than a number of tokens.
    """
    length = getattr(config.get_text_config(), LENGTH, None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise InputError(f"parallel draft: expected {LENGTH} of at least 1 in the config, found {length}")
    return length


def tree_of(config: PretrainedConfig) -> Tree | None:
    """Return the tree that was searched for a parallel draft; None where its config has none, and it drafts chains.

    Raises:
        InputError: the config says something else than a tree, or one deeper than the draft was trained for.
    """
    tree = searched_tree(config, TREE)
    if tree is not None:
        check_depth(tree, config)
    return tree


def check_depth(tree: Tree, config: PretrainedConfig) -> None:
    """Raise an InputError for a tree that is deeper than a parallel draft was trained for."""
    longest = length_of(config)
    if longest is not None and tree.depth > longest:
        raise InputError(f"tree: expected a depth of at most the draft's {LENGTH} {longest}, found {tree.depth}")


def mask_token_of(model: PreTrainedModel) -> int:
    """Return a parallel draft's mask token.

    Raises:
        InputError: the model's config names none, so it is no parallel draft, or one outside its vocabulary.
    """
    config = model.config.get_text_config()
    token = getattr(config, MASK_TOKEN, None)
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise InputError(
            f"parallel draft: expected {MASK_TOKEN} in the config, a token below {config.vocab_size}, found {token}"
        )
    return token


def mask_tokens(config: PretrainedConfig) -> list[int]:
    """Return the mask token of a draft's config, as a list; an empty one where the draft is a plain one."""
    token = getattr(config.get_text_config(), MASK_TOKEN, None)
    return [] if token is None else [token]


def visible_entries(
    positions_BL: Tensor, anchors_BL: Tensor, texts_BL: Tensor | None = None, last: int | None = None
) -> Tensor:
    """Say which entries of a row each entry attends to, (B, L, L) bool: queries, then keys.

    Args:
        positions_BL: the position of each entry in its text, int64; of mask j behind anchor a, a + j.
        anchors_BL: the position of the last token of the text that an entry sees: its own of a token of the text, and
            less than its position of a mask.
        texts_BL: which text each entry belongs to, where a row has several.
        last: only the last `last` entries are queries, (B, last, L): those before are cached.
    """
    queries = slice(0 if last is None else positions_BL.shape[1] - last, None)
    is_text_BL = anchors_BL == positions_BL
    of_positions, of_anchors = positions_BL[:, queries, None], anchors_BL[:, queries, None]
    of_text = is_text_BL[:, None, :] & (positions_BL[:, None, :] <= of_anchors)
    same_draft = ~is_text_BL[:, None, :] & ~is_text_BL[:, queries, None] & (anchors_BL[:, None, :] == of_anchors)
    visible = of_text | (same_draft & (positions_BL[:, None, :] <= of_positions))
    if texts_BL is not None:
        visible &= texts_BL[:, None, :] == texts_BL[:, queries, None]
    return visible


def unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return a token that texts do not contain, to serve as mask.

    It is the first row of a padded vocabulary, or else the last special token that is none of the tokenizer's named
    ones but padding (bos, eos, …) and does not stand in its chat template.

    Raises:
        InputError: there is none; says which option names one.
    """
    beyond = max(tokenizer.get_vocab().values()) + 1
    if beyond < vocab_size:
        return beyond
    unused = [token for token in _unused_added(tokenizer) if token < vocab_size]
    if unused:
        return max(unused)
    raise InputError(
        "parallel_mask_token: expected a token that no text contains, found no unused special token in the tokenizer: "
        "name one"
    )


def is_unused(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether texts do not contain a token, as far as the tokenizer can say: see `unused_token`."""
    return token > max(tokenizer.get_vocab().values()) or token in _unused_added(tokenizer)


def _unused_added(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # What pads may have a role in texts besides: it is often the end of sequence.
    roles = [name for role, name in tokenizer.special_tokens_map.items() if role != "pad_token"]
    named = set(tokenizer.all_special_ids)
    if tokenizer.pad_token not in roles:
        named.discard(tokenizer.pad_token_id)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    # Tokenizers make these properties anew each time that they are asked.
    added = tokenizer.added_tokens_decoder.items()
    return [n for n, entry in added if entry.special and n not in named and entry.content not in template]
