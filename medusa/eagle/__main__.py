"""`accelerate launch -m draftsmith.medusa.eagle --config configs/eagle/tiny.yaml`."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.medusa.eagle.card import card
from draftsmith.medusa.eagle.config import EagleTrainingConfig
from draftsmith.medusa.eagle.heads import EagleHeads
from draftsmith.medusa.eagle.initial import beginning, new_heads, quieten, seen_before, seen_now
from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import few_texts
from draftsmith.train.data.packing import pack, require_packing
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch, load_target, read_data, run_training
from draftsmith.train.models import check_head, load_config, load_tokenizer, whole_weights
from draftsmith.train.teacher.feature_reader import FeatureCollator, find_features


def train_heads(config: EagleTrainingConfig) -> EagleTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    heads: EagleHeads | None = None
    features = None
    if config.teacher_cache:
        target_config = load_config(config.target, field="target", trust_remote_code=config.trust_remote_code)
        features = find_features(config.teacher_cache, config, token_count(tokenizer, target_config))
    with whole_weights():
        if config.heads is not None:  # at once: completions and the target take longer to read
            heads = EagleHeads.from_pretrained(config.heads).float()
        train, heldout = read_data(config)
        target = load_target(config, tokenizer) if features is None else features.load_target(config)
        count, tokens = config.draft_vocabulary, token_count(tokenizer, target.config)
        if heads is None:
            heads = new_heads(config, target, None if count is None else frequent_tokens(train, count, tokens))
        if features is not None:
            check_head(target.config, tokenizer, "target")
            features.require_layers(heads.layer_ids)
        # A state that is handed on must not be scaled.
        looks = config.heads is None and config.target_device != "auto" and not config.norm_output
        if looks and beginning(config, heads, target)[0] == "last_layer":
            look = partial(seen_now, target, heads.layer_ids)
            look = look if features is None else partial(seen_before, target, features)
            quieten(heads, look, few_texts(train), config.num_steps, tokens)
    if config.packing:
        if features is None:
            require_packing(target, "target", config.training.per_device_train_batch_size)
        train = pack(train, int(config.max_length or 0), by_source=bool(config.source_weights))
    trainer = EagleTrainer(heads, target, tokenizer, config, train, heldout)
    if config.heads is None and trainer.is_world_process_zero():
        print(f"init: heads {beginning(config, heads, target)[1]}", file=sys.stderr)
    if features is not None:
        trainer.data_collator = FeatureCollator(trainer.data_collator, features)

    def finish(output: Path) -> None:
        card(trainer).save(output / "README.md")

    run_training(trainer, finish)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(EagleTrainingConfig, train_heads, argv, prog="draftsmith.medusa.eagle")


if __name__ == "__main__":
    leave(run_rank(main))
