"""`accelerate launch -m draftsmith.medusa --config configs/medusa/tiny.yaml`."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.decode.draft_models.vocabulary import token_count
from draftsmith.medusa.heads.beginning import quieten
from draftsmith.medusa.heads.card import card
from draftsmith.medusa.heads.config import MedusaTrainingConfig
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.medusa.heads.trainer import MedusaTrainer
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import few_texts
from draftsmith.train.data.packing import pack, require_packing
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.launch import launch, load_target, read_data, run_training
from draftsmith.train.models import load_tokenizer, whole_weights


def train_heads(config: MedusaTrainingConfig) -> MedusaTrainer:
    """Train as the config says; the heads are in `config.training.output_dir` when this returns."""
    tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=config.trust_remote_code)
    heads: MedusaHeads | None = None
    with whole_weights():
        if config.heads is not None:  # at once: completions and the target take longer to read
            heads = MedusaHeads.from_pretrained(config.heads).float()
        train, heldout = read_data(config)
        target = load_target(config, tokenizer)
        if heads is None:
            count, tokens = config.draft_vocabulary, token_count(tokenizer, target.config)
            heads = MedusaHeads.of_target(
                target,
                config.num_heads,
                token_map=None if count is None else frequent_tokens(train, count, tokens),
                num_hidden_layers=config.num_layers,
                medusa_fc_bias=config.bias,
                original_lm_head=config.lm_heads == "shared",
                hydra=config.hydra,
                base_model_name_or_path=config.target,
            ).float()
            if config.train_lm_heads and config.target_device != "auto":
                quieten(heads, target, few_texts(train), tokens)
    if config.packing:
        require_packing(target, "target", config.training.per_device_train_batch_size)
        train = pack(train, int(config.max_length or 0), by_source=bool(config.source_weights))
    trainer = MedusaTrainer(heads, target, tokenizer, config, train, heldout)

    def finish(output: Path) -> None:
        evaluations = [entry for entry in trainer.state.log_history if "eval_accuracy_1" in entry]
        top_1, tau = list[float](), None
        if evaluations:
            top_1 = [evaluations[-1][f"eval_accuracy_{i}"] for i in range(1, heads.config.num_heads + 1)]
            tau = evaluations[-1]["eval_mean_acceptance_length"]
        card(heads, top_1=top_1, tau=tau).save(output / "README.md")

    run_training(trainer, finish)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and train."""
    launch(MedusaTrainingConfig, train_heads, argv, prog="draftsmith.medusa")


if __name__ == "__main__":
    leave(run_rank(main))
