"""`draftsmith prepare --config configs/prepare/tiny.yaml`: prompts in, completions written by the target out.

The target runs here or on a server (`--endpoint`), or the records have its answers already (`--answers given`).
"""

from collections.abc import Sequence

from draftsmith.decode.clock import speed
from draftsmith.scripts.summary import print_summary
from draftsmith.train.cli import parse_config
from draftsmith.train.data.generate import PrepareConfig, prepare
from draftsmith.train.job.processes import is_first
from draftsmith.train.job.ranks import leave, run_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare completions, and print a summary once for all processes; `argv` defaults to the process's."""
    summary = prepare(parse_config(PrepareConfig, argv, prog="draftsmith prepare"))
    if not is_first():
        return 0
    share, rate = summary.repeated_ngram_share, summary.tokens_per_second
    rows = {
        "completions": f"{summary.written + summary.kept} ({summary.written} written now, {summary.kept} kept)",
        "tokens": f"{summary.tokens} ({summary.cut} completions cut at max_new_tokens, {summary.empty} empty)",
        "repeated 4-grams": "none to count" if share is None else f"{share:.1%}",
        "speed": "nothing to write" if rate is None else f"{speed(rate)} tokens/s over {summary.seconds:.0f} s",
    }
    if summary.uncertain:
        rows["tokenized again"] = f"{summary.uncertain} completions may differ from what the target wrote"
    if summary.padded:
        rows["padding ids"] = f"{summary.padded} completions cut before an id that is no token"
    if summary.untrainable:
        rows["nothing to learn"] = f"{len(summary.untrainable)} samples: {_names(summary.untrainable)}"
    if summary.unfinished:
        rows["left out, cut"] = f"{len(summary.unfinished)} answers that were cut: {_names(summary.unfinished)}"
    if summary.left_out:
        rows["left out"] = f"{len(summary.left_out)} too long for the target's positions: {_names(summary.left_out)}"
    print_summary(rows, "completions", summary.output)
    return 0


def _names(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")


if __name__ == "__main__":
    leave(run_rank(main))
