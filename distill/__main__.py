"""`accelerate launch -m draftsmith.distill --config configs/distill/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.distill.card import card
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.draft_init import finish_draft, make_draft
from draftsmith.distill.parallel.model import choose_attention, make_parallel, require_masks
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.data.decoding import end_of_sequence_ids
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import few_texts
from draftsmith.train.data.packing import pack, require_packing
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch, load_target, read_data, run_training
from draftsmith.train.models import check_same_tokenizer, load_config, load_tokenizer, set_attention
from draftsmith.train.teacher.cache_reader import CachedCollator, find_distributions


def distill(config: DistillConfig) -> DistillTrainer:
    """Distil as the config says; the draft is in `config.training.output_dir` when this returns."""
    code = config.trust_remote_code
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
    target_config = load_config(config.target, field="target", trust_remote_code=code)
    tokens = token_count(tokenizer, target_config)
    if config.draft is not None:  # at once: completions and weights take longer to read
        stored = load_tokenizer(config.draft, field="draft", trust_remote_code=code)
        size = target_config.get_text_config().vocab_size
        check_same_tokenizer(tokenizer, stored, config.target, config.draft, vocab_size=size, ends_may_differ=True)
    args = config.training
    distributions = None
    if config.teacher_cache:
        distributions = find_distributions(config.teacher_cache, config, tokens)
    train, heldout = read_data(config)
    target = load_target(config, tokenizer) if distributions is None else None
    draft, draft_tokenizer = make_draft(
        config.draft,
        config.init,
        config.target if target is None or config.target_sharded else target,
        tokenizer,
        () if config.target_device == "auto" else few_texts(train),  # layers of several devices are not rearranged
        trust_remote_code=code,
    )
    if config.parallel:
        make_parallel(draft, draft_tokenizer, config.parallel, config.parallel_mask_token)
        choose_attention(draft, config.attn_implementation)
        require_masks(draft)
    else:
        set_attention(draft, config.attn_implementation)
    if config.init.draft_vocabulary is not None:
        count = config.init.draft_vocabulary
        ends = end_of_sequence_ids(draft.generation_config, tokenizer)
        keep_tokens(draft, frequent_tokens(train, count, tokens, ends, "init.draft_vocabulary").tolist())
    if config.packing:
        if not config.parallel:  # masks tell the samples apart
            require_packing(draft, "draft", args.per_device_train_batch_size)
        if target is not None:
            require_packing(target, "target", args.per_device_train_batch_size)
        train = pack(train, int(config.max_length or 0), by_source=bool(config.source_weights))
    kind = ParallelTrainer if config.parallel else DistillTrainer
    trainer = kind(draft, target, draft_tokenizer, config, train, heldout)
    if distributions is not None:
        trainer.data_collator = CachedCollator(trainer.data_collator, distributions)

    def finish(output: Path) -> None:
        if config.init.pad_vocabulary:
            finish_draft(output, tokens, trust_remote_code=code)
        card(trainer, output).save(output / "README.md")

    run_training(trainer, finish)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and distil."""
    launch(DistillConfig, distill, argv, prog="draftsmith.distill")


if __name__ == "__main__":
    leave(run_rank(main))
