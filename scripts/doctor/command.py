"""`draftsmith doctor`: will this target work with this draft or these heads? One line a check, weights unloaded."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftsmith.decode.progress import phase
from draftsmith.scripts.doctor import loss_masks
from draftsmith.scripts.doctor.checks import check_pair
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.doctor.costs import check_costs, check_memory
from draftsmith.scripts.doctor.heads import check_run, load_pair
from draftsmith.train.cli import parse_config, run
from draftsmith.train.files import require_writable
from draftsmith.train.kinds.findings import SYMBOLS, Finding, report
from draftsmith.train.models import default_device, resolve_dtype
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.doctor/1"


def doctor(config: DoctorConfig, console: Console, errors: Console) -> int:
    """Print all findings and the samples asked for; 2 where something cannot be used, else 0."""
    findings: list[Finding] = []
    if config.json is not None:
        file = Path(config.json)
        require_writable(file.parent, file.name, field="json")

    def add(finding: Finding) -> None:
        findings.append(finding)
        report(finding, console)

    device = default_device()
    with phase("reading configs and tokenizers"):
        pair, loaded = load_pair(config.target, config.draft, config.medusa, config.eagle, config.trust_remote_code)
    if config.dtype == "auto":
        dtype = "float32"
        if pair.target is not None:
            dtype = resolve_dtype("auto", config.target, trust_remote_code=config.trust_remote_code)
        config = replace(config, dtype=dtype)
    with phase("comparing target and draft"):
        loaded += check_pair(pair, config.context, config.dtype, device)
    for finding in loaded:
        add(finding)
    if config.eagle_run is not None and pair.target is not None:
        for finding in check_run(pair.target, config.eagle_run):
            add(finding)
    fits = False
    if pair.parts:
        fits, finding = check_memory(pair, config.batch_size, config.context, config.dtype, device)
        add(finding)
    works = all(finding.state != "error" for finding in findings)
    if config.costs and works and not fits:
        add(Finding("warning", "costs", "not measured: the weights do not fit", "see memory, above"))
    elif config.costs and works:
        with phase("costs"):
            costs = list(check_costs(pair, config.batch_size, config.dtype, device, config.trust_remote_code))
        for finding in costs:
            add(finding)
    sampled = config.prompts is not None or config.completions is not None
    if sampled and pair.target is not None:
        tokenizer = pair.target.tokenizer
        samples = loss_masks.read(config, tokenizer, pair.target.head)
        for finding in loss_masks.check_masks(samples):
            add(finding)
        if config.completions is not None:
            add(loss_masks.check_origin(config.completions, config.target, config.trust_remote_code))
        if (lengths := loss_masks.check_lengths(samples.all, pair)) is not None:
            add(lengths)
        loss_masks.show(samples, config.show_mask, tokenizer, console)
    states = Counter(finding.state for finding in findings)
    counts = ", ".join(f"{states[state]} {SYMBOLS[state]}" for state in ("ok", "warning", "error"))
    console.print(Text(f"\n{counts}"), highlight=False)
    first = next((finding for finding in findings if finding.state == "error"), None)
    code = 0 if first is None else 2
    if config.json is not None:
        _write(config, findings, code)
    if first is not None:
        line = f"error: {first.name}: {' '.join(first.text.split())}"
        errors.print(Text(line), soft_wrap=True, highlight=False)
    return code


def _write(config: DoctorConfig, findings: list[Finding], code: int) -> None:
    content = {
        "schema": SCHEMA,
        "environment": environment(default_device(), config.dtype),
        "config": config,
        "exit_code": code,
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(Path(str(config.json)), content)


def main(argv: Sequence[str] | None = None) -> int:
    """Check as the flags say; 0 where all is well or only worth a warning, 2 where something cannot be used."""
    return doctor(parse_config(DoctorConfig, argv, prog="draftsmith doctor"), Console(), Console(stderr=True))


if __name__ == "__main__":
    sys.exit(run(main))
