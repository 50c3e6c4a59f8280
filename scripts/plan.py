"""`draftsmith plan`: does a run fit, and how long does it take; without weights and without a GPU."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.kinds import recipes
from draftsmith.train.cli import flags, parse_config
from draftsmith.train.kinds.kind import Recipe
from draftsmith.train.memory.machines import GIB, RESERVE, Machines
from draftsmith.train.memory.plan import MOMENTS, TrainingPlan
from draftsmith.train.models import DTYPES

DOES_NOT_FIT = 3
ADVICE = (
    "takes less: a smaller training.per_device_train_batch_size with more training.gradient_accumulation_steps, "
    "training.activation_checkpointing, training.bf16, target_quantization, target_sharded, a teacher_cache, and "
    "--strategy zero2 or zero3"
)


def planned_run(arguments: Sequence[str]) -> tuple[Recipe, Any, Machines]:
    """Return the planned command, its config and the machines from a command line: COMMAND, and flags of both."""
    known = {name: recipe for name, recipe in recipes().items() if recipe.plan is not None}
    words = ["--max_length" if word == "--sequence_length" else word for word in flags(arguments)]  # its earlier name
    name, *rest = words[words[:1] == ["--recipe"] :] or [""]
    if name not in known:
        raise InputError(f"plan: expected a command that trains ({', '.join(known)}), found {name or 'none'}")
    own, others, names = list[str](), list[str](), {f"--{field.name}" for field in fields(Machines)}
    remaining = iter(rest)
    for word in remaining:
        flag, given, _ = word.partition("=")
        (own if flag in names else others).append(word)
        if flag in names and not given:
            own += [value for value in [next(remaining, None)] if value is not None]
    machines = parse_config(Machines, own, prog="draftsmith plan")
    # Otherwise bf16 would require a GPU on this machine, which only plans.
    config = parse_config(known[name].config_class(), [*others, "--training.use_cpu", "true"], prog="draftsmith plan")
    return known[name], config, machines


def memory_table(plan: TrainingPlan) -> Table:
    """Return the memory of a GPU: permanent parts, those of each moment, and the sum at the peak."""
    machines = plan.machines
    spread = f"{machines.gpus} × {machines.gpu_memory:g} GiB, {plan.strategy}, {plan.precision}"
    table = Table(title=spread, caption="GiB of each GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    moments = {MOMENTS[name]: size for name, size in plan.moments.items()}
    for heading, parts in (("at all times:", plan.held), ("in addition, the largest of:", moments)):
        table.add_row(Text(heading, "italic"), "")
        for name, size in parts.items():
            if size:
                table.add_row(name, f"{size / GIB:.2f}")
        table.add_section()
    table.add_row("reserve (an assumption: CUDA, NCCL, fragmentation)", f"{RESERVE / GIB:.2f}")
    total = f"{(plan.total + RESERVE) / GIB:.2f} of {machines.gpu_memory:.2f}"
    table.add_row(Text("total", "bold"), Text(total, "bold"))
    return table


def time_words(hours: float) -> str:
    """Format a time: in minutes below two hours, in seconds below two minutes."""
    unit, count = next(
        (pair for pair in (("hours", hours), ("minutes", 60 * hours)) if pair[1] >= 2), ("seconds", 3600 * hours)
    )
    return f"{count:.1f} {unit}" if count < 10 else f"{count:,.0f} {unit}"


def outlook(plan: TrainingPlan) -> list[str]:
    """Return lines about states from servers, a step and the hours."""
    config, machines, rows, lines = plan.config, plan.machines, plan.batch.rows, list[str]()
    if config.teacher:  # of layers as vLLM counts them
        text = plan.target_shape.get_text_config()
        depths = [*sorted({*plan.layer_ids} - {text.num_hidden_layers}), f"{text.num_hidden_layers} (the last)"]
        size = len(depths) * text.hidden_size * DTYPES[plan.dtype].itemsize
        words = f"after layers {', '.join(map(str, depths))}, in {plan.dtype}"
        lines.append(f"states from servers: {size:,} bytes a token, {words}")
    accumulation = int(config.training.gradient_accumulation_steps)
    samples = rows * accumulation * machines.gpus
    lines.append(
        f"a step: {rows} rows × {accumulation} accumulated × {machines.gpus} GPUs = {samples} samples, at most "
        f"{samples * plan.batch.length:,} tokens"
    )
    if plan.hours is None:
        return [*lines, "no estimate of hours: the arithmetic of a token is not known"]
    time = f"{machines.tokens:,.0f} tokens on {machines.gpus} × {machines.device}: about {time_words(plan.hours)}"
    return [*lines, f"{time} (by assumption {machines.mfu:.0%} of their arithmetic)"]


def main(argv: Sequence[str] | None = None) -> int:
    """Plan as the flags say; return 0 if the run fits, 3 if not."""
    recipe, config, machines = planned_run(list(sys.argv[1:] if argv is None else argv))
    console = Console()
    with phase("plan"):
        plan: TrainingPlan = recipe.memory_plan(config, machines)
        console.print(memory_table(plan))
    texts = [Text(line, "dim") for line in outlook(plan)]
    texts += [Text("fits", "bold green")] if plan.fits else [Text("does not fit", "bold red"), Text(ADVICE)]
    for text in texts:
        console.print(text, soft_wrap=True, highlight=False)
    return 0 if plan.fits else DOES_NOT_FIT
