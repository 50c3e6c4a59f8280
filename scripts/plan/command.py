"""`draftsmith plan`: will this run fit, how long does it take, what to change; without weights and without a GPU."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.decode.progress import phase
from draftsmith.distill.config import DistillPlanConfig
from draftsmith.distill.memory import MemoryPlan
from draftsmith.medusa.eagle.config import EaglePlanConfig
from draftsmith.medusa.eagle.memory import EaglePlan
from draftsmith.medusa.heads.config import MedusaPlanConfig
from draftsmith.medusa.heads.memory import MedusaPlan
from draftsmith.scripts.plan.config import plan_config
from draftsmith.scripts.plan.duration import READING, Plan, host_bytes, hours
from draftsmith.scripts.plan.inference import InferencePlan
from draftsmith.train.cli import parse_config, run
from draftsmith.train.job.flops import DEVICES
from draftsmith.train.memory.heads import HeadsPlan
from draftsmith.train.memory.moments import Moment
from draftsmith.train.memory.setting import GIB, Machines, TrainingMachines
from draftsmith.train.models import default_device, fast_dtype
from draftsmith.train.teacher.distribution_shards import distribution_bytes

DOES_NOT_FIT = 3


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.2f}"


def print_table(config: Machines, title: str, held: Mapping[str, float], peak: Moment, console: Console) -> None:
    """Print what a GPU holds at all times and when it holds most."""
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


def lasting(hours: float) -> str:
    """Write a time: in minutes below two hours, and in seconds below two minutes."""
    unit, count = next(
        (pair for pair in (("hours", hours), ("minutes", 60 * hours)) if pair[1] >= 2), ("seconds", 3600 * hours)
    )
    return f"{count:.1f} {unit}" if count < 10 else f"{count:,.0f} {unit}"


def outlook(plan: Plan) -> list[str]:
    """Return what a run takes besides its GPUs' memory: the host's, and hours."""
    config: Machines = plan.config
    host = host_bytes(plan)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in host.items())
    count = min(config.gpus, config.node_gpus)
    lines = [f"the host's memory, beside {count} GPU{'s' * (count > 1)}: {gib(sum(host.values()))} ({parts})"]
    if (note := _dtype_note(plan)) is not None:
        lines.append(note)
    found, devices = hours(plan), f"{config.gpus} × {config.device}"
    device = DEVICES[config.device]
    assumed = f"by assumption {config.mfu:.0%} of {device.tflops:g} TFLOP/s each"
    if isinstance(plan, InferencePlan) and plan.writes:
        assumed += f", and weights read at {READING:.0%} of {device.terabytes:g} TB/s"
    if found is None:
        lines.append("no estimate of hours: a mixture of experts uses some of its weights a token")
    else:
        lines.append(f"{config.tokens:,.0f} tokens on {devices}: about {lasting(found)} ({assumed})")
    return lines


def _dtype_note(plan: Plan) -> str | None:
    """Say that a target is planned as it is stored, which a GPU loads and this machine does not."""
    if isinstance(plan, InferencePlan):
        field, asked, target = "dtype", plan.config.dtype, plan.target
    elif plan.setting.target is None:
        return None
    else:
        field, asked, target = "target_dtype", plan.config.target_dtype, plan.target(plan.setting.target_dtype)
    planned, here = str(target.dtype).removeprefix("torch."), fast_dtype(target.config, default_device().type)
    if asked != "auto" or planned == here:
        return None
    return (
        f"the target in {planned}, as it is stored and {plan.config.device}s load it; this machine loads it in {here}, "
        f"which --{field} {here} plans"
    )


def report(plan: MemoryPlan | HeadsPlan, console: Console) -> bool:
    """Print what a GPU holds when it holds most, and what to change where that does not fit; return whether it fits."""
    config, setting, rows = plan.config, plan.setting, plan.setting.rows
    if isinstance(plan, MemoryPlan):
        footprint = plan.footprint(setting)
        held, moments = footprint.held, footprint.moments(rows, plan.eval_rows)
        notes = [
            f"the loss on whole logits would take {gib(footprint.eager_logits(rows))}; in chunks it takes "
            f"{gib(footprint.loss_bytes(rows)[0])}",
            f"a teacher cache of k = {plan.config.cache_k}: {distribution_bytes(plan.config.cache_k)} bytes a "
            "completion token, uncompressed",
        ]
    else:
        held, moments, notes = plan.held(setting), plan.moments(setting), [plan.note(setting)]
    peak, fits = max(moments, key=lambda moment: moment.total), plan.fits(setting)
    spread = f"{config.gpus} × {config.gpu_memory:g} GiB, {setting.strategy}, {setting.precision}"
    checkpointing = "activation checkpointing" if setting.checkpointing else "no activation checkpointing"
    print_table(config, f"{spread}, {checkpointing}", held, peak, console)
    others = [moment for moment in moments if moment.name != peak.name and moment.total]
    accumulation = int(config.training.gradient_accumulation_steps)
    together = rows * accumulation * config.gpus
    lines = [
        "other moments: " + ", ".join(f"{m.name} {gib(m.total)}" for m in others),
        *notes,
        f"a step: {rows} rows × {accumulation} accumulated × {config.gpus} GPUs = {together} samples, at most "
        f"{together * plan.batch.length:,} tokens",
        *outlook(plan),
    ]
    if setting.target == "elsewhere":
        lines.append(f"of the target, on {config.target_device}, the head alone is counted")
    texts = [Text(line, "dim") for line in lines]
    largest = plan.largest(setting)
    rest = f"; the largest micro batch that does: {largest} rows" if largest else ", not even one row"
    texts.append(Text.assemble(_verdict(fits), rest))
    if not fits:
        reserve = config.reserve * GIB
        changes = [f"{name}: {gib(plan.total(change) + reserve)} GiB" for name, change in plan.changes()]
        nothing = "no change of this plan's makes it fit: shorter samples, or a smaller pair"
        texts += [Text(f"  → {line}") for line in changes or [nothing]]
    for text in texts:
        console.print(text, soft_wrap=True, highlight=False)
    return fits


def report_inference(plan: InferencePlan, console: Console) -> bool:
    """Print what a GPU holds that the target answers on; return whether it fits."""
    config, rows = plan.config, plan.config.batch_size
    peak = max(plan.moments(rows), key=lambda moment: moment.total)
    print_table(config, f"{config.gpu_memory:g} GiB, {rows} texts of {plan.length} tokens", plan.held, peak, console)
    lines = outlook(plan)
    if not plan.writes:
        size = plan.disk_bytes()
        lines.append(f"on disk: at most {config.tokens * size / 1e9:,.0f} GB, {size} bytes a token")
    fits, largest = plan.total(rows) <= plan.capacity, plan.largest()
    rest = f"; the largest batch that does: {largest} texts" if largest else ", not even one text"
    for text in (*(Text(line, "dim") for line in lines), Text.assemble(_verdict(fits), rest)):
        console.print(text, soft_wrap=True, highlight=False)
    return fits


def _verdict(fits: bool) -> tuple[str, str]:
    return ("fits", "bold green") if fits else ("does not fit", "bold red")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan as the flags say; 0 where the run fits, 3 where it does not."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    kind = plan_config(arguments)
    if issubclass(kind, TrainingMachines):
        # The machine that plans need not be the one that trains: bf16 without this asks for a GPU here.
        arguments += ["--training.use_cpu", "true"]
    config, console = parse_config(kind, arguments, prog="draftsmith plan"), Console()
    with phase("plan"):
        if isinstance(config, DistillPlanConfig):
            fits = report(MemoryPlan(config), console)
        elif isinstance(config, MedusaPlanConfig):
            fits = report(MedusaPlan(config), console)
        elif isinstance(config, EaglePlanConfig):
            fits = report(EaglePlan(config), console)
        else:
            fits = report_inference(InferencePlan(config), console)
    return 0 if fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(run(main))
