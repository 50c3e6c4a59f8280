"""The `draftsmith` command."""

import importlib
import sys
from collections.abc import Sequence

from draftsmith.train.cli import run

COMMANDS = {
    "quickstart": "the whole road on the embedded target, in minutes on a laptop CPU",
    "doctor": "will this pair work? a line a check, and which tokens of your samples count in the loss",
    "plan": "will a distillation run fit its GPUs? by arithmetic, without weights or a GPU",
    "prepare": "prompts → completions written by the target",
    "cache": "the target's laws on its completions, to distil with no target in memory",
    "generate": "one prompt in the terminal: every token in the colour of how it came about",
    "measure": "go or no-go: acceptance, speed-up and costs of drafters, on one page",
    "profile": "where a round's time goes: draft, target, accept, sync and rest, as a table and a trace",
    "medusa-tree": "the tree that Medusa heads should draft, searched on the target's own text",
    "tune": "lossy rules at many levels: speed against departure from the target, and the level to take",
    "export": "Medusa heads in the formats of vLLM and others, and what launches a draft model there",
}
PACKAGES = ("doctor", "measure", "plan", "tune")
"""Commands that are packages of several modules."""
USAGE = "\n".join(
    [
        "usage: draftsmith COMMAND [--config FILE.yaml] [--FIELD VALUE …]",
        "",
        *(f"  {name:<12}{what}" for name, what in COMMANDS.items()),
        "",
        "  accelerate launch -m draftsmith.distill --config FILE.yaml     distil a draft model",
        "  accelerate launch -m draftsmith.medusa --config FILE.yaml      train Medusa heads",
        "",
        "draftsmith COMMAND --help lists its fields.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input; a failure of ours raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: expected a command out of {', '.join(COMMANDS)}, found {name!r}", file=sys.stderr)
        return 2
    # Imported by need: the Trainer that quickstart brings in takes seconds, which measure should not cost.
    module = name.replace("-", "_")
    command = importlib.import_module(f"draftsmith.scripts.{module}" + (".command" if name in PACKAGES else ""))
    return run(lambda: command.main(rest))
