"""Answers of vLLM and SGLang, as far as they are read: the fields of OpenAI's API and of SGLang's `/generate`."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from draftsmith.decode.validation import MOST, Count, Said, TokenId

Limit = Annotated[int, Field(ge=-1, le=MOST), AfterValidator(lambda limit: limit if limit > 0 else None)]
"""A limit of at least 1, or None; some servers say 0 or −1 for none."""


def _joined(content: Any) -> Any:
    """Return one text of a content that comes in parts, as Mistral's models send it; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


class ModelCard(Said):
    """One model of `/v1/models`."""

    id: str
    max_model_len: Limit | None = None


class ModelList(Said):
    """The answer of `/v1/models`."""

    data: list[ModelCard]


class Delta(Said):
    """A part of a chat's message."""

    content: Annotated[str | None, BeforeValidator(_joined)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer vLLM's word for it."""

    @property
    def text(self) -> str:
        """Its text: the thinking, by either name, and then the answer; a part of several tokens may have both."""
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class Choice(Said):
    """An answer's text, or a part of it; there is never more than one."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM's: the token or text that ended it."""
    matched_stop: Any = None
    """SGLang's word for it."""


class Usage(Said):
    """Tokens as the server counts them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Drafted(Said):
    """vLLM's counts of one answer."""

    acceptance_histogram: Annotated[list[Count], Field(min_length=1)]
    num_draft_tokens: Count


class AnswerMetrics(Said):
    """vLLM's `metrics` of one answer."""

    speculative_decoding: Drafted | None = None


class StreamPart(Said):
    """A part of a completion or a chat, as it streams in."""

    error: Any = None
    choices: Sequence[Choice] | None = None
    prompt_token_ids: list[TokenId] | None = None
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


class WholeCompletion(StreamPart):
    """A completion in one piece."""

    choices: Annotated[Sequence[Choice], Field(min_length=1)]


class FinishReason(Said):
    """Why a text of SGLang's `/generate` ended."""

    type: str
    message: str | None = None
    matched: Any = None
    """The token or text that ended it."""


class Meta(Said):
    """SGLang's `meta_info`; what it calls its counts changed in 2026."""

    completion_tokens: Count
    prompt_tokens: Count | None = None
    finish_reason: FinishReason | None = None
    spec_verify_ct: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_num_correct_drafts: Count | None = None
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_draft_token_num: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_accept_histogram: list[Count] | None = None


class Generated(Said):
    """A part of an answer of SGLang's `/generate`."""

    error: Any = None
    text: str = ""
    output_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    meta_info: Meta | None = None


class WholeMeta(Meta):
    """SGLang's `meta_info` of an answer that has ended."""

    finish_reason: FinishReason


class WholeGeneration(Generated):
    """An answer of SGLang's `/generate` in one piece."""

    text: str
    meta_info: WholeMeta


def whole_ids(ids: Sequence[int] | None, count: int | None, finish_reason: str | None) -> bool:
    """Return whether ids are as many as the server's usage counts, where both are known; the end may be left out."""
    return ids is None or count is None or len(ids) == count or (finish_reason == "stop" and len(ids) == count - 1)
