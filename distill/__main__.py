"""`accelerate launch -m draftsmith.distill --config configs/distill/tiny.yaml`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.cache import check_rollback, positions_of
from draftsmith.decode.errors import InputError
from draftsmith.distill.carving import CHOICE, Carving, choose
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.draft_init import finish_draft, make_draft
from draftsmith.distill.memory import DraftPlan
from draftsmith.distill.parallel.layout import mask_tokens
from draftsmith.distill.parallel.memory import ParallelPlan
from draftsmith.distill.parallel.model import choose_attention, make_parallel, require_masks
from draftsmith.distill.parallel.trainer import ParallelTrainer
from draftsmith.distill.trainer import DistillTrainer
from draftsmith.distill.vocabulary import keep_tokens
from draftsmith.train.checkpoint import stored_tensors
from draftsmith.train.data.examples import frequent_tokens
from draftsmith.train.data.first_look import few_texts
from draftsmith.train.data.generate import other_target
from draftsmith.train.data.shards import read_manifest
from draftsmith.train.job.ranks import leave, run_rank
from draftsmith.train.kinds.export import sglang_command, vllm_command
from draftsmith.train.launch import TrainingRun, launch
from draftsmith.train.memory.machines import Machines
from draftsmith.train.models import check_same_tokenizer, load_config, load_tokenizer, set_attention
from draftsmith.train.provenance import environment
from draftsmith.train.runs import hub_name
from draftsmith.train.teacher.cache_reader import SampleIndex, find_distributions
from draftsmith.train.teacher.feature_reader import holds_features
from draftsmith.train.teacher.state_cache import StateCache

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


class DistillRun(TrainingRun[DistillConfig]):
    """A run that distils a draft model."""

    draft_tokenizer: PreTrainedTokenizerBase
    """The tokenizer to save with the draft: its own if it maps all tokens as the target's does."""

    def read_small_files(self) -> None:
        """Compare the tokenizers, and read the index of a cache."""
        config = self.config
        if config.draft is not None:
            stored = load_tokenizer(config.draft, field="draft", trust_remote_code=config.trust_remote_code)
            size = self.target_config.get_text_config().vocab_size
            check_same_tokenizer(
                self.tokenizer, stored, config.target, config.draft, vocab_size=size, ends_may_differ=True
            )
        super().read_small_files()

    def find_cached(self) -> SampleIndex:
        """Return the index of caches of features or of distributions, as the first one is."""
        config = self.config
        if holds_features(config.teacher_cache[0]):
            return super().find_cached()
        if config.prompt_loss:
            cache = f"{config.teacher_cache[0]}, whose distributions are those of completions"
            raise InputError(f"prompt_loss: expected false with {cache}, found true; a cache of features serves it")
        return find_distributions(config.teacher_cache, config, self.tokens)

    @property
    def positions(self) -> int | None:
        """The positions of the target or of the draft, whichever has fewer."""
        config = self.config
        changed = (config.init.config or {}).get("max_position_embeddings")
        own = changed if config.draft is None else positions_of(self._config_of(config.draft))
        return min(filter(None, [own, super().positions]), default=None)

    def make_model(self) -> PreTrainedModel:
        """Return the initial draft."""
        config, init = self.config, self.config.init
        # A cache has no layers to carve.
        absent = config.target_sharded or (self.cached is not None and init.layers is not None)
        draft, self.draft_tokenizer = make_draft(
            config.draft,
            init,
            config.target if self.target is None or absent else self.target,
            self.tokenizer,
            self.choose_layers,
            trained_padding=() if config.draft is None else mask_tokens(self._config_of(config.draft)),
            trust_remote_code=config.trust_remote_code,
        )
        if config.parallel:
            make_parallel(draft, self.draft_tokenizer, config.parallel, config.parallel_mask_token)
            choose_attention(draft, config.attn_implementation)
            check_rollback(draft, "draft")
            require_masks(draft)
        else:
            set_attention(draft, config.attn_implementation)
        draft.generation_config.eos_token_id = self.ends or None  # type: ignore[union-attr]
        if init.draft_vocabulary is not None:
            frequent = frequent_tokens(
                self.data, init.draft_vocabulary, self.tokens, self.ends, "init.draft_vocabulary"
            )
            keep_tokens(draft, frequent.tolist())
        return draft

    def choose_layers(self, ways: Sequence[list[int]], view: Callable[[list[int]], PreTrainedModel]) -> Carving:
        """Choose the layers of a carved draft on a few completions; a resumed run reads its earlier choice."""
        file = Path(str(self.config.training.output_dir)) / CHOICE
        if not self.begins and (carving := Carving.read(file)) is not None:
            return carving
        carving = choose(ways, view, few_texts(self.data), self.tokens)
        if self.config.training.should_save:
            carving.write(file)
        return carving

    def packed_models(self, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Return the target and, unless its masks separate samples, the draft."""
        return ({} if self.config.parallel else {"draft": model}) | super().packed_models(model)

    def make_trainer(self, model: PreTrainedModel) -> DistillTrainer:
        """Return the trainer of a plain or a parallel draft."""
        kind = ParallelTrainer if self.config.parallel else DistillTrainer
        return kind(model, self.target, self.draft_tokenizer, self.config, self.data, self.heldout)

    def finish(self, trainer: DistillTrainer, output: Path) -> None:
        """Silence the padding of the saved draft's head, and write its card."""
        if self.config.init.pad_vocabulary:
            spared, code = mask_tokens(self._config_of(output)), self.config.trust_remote_code
            finish_draft(output, self.tokens, spared, trust_remote_code=code)
        card(trainer, output).save(output / "README.md")

    def _config_of(self, draft: str | Path) -> PretrainedConfig:
        return load_config(draft, field="draft", trust_remote_code=self.config.trust_remote_code)


def distill(config: DistillConfig, state_cache: StateCache | None = None) -> DistillTrainer:
    """Distil a draft into `config.training.output_dir`; a `state_cache` spares second forwards of the target."""
    run = DistillRun(config)
    run.state_cache = state_cache
    return run.train()  # type: ignore[return-value]


def plan_of(config: DistillConfig, machines: Machines) -> DraftPlan:
    """Return the plan of a run's memory, with masks for a parallel draft."""
    return (ParallelPlan if config.parallel else DraftPlan)(config, machines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the config and distil."""
    launch(DistillConfig, distill, argv, prog="draftsmith.distill")


if __name__ == "__main__":
    leave(run_rank(main))
