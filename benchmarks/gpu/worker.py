"""`python -m benchmarks.gpu.worker FILE`: runs the cases that wait in a file.

Its parent starts it again if it dies: a failed assertion on a GPU spoils its process.
"""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import Place, cases
from draftsmith.decode.errors import InputError, first_line
from draftsmith.train.provenance import write_json

WAITING, RUNNING, PASSED, FAILED = "waiting", "running", "passed", "failed"
REFUSED = "refused"
"""This machine, its libraries or the family have not what the case needs."""
LAST_LINES = 12


def without_figures(value: Any) -> Any:
    """Return figures with None in place of each number."""
    return {name: without_figures(each) for name, each in value.items()} if isinstance(value, dict) else None


def run_cases(file: Path) -> None:
    """Run all cases that wait in a file of results, and write each result there."""
    known, place = cases(), Place(file.parent / f"{file.stem}-files")
    place.folder.mkdir(parents=True, exist_ok=True)
    if not place.full:
        torch.set_num_threads(1)  # threads of tiny models wait for each other
    results = json.loads(file.read_text(encoding="utf-8"))
    waiting = [name for name, of_case in results["cases"].items() if of_case["state"] == WAITING]
    for name in waiting:
        results["cases"][name] = {"state": RUNNING, "began": time.time()}
        write_json(file, results)
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            outcome = known[name].run(place)
            entry = {"state": PASSED if outcome.passed else FAILED, **outcome.facts}
            if outcome.figures:
                entry["figures"] = outcome.figures if place.full else without_figures(outcome.figures)
        except InputError as error:
            entry = {"state": REFUSED, "error": [first_line(error)]}
        except (Exception, SystemExit):
            traceback.print_exc()
            entry = {"state": FAILED, "error": traceback.format_exc().splitlines()[-LAST_LINES:]}
        results["cases"][name] = entry | {"seconds": round(time.perf_counter() - begin, 1)}
        write_json(file, results)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
