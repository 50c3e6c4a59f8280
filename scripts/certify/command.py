"""`draftsmith certify`: texts of a server under test, compared with what its target would write."""

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm

from draftsmith.decode.errors import InputError
from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.decode.measurement.power import detectable
from draftsmith.scripts.certify.asking import Kept, Question, Request, ask, stages
from draftsmith.scripts.certify.config import CertifyConfig
from draftsmith.scripts.certify.judging import Law, judge_greedy, judge_law
from draftsmith.scripts.pair import DrafterSpec, Pair, load_pair
from draftsmith.scripts.serving.client import Client, ServerFailure
from draftsmith.scripts.serving.counters import ServerCounters
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.decoding import end_of_sequence_ids
from draftsmith.train.data.prompts import encode_prompt, read_prompts
from draftsmith.train.data.shards import settle_manifest
from draftsmith.train.files import remove, require_writable
from draftsmith.train.job.lock import locked
from draftsmith.train.models import identity, load_tokenizer
from draftsmith.train.provenance import environment, git_sha, write_json

SCHEMA, KEPT_SCHEMA = "draftsmith.certificate/1", "draftsmith.certify/1"
SERVERS = ("server", "plain_server")
"""Fields that name a server."""
CERTIFICATE, KEPT = "certificate.json", ".unfinished"
ELSEWHERE = ("output", "target", "draft", "prompts", "timeout", "threads", "trust_remote_code", "false_alarm")
"""Settings that shape no text, or say where something lies that is compared itself."""
HALF, LOW = ("bfloat16", "float16"), 0.3


def certify(config: CertifyConfig, console: Console, progress: bool = True) -> dict[str, Any]:
    """Ask, compare, write `certificate.json`, and return what it holds.

    Raises:
        InputError: models, prompts or settings that cannot be used, or a server that refuses them.
        ServerFailure: a server that fails; what it has answered is kept, and the same call goes on from there.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    output = require_writable(config.output, CERTIFICATE)
    questions = _questions(config)
    pair = _load(config)
    with locked(output):
        report = _report(config, console, progress, questions, pair, output / KEPT)
        write_json(output / CERTIFICATE, report)
        remove(output / KEPT)
    return report


def _report(
    config: CertifyConfig,
    console: Console,
    progress: bool,
    questions: list[Question],
    pair: Pair | None,
    directory: Path,
) -> dict[str, Any]:
    ends = [] if pair is None else end_of_sequence_ids(pair.target.generation_config, pair.tokenizer)
    models = asyncio.run(_models(config))
    if not any(path.stat().st_size for path in directory.glob("*.jsonl")):
        remove(directory)  # nothing is kept of a run that failed at once: it may be begun otherwise
    settle_manifest(directory, _manifest(config, questions, models))
    asked = stages(config, len(questions))
    _announce(config, console, len(questions), pair)
    servers: dict[str, Any] = {}
    found = _ask(config, "server", models, questions, asked, ends, directory, progress, servers)
    # With the target here, sampled texts are judged by it, and T=0 alone is compared.
    wanted = [[request for request in stage if pair is None or request.temperature == 0] for stage in asked]
    plain = None
    if config.plain_server is not None:
        plain = _ask(config, "plain_server", models, questions, wanted, ends, directory, progress, servers)
    greedy, laws = None, []
    for temperature in config.temperature:
        reference = None if plain is None else plain.of(temperature)
        texts = found.of(temperature)
        if temperature == 0:
            greedy = judge_greedy(config, pair, questions, texts, reference)
            _show_greedy(console, greedy, len(questions))
        else:
            laws.append(judge_law(config, pair, questions, temperature, texts, reference, ends))
            _show_law(console, laws[-1])
    passed = (greedy is None or bool(greedy.passed)) and all(law.passed for law in laws)
    drafted = servers["server"]["counters"]
    if drafted is not None and not drafted["num_drafts"]:
        _say(console, "note: the server drafted nothing meanwhile: this is of its plain decoding")
    _say(console, "lossless, as far as tested" if passed else "not lossless")
    return {
        "schema": SCHEMA,
        "passed": passed,
        "servers": servers,
        "false_alarm": config.false_alarm,
        "greedy": None if greedy is None else asdict(greedy) | {"prompts": len(questions)},
        "sampled": [asdict(law) | {"passed": law.passed, "finds": _finds(config, law.tokens, pair)} for law in laws],
        "settings": asdict(config),
        "target": None if config.target is None else {"path": config.target} | _identity(config, config.target),
        "environment": None if pair is None else environment(pair.target.device, pair.dtype),
        "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
    }


def _questions(config: CertifyConfig) -> list[Question]:
    prompts = read_prompts(config.prompts, limit=config.limit)
    if config.target is None:
        return [Question(prompt, None) for prompt in prompts]
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    return [Question(prompt, encode_prompt(prompt, tokenizer, **config.encoding)) for prompt in prompts]


def _load(config: CertifyConfig) -> Pair | None:
    if config.target is None:
        return None
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    specs = [] if config.draft is None else [DrafterSpec("draft", config.draft)]
    return load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code)


def _ask(
    config: CertifyConfig,
    name: str,
    models: dict[str, str],
    questions: list[Question],
    asked: Sequence[Sequence[Request]],
    ends: list[int],
    directory: Path,
    progress: bool,
    servers: dict[str, Any],
) -> Kept:
    """Ask one of the two servers for all texts that it has not written yet, and note down what it is."""
    kept = Kept(directory / f"{name}.jsonl")
    most = config.max_new_tokens * sum(map(len, asked))

    async def work() -> None:
        async with _client(config, name) as client:
            before = await _counters(client)
            with tqdm(total=most, desc=f"texts of {name}, tokens", disable=None if progress else True) as bar:
                bar.update(sum(len(tokens) for tokens, _ in kept.texts.values()))
                for stage in asked:
                    await ask(config, client, models[name], questions, stage, ends, kept, bar.update)
            after = await _counters(client)
            counted = None if before is None or after is None else asdict(after - before)
            servers[name] = {"url": client.url, "model": models[name], "counters": counted}

    try:
        asyncio.run(work())
    except KeyboardInterrupt as error:
        error.add_note(f"{len(kept.texts)} texts are kept in {directory}")
        raise
    return kept


def _client(config: CertifyConfig, name: str) -> Client:
    """Return a client of the server, or of the plain one, by its field's name."""
    return Client(getattr(config, name), name, getattr(config, f"{name}_key_env"), config.timeout)


async def _models(config: CertifyConfig) -> dict[str, str]:
    """Return the model that each server is asked for."""
    models = {}
    for name in SERVERS:
        if getattr(config, name) is not None:
            async with _client(config, name) as client:
                models[name] = await client.model(getattr(config, f"{name}_model"))
    return models


async def _counters(client: Client) -> ServerCounters | None:
    """Return vLLM's counters; None of a server that shows none."""
    try:
        return await client.counters()
    except InputError:
        return None


def _announce(config: CertifyConfig, console: Console, prompts: int, pair: Pair | None) -> None:
    """Say what is going to be asked, and what that can find."""
    parts = []
    if 0 in config.temperature:
        parts.append(f"{prompts} texts at T=0")
    if config.sampled:
        where = ", ".join(f"{temperature:g}" for temperature in config.sampled)
        each = " each" if len(config.sampled) > 1 else ""
        parts.append(f"{config.texts} texts, {config.texts * config.max_new_tokens} tokens at most, at T={where}{each}")
    _say(console, f"asks for {'; '.join(parts)}; {config.concurrency} at once")
    if config.sampled and pair is not None:
        finds = _finds(config, config.texts * config.max_new_tokens, pair)
        assert finds is not None
        _say(
            console,
            f"finds with probability 0.9, at a false-alarm rate of {config.false_alarm:g} in all: unlikely tokens from "
            f"a share of {finds['unlikely_tokens']:.2%} on; a law that leans one way from a total variation of "
            f"{finds['total_variation']:.2%} on",
        )
        if pair.dtype in HALF and min(config.sampled) < LOW:
            _say(
                console,
                f"note: in {pair.dtype} two programs' laws differ by rounding, which a low temperature magnifies: "
                f"below T={LOW} rather compare with a plain server alone, without target",
            )


def _finds(config: CertifyConfig, tokens: int, pair: Pair | None) -> dict[str, float] | None:
    """Return what so many tokens find with probability 0.9; None against a plain server."""
    if pair is None:
        return None
    orders = 2 + len(pair.drafters)
    unlikely, variation = detectable(tokens, config.level / (5 * orders + 2))  # so many tests share the level
    return {"unlikely_tokens": unlikely, "total_variation": variation}


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show_greedy(console: Console, found: Certificate, prompts: int) -> None:
    _say(console, f"T=0: {found.prompts_identical} of {prompts} texts identical")
    if found.reason:
        _say(console, f"  {found.reason}")


def _show_law(console: Console, law: Law) -> None:
    _say(
        console,
        f"T={law.temperature:g}: {law.tokens} tokens in {law.texts} texts, {law.distinct} of them different; p-value "
        f"{law.p_value:.2g}, {'above' if law.passed else 'not above'} {law.threshold:.2g}",
    )
    if law.reason:
        _say(console, f"  {law.reason}")


def _identity(config: CertifyConfig, path: str) -> dict[str, Any]:
    return identity(path, trust_remote_code=config.trust_remote_code)


def _manifest(config: CertifyConfig, questions: Sequence[Question], models: dict[str, str]) -> dict[str, Any]:
    """Say what shapes the texts, for a run that goes on."""
    settings = {name: value for name, value in asdict(config).items() if name not in ELSEWHERE}
    sent = [[question.ids, question.prompt.text, question.prompt.messages] for question in questions]
    return {
        "schema": KEPT_SCHEMA,
        "settings": settings | {f"{name}_model": model for name, model in models.items()},
        "target": {} if config.target is None else {"path": config.target} | _identity(config, config.target),
        "prompts": {"path": config.prompts, "sha256": _digest(sent)},
        "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Certify a server: 0 lossless as far as tested, 3 not, 1 where a server fails."""
    config = parse_config(CertifyConfig, argv, prog="draftsmith certify")
    try:
        report = certify(config, Console())
    except ServerFailure as error:
        print(f"error: {error}; what was answered is kept, and the same command goes on", file=sys.stderr)
        return 1
    return 0 if report["passed"] else 3


if __name__ == "__main__":
    sys.exit(run(main))
