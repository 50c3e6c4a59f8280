"""`accelerate launch -m draftsmith.distill --config configs/distill/tiny.yaml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data import training_examples
from draftsmith.train.models import check_head, check_same_tokenizer, load_model, load_tokenizer
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.provenance import write_run_record
from draftsmith.train.runs import last_checkpoint


def distill(config: DistillConfig) -> DistillTrainer:
    """Distil as the config says; the draft is in `config.training.output_dir` when this returns."""
    code = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
    draft_tokenizer = load_tokenizer(config.draft, field="draft", trust_remote_code=code)
    check_same_tokenizer(tokenizer, draft_tokenizer, config.target, config.draft)
    args = config.training
    train = training_examples(config.completions, config.max_length)
    heldout = training_examples(config.heldout, config.max_length) if config.heldout else None
    target = load_model(config.target, field="target", dtype=config.target_dtype, trust_remote_code=code, device="cpu")
    draft = load_model(config.draft, field="draft", trust_remote_code=code, device="cpu").requires_grad_(True)
    for field, model in (("target", target), ("draft", draft)):
        check_head(model, tokenizer, field)
    muon = MuonAdamW(draft, args.learning_rate, args.weight_decay) if config.optimizer == "muon" else None
    trainer = DistillTrainer(draft, target, draft_tokenizer, config, train, heldout, optimizers=(muon, None))
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir) if config.resume else None)
    if heldout is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        write_run_record(Path(str(args.output_dir)), config, args.device)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config, distil, and end the process group, without which gloo may abort after correct output."""
    try:
        distill(parse_config(DistillConfig, argv, prog="draftsmith.distill"))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run(main))
