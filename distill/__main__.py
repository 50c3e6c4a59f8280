"""`accelerate launch -m draftsmith.distill --config configs/distill/tiny.yaml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.drafts import finish_draft, make_draft
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.cached_laws import CachedCollator, FoundLaws, find_laws
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data import training_examples
from draftsmith.train.models import check_head, load_model, load_tokenizer, tokenizer_size
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.packing import pack, require_packing
from draftsmith.train.provenance import write_run_record
from draftsmith.train.runs import last_checkpoint
from draftsmith.train.vocabulary import check_compatible_tokenizer


def distill(config: DistillConfig) -> DistillTrainer:
    """Distil as the config says; the draft is in `config.training.output_dir` when this returns."""
    code = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
    if config.draft is not None:  # at once: completions and weights take longer to read
        own = load_tokenizer(config.draft, field="draft", trust_remote_code=code)
        check_compatible_tokenizer(tokenizer, own, config.target, config.draft)
    args = config.training
    laws = _cached_laws(config, tokenizer_size(tokenizer)) if config.teacher_cache else None
    train = training_examples(config.completions, config.max_length)
    heldout = training_examples(config.heldout, config.max_length) if config.heldout else None
    target = None
    if laws is None:
        target = load_model(
            config.target,
            field="target",
            dtype=config.target_dtype,
            trust_remote_code=code,
            device=config.target_device or (args.device if config.target_quantization else "cpu"),
            quantization=config.target_quantization,
        )
        check_head(target, tokenizer, "target")
    draft, draft_tokenizer = make_draft(
        config.draft,
        config.init,
        config.target if target is None else target,
        tokenizer,
        target_path=config.target,
        trust_remote_code=code,
    )
    if config.packing:
        require_packing(draft, "draft", args.per_device_train_batch_size)
        if target is not None:
            require_packing(target, "target", args.per_device_train_batch_size)
        train = pack(train, int(config.max_length or 0))
    muon = MuonAdamW(draft, args.learning_rate, args.weight_decay) if config.optimizer == "muon" else None
    trainer = DistillTrainer(draft, target, draft_tokenizer, config, train, heldout, optimizers=(muon, None))
    if laws is not None:
        trainer.data_collator = CachedCollator(trainer.data_collator, laws)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir) if config.resume else None)
    if heldout is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        if config.init.pad_vocabulary:
            finish_draft(Path(str(args.output_dir)), draft_tokenizer, trust_remote_code=code)
        write_run_record(Path(str(args.output_dir)), config, args.device)
    trainer.accelerator.wait_for_everyone()  # the draft is whole when any process returns
    return trainer


def _cached_laws(config: DistillConfig, vocab_size: int) -> FoundLaws:
    return find_laws(
        config.teacher_cache,
        [*config.completions, *config.heldout],
        config.target,
        vocab_size,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_length=config.max_length,
        trust_remote_code=config.trust_remote_code,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config, distil, and end the process group, without which gloo may abort after correct output."""
    try:
        distill(parse_config(DistillConfig, argv, prog="draftsmith.distill"))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run(main))
