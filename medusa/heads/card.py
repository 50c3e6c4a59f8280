"""The model card of Medusa heads: what they are, how to load them, and their acceptance."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.medusa.checkpoint_files import dtype_name
from draftsmith.medusa.heads.formats.writing import check_format, refusal
from draftsmith.medusa.heads.model import MedusaHeads
from draftsmith.train.job.kept_step import KeptStep
from draftsmith.train.kinds.export import vllm_command
from draftsmith.train.runs import hub_name

TEMPLATE = Path(__file__).with_name("card.md.j2")


def card(
    heads: MedusaHeads,
    format: str = "own",
    step: KeptStep | None = None,
    top_1: Sequence[float] = (),
    tau: float | None = None,
    teacher: str = "",
) -> ModelCard:
    """Return the card of heads in a format, with their `step`, acceptance and teacher if these are known.

    `top_1` is each head's share of held-out tokens that it put first, `tau` the mean acceptance length of their chain.
    """
    check_format(format)
    config = heads.config
    base = config.base_model_name_or_path
    data = ModelCardData(
        base_model=hub_name(base),
        library_name="draftsmith",
        tags=["medusa", "speculative-decoding", *(["hydra"] if config.hydra else [])],
    )
    model = "DIR" if format == "vllm" else "VLLM"
    speculative = {"method": "medusa", "model": model, "num_speculative_tokens": config.num_heads}
    return ModelCard.from_template(
        data,
        str(TEMPLATE),
        name="Hydra" if config.hydra else "Medusa",
        config=config,
        base=base,
        parameters=f"{heads.num_parameters():,}",
        dtype=dtype_name(heads.dtype),
        format=format,
        refusal=refusal(heads, "vllm"),
        serve=vllm_command(base or "TARGET", speculative),
        step=step,
        top_1=top_1,
        tau=tau,
        teacher=teacher,
    )
