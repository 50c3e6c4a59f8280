"""From a plan to a table in the terminal, and what to change where the run does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from draftsmith.scripts.plan.command import Planner

GIB = 2**30


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f}"


def report(planner: Planner, console: Console) -> bool:
    """Print the plan; True where it fits."""
    config, setting, eval_rows = planner.config, planner.setting, planner.eval_rows
    footprint, rows = planner.footprint(setting), setting.rows
    peak, total, reserve = footprint.peak(rows, eval_rows), planner.total(setting), config.reserve * GIB
    fits = planner.fits(setting)
    spread = f"{config.gpus} × {config.gpu_memory:g} GiB, {setting.strategy}, {setting.precision}"
    checkpointing = "activation checkpointing" if setting.checkpointing else "no activation checkpointing"
    table = Table(title=f"{spread}, {checkpointing}", caption="GiB of each GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name, size in footprint.held.items():
        if size:
            table.add_row(name, gib(size))
    table.add_section()
    table.add_row(Text(f"at most, in {peak.name}:", "italic"), "")
    for name, size in peak.parts.items():
        if size:
            table.add_row(name, gib(size))
    table.add_section()
    table.add_row("reserve (an assumption: CUDA, NCCL, fragmentation)", gib(reserve))
    table.add_row(Text("total", "bold"), Text(f"{gib(total + reserve)} of {config.gpu_memory:.2f}", "bold"))
    console.print(table)
    others = [m for m in footprint.moments(rows, eval_rows) if m.name != peak.name and m.total]
    lines = [
        "other moments: " + ", ".join(f"{m.name} {gib(m.total)}" for m in others),
        f"the loss on whole logits would take {gib(footprint.eager_logits(rows))}; in chunks it takes "
        f"{gib(footprint.loss_bytes(rows)[0])}",
    ]
    accumulation = int(config.training.gradient_accumulation_steps)
    together = rows * accumulation * config.gpus
    lines.append(
        f"a step: {rows} rows × {accumulation} accumulated × {config.gpus} GPUs = {together} samples, at most "
        f"{together * planner.batch.length:,} tokens"
    )
    each = 6 * config.cache_k + 8
    lines.append(
        f"a teacher cache of k = {config.cache_k}: {each} bytes a completion token before compression, "
        f"{gib(each * config.cache_tokens)} GiB for {config.cache_tokens:,}"
    )
    if setting.target == "elsewhere":
        lines.append(f"of the target, on {config.target_device}, the head alone is counted")
    for line in lines:
        console.print(Text(line, "dim"), soft_wrap=True, highlight=False)
    largest = planner.largest(setting)
    if fits:
        said = Text("fits", "bold green") + Text(f"; the largest micro batch that does: {largest} rows")
    else:
        said = Text("does not fit", "bold red") + Text(
            f"; the largest micro batch that does: {largest} rows" if largest else ", not even one row"
        )
    console.print(said, soft_wrap=True, highlight=False)
    if not fits:
        found = False
        for name, change in planner.changes():
            found = True
            console.print(
                Text(f"  → {name}: {gib(planner.total(change) + reserve)} GiB"), soft_wrap=True, highlight=False
            )
        if not found:
            console.print(Text("  → no change of this plan's makes it fit: shorter samples, or a smaller pair"))
    return fits
