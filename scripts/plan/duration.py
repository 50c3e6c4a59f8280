"""How long a run takes, and what it holds in the host's memory: estimates, whose assumptions are said beside them."""

from draftsmith.distill.memory import MemoryPlan
from draftsmith.scripts.plan.inference import InferencePlan
from draftsmith.train.job.flops import DEVICES, Work
from draftsmith.train.memory.heads import HeadsPlan
from draftsmith.train.memory.setting import GIB, Machines
from draftsmith.train.memory.states import Weights

READING = 0.5
"""The share of a memory's speed that writing texts reads weights with: an assumption."""
PROCESS = 3 * GIB
"""Python, torch and CUDA's libraries in one process."""

Plan = MemoryPlan | HeadsPlan | InferencePlan


def hours(plan: Plan) -> float | None:
    """Return the hours of `tokens` tokens; None where a model's arithmetic is not known.

    Training and looking at texts are arithmetic, at `mfu` of what the devices can do. Writing them is mostly reading
    the weights once a token of the batch.
    """
    config: Machines = plan.config
    device = DEVICES[config.device]
    speed = device.tflops * 1e12 * config.mfu
    if isinstance(plan, InferencePlan):
        work, copies = Work.of(plan.target), config.gpus / plan.spread
        if work is None:
            return None
        if plan.writes:
            rows = plan.config.batch_size
            reading = plan.bytes_of_a_step() / (device.terabytes * 1e12 * READING)
            step = max(reading, rows * _forward(work, plan.length) / speed)
            return config.tokens / rows * step / copies / 3600
        return config.tokens * _forward(work, plan.length) / speed / copies / 3600
    each = _trained(plan)
    return None if each is None else config.tokens * each / speed / config.gpus / 3600


def _forward(work: Work, length: int) -> float:
    return work.forward(1, length / 2, 1)


def _trained(plan: MemoryPlan | HeadsPlan) -> float | None:
    """Return the operations of a token that is trained on, checkpointing's second forward included."""
    length, again = plan.batch.length, plan.setting.checkpointing
    target = None if plan.setting.target is None else Work.of(plan.target(plan.setting.target_dtype))
    if plan.setting.target is not None and target is None:
        return None
    total = 0.0 if target is None or plan.setting.target == "elsewhere" else _forward(target, length)
    if isinstance(plan, HeadsPlan):
        of_heads = plan.work(plan.setting)
        total += of_heads.step(1, length / 2, 1) + (of_heads.forward(1, length / 2, 0) if again else 0)
        student = target if plan.joint else Work(0, 0, 0)
    else:
        student = Work.of(plan.draft(False))
    if student is None:
        return None
    entries = 1.0
    if isinstance(plan, MemoryPlan) and plan.config.parallel:  # a mask sees as much as a token, and has logits
        entries += float(plan.config.kept_shares.sum())
    return total + entries * (student.step(1, length / 2, 1) + (_forward(student, length) if again else 0))


def host_bytes(plan: Plan) -> dict[str, float]:
    """Return what the processes of one machine hold in its memory while they load models, by what it is for.

    Completions are not counted.
    """
    config: Machines = plan.config
    processes = min(config.gpus, config.node_gpus)
    parts = {"processes": float(PROCESS * processes)}
    if isinstance(plan, InferencePlan):
        return parts
    setting = plan.setting
    if isinstance(plan, HeadsPlan):
        own = sum(p.numel() for p in plan.heads(setting.lm_heads, False).parameters())
    else:
        own = Weights.of(plan.draft(False)).all
    parts["what is trained, in float32, a copy a process"] = 4.0 * own * processes
    if setting.target is None:
        return parts
    target = plan.target(setting.target_dtype)
    whole = float(sum(p.numel() * p.element_size() for p in target.parameters()))
    if setting.target == "sharded":
        parts["the target, in the first process of all"] = whole
    elif isinstance(plan, HeadsPlan) and plan.joint and setting.target == "whole":
        parts["the target, a copy a process until it is wrapped"] = whole * processes
    return parts
