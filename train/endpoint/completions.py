"""Completions from an inference server: prompts go out as token ids, and token ids come back.

Text would have to be tokenized again, and might give other ids than the target wrote. So the server is asked for ids:

* `"return_token_ids": true` gives `choices[].token_ids` and `prompt_token_ids` on `/v1/completions`: vLLM since 0.10.2
  (its pull request 22587) and SGLang (pull request 30917);
* of other servers the text is tokenized again, decoded once more, and its tokens are counted.

If the ids, text and number of tokens of an answer disagree, the sample counts as uncertain. Both servers list the
end-of-sequence token among the ids; if a server does not, it is added.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.data.samples import Completion, Sample, ShardBatch
from draftsmith.train.endpoint.answers import whole_ids
from draftsmith.train.endpoint.client import SentPrompt, ServedCompletion, completion_request, request_seed
from draftsmith.train.endpoint.retries import RetryingClient, ask_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """The target's token ids: those below `tokens` are tokens, those below `size` can be sampled, `ends` end a text."""

    tokenizer: PreTrainedTokenizerBase
    tokens: int
    size: int
    ends: list[int]


def served_model(config: PrepareConfig) -> str:
    """Return the target's name on the server: the configured one, or the only one listed."""
    if config.endpoint_model is not None:
        return config.endpoint_model

    async def ask() -> str:
        async with RetryingClient(config) as server:
            return await server.model()

    return asyncio.run(ask())


def complete_remotely(
    config: PrepareConfig,
    model: str,
    vocabulary: Vocabulary,
    batches: Sequence[ShardBatch],
    on_batch: Callable[[ShardBatch, list[Completion]], None],
    on_completion: Callable[[int], None],
) -> None:
    """Complete batches of prompts on the server, across batches, with as many requests as its `Window` allows.

    Each prompt has a seed of its own, mixed from the run's seed and its id, so that order and batches do not matter, if
    the server honours seeds. `on_batch` gets a batch with its completions, in the prompts' order, as soon as all are
    there. `on_completion` gets each completion's number of tokens. The first InputError stops all requests.
    """
    begun: dict[int, dict[int, Completion]] = {}

    async def run() -> None:
        async with RetryingClient(config) as server:
            target = RemoteTarget(server, model, vocabulary)

            async def complete(place: tuple[ShardBatch, int]) -> None:
                batch, row = place
                done = begun.setdefault(batch.index, {})
                completion = await target.complete(batch.samples[row])
                on_completion(len(completion.ids))
                done[row] = completion
                if len(done) == len(batch.samples):
                    on_batch(batch, [completion for _, completion in sorted(begun.pop(batch.index).items())])

            places = ((batch, row) for batch in batches for row in range(len(batch.samples)))
            await ask_all(places, complete, server.window)

    asyncio.run(run())


@dataclass
class RemoteTarget:
    """The target on a server; `warned` is set once the user knows that the server gives no ids."""

    server: RetryingClient
    model: str
    vocabulary: Vocabulary
    warned: bool = False

    async def complete(self, sample: Sample) -> Completion:
        """Complete one prompt."""
        config, url, name = self.server.config, self.server.url, f"prompt {sample.prompt.id!r}"
        temperature = config.temperature if sample.temperature is None else sample.temperature
        prompt, seed = SentPrompt(sample.prompt, sample.ids), request_seed(config.seed, sample.prompt.id)
        sent = prompt, self.model, config, temperature, config.max_new_tokens, seed
        # Text with its special tokens, as they were written, in case it must be tokenized again.
        whole: dict[str, Any] = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        body, path = completion_request(*sent, stop_token_ids=self.vocabulary.ends, **whole)
        what = f"a completion of {name}"
        answer = await self.server.complete_whole(body, path, what)
        if answer.text is None and answer.token_ids is None:
            raise InputError(f"endpoint: expected {what} from {url}, found neither a text nor token ids")
        most = config.new_tokens()
        if answer.finish_reason not in {"stop", "length"}:
            problem = f"finish_reason {answer.finish_reason!r}"
            raise InputError(f"endpoint: expected {what} from {url}, found {problem}")
        if answer.prompt_ids is not None and answer.prompt_ids != sample.ids:
            raise InputError(
                f"endpoint: expected {what} after its {len(sample.ids)} tokens as sent, found that "
                f"{url} put it after {len(answer.prompt_ids)} others"
            )
        if answer.token_ids is not None and len(answer.token_ids) > most:
            problem = f"{len(answer.token_ids)} from {url}"
            raise InputError(f"endpoint: expected at most {most} tokens for {name}, found {problem}")
        if answer.token_ids is None and not self.warned:
            self.warned = True
            logger.warning("%s: gives no token ids, so its text is tokenized again", url)
        return to_completion(answer, sample.ids, self.vocabulary, name)


def to_completion(answer: ServedCompletion, prompt_ids: list[int], vocabulary: Vocabulary, what: str) -> Completion:
    """Return an answer as `generate` would have: ids that end with the first end-of-sequence token."""
    tokenizer, ends = vocabulary.tokenizer, vocabulary.ends
    ids, reason, count = answer.token_ids, answer.finish_reason or "", answer.completion_tokens
    if ids is not None:
        uncertain = not whole_ids(ids, count, reason) or not spells(ids, answer.text, prompt_ids, tokenizer)
    else:
        text = answer.text or ""
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        before, together = str(tokenizer.decode(prompt_ids)), str(tokenizer.decode(prompt_ids + ids))
        uncertain = "\ufffd" in text  # it hides what the target wrote
        uncertain |= together != before + text  # compared with the prompt: some tokenizers change a first word
    first = next((i for i, token in enumerate(ids) if token in ends), None)
    if first is not None:
        ids, reason = ids[: first + 1], "stop"
    elif answer.stop not in (None, tokenizer.eos_token_id, *ends):
        reason = "length"  # a stop of the server's own is no end, and if it is a token the target wrote it
        ids = [*ids, answer.stop] if isinstance(answer.stop, int) and ids[-1:] != [answer.stop] else ids
    elif reason == "stop" and ends and ids[-1:] != [tokenizer.eos_token_id]:
        # A server that names no token means the tokenizer's: vLLM names only other ones.
        usual = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
        ids = [*ids, answer.stop if isinstance(answer.stop, int) and answer.stop in ends else usual]
        uncertain |= answer.stop not in ends and len(ends) > 1
    if answer.token_ids is None and count is not None:
        uncertain |= len(ids) != count
    if not ids:
        raise InputError(f"endpoint: expected at least one token for {what}, found none")
    if answer.token_ids is not None and not 0 <= min(ids) <= max(ids) < vocabulary.size:
        raise InputError(
            f"endpoint: expected ids below {vocabulary.size} for {what}, found {max(ids)}: does the server run another "
            "model than --target?"
        )
    # Text may spell a token that the tokenizer has and the model lacks; then the target wrote it in pieces.
    padding = next((i for i, token in enumerate(ids) if token >= vocabulary.tokens), None)
    if padding is not None:
        return Completion(ids[:padding], "length", uncertain, padded=True)
    return Completion(ids, reason, uncertain)


def spells(ids: list[int], text: str | None, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether ids spell the text that the server gave with them, or it gave none.

    Servers may omit special tokens, the token that ended the text, spaces at either end, and half a character.
    """
    expected = (text or "").strip().rstrip("\ufffd")
    for written in (ids, ids[:-1]):
        for skips in (False, True):
            alone, before, together = (
                partial(tokenizer.decode, part, skip_special_tokens=skips)
                for part in (written, prompt_ids, prompt_ids + written)
            )
            if expected == str(alone()).strip().rstrip("\ufffd"):  # without the long prompt, which is seldom needed
                return True
            if expected == str(together()).removeprefix(str(before())).strip().rstrip("\ufffd"):
                return True
    return not expected
