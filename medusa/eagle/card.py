"""The model card of EAGLE-3 heads: what they are, and what they accept."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.medusa.eagle.trainer import EagleTrainer
from draftsmith.train.runs import hub_name

TEMPLATE = Path(__file__).with_name("card.md.j2")


def card(trainer: EagleTrainer) -> ModelCard:
    """Return the card of heads that were trained; its text is `str(card)`.

    Args:
        trainer: that trained them. The card says which step is kept, and what it accepts where that was measured.
    """
    heads = trainer.heads
    base, steps = heads.config.base_model_name_or_path, trainer.config.num_steps
    return ModelCard.from_template(
        ModelCardData(base_model=hub_name(base), library_name="draftsmith", tags=["eagle3", "speculative-decoding"]),
        str(TEMPLATE),
        config=heads.config,
        base=base,
        parameters=f"{heads.num_parameters():,}",
        dtype=str(trainer.save_dtype).removeprefix("torch."),
        num_steps=steps,
        **trainer.acceptance,
    )
