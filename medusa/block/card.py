"""The model card of a block drafter: what it is, and what it accepts."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.medusa.block.trainer import BlockTrainer
from draftsmith.train.runs import hub_name

TEMPLATE = Path(__file__).with_name("card.md.j2")


def card(trainer: BlockTrainer) -> ModelCard:
    """Return the card of a drafter that was trained; its text is `str(card)`.

    Args:
        trainer: that trained it. The card says which step is kept, and what it accepts where that was measured.
    """
    drafter = trainer.heads
    name = "DSpark" if drafter.config.markov_rank else "DFlash"
    data = ModelCardData(
        base_model=hub_name(drafter.config.base_model_name_or_path),
        library_name="draftsmith",
        tags=[name.lower(), "speculative-decoding"],
    )
    return ModelCard.from_template(
        data,
        str(TEMPLATE),
        name=name,
        config=drafter.config,
        parameters=f"{drafter.num_parameters():,}",
        dtype=str(trainer.save_dtype).removeprefix("torch."),
        **trainer.acceptance,
    )
