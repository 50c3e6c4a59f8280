"""What servers of OpenAI's API say, as far as it is read: vLLM's and SGLang's words, `draftsmith.decode.validation`."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from draftsmith.decode.validation import Count, Said, TokenId


class ModelCard(Said):
    """One model of `/v1/models`."""

    id: str
    max_model_len: Annotated[Count, Field(ge=1)] | None = None


class ModelList(Said):
    """What `/v1/models` answers."""

    data: list[ModelCard]


class Delta(Said):
    """What a part of a chat adds."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(Said):
    """One of a part's texts; there is never more than one."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None


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


class Part(Said):
    """A part of a completion or a chat, as it streams in."""

    error: Any = None
    choices: Sequence[Choice] = ()
    prompt_token_ids: list[TokenId] | None = None
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


class FinishReason(Said):
    """Why a text of SGLang's `/generate` ended."""

    type: str
    message: str | None = None


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


class ServerInfo(Said):
    """What SGLang's `/server_info` says; that it has `internal_states` tells it from other servers."""

    internal_states: Any = None
    version: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: Annotated[Count, Field(ge=1)] | None = None
    speculative_num_steps: Count | None = None
    speculative_eagle_topk: Count | None = None


class Version(Said):
    """What vLLM's `/version` says."""

    version: str | None = None
