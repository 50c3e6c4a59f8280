"""`draftsmith certify`: texts of a server under test, compared with what its target would write."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console

from draftsmith.decode.measurement.certificate import Certificate
from draftsmith.scripts.engines.certify import verdicts
from draftsmith.scripts.engines.certify.config import CertifyConfig, Texts
from draftsmith.scripts.engines.certify.servers import Servers, TextRequest, requests_of, target_identity
from draftsmith.scripts.kinds import drafter_specs
from draftsmith.scripts.pair import load_pair, read_tokens
from draftsmith.train.checkpoint import end_of_sequence_ids
from draftsmith.train.cli import parse_config
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.endpoint.client import SentPrompt
from draftsmith.train.endpoint.http import ServerFailure
from draftsmith.train.files import require_writable
from draftsmith.train.job.lock import lock_directory
from draftsmith.train.kinds.drafter import Pair
from draftsmith.train.provenance import environment, git_sha, write_json

SCHEMA = "draftsmith.certificate/1"
OTHER_BATCH = 4
"""Requests at once where a plain server that was asked one at a time is asked again."""
CERTIFICATE = "certificate.json"


def certify(config: CertifyConfig, console: Console) -> dict[str, Any]:
    """Request texts, compare them, write `certificate.json`, and return its content.

    Raises:
        InputError: unusable models, prompts or settings, or a server that refuses them.
        ServerFailure: a server fails.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    output = require_writable(config.output, CERTIFICATE)
    questions, pair = _load(config)
    ends = [] if pair is None else end_of_sequence_ids(pair.target.generation_config, pair.tokenizer)
    judge = verdicts.Judge(config, pair, questions, ends)
    judge.require()
    with lock_directory(output):
        size = None if pair is None else pair.target.config.get_text_config().vocab_size
        servers = Servers(config, questions, ends, size)
        servers.begin()
        greedy, sampled = _judge(servers, judge, console)
        passed = (greedy is None or bool(greedy.passed)) and all(verdict.passed for verdict in sampled)
        _say(console, "lossless, as far as tested" if passed else "not lossless")
        report = {
            "schema": SCHEMA,
            "passed": passed,
            "servers": servers.to_dict(),
            "false_alarm": config.false_alarm,
            "greedy": None if greedy is None else asdict(greedy) | {"prompts": len(questions)},
            "sampled": [asdict(verdict) | {"passed": verdict.passed} for verdict in sampled],
            "settings": asdict(config),
            "target": target_identity(config),
            "environment": None if pair is None else environment(pair.target.device, pair.dtype),
            "versions": {"draftsmith": version("draftsmith"), "git_sha": git_sha()},
        }
        write_json(output / CERTIFICATE, report)
    return report


def _judge(
    servers: Servers, judge: verdicts.Judge, console: Console
) -> tuple[Certificate | None, list[verdicts.SampledVerdict]]:
    config, pair, count = judge.config, judge.pair, len(judge.questions)
    requests = requests_of(config, count)
    _announce(config, console, count)
    answers, plain = servers.texts("server", requests), None
    if config.plain_server is not None:
        # With the target here, it judges the sampled texts; only T=0 is compared with the plain server.
        plain = servers.texts("plain_server", [r for r in requests if pair is None or r.temperature == 0])

    def again() -> Texts:
        # In another order and in batches of another size, so that kernels round otherwise.
        requests = [TextRequest(0, i, i) for i in reversed(range(count))]
        return servers.texts("plain_server", requests, OTHER_BATCH if config.concurrency == 1 else 1)[0]

    greedy, sampled = None, []
    for temperature in config.temperature:
        reference = None if plain is None else plain.get(temperature)
        if temperature == 0:
            greedy = judge.greedy(answers[0], reference, again)
            _say(console, f"T=0: {greedy.prompts_identical} of {count} texts identical")
            if greedy.reason:
                _say(console, f"  {greedy.reason}")
        else:
            sampled.append(judge.sampled(temperature, answers[temperature], reference))
            _show_sampled(console, sampled[-1])
    drafts = {name: counters.num_drafts for name, counters in servers.counters.items()}
    if drafts.get("server") == 0:
        _say(console, "note: the server drafted nothing meanwhile: this certifies its plain decoding")
    if drafts.get("plain_server"):
        _say(console, f"note: the plain server drafted too, {drafts['plain_server']} times: it is no plain reference")
    return greedy, sampled


def _load(config: CertifyConfig) -> tuple[list[SentPrompt], Pair | None]:
    if config.target is None:
        prompts = read_prompts(config.prompts, limit=config.limit, invalid=config.invalid_prompts)
        return [SentPrompt(prompt, fields=prompt.request(**config.template)) for prompt in prompts], None
    tokenizer, prompts, encoded = read_tokens(config.target, config, config.prompts, config.limit)
    specs = drafter_specs(config.drafter)
    decodes = config.plain_server is None and 0 in config.temperature
    pair = load_pair(config.target, tokenizer, specs, config.dtype, config.trust_remote_code, decodes=decodes)
    return list(map(SentPrompt, prompts, encoded)), pair


def _announce(config: CertifyConfig, console: Console, prompts: int) -> None:
    parts = [f"{prompts} texts at T=0"] if 0 in config.temperature else []
    if config.sampled:
        where = ", ".join(f"{temperature:g}" for temperature in config.sampled)
        tokens = config.texts * config.max_new_tokens
        parts.append(f"{config.texts} texts, {tokens} tokens at most, at each T of {where}")
    _say(console, f"asks for {'; '.join(parts)}; {config.concurrency} at once")


def _show_sampled(console: Console, verdict: verdicts.SampledVerdict) -> None:
    texts = f"{verdict.tokens} tokens in {verdict.texts} texts, {verdict.distinct} of them different"
    comparison = f"{'above' if verdict.passed else 'not above'} {verdict.threshold:.2g}"
    _say(console, f"T={verdict.temperature:g}: {texts}; p-value {verdict.p_value:.2g}, {comparison}")
    if verdict.reason:
        _say(console, f"  {verdict.reason}")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Certify a server; return 0 if lossless as far as tested, 3 if not, 1 if a server failed."""
    config = parse_config(CertifyConfig, argv, prog="draftsmith certify")
    try:
        report = certify(config, Console())
    except ServerFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if report["passed"] else 3
