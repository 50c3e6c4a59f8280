"""`draftsmith doctor`: will this target work with this draft or these heads? One line a check, weights unloaded."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftsmith.decode.errors import InputError, at_least, one_of, require, require_some
from draftsmith.scripts.doctor import loss_masks
from draftsmith.scripts.doctor.checks import check_pair
from draftsmith.scripts.doctor.costs import check_costs, check_memory
from draftsmith.scripts.doctor.findings import SYMBOLS, Finding, report
from draftsmith.scripts.doctor.sides import load_pair
from draftsmith.train.cli import numbers, parse_config, run
from draftsmith.train.models import DTYPES, default_device
from draftsmith.train.provenance import environment, write_json

SCHEMA = "draftsmith.doctor/1"


@dataclass
class DoctorConfig:
    """Check a target, a draft, heads and samples before they cost any time: what fits, what does not, a way out."""

    target: str
    """The target: a model directory or hub id."""
    draft: str | None = None
    """The draft model; without one the target and the samples are checked alone."""
    medusa: str | None = None
    """Medusa or Hydra heads, beside a draft or without one."""
    prompts: str | None = None
    """Conversations with the assistant's answers, or prompts, as `prepare` reads them: their loss masks are checked."""
    completions: str | None = None
    """Completions written by `prepare`, whose loss masks are checked instead."""
    split: str = "train"
    """The split of a directory or hub id of prompts."""
    limit: int | None = None
    """Check the first so many samples only."""
    show_mask: int = 0
    """Print the first so many samples: in green what a draft learns from, dimmed what it only reads."""
    context: int | None = None
    """Tokens of a text, prompt included, that positions and memory have to hold; by default what the models can."""
    batch_size: str | int | list[int] = "1,8"
    """Texts decoded together, several with commas: for these memory is checked and costs are measured."""
    costs: bool = False
    """Load all models and measure forwards here, behind 64 tokens: the acceptance from which γ = 4, or a tree, pays."""
    dtype: str = "bfloat16"
    """Weights and arithmetic, as `measure` has it."""
    json: str | None = None
    """A file that receives the findings, for a CI job or a dashboard."""
    trust_remote_code: bool = False
    """Run model code that a repository ships."""
    batch_sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.batch_sizes = numbers(self.batch_size, int, "batch_size")
        require_some(self, "batch_sizes", "number")
        at_least(1).check("batch_size", self.batch_sizes)
        require(self, at_least(0), "show_mask")
        require(self, at_least(1), "limit", "context")
        require(self, one_of(DTYPES), "dtype")
        if self.prompts is not None and self.completions is not None:
            raise InputError("completions: expected either prompts or completions, found both")
        if self.show_mask and self.prompts is None and self.completions is None:
            raise InputError("show_mask: expected samples to show in prompts or completions, found none")
        if self.costs and self.draft is None and self.medusa is None:
            raise InputError("costs: expected a draft or Medusa heads to measure, found neither")


def doctor(config: DoctorConfig, console: Console, errors: Console) -> int:
    """Print all findings and the samples asked for; 2 where something cannot be used, else 0."""
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        report(finding, console)

    device = default_device()
    pair, loaded = load_pair(config.target, config.draft, config.medusa, config.trust_remote_code)
    for finding in [*loaded, *check_pair(pair, config.context, config.dtype, device)]:
        add(finding)
    fits = False
    if pair.parts:
        fits, finding = check_memory(pair, config.batch_sizes, config.context, config.dtype, device)
        add(finding)
    works = all(finding.state != "error" for finding in findings)
    if config.costs and works and not fits:
        add(Finding("warning", "costs", "not measured: the weights do not fit", "see memory, above"))
    elif config.costs and works:
        with errors.status("measuring"):
            costs = list(check_costs(pair, config.batch_sizes, config.dtype, device, config.trust_remote_code))
        for finding in costs:
            add(finding)
    sampled = config.prompts is not None or config.completions is not None
    if sampled and pair.target is not None:
        tokenizer = pair.target.tokenizer
        with errors.status("reading the samples"):
            samples = loss_masks.read(config.prompts, config.completions, tokenizer, config.split, config.limit)
        for finding in loss_masks.check_masks(samples):
            add(finding)
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
    try:
        write_json(Path(str(config.json)), content)
    except OSError as error:
        raise InputError(f"json: expected a file that can be written, found {config.json}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Check as the flags say; 0 where all is well or only worth a warning, 2 where something cannot be used."""
    return doctor(parse_config(DoctorConfig, argv, prog="draftsmith doctor"), Console(), Console(stderr=True))


if __name__ == "__main__":
    sys.exit(run(main))
