"""`draftsmith export`: heads in the formats of others, and the lines that launch them or a draft model."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode import DraftModelProposer, ParallelDraftProposer, Proposer, Tree
from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.distill.parallel.layout import is_parallel, length_of, mask_token_of, tree_of
from draftsmith.distill.vocabulary import with_whole_head
from draftsmith.medusa import MedusaProposer
from draftsmith.medusa.eagle.formats.export import GAMMA, export_lines, import_lines, served_eagle
from draftsmith.medusa.eagle.formats.importing import is_eagle
from draftsmith.medusa.heads.card import card
from draftsmith.medusa.heads.formats.importing import import_heads
from draftsmith.medusa.heads.formats.writing import (
    VLLM_READS,
    check_format,
    export_heads,
    refusal,
    written_bytes,
)
from draftsmith.scripts.configs import ExportConfig
from draftsmith.scripts.engine.offline import EngineFailure, engine_python
from draftsmith.scripts.engine.verification import room, verify
from draftsmith.scripts.summary import size
from draftsmith.train.cli import parse_config, run
from draftsmith.train.data.corpus import encoded_prompts
from draftsmith.train.kinds.export import Served, check_output
from draftsmith.train.models import (
    DTYPES,
    check_same_tokenizer,
    empty_model,
    load_config,
    load_draft,
    load_model,
    load_tokenizer,
    stored_dtype,
)
from draftsmith.train.runs import save_model, sglang_command, vllm_command

PROMPT_TOKENS = 128
"""Kept of a prompt that is verified with."""


def export(config: ExportConfig) -> list[str]:
    """Do what the config says and return what to tell: the launch line is the last that is no comment.

    Raises:
        InputError: anything that cannot be read, written, or held by the format.
    """
    if config.draft is not None:
        return _serve_draft(config, config.draft)
    check_output(Path(str(config.output)))
    if config.import_from is not None:
        return (import_lines if is_eagle(config.import_from) else _import)(config, config.import_from)
    return (export_lines if is_eagle(str(config.heads)) else _export)(config, str(config.heads))


def _export(config: ExportConfig, source: str) -> list[str]:
    format, output = str(config.format), str(config.output)
    heads = import_heads(source, "own")
    overrides: dict[str, int] = {}
    model = None
    if config.target is not None:
        model = empty_model(config.target, field="target", trust_remote_code=config.trust_remote_code)
        heads.check_fits(model)
        overrides = vocabulary_override(model.config)
        heads.config.base_model_name_or_path = config.target
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    if count > heads.config.num_heads:
        raise InputError(f"draft_length: expected at most the {heads.config.num_heads} heads, found {count}")
    if refusal(heads, check_format(format), config.by_rank) is None:
        written = f"# writes {size(written_bytes(heads, format, config.dtype))} of weights to {output}"
        if model is not None:
            written += f"; the target's own take {size(sum(p.numel() * p.element_size() for p in model.parameters()))}"
        print(written, flush=True)  # at once: a disk may be too small for it
    notes = export_heads(
        heads, output, format, config.dtype, by_rank=config.by_rank, readme=str(card(heads, format=format))
    )
    target = heads.config.base_model_name_or_path or "TARGET"
    lines = [f"# {note}" for note in [f"wrote {output}, read back by another process with the same logits", *notes]]
    if overrides and format in VLLM_READS:
        lines.append(
            "# vLLM 0.32 looks for vocab_size at the top of the target's config, which has it in its text_config "
            "alone: hence the override"
        )
    speculative = {"method": "medusa", "model": output, "num_speculative_tokens": count}
    vllm = vllm_command(target, speculative, overrides)
    if format == "vllm":
        return [*lines, "# SGLang loads no Medusa heads, but EAGLE-3 heads", vllm]
    if format == "fasterdecoding":
        return [*lines, f"# {vllm}", f"python -m medusa.inference.cli --model {shlex.quote(output)}"]
    if format == "modelopt":
        return [*lines, "# load the target, convert it with ModelOpt's medusa mode, then load these tensors into it"]
    return lines


def verified(config: ExportConfig, python: Path) -> list[str]:
    """Decode with what was exported in a real engine, and return what was compared, a line each.

    Raises:
        InputError: prompts or models that cannot be read.
        EngineFailure: the engine does not load it, or decodes otherwise: one line.
    """
    target, code = str(config.target), config.trust_remote_code
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=code)
    prompts = encoded_prompts(config.prompts, tokenizer, config.limit, PROMPT_TOKENS)
    if not prompts:
        raise InputError(f"prompts: expected at least one in {config.prompts}, found none")
    of_heads = served_eagle if is_eagle(str(config.heads)) else _served_heads
    served, drafter = (_served_draft if config.draft is not None else of_heads)(config)

    def load() -> tuple[PreTrainedModel, Proposer]:
        model = load_model(target, field="target", dtype="float32", trust_remote_code=code)
        return model, drafter(model)

    options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "timeout": config.timeout}
    model_config = load_config(target, field="target", trust_remote_code=code)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and (needed := room(served, prompts, config.max_new_tokens)) > positions:
        raise InputError(
            f"max_new_tokens: expected prompts of at most {PROMPT_TOKENS} tokens, their texts and two rounds' drafts "
            f"within the target's {positions} positions, found {needed}"
        )
    if config.draft is None:
        options["overrides"] = vocabulary_override(model_config)
    return verify(python, target, served, prompts, load, trust_remote_code=code, **options)


def _served_draft(config: ExportConfig) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    path, code = str(config.draft), config.trust_remote_code
    written = config.output or path  # of a cut vocabulary
    speculative = speculative_config(config, written, load_config(path, field="draft", trust_remote_code=code))
    served = [
        Served(f"the draft, {method}", {**speculative, "draft_sample_method": method})
        for method in ("greedy", "probabilistic")
    ]

    def drafter(_: PreTrainedModel) -> Proposer:
        draft = load_draft(path, dtype="float32", trust_remote_code=code)
        return ParallelDraftProposer(draft) if is_parallel(draft.config) else DraftModelProposer(draft)

    return served, drafter


def speculative_config(config: ExportConfig, path: str, draft: PretrainedConfig) -> dict[str, Any]:
    """Return vLLM's speculative config of a draft; one that names a mask token drafts all tokens in one forward.

    vLLM 0.32 reads `pard_token` of the draft's config (`v1/spec_decode/llm_base_proposer.py`) and asks for no length.
    """
    found: dict[str, Any] = {
        "method": "draft_model",
        "model": path,
        "num_speculative_tokens": draft_length(config, draft),
    }
    return found | ({"parallel_drafting": True} if is_parallel(draft) else {})


def draft_length(config: ExportConfig, draft: PretrainedConfig) -> int:
    """Return γ: what was asked for, all that a parallel draft proposes, or 4.

    Raises:
        InputError: more than a parallel draft was trained to propose.
    """
    longest = length_of(draft)
    given = config.draft_length or longest or GAMMA
    if longest is not None and given > longest:
        raise InputError(
            f"draft_length: expected at most the {longest} tokens that the draft was trained to propose, found {given}"
        )
    return given


def _served_heads(config: ExportConfig) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    # What was given, not what was written: so the file is proven, too.
    heads: Any = import_heads(str(config.heads), "own")
    count = heads.config.num_heads if config.draft_length is None else config.draft_length
    speculative = {"method": "medusa", "model": str(config.output), "num_speculative_tokens": count}

    def drafter(model: PreTrainedModel) -> Proposer:
        rounded = heads if config.dtype is None else heads.to(DTYPES[config.dtype])
        return MedusaProposer(rounded.to(model.device, model.dtype), Tree.chain(count))

    return [Served("the heads", speculative)], drafter


def vocabulary_override(config: PretrainedConfig) -> dict[str, int]:
    """Return what must be added to a target's config so that vLLM finds its vocabulary size; nothing for most.

    Its speculative config reads `hf_config.vocab_size` (vLLM 0.32, `config/speculative.py`), which configs of several
    modalities have in their `text_config` alone.
    """
    fields = config.to_dict()
    return {} if "vocab_size" in fields else {"vocab_size": int(config.get_text_config().vocab_size)}


def _import(config: ExportConfig, source: str) -> list[str]:
    output = str(config.output)
    target, code = None, config.trust_remote_code
    if config.target is not None:
        dtype = stored_dtype(empty_model(config.target, field="target", trust_remote_code=code).config)
        target = load_model(config.target, field="target", dtype=dtype, trust_remote_code=code, device="cpu")
    heads = import_heads(source, config.format, target)
    heads.config.base_model_name_or_path = config.target or heads.config.base_model_name_or_path
    notes = export_heads(heads, output, "own", config.dtype, readme=str(card(heads)))
    written = f"wrote {output}: {heads.config.num_heads} heads, read back by another process with the same logits"
    return [f"# {note}" for note in [written, *notes]]


def _serve_draft(config: ExportConfig, path: str) -> list[str]:
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(f"draft: expected a directory, found none at {path}")
    if not any(directory.glob("*.safetensors")):
        raise InputError(f"draft: expected weights in safetensors in {path}, found none; save it with save_pretrained")
    code = config.trust_remote_code
    dtype = stored_dtype(load_config(path, field="draft", trust_remote_code=code))
    draft = load_model(path, field="draft", dtype=dtype, trust_remote_code=code, device="cpu")
    tokenizer = load_tokenizer(path, field="draft", trust_remote_code=code)
    kept_D = kept_tokens(draft.config)
    if (kept_D is None) != (config.output is None):
        if config.output is not None:
            raise InputError("output: expected none with a draft model, which stays as it is, found one")
        assert kept_D is not None
        raise InputError(
            f"output: expected a new directory for a whole head, which is what servers load: {path} drafts "
            f"{len(kept_D):,} of {draft.config.get_text_config().vocab_size:,} tokens; found none, give --output"
        )
    if config.target is not None:
        other = load_tokenizer(config.target, field="target", trust_remote_code=code)
        target = empty_model(config.target, field="target", trust_remote_code=code)
        sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
        check_same_tokenizer(other, tokenizer, config.target, path, vocab_size=sizes[0])
        if sizes[0] != sizes[1]:
            server = {"vllm": "vLLM", "sglang": "SGLang"}[str(config.format)]
            raise InputError(
                f"draft: expected the target's vocab_size {sizes[0]}, which {server} requires, found {sizes[1]}; "
                f"draft.resize_token_embeddings({max(sizes)}) pads it"
            )
    name, parallel = config.target or "TARGET", is_parallel(draft.config)
    lines = [
        f"# {path}: {draft.num_parameters():,} parameters, {'its' if config.target is None else 'the same'} tokenizer"
    ]
    if kept_D is not None:
        path = str(config.output)
        check_output(Path(path))
        save_model(with_whole_head(draft), tokenizer, Path(path).absolute())
        rows = draft.config.get_text_config().vocab_size
        lines.append(
            f"# wrote {path}: servers load no cut vocabulary, so that a draft of {len(kept_D):,} tokens has all "
            f"{rows:,} there, the others never the most likely; greedy drafts stay as they are, what it saves is lost"
        )
    if config.format == "sglang":
        # SGLang 0.5.23, `arg_groups/speculative_hook.py` and `speculative/standalone_worker_v2.py`: STANDALONE refuses
        # rejection sampling, and a draft of another vocab_size or another map of tokens than the target's.
        drawn = "it drafts the most likely token, and cannot draw: of the report's figures those of greedy drafts apply"
        lines.append(f"# {drawn}")
        if parallel:
            lines.append("# SGLang's STANDALONE drafts a token a forward, with this draft too: measure it as --draft")
        return [*lines, sglang_command(name, path, config.draft_length or GAMMA)]
    if parallel:
        mask_token_of(draft)
        lines.append("# it drafts all tokens in one forward; measure it as --parallel_draft")
        if (tree := tree_of(draft.config)) is not None:
            lines.append(f"# the tree of {len(tree)} tokens in its config.json is not for vLLM, which drafts chains")
    speculative = speculative_config(config, path, draft.config)
    drawn = 'it drafts greedily; "draft_sample_method":"probabilistic" draws from the draft, as measure does'
    return [*lines, f"# {drawn}", vllm_command(name, speculative)]


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the flags say, and print what there is to know, the launch line last of what is no comment.

    Returns:
        0, or 1 where the engine that it is verified in fails or decodes otherwise; what was exported stays.
    """
    config = parse_config(ExportConfig, argv, prog="draftsmith export")
    python = None if config.verify is None else engine_python(config.engine)
    with phase("export"):
        lines = export(config)
    for line in lines:
        print(line, flush=True)
    if python is not None:
        try:
            for line in verified(config, python):
                print(f"# {line}")
        except EngineFailure as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
