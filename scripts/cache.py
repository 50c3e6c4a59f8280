"""`draftsmith cache --config configs/cache/tiny.yaml`: store the target's outputs, to train without it."""

from collections.abc import Sequence

from draftsmith.decode.clock import speed
from draftsmith.scripts.summary import print_summary
from draftsmith.train.cli import parse_config
from draftsmith.train.job.processes import is_first
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.teacher.cache_writer import CacheConfig, make_cache


def main(argv: Sequence[str] | None = None) -> int:
    """Write a teacher cache, and print a summary once for all processes; `argv` defaults to the process's."""
    summary = make_cache(parse_config(CacheConfig, argv, prog="draftsmith cache"))
    if not is_first():
        return 0
    size, positions = summary.bytes_per_token, summary.positions_written
    rows = {
        "samples": f"{summary.samples} ({summary.written} written now, {summary.kept} kept)",
        "tokens": f"{summary.positions}",
        "size": f"{summary.size / 1e6:.1f} MB" + ("" if size is None else f", {size:.1f} bytes a token"),
        "speed": f"{speed(positions / summary.seconds)} tokens/s over {summary.seconds:.0f} s"
        if positions
        else "nothing to write",
    }
    print_summary(rows, summary.title, summary.output)
    return 0


if __name__ == "__main__":
    leave(run_rank(main))
