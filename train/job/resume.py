"""The checkpoint that a job resumes from, chosen and checked once for all of its processes."""

import dataclasses
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainingArguments

from draftsmith.decode.errors import InputError
from draftsmith.decode.validation import file_bytes, parse
from draftsmith.train.provenance import as_json, write_json
from draftsmith.train.runs import checkpoints

RECORD = "job.json"
AGAIN = "give that, or another training.output_dir"


@dataclass(frozen=True)
class JobRecord:
    """Facts that a run must share with the one it resumes: data, their order, step size, sharding, and settings."""

    samples: int  # rows of training data
    data: str  # a digest of these rows in their order, and of how often an epoch takes each
    seed: int
    sampling: str
    processes: int
    batch: int  # samples per process and forward
    accumulation: int  # forwards per step
    strategy: str  # the sharding of the optimizer's state: DDP (or one process), FSDP, ZeRO-1, …
    settings: dict[str, Any]  # the drafter's shape, its loss, and what the optimizer's state holds

    @classmethod
    def of(
        cls, args: TrainingArguments, accelerator: Accelerator, samples: int, data: str, settings: dict[str, Any]
    ) -> "JobRecord":
        """Return this job's record."""
        zero = getattr(accelerator.state, "deepspeed_plugin", None)
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        return cls(
            samples=samples,
            data=data,
            seed=int(args.seed if args.data_seed is None else args.data_seed),
            sampling=str(args.train_sampling_strategy),
            processes=accelerator.num_processes,
            batch=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            strategy=f"ZeRO-{zero.zero_stage}" if zero else "FSDP" if fsdp else "DDP",
            settings=as_json(settings),
        )

    def write(self, checkpoint: Path) -> None:
        """Write the record into a checkpoint or a finished run's directory."""
        write_json(checkpoint / RECORD, dataclasses.asdict(self))

    @classmethod
    def left_in(cls, directory: Path) -> "JobRecord | None":
        """Return the record in a directory; None if there is none, or one of an earlier version with other fields."""
        file = directory / RECORD
        try:
            text = file_bytes(file)
        except FileNotFoundError:
            return None
        fields = {field.name for field in dataclasses.fields(cls)}
        return parse(cls, text, str(file)) if parse(dict[str, Any], text, str(file)).keys() == fields else None

    def is_of(self, directory: Path) -> bool:
        """Return whether this job left its record in a directory."""
        return JobRecord.left_in(directory) == self

    def require_resumable(self, checkpoint: Path) -> None:
        """Require that this job continues a checkpoint's data without repeating or skipping a sample.

        The order follows from the seed and the epoch alone, and each step takes the next samples of it, on any number
        of processes. So it is enough that the steps have the same size. ZeRO also fixes the number of processes.
        """
        record = JobRecord.left_in(checkpoint)
        if record is None:
            return  # an earlier version wrote it: the user must judge
        name = checkpoint.name
        for field, own, expected in (
            ("completions", f"{self.samples} samples", f"{record.samples} samples"),
            ("completions", f"data {self.data}", f"data {record.data}"),
            ("training.seed", self.seed, record.seed),
            ("training.train_sampling_strategy", self.sampling, record.sampling),
            ("strategy", self.strategy, record.strategy),
            # A setting that only one of the two has belongs to another version.
            *((field, own, record.settings.get(field, own)) for field, own in self.settings.items()),
        ):
            if own != expected:
                raise InputError(f"{field}: expected {expected} as in {name}, found {own}; {AGAIN}")
        if self.strategy.startswith("ZeRO") and self.processes != record.processes:
            raise InputError(
                f"processes: expected {record.processes}, over which {self.strategy} has divided {name}, "
                f"found {self.processes}; {AGAIN}"
            )
        # Name the nearest setting that divides evenly into steps of the same size.
        whole, part = record.processes * record.batch * record.accumulation, self.processes * self.batch
        if part * self.accumulation != whole:
            problem = (
                f"training.gradient_accumulation_steps: expected {whole // part}, found {self.accumulation}"
                if whole % part == 0
                else f"training.per_device_train_batch_size: expected a divisor of {whole // self.processes}, "
                f"found {self.batch}"
                if whole % self.processes == 0
                else f"processes: expected a divisor of {whole}, found {self.processes}"
            )
            raise InputError(f"{problem}: steps of {name} have {whole} samples; {AGAIN}")


def newest_checkpoint(output_dir: str) -> Path | None:
    """Return the newest checkpoint that all processes see, None if no process sees any; all call this together."""
    listings = gather_object([(socket.gethostname(), [path.name for path in checkpoints(output_dir)])])
    common = set.intersection(*(set(names) for _, names in listings))
    if not common and (hosts := [host for host, names in listings if names]):
        lacking = next((host for host, names in listings if not names), hosts[-1])
        raise InputError(
            f"training.output_dir: expected the same checkpoints on all machines, found some in {output_dir} on "
            f"{hosts[0]} and not on {lacking}; copy them there, or give another one"
        )
    return next((path for path in reversed(checkpoints(output_dir)) if path.name in common), None)


def require_shared(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Require that all machines share the output directory, unless no checkpoints are wanted; all call this together.

    Each process writes a part of a checkpoint and reads all of it.
    """
    if args.save_strategy == "no":
        return
    output = Path(str(args.output_dir))
    (token, *_) = gather_object([secrets.token_hex(8)])  # a new name: file systems cache which names do not exist
    probe = output / f".{token}.partial"
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        probe.touch()
    accelerator.wait_for_everyone()
    apart = gather_object([] if probe.exists() else [socket.gethostname()])
    if accelerator.is_main_process:
        probe.unlink()
    if apart:
        raise InputError(
            f"training.output_dir: expected a directory that all machines share, found none of rank 0's files in "
            f"{output} on {apart[0]}; give a shared one, or training.save_strategy no"
        )
