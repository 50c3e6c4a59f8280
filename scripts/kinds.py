"""The kinds of drafters: the only list of them, which every command asks; and how `--drafter` names them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.distill.kind import DraftModel, RenumberedDraft, RunAheadDraft
from draftsmith.distill.parallel.kind import ParallelDraft
from draftsmith.medusa.block.kind import Block
from draftsmith.medusa.eagle.kind import Eagle
from draftsmith.medusa.heads.kind import Medusa
from draftsmith.medusa.mtp.kind import Mtp
from draftsmith.train.cli import Alias
from draftsmith.train.kinds.drafter import DrafterSpec
from draftsmith.train.kinds.hybrid import Hybrid
from draftsmith.train.kinds.kind import DrafterKind, Recipe
from draftsmith.train.kinds.untrained import LookAhead, PromptLookup, Suffix, Unigram

KINDS: list[DrafterKind] = [
    ParallelDraft(), Medusa(), Eagle(), Block(), Mtp(), DraftModel(), RenumberedDraft(), RunAheadDraft(),
    PromptLookup(), Suffix(), LookAhead(), Unigram(), Hybrid(lambda text: parse_drafter(text)),
]  # fmt: skip
"""All kinds. The first one that recognises a directory has it: draft models, which are any model, come last."""
STOCK, BASELINE = "stock", "baseline_draft"
"""Name and kind of the draft to beat in reports; it is a draft model."""
SERVER = "server"
"""The kind, in reports, of the drafter of a server that was measured from outside."""
NONE = "none"
P_EAGLE = "P-EAGLE"
"""A kind that we do not have; files of SpecForge with it say that they are a Llama."""

if TYPE_CHECKING:
    Drafters = list[str]
else:  # a file or a flag may give one text; `drafter_texts` makes a list of it
    Drafters = str | list[str]


def kind_named(name: str) -> DrafterKind:
    """Return the kind of this name, or raise InputError."""
    for kind in KINDS:
        if kind.name == ("draft" if name == BASELINE else name):
            return kind
    raise InputError(f"drafter: expected a kind out of {', '.join(kind.name for kind in KINDS)}, found {name}")


def title_of(name: str) -> str:
    """Return a kind's name in a report's sentences."""
    titles = {BASELINE: "stock draft", SERVER: "what drafts on the server"}
    return titles.get(name) or next((kind.title for kind in KINDS if kind.name == name), name)


def kind_of(directory: str) -> DrafterKind:
    """Return the kind of the drafter in a directory or at a hub id, by its config.json, or raise InputError."""
    from transformers import PretrainedConfig

    from draftsmith.train.checkpoint import reading_errors, require_config

    require_config(directory, "drafter")
    with reading_errors("drafter", f"a config.json in {directory}"):
        config = PretrainedConfig.get_config_dict(directory)[0]
    named = _unread(config)
    for kind in KINDS:
        if kind.recognises(config) and named != P_EAGLE:
            return kind
    names = ", ".join(kind.title for kind in KINDS if kind.stored)
    raise InputError(
        f"drafter: expected one of {names} in {directory}, found {named or 'a config.json of none of them'}"
    )


def _unread(config: Mapping[str, Any]) -> str | None:
    """Return the name of another tool's kind of drafter, if its config says one."""
    if "PEagle" in str(config.get("architectures")):
        return P_EAGLE
    named = config.get("speculators_model_type")
    return named and f"speculators' {named}"


def foreign_kind(directory: str) -> DrafterKind:
    """Return the kind of another tool's drafter in a directory, or raise InputError if none can be imported."""
    for kind in KINDS:
        if kind.recognises_foreign(Path(directory)):
            return kind
    from draftsmith.medusa.checkpoint_files import CONFIG, read_config

    titles = ", ".join(kind.title for kind in KINDS if kind.formats)
    path = Path(directory)
    named = _unread(read_config(path)) if (path / CONFIG).is_file() else None
    raise InputError(f"import_from: expected {titles} in {directory}, found {named or 'none'}")


def parse_drafter(text: str) -> tuple[str | None, DrafterKind, str | None]:
    """Return name, kind and argument of "[NAME=][KIND:]DIR" or "[NAME=]KIND[:ARGUMENT]".

    Raise InputError for a directory of no kind, or a kind without the directory that it needs.
    """
    name, equals, rest = text.partition("=")
    if not equals or not name or {"/", ":"} & set(name):
        name, rest = "", text
    kinds = {kind.name: kind for kind in KINDS}
    word, _, argument = rest.partition(":")
    if word in kinds:
        if kinds[word].stored and not argument:
            raise InputError(f"drafter: expected {word}:DIR, found {text} without a directory")
        return name or None, kinds[word], argument or None
    if "/" not in rest and not Path(rest).is_dir():
        raise InputError(f"drafter: expected a directory, a hub id or one of {', '.join(kinds)}, found {text}")
    return name or None, kind_of(rest), rest


def drafter_specs(texts: Sequence[str], draft_lengths: Sequence[int] = (4,), **fields: Any) -> list[DrafterSpec]:
    """Return the specs of `--drafter` texts, with further `fields`; drafters without a name get their kind's or path's.

    Raise InputError for a name or path that occurs twice.
    """
    drafters = [parse_drafter(text) for text in texts if text != NONE]
    names = [name for name, _, _ in drafters]
    for kind in KINDS:
        indices = [index for index, (name, other, _) in enumerate(drafters) if name is None and other is kind]
        taken = {STOCK, *(other.name for other in KINDS), *filter(None, names)} - {kind.name}
        stored = [index for index in indices if drafters[index][2] is not None]
        for index in set(indices) - set(stored):  # such as a target's own layers, next to trained ones
            names[index] = kind.name
        paths = [str(drafters[index][2]) for index in stored]
        shorts = short_names(kind.name, paths, taken, alone=len(stored) == len(indices))
        for index, short in zip(stored, shorts, strict=True):
            names[index] = short
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"drafter: expected each name once, found {name} again")
    specs = zip(names, drafters, strict=True)
    return [DrafterSpec(kind.name, path, name, draft_lengths, **fields) for name, (_, kind, path) in specs]


def short_names(kind: str, paths: Sequence[str], taken: set[str], alone: bool = True) -> list[str]:
    """Return a kind's name for its only drafter, or for several the last parts of their paths that differ.

    The only path is not `alone` if there is a drafter of this kind without one.
    """
    if len(paths) == 1 and alone:
        return [kind]
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    for parts in range(1, 1 + max(map(len, whole), default=0)):
        names = ["/".join(path[-parts:]) for path in whole]
        if len(set(names) | taken | {kind}) == len(names) + len(taken) + 1:
            return names
    if paths:
        raise InputError(f"drafter: expected each {kind} once, found {', '.join(paths)}")
    return []


def aliases(*flags: str) -> dict[str, Any]:
    """Return the metadata of a field `drafter`: `flags` and those of the kinds are aliases of `--drafter`."""

    def spelled(kind: DrafterKind, values: list[Any]) -> list[str]:
        return [kind.name if kind.switch else f"{kind.name}:{value}" for value in values]

    def entries() -> list[Alias]:
        # Draft models first: reports have drafters in this order.
        return [Alias(name, "of --drafter DIR", list, list) for name in flags] + [
            Alias(name, f"of --drafter {kind.name}", bool if kind.switch else list, partial(spelled, kind))
            for kind in sorted(KINDS, key=lambda kind: kind.name != DraftModel.name)
            for name in kind.flags
        ]

    return {"aliases": entries}


def drafter_texts(value: Drafters) -> list[str]:
    """Return the drafters of a field that takes one or several."""
    return [value] if isinstance(value, str) else list(value)


def only_drafter(value: Drafters) -> list[str]:
    """Return the drafter of a command that takes one; raise InputError for none or several."""
    texts = drafter_texts(value)
    if len(texts) != 1:
        raise InputError(f"drafter: expected one, found {' and '.join(texts) or 'none'}")
    return texts


def recipes() -> dict[str, Recipe]:
    """Return the commands that train drafters, by name."""
    return {kind.recipe.command: kind.recipe for kind in KINDS if kind.recipe is not None}


def recipe_of(name: str) -> Recipe:
    """Return the command that trains drafters of a kind; raise InputError without one."""
    recipe = kind_named(name).recipe
    if recipe is None:
        trained = ", ".join(kind.name for kind in KINDS if kind.recipe is not None)
        raise InputError(f"drafter: expected a kind that is trained ({trained}), found {name}")
    return recipe


def stored_as(spec: DrafterSpec) -> tuple[DrafterKind, DrafterSpec]:
    """Return a drafter's spec by its files, and their kind: `draft:DIR` may draft with files of another kind."""
    kind = kind_named(spec.kind)
    if spec.kind == DraftModel.name:
        with suppress(InputError):  # files that do not load are the named kind's to report
            kind = kind_of(str(spec.path))
    return kind, dataclasses.replace(spec, kind=kind.name)


def run_of(text: str) -> tuple[DrafterKind, str]:
    """Return kind and file of "KIND:FILE", the config of a training run, or raise InputError."""
    name, _, file = text.partition(":")
    recipe_of(name)
    if not file:
        raise InputError(f"run: expected KIND:FILE, found {text}")
    return kind_named(name), file
