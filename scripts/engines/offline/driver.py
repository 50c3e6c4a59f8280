"""Decode jobs in vLLM offline. The engine's Python runs this file, which imports only the standard library and vllm.

    python -P driver.py JOBS.json RESULTS.json

JOBS holds a list of objects with the fields of `draftsmith.scripts.engines.offline.jobs.Job`. RESULTS receives
`{"vllm": version, "device": kind, "results": [...]}` with a result for each job: `token_ids` and vLLM's counts, or
`error`, one line. It is written after each job, so that a crash loses no earlier result.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""A cache of 1 GiB, and no binding to cores that others may use; ignored on GPUs."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
COUNTERS = {
    f"vllm:spec_decode_{name}": name
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
}


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Decode one job, and return the texts and vLLM's counts."""
    from vllm import LLM, SamplingParams

    options = {name: job[name] for name in ("dtype", "max_model_len", "max_num_seqs", "seed", "trust_remote_code")}
    options |= {"model": job["target"], "speculative_config": job["speculative"], "hf_overrides": job["overrides"]}
    llm = LLM(enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, **options)
    try:
        options = {name: job[name] for name in ("temperature", "max_tokens", "seed")}
        sampling = SamplingParams(ignore_eos=True, detokenize=False, **options)
        before = counters(llm)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        result: dict[str, Any] = {"token_ids": [list(output.outputs[0].token_ids) for output in outputs]}
        for name, after in counters(llm).items():
            result[name] = [now - then for now, then in zip(after, before.get(name, [0] * len(after)), strict=True)]
        return result
    finally:
        llm.llm_engine.engine_core.shutdown()


def counters(llm: Any) -> dict[str, list[int]]:
    """Return vLLM's counters of speculative decoding by name: lists, of one value unless by position."""
    values = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            values[COUNTERS[metric.name]] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    return values


def main(jobs_file: str, results_file: str) -> None:
    """Decode all jobs of a file."""
    for name, value in {**CPU, **QUIET}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors are raised here, not logged by a child
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    results: list[dict[str, Any]] = []
    answers = {"vllm": vllm.__version__, "device": current_platform.device_type, "results": results}
    for job in json.loads(Path(jobs_file).read_text(encoding="utf-8")):
        try:
            results.append(decode(job))
        except Exception as error:
            traceback.print_exc()
            results.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]})
        gc.collect()
        cleanup_dist_env_and_memory()
        aside = Path(f"{results_file}.partial")
        aside.write_text(json.dumps(answers), encoding="utf-8")
        os.replace(aside, results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
