"""Checks of `draftsmith doctor` on servers that give a target's states: who they are, and what they give."""

from collections.abc import Iterator
from dataclasses import replace

from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.scripts.doctor.checks import planned
from draftsmith.scripts.doctor.config import DoctorConfig
from draftsmith.scripts.doctor.findings import Finding
from draftsmith.scripts.kinds import run_of
from draftsmith.train.kinds.parts import Side
from draftsmith.train.teacher.served import ServedTarget, urls_of
from draftsmith.train.teacher.served_check import LENGTHS, check_states, library_at_hand, require_files, require_served
from draftsmith.train.teacher.target_ends import read_ends

TEXT = """A server that holds a large model computes what a smaller one learns from. It reads a text once, from the
first word to the last, and keeps what each of its layers makes of every word. The smaller model sees these states, and
the words that followed them, and learns to guess the next ones: in a round of drafting it proposes several, and the
large model accepts those that it would have written itself. So nothing of the text changes, only the time it takes."""


def check_teacher(config: DoctorConfig, target: Side) -> Iterator[Finding]:
    """Ask the servers of `--teacher` what they serve, and compare their states with the target's."""
    name, remedy = "teacher", "start the servers as docs/teachers.md says"
    urls = urls_of(config.teacher)
    try:
        with phase("asking the servers"), ServedTarget(urls) as teacher:
            served = teacher.served
            assert served is not None
            plans = [planned(kind.name, file, config.target) for kind, file in map(run_of, config.run)]
            for layer_ids in [plan.layer_ids for plan in plans] or [()]:
                require_served(served, urls[0], target.model.config, layer_ids)
            depths, quantized = ", ".join(map(str, served.layer_ids)), served.quantization or "not quantised"
            text = f"{', '.join(urls)}: {served.model} in {served.dtype}, {quantized}, by vLLM {served.vllm}"
            yield Finding(
                "ok", name, f"{text}; states after layers {depths}, texts of up to {served.max_model_len} tokens"
            )
            name, remedy = "its files", "serve the model that you name as --target"
            if require_files(served, urls[0], config.target):
                yield Finding("ok", name, f"those of {config.target}")
            else:
                text = f"those of {served.model} cannot be compared with {config.target}"
                yield Finding("warning", name, text, "give both as directories, or both as the hub's ids")
            name = "its states"
            ids = target.tokenizer.encode(TEXT)
            texts = [ids[start : start + length] for start, length in enumerate(LENGTHS)]
            ends = read_ends(config.target, served.dtype, trust_remote_code=config.trust_remote_code)
            library = library_at_hand(config.target, served.dtype, float("inf"), config.trust_remote_code)
            for found in check_states(teacher, ends, texts, library):
                yield Finding("ok", name, str(found))
    except InputError as error:
        refused = Finding.of(error, "teacher")
        yield replace(refused, name=name, remedy=remedy)
