"""`draftsmith plan`: does a run fit, how long does it take, what to change; without weights and without a GPU."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.decode.progress import phase
from draftsmith.scripts.plan.config import plan_config
from draftsmith.train.cli import parse_config
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.plan import MemoryPlan
from draftsmith.train.memory.setting import GIB, Machines, gib
from draftsmith.train.models import default_device, fast_dtype

DOES_NOT_FIT = 3


def print_table(config: Machines, title: str, held: Mapping[str, float], peak: Moment, console: Console) -> None:
    """Print the memory of a GPU: permanent parts, and those at the peak."""
    table = Table(title=title, caption="GiB of each GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for heading, parts in ((None, held), (f"at most, in {peak.name}:", peak.parts)):
        if heading is not None:
            table.add_row(Text(heading, "italic"), "")
        for name, size in parts.items():
            if size:
                table.add_row(name, gib(size))
        table.add_section()
    total = sum(held.values()) + peak.total + config.reserve * GIB
    table.add_row("reserve (an assumption: CUDA, NCCL, fragmentation)", gib(config.reserve * GIB))
    table.add_row(Text("total", "bold"), Text(f"{gib(total)} of {config.gpu_memory:.2f}", "bold"))
    console.print(table)


def time_words(hours: float) -> str:
    """Format a time: in minutes below two hours, in seconds below two minutes."""
    unit, count = next(
        (pair for pair in (("hours", hours), ("minutes", 60 * hours)) if pair[1] >= 2), ("seconds", 3600 * hours)
    )
    return f"{count:.1f} {unit}" if count < 10 else f"{count:,.0f} {unit}"


def outlook(plan: MemoryPlan) -> list[str]:
    """Return lines about the host's memory and the hours of a run."""
    config, host, hours = plan.config, plan.host_bytes(), plan.hours()
    parts = ", ".join(f"{name} {gib(size)}" for name, size in host.items())
    several = "s" * (plan.processes > 1)
    lines = [f"host memory, for {plan.processes} GPU{several}: {gib(sum(host.values()))} ({parts})"]
    lines += _dtype_note(plan)
    if hours is None:
        return [*lines, "no estimate of hours: the config of a mixture of experts does not say how many a token uses"]
    assumptions, devices = ", and ".join(plan.assumptions()), f"{config.gpus} × {config.device}"
    return [*lines, f"{config.tokens:,.0f} tokens on {devices}: about {time_words(hours)} ({assumptions})"]


def _dtype_note(plan: MemoryPlan) -> list[str]:
    """Return a note if "auto" means another dtype for the planned GPUs than for this machine."""
    planned, here = plan.setting.target_dtype, fast_dtype(plan.target_shape, default_device().type)
    if plan.setting.target is None or getattr(plan.config, plan.dtype_field) != "auto" or planned == here:
        return []
    there = f"the target in {planned}, as it is stored and {plan.config.device}s load it"
    return [f"{there}; this machine loads it in {here}, which --{plan.dtype_field} {here} plans"]


def report(plan: MemoryPlan, console: Console) -> bool:
    """Print a GPU's memory at its peak, and advice if that does not fit; return whether it fits."""
    setting = plan.setting
    print_table(plan.config, plan.title(), plan.held(setting), plan.peak(setting), console)
    fits, largest = plan.fits(setting), plan.largest(setting)
    texts = [Text(line, "dim") for line in (*plan.facts(), *outlook(plan), *plan.remarks())]
    verdict = ("fits", "bold green") if fits else ("does not fit", "bold red")
    most = f"; the largest {plan.batch_name} that does: {largest} {plan.row_name}s"
    texts.append(Text.assemble(verdict, most if largest else f", not even one {plan.row_name}"))
    texts += [Text(f"  → {line}") for line in ([] if fits else plan.advice())]
    for text in texts:
        console.print(text, soft_wrap=True, highlight=False)
    return fits


def main(argv: Sequence[str] | None = None) -> int:
    """Plan as the flags say; return 0 if the run fits, 3 if not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Otherwise bf16 would require a GPU on this machine, which only plans.
    config = parse_config(plan_config(arguments), [*arguments, "--training.use_cpu", "true"], prog="draftsmith plan")
    with phase("plan"):
        fits = report(config.memory_plan(), Console())
    return 0 if fits else DOES_NOT_FIT
