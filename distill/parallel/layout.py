"""Parallel drafts: a causal LM that drafts K tokens in one forward (PARD, An et al. 2025, arXiv 2504.18583).

K − 1 equal mask tokens follow a text. As in any causal LM, the logits at the text's last token are those of the first
drafted token; the logits at mask j are those of drafted token j + 1. So the same weights also draft token by token.

One forward can compute many drafts, each after another prefix of the text: a mask sees the text up to its anchor, the
last token that its draft knows, and the earlier masks of the same draft. Shape suffixes: B rows, L entries of a row,
tokens of the text and masks in any order.
"""

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import follows_one_path
from draftsmith.decode.errors import InputError
from draftsmith.decode.tree import Tree, searched_tree

MASK_TOKEN = "pard_token"  # the config key of the mask token; vLLM reads it
LENGTH = "parallel_length"
"""The config key of K, the number of tokens that the draft was trained to propose in one forward."""
TREE = "parallel_tree"  # the config key of the tree that was searched for the draft: see `Tree.from_choices`


def length_of(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a parallel draft was trained to propose; None if its config has none."""
    length = getattr(config.get_text_config(), LENGTH, None)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise InputError(f"parallel draft: expected {LENGTH} of at least 1 in the config, found {length}")
    return length


def tree_of(config: PretrainedConfig) -> Tree | None:
    """Return the tree that was searched for a parallel draft; None if its config has none."""
    tree = searched_tree(config, TREE)
    if tree is not None:
        check_depth(tree, config)
    return tree


def check_depth(tree: Tree, config: PretrainedConfig) -> None:
    """Raise an InputError for a tree that is deeper than the trained length."""
    longest = length_of(config)
    if longest is not None and tree.depth > longest:
        raise InputError(f"tree: expected a depth of at most the draft's {LENGTH} {longest}, found {tree.depth}")


def mask_token_of(model: PreTrainedModel) -> int:
    """Return a parallel draft's mask token, or raise an InputError without one, or if masks would change the text."""
    if follows_one_path(model.config):
        raise InputError(
            f"parallel draft: expected layers with attention alone, found {type(model).__name__}, whose layers no mask "
            "parts"
        )
    config = model.config.get_text_config()
    token = getattr(config, MASK_TOKEN, None)
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise InputError(
            f"parallel draft: expected {MASK_TOKEN} in the config, a token below {config.vocab_size}, found {token}"
        )
    return token


def mask_tokens(config: PretrainedConfig) -> list[int]:
    """Return the mask token of a draft's config as a list, which is empty for a plain draft."""
    token = getattr(config.get_text_config(), MASK_TOKEN, None)
    return [] if token is None else [token]


def visible_entries(
    positions_BL: Tensor, anchors_BL: Tensor, texts_BL: Tensor | None = None, last: int | None = None
) -> Tensor:
    """Return the mask of the entries to which each entry of a row attends, (B, L, L) bool: queries, then keys.

    Mask j of anchor a has position a + j. `anchors_BL` are the positions of the last token of the text that an entry
    sees: a token's own position, and a mask's anchor. `texts_BL` are the entries' texts, if a row has several. With
    `last`, only that number of last entries are queries, (B, last, L).
    """
    queries = slice(0 if last is None else positions_BL.shape[1] - last, None)
    is_text_BL = anchors_BL == positions_BL
    query_positions, query_anchors = positions_BL[:, queries, None], anchors_BL[:, queries, None]
    sees_text = is_text_BL[:, None, :] & (positions_BL[:, None, :] <= query_anchors)
    # Masks with one anchor are one draft.
    same_draft = ~is_text_BL[:, None, :] & ~is_text_BL[:, queries, None] & (anchors_BL[:, None, :] == query_anchors)
    visible = sees_text | (same_draft & (positions_BL[:, None, :] <= query_positions))
    if texts_BL is not None:
        visible &= texts_BL[:, None, :] == texts_BL[:, queries, None]
    return visible


def unused_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return a token that texts do not contain, to serve as mask.

    It is the first row beyond the tokenizer, or else the last special token that has no role but padding and does not
    occur in the chat template. If there is no such token, the InputError names the option that sets one.
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


def _unused_added(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # The padding token may have a second role in texts: it is often the end of sequence.
    roles = [name for role, name in tokenizer.special_tokens_map.items() if role != "pad_token"]
    with_role = set(tokenizer.all_special_ids)
    if tokenizer.pad_token not in roles:
        with_role.discard(tokenizer.pad_token_id)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    # Read once: tokenizers rebuild this property on each access.
    added = tokenizer.added_tokens_decoder.items()
    return [n for n, entry in added if entry.special and n not in with_role and entry.content not in template]
