"""Completions from an inference server: prompts go out as token ids, and token ids come back.

Text would have to be tokenized again, and what comes out need not be what the target wrote. So the server is asked for
the ids:

* `"return_token_ids": true` gives `choices[].token_ids` and `prompt_token_ids`: vLLM since 0.10.2 (its pull request
  22587) and SGLang (pull request 30917), both on `/v1/completions`;
* SGLang's native `/generate` gives `output_ids`, whatever its age; it is used where the URL ends with that name;
* of other servers the text is tokenized again: it is decoded once more and the tokens are counted.

Where ids, text and number of tokens of one answer disagree, the sample is one that may differ from what the target
wrote.

Both servers list the end-of-sequence token among the ids; where one does not, it is added.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.decode.errors import InputError
from draftsmith.train.data.prepare_config import PrepareConfig
from draftsmith.train.data.samples import Completion, Sample, ShardBatch
from draftsmith.train.endpoint.answers import ModelList, WholeCompletion, WholeGeneration, whole_ids
from draftsmith.train.endpoint.retries import RetryingServer
from draftsmith.train.endpoint.sampling import request_seed, sampling_fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedCompletion:
    """A completion in either dialect; None where the server does not say."""

    text: str | None
    finish_reason: str | None
    stop_id: int | None
    token_ids: list[int] | None
    prompt_ids: list[int] | None
    count: int | None


@dataclass(frozen=True)
class Vocabulary:
    """The target's token ids."""

    tokenizer: PreTrainedTokenizerBase
    """It makes ids of text."""
    tokens: int
    """Ids below this are tokens."""
    size: int
    """Ids below this can be sampled; those from `tokens` on pad the vocabulary."""
    ends: list[int]
    """These end a text."""


def served_model(config: PrepareConfig) -> str:
    """Return the name of the target on the server: the one that is configured, or the only one that is listed.

    Raises:
        InputError: the server cannot be asked, or lists none or several.
    """
    if config.endpoint_model is not None:
        return config.endpoint_model

    async def ask() -> ModelList:
        server = RetryingServer(config)
        async with server.client:
            return await server.call(ModelList, server.models, "a list of models")

    names = [model.id for model in asyncio.run(ask()).data]
    if len(names) != 1:
        raise InputError(
            f"endpoint_model: expected one model at {config.endpoint}, found {', '.join(names) or 'none'}; "
            "name the target with --endpoint_model"
        )
    return names[0]


def complete_remotely(
    config: PrepareConfig,
    model: str,
    vocabulary: Vocabulary,
    batches: Sequence[ShardBatch],
    finished: Callable[[ShardBatch, list[Completion]], None],
    ended: Callable[[int], None],
) -> None:
    """Complete batches of prompts on the server, as many at once as its `Window` allows, whatever batch they are of.

    Each prompt is sampled with another seed, mixed from the run's seed and its id, so that neither the order nor
    the batches matter; whether the server honours it is the server's business.

    Args:
        config: says which server, and how to sample.
        model: the target's name there.
        vocabulary: of the target.
        batches: the prompts.
        finished: is given a batch and its completions, in the prompts' order, as soon as all are there.
        ended: receives the number of tokens of each completion as it comes.

    Raises:
        InputError: the server refuses or fails; the first such error stops all requests.
    """

    async def run() -> None:
        begun: dict[int, dict[int, Completion]] = {}

        async def work(batch: ShardBatch, row: int) -> None:
            done = begun.setdefault(batch.index, {})
            completion = await target.complete(batch.samples[row])
            window.leave()
            ended(len(completion.ids))
            done[row] = completion
            if len(done) == len(batch.samples):
                finished(batch, [completion for _, completion in sorted(begun.pop(batch.index).items())])

        target = RemoteTarget(RetryingServer(config), model, vocabulary)
        window = target.server.window
        async with target.server.client, asyncio.TaskGroup() as group:
            for batch in batches:
                for row in range(len(batch.samples)):
                    await window.enter()
                    group.create_task(work(batch, row))

    try:
        asyncio.run(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@dataclass
class RemoteTarget:
    """The target on a server."""

    server: RetryingServer
    model: str
    vocabulary: Vocabulary
    warned: bool = False
    """That the server gives no ids."""

    async def complete(self, sample: Sample) -> Completion:
        """Complete one prompt."""
        name, url = f"prompt {sample.prompt.id!r}", self.server.url
        what, request = f"a completion of {name}", self.request(sample)
        if self.server.native:
            answer = native_answer(await self.server.call(WholeGeneration, self.server.completions, what, request))
        else:
            answer = openai_answer(await self.server.call(WholeCompletion, self.server.completions, what, request))
        if answer.text is None and answer.token_ids is None:
            raise InputError(f"endpoint: expected {what} from {url}, found neither a text nor token ids")
        most = self.server.config.new_tokens()
        if answer.finish_reason is None:
            answer = replace(answer, finish_reason=reason_of(answer.token_ids, most, self.vocabulary.ends))
        if answer.finish_reason not in {"stop", "length"}:
            found = f"finish_reason {answer.finish_reason!r}"
            raise InputError(f"endpoint: expected a completion of {name} from {url}, found {found}")
        if answer.prompt_ids is not None and answer.prompt_ids != sample.ids:
            raise InputError(
                f"endpoint: expected a completion of {name} after its {len(sample.ids)} tokens as sent, found that "
                f"{url} put it after {len(answer.prompt_ids)} others"
            )
        if answer.token_ids is not None and len(answer.token_ids) > most:
            found = f"{len(answer.token_ids)} from {url}"
            raise InputError(f"endpoint: expected at most {most} tokens for {name}, found {found}")
        if answer.token_ids is None and not self.warned:
            self.warned = True
            logger.warning("%s: gives no token ids, so its text is tokenized again", url)
        return settle(answer, sample.ids, self.vocabulary, name)

    def request(self, sample: Sample) -> dict[str, Any]:
        """Return the body that asks for one completion."""
        config = self.server.config
        temperature = config.temperature if sample.temperature is None else sample.temperature
        mixed = request_seed(config.seed, sample.prompt.id)
        seed = {"sampling_seed" if self.server.native else "seed": mixed} if temperature > 0 else {}
        sampling = sampling_fields(config, temperature) | {
            "stop_token_ids": self.vocabulary.ends,
            # for the text, should it come to that
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if self.server.native:
            sampling = {"max_new_tokens": config.max_new_tokens} | sampling | seed
            return {"input_ids": sample.ids, "sampling_params": sampling}
        asked = {"model": self.model, "prompt": sample.ids, "max_tokens": config.max_new_tokens}
        return asked | sampling | seed | {"return_token_ids": True}


def openai_answer(body: WholeCompletion) -> ServedCompletion:
    """Return what `/v1/completions` answers."""
    choice = body.choices[0]
    stopped_by = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
    count = None if body.usage is None else body.usage.completion_tokens
    ids = choice.token_ids
    return ServedCompletion(choice.text, choice.finish_reason, _id(stopped_by), ids, choice.prompt_token_ids, count)


def native_answer(body: WholeGeneration) -> ServedCompletion:
    """Return what SGLang's `/generate` answers."""
    about = body.meta_info
    ended = about.finish_reason
    return ServedCompletion(body.text, ended.type, _id(ended.matched), body.output_ids, None, about.completion_tokens)


def reason_of(ids: Sequence[int] | None, most: int, ends: Sequence[int]) -> str | None:
    """Return why a completion ended whose server does not say; None where its ids do not tell either.

    Args:
        ids: of the completion.
        most: tokens that were asked for.
        ends: ids that end a text.
    """
    if ids is None:
        return None
    if any(token in ends for token in ids):
        return "stop"
    return "length" if len(ids) >= most else None


def settle(answer: ServedCompletion, prompt_ids: list[int], vocabulary: Vocabulary, what: str) -> Completion:
    """Turn an answer into what `generate` would have returned: ids that end with the first end-of-sequence token.

    Raises:
        InputError: names the prompt (`what`) whose completion has an id that the target does not, or no tokens.
    """
    tokenizer, ends = vocabulary.tokenizer, vocabulary.ends
    ids, reason, uncertain = answer.token_ids, answer.finish_reason or "", False
    if ids is not None:
        uncertain = not whole_ids(ids, answer.count, reason) or not spells(ids, answer.text, prompt_ids, tokenizer)
    else:
        text = answer.text or ""
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        before, together = str(tokenizer.decode(prompt_ids)), str(tokenizer.decode(prompt_ids + ids))
        uncertain = "\ufffd" in text  # which hides what was written
        uncertain |= together != before + text  # with the prompt: some tokenizers treat a first word otherwise
    first = next((i for i, token in enumerate(ids) if token in ends), None)
    if first is not None:
        ids, reason = ids[: first + 1], "stop"
    elif reason == "stop" and ends and ids[-1:] != [tokenizer.eos_token_id]:
        # Where a server names none, it is the tokenizer's: vLLM names only the others.
        usual = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
        ids = [*ids, answer.stop_id if answer.stop_id in ends else usual]
        uncertain |= answer.stop_id not in ends and len(ends) > 1
    if answer.token_ids is None and answer.count is not None:
        uncertain |= len(ids) != answer.count
    if not ids:
        raise InputError(f"endpoint: expected at least one token for {what}, found none")
    if answer.token_ids is not None and not 0 <= min(ids) <= max(ids) < vocabulary.size:
        raise InputError(
            f"endpoint: expected ids below {vocabulary.size} for {what}, found {max(ids)}: does the server run another "
            "model than --target?"
        )
    # Text may spell a token that the tokenizer has and the model lacks: that the target wrote in pieces.
    padding = next((i for i, token in enumerate(ids) if token >= vocabulary.tokens), None)
    if padding is not None:
        return Completion(ids[:padding], "length", uncertain, padded=True)
    return Completion(ids, reason, uncertain)


def spells(ids: list[int], text: str | None, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether ids spell the text that the server gave with them; True where it gave none.

    Servers may leave out special tokens, the token that ended the text, spaces at either end, and the half of a
    character.
    """
    wanted = (text or "").strip().rstrip("\ufffd")
    for written in (ids, ids[:-1]):
        for skips in (False, True):
            alone, before, together = (
                partial(tokenizer.decode, of, skip_special_tokens=skips)
                for of in (written, prompt_ids, prompt_ids + written)
            )
            if wanted == str(alone()).strip().rstrip("\ufffd"):  # prompts are long, and seldom needed
                return True
            if wanted == str(together()).removeprefix(str(before())).strip().rstrip("\ufffd"):
                return True
    return not wanted


def _id(value: Any) -> int | None:
    """Return a token's id; None of a text that ended the completion."""
    return value if type(value) is int else None
