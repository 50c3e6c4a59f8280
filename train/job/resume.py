"""The checkpoint that a job resumes from, and whether it can: decided once for all of its processes."""

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
from draftsmith.decode.validation import file_bytes, parsed
from draftsmith.train.provenance import write_json
from draftsmith.train.runs import checkpoints

RECORD = "job.json"
AGAIN = "give that, or resume false and another training.output_dir"


@dataclass(frozen=True)
class JobRecord:
    """What a run must share with the one that it resumes: data and their order, samples a step, and who holds what."""

    samples: int
    """Rows of the data that are trained on."""
    data: str
    """A digest of these rows, in their order, and of how often an epoch takes each."""
    seed: int
    sampling: str
    processes: int
    batch: int
    """Samples of a process's part of a step."""
    accumulation: int
    """Parts of a step."""
    strategy: str
    """What holds the optimizer's state: DDP (or one process), FSDP, ZeRO-1, …"""

    @classmethod
    def of(cls, args: TrainingArguments, accelerator: Accelerator, samples: int, data: str) -> "JobRecord":
        """Return what this job is."""
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
        )

    def write(self, checkpoint: Path) -> None:
        """Leave this in a checkpoint, or beside what was trained."""
        write_json(checkpoint / RECORD, dataclasses.asdict(self))

    @classmethod
    def left_in(cls, directory: Path) -> "JobRecord | None":
        """Return what was left there; None where nothing was, or by an earlier version with other fields.

        Raises:
            InputError: it is damaged.
        """
        file = directory / RECORD
        try:
            text = file_bytes(file)
        except FileNotFoundError:
            return None
        fields = {field.name for field in dataclasses.fields(cls)}
        return parsed(cls, text, str(file)) if parsed(dict[str, Any], text, str(file)).keys() == fields else None

    def is_of(self, directory: Path) -> bool:
        """Say whether this job left its record there."""
        return JobRecord.left_in(directory) == self

    def require_goes_on(self, checkpoint: Path) -> None:
        """Require that this job sees what is left of the checkpoint's data: no sample twice, and none left out.

        The seed and the epoch alone give the order, and a step takes the next samples of it, whatever the number of
        processes: so it is enough that steps are as large.

        Raises:
            InputError: it does not, or cannot read the optimizer's state; says what to give.
        """
        record = JobRecord.left_in(checkpoint)
        if record is None:
            return  # of an earlier version: it is the user who knows
        name = checkpoint.name
        for field, found, expected in (
            ("completions", f"{self.samples} samples", f"{record.samples} samples"),
            ("completions", f"data {self.data}", f"data {record.data}"),
            ("training.seed", self.seed, record.seed),
            ("training.train_sampling_strategy", self.sampling, record.sampling),
            ("strategy", self.strategy, record.strategy),
        ):
            if found != expected:
                raise InputError(f"{field}: expected {expected} as in {name}, found {found}; {AGAIN}")
        if self.strategy.startswith("ZeRO") and self.processes != record.processes:
            raise InputError(
                f"processes: expected {record.processes}, over which {self.strategy} has divided {name}, "
                f"found {self.processes}; {AGAIN}"
            )
        whole, part = record.processes * record.batch * record.accumulation, self.processes * self.batch
        if part * self.accumulation != whole:
            wanted = (
                f"training.gradient_accumulation_steps: expected {whole // part}, found {self.accumulation}"
                if whole % part == 0
                else f"training.per_device_train_batch_size: expected a divisor of {whole // self.processes}, "
                f"found {self.batch}"
                if whole % self.processes == 0
                else f"processes: expected a divisor of {whole}, found {self.processes}"
            )
            raise InputError(f"{wanted}: steps of {name} have {whole} samples; {AGAIN}")


def newest_checkpoint(output_dir: str) -> Path | None:
    """Return the newest checkpoint that all processes see, or None where none sees any; all call this together.

    Raises:
        InputError: some processes see checkpoints, and others not the same.
    """
    seen = gather_object([(socket.gethostname(), [path.name for path in checkpoints(output_dir)])])
    common = set.intersection(*(set(names) for _, names in seen))
    if not common and (hosts := [host for host, names in seen if names]):
        lacking = next((host for host, names in seen if not names), hosts[-1])
        raise InputError(
            f"training.output_dir: expected the same checkpoints on all machines, found some in {output_dir} on "
            f"{hosts[0]} and not on {lacking}; copy them there, or give resume false"
        )
    return next((path for path in reversed(checkpoints(output_dir)) if path.name in common), None)


def require_shared(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Require that all machines see the output directory, where checkpoints are wanted; all call this together.

    Each process writes a part of a checkpoint, and reads all of it.

    Raises:
        InputError: some have a disk of their own there; says what to give.
    """
    if args.save_strategy == "no":
        return
    output = Path(str(args.output_dir))
    (token, *_) = gather_object([secrets.token_hex(8)])  # a new name: file systems remember what was not there
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
