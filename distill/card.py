"""The model card of a draft, with its origin, acceptance, and launch lines."""

import math
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.train.checkpoint import stored_tensors
from draftsmith.train.data.generate import other_target
from draftsmith.train.data.shards import read_manifest
from draftsmith.train.kinds.export import sglang_command, vllm_command
from draftsmith.train.provenance import environment
from draftsmith.train.runs import hub_name

TEMPLATE = Path(__file__).with_name("card.md.j2")


def authors(config: DistillConfig) -> str:
    """Return the authors of the completions: the target, another model, or answers that were given."""
    names = list[str]()
    for path in config.completions:
        source = (read_manifest(Path(path)) or {}).get("source")
        if isinstance(source, dict) and source.get("answers") == "given":
            names.append("answers that were given")
        elif (model := other_target(path, config.target)) is not None:
            names.append(f"written by `{model}`")
        else:
            names.append("written by the target")
    return ", ".join(dict.fromkeys(names))


def card(trainer: DistillTrainer, output: Path) -> ModelCard:
    """Return the card of a trained draft that is saved in `output`; its text is `str(card)`."""
    config, args, init = trainer.config, trainer.args, trainer.config.init
    origin = "some of the target's layers" if init.layers is not None else "random weights"
    tensors = stored_tensors(output, "draft").values()
    block = trainer.block
    draft_length = min(config.draft_length, block["tokens"]) if block else config.draft_length
    served = "DIR" if trainer.cut is None else "WHOLE"
    speculative = {"method": "draft_model", "model": served, "num_speculative_tokens": draft_length}
    speculative |= block.get("served", {})
    return ModelCard.from_template(
        ModelCardData(
            base_model=hub_name(config.draft or config.target),
            library_name="transformers",
            tags=["speculative-decoding", "draft-model", "knowledge-distillation"],
        ),
        str(TEMPLATE),
        target=config.target,
        teacher=trainer.teacher,
        start=f"`{config.draft}`" if config.draft else origin,
        parameters=sum(math.prod(shape) for _, shape in tensors),
        kept=None if trainer.cut is None else len(trainer.cut.tokens_D),
        dtype=str(trainer.save_dtype).removeprefix("torch."),
        divergence=" + ".join(name if weight == 1 else f"{weight} × {name}" for name, weight in config.terms.items()),
        config=config,
        draft_length=draft_length,
        block=block,
        completions=", ".join(f"`{Path(path).name}`" for path in config.completions),
        authors=authors(config),
        served=served,
        rows=len(trainer.train_dataset),  # type: ignore[arg-type]
        heldout=len(trainer.eval_dataset or ()),  # type: ignore[arg-type]
        steps=trainer.state.global_step,
        batch=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        environment=environment(args.device),
        step=trainer.kept_step,
        metrics=trainer.kept_evaluation,
        vllm=vllm_command(config.target, speculative),
        sglang=sglang_command(config.target, served, config.draft_length),
    )
