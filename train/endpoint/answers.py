"""The fields that are read of servers' answers, in OpenAI's API, SGLang's `/generate` and llama.cpp's `/completion`."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from draftsmith.decode.measurement.server_counts import ServerCounts
from draftsmith.decode.validation import MOST, Count, ServerMessage, TokenId

Limit = Annotated[int, Field(ge=-1, le=MOST), AfterValidator(lambda limit: limit if limit > 0 else None)]
"""A limit of at least 1, or None; some servers give 0 or −1 for no limit."""
COUNTED = (
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_accept_histogram"),
)
"""SGLang's fields for drafted and accepted tokens and for steps by accepted tokens: since 2026, and before."""


def _joined(content: Any) -> Any:
    """Join a content that comes in parts, as Mistral's models send it; return anything else unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


class ModelCard(ServerMessage):
    """One model of `/v1/models`."""

    id: str
    max_model_len: Limit | None = None


class ModelList(ServerMessage):
    """An answer of `/v1/models`."""

    data: list[ModelCard]


class Delta(ServerMessage):
    """A part of a chat's message."""

    content: Annotated[str | None, BeforeValidator(_joined)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same in newer versions of vLLM
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """The reasoning, by either name, followed by the answer; a part of several tokens may have both."""
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class Choice(ServerMessage):
    """An answer's text, or a part of it; a request has only one choice."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # in vLLM, the token or text that ended it
    matched_stop: Any = None  # the same in SGLang


class Usage(ServerMessage):
    """The server's counts of tokens."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Drafted(ServerMessage):
    """vLLM's counts of drafted tokens in one answer."""

    acceptance_histogram: Annotated[list[Count], Field(min_length=1)]
    num_draft_tokens: Count


class AnswerMetrics(ServerMessage):
    """vLLM's `metrics` of one answer."""

    speculative_decoding: Drafted | None = None


class Verified(ServerMessage):
    """SGLang's counts of drafts in one answer; they were renamed in 2026."""

    spec_verify_ct: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_num_correct_drafts: Count | None = None
    spec_correct_drafts_histogram: list[Count] | None = None
    spec_draft_token_num: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_accept_histogram: list[Count] | None = None

    def counts(self) -> ServerCounts | None:
        """Return the counts of one answer; None without speculation."""
        for names in COUNTED:
            drafted, accepted, steps = (getattr(self, name) for name in names)
            if drafted is not None and self.spec_verify_ct:
                if steps and sum(steps) == self.spec_verify_ct:
                    return ServerCounts.of_histogram(steps, drafted)
                return ServerCounts(self.spec_verify_ct, drafted, accepted or 0, ())
        return None


class Extension(ServerMessage):
    """SGLang's own part of an answer in OpenAI's API, a part without choices (0.5.19 and later)."""

    spec_tokens_details: Verified | None = None


class StreamPart(ServerMessage):
    """A streamed part of a completion or a chat."""

    error: Any = None
    choices: Sequence[Choice] | None = None
    prompt_token_ids: list[TokenId] | None = None
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None
    sglext: Extension | None = None


class WholeCompletion(StreamPart):
    """A completion in one piece."""

    choices: Annotated[Sequence[Choice], Field(min_length=1)]


class FinishReason(ServerMessage):
    """The reason why a text of SGLang's `/generate` ended, and the token or text that it `matched`."""

    type: str
    message: str | None = None
    matched: Any = None


class Meta(Verified):
    """SGLang's `meta_info`."""

    completion_tokens: Count
    prompt_tokens: Count | None = None
    finish_reason: FinishReason | None = None


class Generated(ServerMessage):
    """A part of an answer of SGLang's `/generate`."""

    error: Any = None
    text: str = ""
    output_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    meta_info: Meta | None = None


class Written(ServerMessage):
    """A part of an answer of llama.cpp's `/completion`; the last one has the reason why it ended, and no token."""

    error: Any = None
    content: str = ""
    tokens: list[TokenId] = Field(default_factory=list)
    stop_type: str | None = None
    tokens_predicted: Count | None = None
    tokens_evaluated: Count | None = None


def whole_ids(ids: Sequence[int] | None, count: int | None, finish_reason: str | None) -> bool:
    """Return whether the number of ids agrees with the server's count, if known; the end token may be missing."""
    return ids is None or count is None or len(ids) == count or (finish_reason == "stop" and len(ids) == count - 1)
