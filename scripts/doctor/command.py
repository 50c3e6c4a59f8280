"""`draftsmith doctor`: will this target work with these drafters? A line for each check, without loading weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftsmith.decode.progress import phase
from draftsmith.scripts.doctor import loss_masks
from draftsmith.scripts.doctor.checks import check_run, check_setup, check_teacher, load_setup
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.doctor.findings import SYMBOLS, Finding, report
from draftsmith.scripts.doctor.memory import check_memory
from draftsmith.train.cli import parse_config
from draftsmith.train.files import require_writable
from draftsmith.train.models import default_device, resolve_dtype
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.doctor/1"


def doctor(config: DoctorConfig, console: Console, errors: Console) -> int:
    """Print all findings and samples; return 2 if something cannot be used, else 0."""
    findings: list[Finding] = []
    if config.json is not None:
        file = Path(config.json)
        require_writable(file.parent, file.name, field="json")

    def add(finding: Finding) -> None:
        findings.append(finding)
        report(finding, console)

    device = default_device()
    with phase("reading configs and tokenizers"):
        setup, found = load_setup(config.target, config.drafter, config.trust_remote_code)
    if config.dtype == "auto":
        dtype = "float32"
        if setup.target is not None:
            dtype = resolve_dtype("auto", config.target, trust_remote_code=config.trust_remote_code)
        config = replace(config, dtype=dtype)
    with phase("comparing target and drafters"):
        found += check_setup(setup, config.context, config.dtype)
        found += [] if setup.target is None else [check_run(run, config.target) for run in config.run]
    for finding in found:
        add(finding)
    if config.teacher and setup.target is not None:
        for finding in check_teacher(config, setup.target):
            add(finding)
    if setup.parts:
        add(check_memory(setup, config.batch_size, config.context, config.dtype, device))
    sampled = config.prompts is not None or config.completions is not None
    if sampled and setup.target is not None:
        tokenizer = setup.target.tokenizer
        samples = loss_masks.read(config, tokenizer, setup.target.head, setup.target.ends)
        for finding in loss_masks.check_masks(samples):
            add(finding)
        if config.completions is not None:
            add(loss_masks.check_origin(config.completions, config.target))
        if (lengths := loss_masks.check_lengths(samples.all, setup)) is not None:
            add(lengths)
        loss_masks.show(samples, config.show_mask, tokenizer, console)
    states = Counter(finding.state for finding in findings)
    counts = ", ".join(f"{states[state]} {SYMBOLS[state]}" for state in ("ok", "warning", "error"))
    console.print(Text(f"\n{counts}"), highlight=False)
    first = next((finding for finding in findings if finding.state == "error"), None)
    code = 0 if first is None else 2
    if config.json is not None:
        content = {"schema": SCHEMA, "environment": environment(device, config.dtype), "config": config}
        content |= {"exit_code": code, "findings": [asdict(finding) for finding in findings]}
        write_json(Path(config.json), content)
    if first is not None:
        errors.print(Text(f"error: {first.name}: {' '.join(first.text.split())}"), soft_wrap=True, highlight=False)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Check as the flags say; return 0, also after warnings, or 2 if something cannot be used."""
    return doctor(parse_config(DoctorConfig, argv, prog="draftsmith doctor"), Console(), Console(stderr=True))
