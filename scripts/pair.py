"""A target and its drafters, loaded alike by every command: checked, and in one dtype; and their replays on texts."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from draftsmith.decode import Proposer, Replay
from draftsmith.decode.cache import NO_PROGRAMS, check_rollback, runs_in_programs
from draftsmith.decode.clock import least_seconds
from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.measurement.costs import forward_after_text
from draftsmith.decode.measurement.replay import Key, replay_drafters
from draftsmith.decode.progress import phase
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.kinds import drafter_specs, kind_named
from draftsmith.train.checkpoint import end_of_sequence_ids, unapplied_settings
from draftsmith.train.data.prompt_files import read_prompts
from draftsmith.train.data.prompts import Prompt, encode_prompts
from draftsmith.train.kinds.drafter import DrafterSpec, Loading, Pair
from draftsmith.train.models import check_head, empty_model, load_model, load_tokenizer, resolve_dtype, vocabulary_size
from draftsmith.train.options import TemplateOptions

REPEATS = 3
COMPILED_BELOW = 0.1
"""Seconds of a token above which arithmetic and memory dominate, and a compiler gains little."""
NOT_HERE = "prepare, cache and training take it all the same, and measure --server measures what was trained"
"""Uses of a target that cannot be decoded speculatively in this process."""


def require_rollback(target: str, trust_remote_code: bool = False) -> None:
    """Check without its weights that a target can be decoded speculatively here, or raise InputError."""
    try:
        check_rollback(empty_model(target, field="target", trust_remote_code=trust_remote_code), "target")
    except InputError as error:
        raise InputError(f"{error}; {NOT_HERE}") from error


def load_pair(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[DrafterSpec] = (),
    dtype: str = "auto",
    trust_remote_code: bool = False,
    again: bool = False,
    decodes: bool = True,
) -> Pair:
    """Load a target and its drafters; tokenizers are compared before any weights are read.

    The target's generation config is replaced by one that only says where a text ends, because `generate` fills open
    settings from it: the target's own temperature and penalties must not take part. A warning names them.

    `dtype` is for models without one of their own; "auto" is the target's (`resolve_dtype`). `again` suppresses
    repeated messages. Without `decodes` the pair only replays: rejected tokens need not leave the target's cache.

    Raises:
        InputError: models that cannot be loaded, do not fit the target or cannot decode.
    """
    kinds = [kind_named(spec.kind) for spec in drafters]
    if decodes:
        require_rollback(path, trust_remote_code)
    loading = Loading(path, tokenizer, trust_remote_code, again=again)
    if any(spec.tree is not None for spec in drafters):
        loading.require_chains("width")
    for kind, spec in zip(kinds, drafters, strict=True):
        kind.check(spec, loading)
    loading.dtype = resolve_dtype(dtype, path, trust_remote_code=trust_remote_code)
    target = load_model(path, field="target", dtype=loading.dtype, trust_remote_code=trust_remote_code)
    generation: Any = target.generation_config
    ends = end_of_sequence_ids(generation, tokenizer) or None
    settings = unapplied_settings(generation, None if again else path)
    check_head(target.config, tokenizer, "target")
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    loading.model = target
    loaded = [kind.load(spec, loading) for kind, spec in zip(kinds, drafters, strict=True)]
    return Pair(target, tokenizer, loading.dtype, loaded, settings)


def load_decoding(
    path: str, tokenizer: PreTrainedTokenizerBase, drafters: Sequence[DrafterSpec], dtype: str = "auto",
    threads: int | None = None, compiled: bool | None = None, trust_remote_code: bool = False,
) -> tuple[Pair, bool]:  # fmt: skip
    """Load a pair to decode with, set torch's threads, and return whether forwards are compiled.

    `compiled` None compiles where a token takes less than `COMPILED_BELOW` eagerly, on a CPU or a CUDA GPU; if a
    compiler fails, a line names that, and forwards stay eager. Errors are those of `load_pair`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    pair = load_pair(path, tokenizer, drafters, dtype, trust_remote_code)
    target, device = pair.target, pair.target.device
    if not runs_in_programs(target):
        if compiled is not False:
            print(NO_PROGRAMS, file=sys.stderr)
        return pair, False
    if compiled is not None or device.type not in ("cpu", "cuda"):
        return pair, bool(compiled)
    with phase("timing a token, and compiling"), torch.inference_mode():
        eager = {"": forward_after_text(target, compiled=False)}
        if least_seconds(eager, REPEATS, device)[""] >= COMPILED_BELOW:
            return pair, False
        try:
            forward_after_text(target, compiled=True)()
        except Exception as error:
            print(f"forwards are eager; compiling failed: {first_line(error)}", file=sys.stderr)
            return pair, False
    return pair, True


def read_tokens(
    target: str, config: TemplateOptions, source: str, limit: int | None
) -> tuple[PreTrainedTokenizerBase, list[Prompt], list[list[int]]]:
    """Return a target's tokenizer, and prompts with their tokens through its chat template; or raise InputError."""
    prompts = read_prompts(source, limit=limit, invalid=config.invalid_prompts)
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=config.trust_remote_code)
    size = vocabulary_size(target, trust_remote_code=config.trust_remote_code)
    return tokenizer, *encode_prompts(prompts, tokenizer, size, config.invalid_prompts, **config.encoding)


def named_specs(drafters: Mapping[str, str]) -> list[DrafterSpec]:
    """Return the specs of directories, or of kinds that need none, by name."""
    specs = drafter_specs([path if name == path else f"{name}={path}" for name, path in drafters.items()], [1])
    return [replace(spec, name=name) for name, spec in zip(drafters, specs, strict=True)]


def load_chains(
    target: str, drafters: Mapping[str, str], draft_length: int, dtype: str = "auto", greedy: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Pair, dict[str, tuple[Proposer, int]]]:  # fmt: skip
    """Load a target and drafters; return them, and each one's proposer of chains with their length, at most γ.

    `drafters` is as for `named_specs`. Trials use chains because trees would need a search of their own. With `greedy`
    they are the likeliest tokens also under sampling.
    """
    tokenizer = load_tokenizer(target, field="target", trust_remote_code=trust_remote_code)
    pair = load_pair(target, tokenizer, named_specs(drafters), dtype, trust_remote_code, decodes=False)
    chains = {drafter.name: drafter.family.chain(drafter, draft_length) for drafter in pair.drafters}
    for drafter in pair.drafters if greedy else ():
        proposer, most = chains[drafter.name]
        chains[drafter.name] = drafter.greedy or proposer, most
    return pair, chains


def replay_completions(
    pair: Pair, proposers: Mapping[Key, Proposer], samples: Sequence[Mapping[str, Any]], draft_lengths: Sequence[int],
    sampler: Sampler, max_new_tokens: int | None = None, with_sizes: bool = False,
) -> dict[Key, Replay]:  # fmt: skip
    """Replay proposers on samples of completions, `with_sizes` of rounds; warn of tokens past their positions."""
    texts = [torch.tensor(sample["input_ids"], device=pair.target.device) for sample in samples]
    lengths = [sample["prompt_length"] for sample in samples]
    pair.warn_undrafted(lengths, list(map(len, texts)))
    whole = [np.zeros(len(text) - n, int) for text, n in zip(texts, lengths, strict=True)] if with_sizes else []
    return replay_drafters(
        pair.target, proposers, texts, lengths, draft_lengths, sampler, max_new_tokens, stretches=whole
    )
