"""The model card of EAGLE-3 heads: what they are, and what they accept."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.train.runs import hub_name

TEMPLATE = Path(__file__).with_name("card.md.j2")


def card(trainer: EagleTrainer) -> ModelCard:
    """Return the card of heads that were trained; its text is `str(card)`.

    Args:
        trainer: that trained them. The acceptance is that of its last evaluation; the card has none without one.
    """
    heads = trainer.heads
    base, steps = heads.config.base_model_name_or_path, trainer.config.num_steps
    top_1, tau = trainer.last_acceptance
    return ModelCard.from_template(
        ModelCardData(base_model=hub_name(base), library_name="draftsmith", tags=["eagle3", "speculative-decoding"]),
        str(TEMPLATE),
        config=heads.config,
        base=base,
        parameters=f"{heads.num_parameters():,}",
        dtype=str(trainer.save_dtype).removeprefix("torch."),
        num_steps=steps,
        top_1=top_1,
        tau=tau,
    )
