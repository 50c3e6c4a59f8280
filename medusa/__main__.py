"""`accelerate launch -m draftsmith.medusa --config configs/medusa/tiny.yaml`."""

import sys
from collections.abc import Sequence

from draftsmith.medusa.config import MedusaTrainingConfig
from draftsmith.medusa.heads import MedusaHeads
from draftsmith.medusa.trainer import MedusaTrainer, frequent_tokens
from draftsmith.train.cli import run
from draftsmith.train.launch import launch, load_target, read_data, run_training
from draftsmith.train.models import load_tokenizer, whole_weights
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.packing import pack, require_packing


def train_heads(config: MedusaTrainingConfig) -> MedusaTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    args = config.training
    train, heldout = read_data(config)
    target = load_target(config, tokenizer)
    with whole_weights():
        if config.heads is not None:
            heads = MedusaHeads.from_pretrained(config.heads).float()
        else:
            count = config.draft_vocabulary
            heads = MedusaHeads.of_target(
                target,
                config.num_heads,
                config.num_layers,
                config.lm_heads,
                bias=config.bias,
                hydra=config.hydra,
                token_map=None if count is None else frequent_tokens(train, count),
                path=config.target,
            ).float()
    if config.packing:
        require_packing(target, "target", args.per_device_train_batch_size)
        train = pack(train, int(config.max_length or 0))
    muon = None
    if config.optimizer == "muon":
        muon = MuonAdamW(heads, args.learning_rate, args.weight_decay, ends=heads.all_lm_heads)
    trainer = MedusaTrainer(heads, target, tokenizer, config, train, heldout, optimizers=(muon, None))
    run_training(trainer)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(MedusaTrainingConfig, train_heads, argv, prog="draftsmith.medusa")


if __name__ == "__main__":
    sys.exit(run(main))
