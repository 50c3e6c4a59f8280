"""`draftsmith plan`: will this distillation run fit, and if not, what to change; without weights and without a GPU."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.scripts.plan.memory_plan import GIB, MemoryPlan, PlanConfig
from draftsmith.train.cli import parse_config, run

DOES_NOT_FIT = 3


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f}"


def report(plan: MemoryPlan, console: Console) -> bool:
    """Print what a GPU holds when it holds most, and what to change where that does not fit; return whether it fits."""
    config, setting, eval_rows = plan.config, plan.setting, plan.eval_rows
    footprint, rows = plan.footprint(setting), setting.rows
    peak, total, reserve = footprint.peak(rows, eval_rows), plan.total(setting), config.reserve * GIB
    fits = plan.fits(setting)
    spread = f"{config.gpus} × {config.gpu_memory:g} GiB, {setting.strategy}, {setting.precision}"
    checkpointing = "activation checkpointing" if setting.checkpointing else "no activation checkpointing"
    table = Table(title=f"{spread}, {checkpointing}", caption="GiB of each GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for heading, parts in ((None, footprint.held), (f"at most, in {peak.name}:", peak.parts)):
        if heading is not None:
            table.add_row(Text(heading, "italic"), "")
        for name, size in parts.items():
            if size:
                table.add_row(name, gib(size))
        table.add_section()
    table.add_row("reserve (an assumption: CUDA, NCCL, fragmentation)", gib(reserve))
    table.add_row(Text("total", "bold"), Text(f"{gib(total + reserve)} of {config.gpu_memory:.2f}", "bold"))
    console.print(table)
    others = [m for m in footprint.moments(rows, eval_rows) if m.name != peak.name and m.total]
    accumulation = int(config.training.gradient_accumulation_steps)
    together = rows * accumulation * config.gpus
    lines = [
        "other moments: " + ", ".join(f"{m.name} {gib(m.total)}" for m in others),
        f"the loss on whole logits would take {gib(footprint.eager_logits(rows))}; in chunks it takes "
        f"{gib(footprint.loss_bytes(rows)[0])}",
        f"a step: {rows} rows × {accumulation} accumulated × {config.gpus} GPUs = {together} samples, at most "
        f"{together * plan.batch.length:,} tokens",
        f"a teacher cache of k = {config.cache_k}: {6 * config.cache_k + 8} bytes a completion token, uncompressed",
    ]
    if setting.target == "elsewhere":
        lines.append(f"of the target, on {config.target_device}, the head alone is counted")
    texts = [Text(line, "dim") for line in lines]
    largest = plan.largest(setting)
    rest = f"; the largest micro batch that does: {largest} rows" if largest else ", not even one row"
    texts.append(Text.assemble(("fits", "bold green") if fits else ("does not fit", "bold red"), rest))
    if not fits:
        changes = [f"{name}: {gib(plan.total(change) + reserve)} GiB" for name, change in plan.changes()]
        nothing = "no change of this plan's makes it fit: shorter samples, or a smaller pair"
        texts += [Text(f"  → {line}") for line in changes or [nothing]]
    for text in texts:
        console.print(text, soft_wrap=True, highlight=False)
    return fits


def main(argv: Sequence[str] | None = None) -> int:
    """Plan as the flags say; 0 where the run fits, 3 where it does not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The machine that plans need not be the one that trains: bf16 without this asks for a GPU here.
    config = parse_config(PlanConfig, [*arguments, "--training.use_cpu", "true"], prog="draftsmith plan")
    return 0 if report(MemoryPlan(config), Console()) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(run(main))
