"""`draftsmith export` of draft models, whose directories servers load unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.draft_models.cut_vocabulary import kept_tokens
from draftsmith.decode.errors import InputError
from draftsmith.decode.proposers.base import Proposer
from draftsmith.distill.vocabulary import with_whole_head
from draftsmith.train.kinds.export import (
    ExportOptions,
    Served,
    check_output,
    sglang_command,
    unserved_rotation,
    vllm_command,
)
from draftsmith.train.models import (
    check_same_tokenizer,
    empty_model,
    load_config,
    load_draft,
    load_model,
    load_tokenizer,
    stored_dtype,
)
from draftsmith.train.runs import save_model

GAMMA = 4


def export(kind: Any, config: ExportOptions, path: str) -> list[str]:
    """Check a draft model, and return the lines that launch a server with it; write it if its vocabulary is cut."""
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
        target_tokenizer = load_tokenizer(config.target, field="target", trust_remote_code=code)
        target = empty_model(config.target, field="target", trust_remote_code=code)
        sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
        check_same_tokenizer(target_tokenizer, tokenizer, config.target, path, vocab_size=sizes[0])
        if sizes[0] != sizes[1]:
            server = {"vllm": "vLLM", "sglang": "SGLang"}[str(config.format)]
            raise InputError(
                f"draft: expected the target's vocab_size {sizes[0]}, which {server} requires, found {sizes[1]}; "
                f"draft.resize_token_embeddings({max(sizes)}) pads it"
            )
    name = config.target or "TARGET"
    lines = [
        f"# {path}: {draft.num_parameters():,} parameters, {'its' if config.target is None else 'the same'} tokenizer"
    ]
    rope = getattr(draft.config.get_text_config(), "rope_parameters", None) or {}
    ropes = [fields for fields in rope.values() if isinstance(fields, dict)] or [rope]
    if reason := next(filter(None, map(unserved_rotation, ropes)), None):
        lines.append(f"# {path} has {reason}: its acceptance there may be another than in a report, texts are not")
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
        method = "it drafts the most likely token and cannot sample: compare with the report's figures of greedy drafts"
        lines += [f"# {note}" for note in [method, *kind.notes(draft, "sglang")]]
        return [*lines, sglang_command(name, path, config.draft_length or GAMMA)]
    method = 'it drafts greedily; with "draft_sample_method":"probabilistic" it samples the draft, as measure does'
    lines += [f"# {note}" for note in [*kind.notes(draft, "vllm"), method]]
    return [*lines, vllm_command(name, speculative(kind, config, path, draft.config))]


def served(kind: Any, config: ExportOptions, path: str) -> tuple[list[Served], Callable[[PreTrainedModel], Proposer]]:
    """Return vLLM's configs for both ways of sampling, and a function that makes our own proposer."""
    code = config.trust_remote_code
    exported = config.output or path  # a cut vocabulary was written to the output
    fields = speculative(kind, config, exported, load_config(path, field="draft", trust_remote_code=code))
    ways = [
        Served(f"the draft, {method}", {**fields, "draft_sample_method": method})
        for method in ("greedy", "probabilistic")
    ]

    def drafter(_: PreTrainedModel) -> Proposer:
        return kind.proposer(load_draft(path, dtype="float32", trust_remote_code=code))

    return ways, drafter


def speculative(kind: Any, config: ExportOptions, path: str, model: PretrainedConfig) -> dict[str, Any]:
    """Return vLLM's speculative config for a draft model."""
    return {"method": "draft_model", "model": path, **kind.drafting(config, model)}
