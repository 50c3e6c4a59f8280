"""Known plans: `tests/golden/plans.txt` has the figures of each shipped config, and of tiny ones in other settings."""

from pathlib import Path

import pytest

from draftsmith.scripts.plan.config import plan_config
from draftsmith.train.cli import parse_config
from draftsmith.train.memory.setting import GIB

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "tests" / "golden" / "configs"
PLANNED = ("block", "distill", "eagle", "medusa")
DRAFTS = {
    "qwen3-8b-to-0.6b": "qwen3-0.6b",
    "qwen3-8b-to-0.6b-parallel": "qwen3-0.6b",
    "llama-3.1-8b-to-1b": "llama-3.2-1b",
    "pythia-6.9b-to-160m": "pythia-160m",
    "gpt2-to-distilgpt2": "distilgpt2",
}
LINES = dict(line.split(" | ", 1) for line in (ROOT / "tests" / "golden" / "plans.txt").read_text().splitlines()[1:])


def planned(call: str):
    """The plan of a line: a shipped config, and flags."""
    recipe, name, *flags = call.split()
    argv = ["--recipe", recipe, "--config", str(ROOT / "configs" / recipe / f"{name}.yaml")]
    if not name.startswith("tiny"):
        target = name.partition("-to-")[0].removesuffix("-carved")
        argv += ["--target_config", str(SHAPES / f"{target}.json")]
        argv += ["--draft_config", str(SHAPES / f"{DRAFTS[name]}.json")] if name in DRAFTS else []
        argv += ["--gpus", "8"]  # as the files say
    else:
        argv += ["--max_length", "256", "--config", f"{{loss_chunk: {2**20}}}"]
    return parse_config(plan_config(argv), [*argv, *flags, "--training.use_cpu", "true"]).memory_plan()


def test_each_shipped_config_is_in_the_table():
    shipped = {f"{recipe} {path.stem}" for recipe in PLANNED for path in (ROOT / "configs" / recipe).glob("*.yaml")}
    assert shipped == {" ".join(call.split()[:2]) for call in LINES}


@pytest.mark.parametrize(
    "call", [pytest.param(call, marks=() if " tiny" in call else pytest.mark.slow, id=call) for call in LINES]
)
def test_a_plan_has_the_known_figures(call, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = planned(call)
    held, moments, hours = (part.split() for part in LINES[call].split(" | "))
    found = [sum(plan.held(plan.setting).values()), *(moment.total for moment in plan.moments(plan.setting))]
    assert [size / 1e6 for size in found] == pytest.approx([float(size) for size in held + moments], rel=0.01, abs=0.01)
    assert plan.hours() == pytest.approx(float(hours[0]), rel=0.01)
    recipe, name, *_ = call.split()
    if not name.startswith("tiny"):
        assert plan.fits(plan.setting)
        total = plan.total(plan.setting) / GIB + plan.config.reserve
        text = (ROOT / "configs" / recipe / f"{name}.yaml").read_text().replace("\n# ", " ")
        assert recipe not in ("distill", "medusa") or f"{total:.0f} GiB of each" in text
