"""Conversations on their way into a chat template: what they begin with, and what is cut of those that are too long."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.checkpoint import reading


def for_template(
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    system_prompt: str | None,
    variables: Mapping[str, Any],
) -> list[dict[str, str]]:
    """Return a conversation that begins with the system prompt, if there is one and it has no system turn.

    Args:
        messages: the conversation.
        tokenizer: with a chat template.
        name: what the conversation is called in error messages.
        system_prompt: the text of the system's turn.
        variables: what the template will be told besides.

    Raises:
        InputError: a variable that does not occur in the template, which would be passed over without a word.
    """
    with reading(name, "messages that the chat template renders"):
        template = tokenizer.get_chat_template() if variables else ""
    if unknown := [variable for variable in variables if variable not in template]:
        raise InputError(
            f"chat_template_kwargs: expected variables of the target's chat template, found {unknown[0]!r}"
        )
    return with_system_prompt(messages, system_prompt)


def with_system_prompt(messages: Sequence[Mapping[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    """Return a conversation that begins with the system prompt, if there is one and it has no system turn."""
    begun = system_prompt is None or any(message["role"] == "system" for message in messages)
    first = [] if begun else [{"role": "system", "content": str(system_prompt)}]
    return [*first, *(dict(message) for message in messages)]


def require_no_template(found: str, system_prompt: str | None, variables: Mapping[str, Any]) -> None:
    """Require that nothing is meant for a chat template where there is none to read it.

    Raises:
        InputError: a system prompt or variables.
    """
    for field, given in (("system_prompt", system_prompt), ("chat_template_kwargs", variables)):
        if given:
            raise InputError(f"{field}: expected conversations and a chat template that they go into, found {found}")


def trimmed(
    messages: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    most: int,
    render: Callable[[Sequence[Mapping[str, str]]], list[int]],
) -> list[int]:
    """Return the tokens of a conversation, of which the users' text is left out, the oldest first, until they are few.

    What is cut of a text is found by its own tokens, then mended: next to other text they may be joined otherwise.
    """
    while len(ids := render(messages)) > most:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        first, content = users[0], messages[users[0]]["content"]
        starts, cut = _token_starts(content, tokenizer), 0
        while (over := len(ids) - most) > 0 and cut + over < len(starts):
            cut += over
            shorter = {"role": "user", "content": content[starts[cut] :]}
            ids = render([*messages[:first], shorter, *messages[first + 1 :]])
        if over <= 0:
            return ids
        if len(users) == 1:
            needed = len(ids) - len(starts) + cut + 1
            raise InputError(f"max_prompt_tokens: expected at least {needed} for the template of {name}, found {most}")
        del messages[first : users[1]]
    return ids


def _token_starts(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return where in a text its tokens begin; every character where a tokenizer does not say."""
    if not tokenizer.is_fast:
        return list(range(len(text)))
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]
