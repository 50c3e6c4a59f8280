"""Command lines: a YAML file and flags become a config dataclass; errors become one line.

torch and transformers are imported only after a config is complete, so that `--help` answers at once.
"""

import dataclasses
import errno
import io
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml  # type: ignore[import-untyped]

from draftsmith.decode.errors import InputError, Range, lacks_memory
from draftsmith.decode.progress import reporting

if TYPE_CHECKING:
    Ints = list[int]
    Floats = list[float]
else:  # the forms in a file or a flag; `numbers` makes a list of them
    Ints = str | int | list[int]
    Floats = str | float | list[float]

INTERRUPTED, BROKEN_PIPE, TERMINATED = 128 + 2, 128 + 13, 128 + 15
"""The exit codes a shell gives for SIGINT, SIGPIPE and SIGTERM."""
BELOW_MOST = Range("a whole number below 2 to the power of 62", lambda value: abs(value) < 2**62)
"""The range of all whole numbers: the libraries use 64 bits, and a sum must not overflow."""
KINDS = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list",
    "NoneType": "null",
}  # fmt: skip
"""The parser's types in words; all others are fields and their values."""
MOST_SHOWN = 200
"""The most characters of a value in a message."""
REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
"""Errors of a disk that cannot be written."""

FILE_ONLY = frozenset({
    "min_p", "repetition_penalty", "no_repeat_ngram_size", "invalid_prompts", "max_prompt_tokens",
    "any_target", "source_weights", "unfinished", "lossless_tokens",
    "alpha", "beta", "eta", "decay", "on_policy_tokens", "patience", "stop_after",
    "attn_implementation", "loss_chunk", "save_dtype",
    "parallel_retention", "parallel_minimum", "parallel_mask_token",
    "head_learning_rate_multiplier", "warmup_heads",
    "norm_before_fc", "fc_norm", "norm_output",
    "anchors", "mask_token",
})  # fmt: skip
"""Fields that no flag sets, only `--config`: what few runs vary. The names mean the same in all commands."""

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Alias:
    """A flag, or key of a config file, that stands for values of a list field.

    `says` is its help text; `kind` is bool, or list for one text or several; `spell` returns the field's values.
    """

    name: str
    says: str
    kind: type
    spell: Callable[[Any], list[str]]


class Terminated(KeyboardInterrupt):
    """An interruption by a scheduler's signal (`job.processes.terminable`)."""


def flags_of(fields: Mapping[str, Any]) -> list[str]:
    """Return a command's fields as its flags; those that have none as a text of `--config`."""
    file = {name: value for name, value in fields.items() if name in FILE_ONLY}
    flags = [
        f"--{name}={value if isinstance(value, str | os.PathLike) else json.dumps(value)}"
        for name, value in fields.items()
        if name not in file
    ]
    return [*([f"--config={json.dumps(file)}"] if file else []), *flags]


def parse_config(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Build a config dataclass from `--config FILE.yaml` and flags.

    `--config '{NAME: VALUE}'` gives fields without a file; `FILE_ONLY` names those that have no flag. Flags override
    both; nested fields are dotted; `--draft-length` and `--draft_length` are the same flag. A field `training` holds
    the library's TrainingArguments, whose hundred flags `--help training` lists. Raise InputError for an unknown key, a
    missing or ill-typed value, or an unreadable file.
    """
    values = _values(cls, argv, prog, whole=True)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        value = values.get(field.name)
        BELOW_MOST.check(field.name, [value] if isinstance(value, int) else [])
    return cls(**{f.name: values[f.name] for f in fields if f.init})


def check_fields(cls: type[Any], argv: Sequence[str]) -> None:
    """Check a config as `parse_config` does, quickly: without the fields of `training`."""
    _values(cls, argv, None, whole=False)


def _values(cls: type[Any], argv: Sequence[str] | None, prog: str | None, whole: bool) -> dict[str, Any]:
    """Return the values of a config's fields; only `whole` checks `training`, whose class takes long to import."""
    import jsonargparse

    fields, aliased = dataclasses.fields(cls), _aliases(cls)
    switches = {f"--{f.name}" for f in fields if f.type is bool}
    switches |= {f"--{alias.name}" for aliases in aliased.values() for alias in aliases if alias.kind is bool}
    arguments = flags(sys.argv[1:] if argv is None else argv, switches)
    for field in fields:
        if field.name in aliased or field.type == list[str]:
            arguments = _gathered(arguments, f"--{field.name}")
    helps = bool({"-h", "--help"} & set(arguments))
    training = next((field for field in fields if field.name == "training"), None)
    config_class: Any = cls  # mypy takes types of dataclasses for unhashable
    parser = _parser(config_class, prog, whole, helps, helps and "training" not in arguments)
    for key, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, _, file = key.partition("=")
        if flag == "--config":
            fields_of(file or following)
        elif (name := flag[2:]) in FILE_ONLY and name in (field.name for field in fields):
            raise InputError(f"{name}: expected it in --config, in a file or as '{{{name}: VALUE}}', found a flag")
    try:
        parsed = parser.parse_args(arguments)
        for name in (f.name for f in fields if f.name == "training" or dataclasses.is_dataclass(f.type)):
            if not isinstance(parsed.get(name, {}), jsonargparse.Namespace | dict):
                raise InputError(f"{name}: expected fields and their values, found {parsed[name]!r}")
        values: dict[str, Any] = vars(parser.instantiate(parsed) if whole else parsed)
        words = {argument.partition("=")[0] for argument in arguments}
        for name, aliases in aliased.items():
            spelled = {alias.name: alias.spell(_texts(values.pop(alias.name, None))) for alias in aliases}
            # The field's flag replaces all values of a file; alias flags add to it, and replace their own values there.
            kept = [flag for flag in spelled if f"--{name}" not in words or f"--{flag}" in words]
            values[name] = _texts(values[name]) + [text for flag in kept for text in spelled[flag]]
        return values
    except InputError:
        raise
    except (jsonargparse.ArgumentError, ValueError) as error:  # the latter from TrainingArguments
        line = _plain(" ".join(str(error).split()))
        known = [*_names(cls), *(alias.name for aliases in aliased.values() for alias in aliases)]
        if training is not None and whole:
            from transformers import TrainingArguments

            known += [f"training.{field.name}" for field in dataclasses.fields(TrainingArguments)]
        raise InputError(_unknown(line, known) or line) from error


def _aliases(cls: type[Any]) -> dict[str, list[Alias]]:
    """Return the aliases of each field that has some."""
    return {f.name: f.metadata["aliases"]() for f in dataclasses.fields(cls) if "aliases" in f.metadata}


@cache  # building a parser with all fields of `training` takes as long as parsing
def _parser(cls: type[Any], prog: str | None, whole: bool, helps: bool, brief: bool) -> Any:
    """Return the parser of a config's fields; `brief` help only mentions `training`."""
    import jsonargparse

    if helps:  # parsing the fields' docstrings doubles the time, and only help shows them
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(prog=prog, description=cls.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument(
        "--config", action="config", help="a YAML file with the fields below, or '{NAME: VALUE}'; flags override it"
    )
    training = next((field for field in dataclasses.fields(cls) if field.name == "training"), None)
    parser.add_class_arguments(cls, skip=None if training is None else {"training"})
    for action in parser._actions if helps else ():
        if action.dest in FILE_ONLY:
            action.option_strings, action.help = [action.dest], f"(in --config) {action.help}"
    aliased = _aliases(cls)
    others = parser.add_argument_group("other names of the same fields") if aliased else parser  # below the fields
    for alias in (alias for aliases in aliased.values() for alias in aliases):
        types = bool if alias.kind is bool else str | list[str] | None
        others.add_argument(f"--{alias.name}", type=types, help=f"alias {alias.says}")
    if training is None:
        pass
    elif brief:
        parser.epilog = "--training.NAME sets one of transformers' TrainingArguments: `--help training` lists them."
    elif not whole:
        parser.add_argument("--training", type=dict[str, Any])
    else:
        from transformers import TrainingArguments

        parser.add_class_arguments(TrainingArguments, "training")
        defaults = training.metadata.get("defaults", {})
        parser.set_defaults({f"training.{name}": value for name, value in defaults.items()})
    return parser


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the nearest known name, or "" if none is near."""
    close = get_close_matches(name, list(known), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _names(cls: type[Any], within: str = "") -> Iterator[str]:
    """Yield the names of a config's fields, nested ones dotted."""
    for field in dataclasses.fields(cls):
        yield within + field.name
        for part in (field.type, *get_args(field.type)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from _names(part, f"{within}{field.name}.")


def _unknown(message: str, known: Sequence[str]) -> str | None:
    """Return our line for the parser's message about an unknown flag or key; None for any other message."""
    patterns = (
        r"unrecognized arguments: --(?P<name>[^ =]+)",
        r"(?:(?P<within>[\w.]+): )?Option '(?P<name>[^']+)' is not accepted",
        r"Group '(?P<within>[^']+)' does not accept option '(?P<name>[^']+)'",
    )
    match = next(filter(None, (re.match(pattern, message) for pattern in patterns)), None)
    if match is None:
        return None
    name = ".".join(filter(None, [match.groupdict().get("within"), match["name"]]))
    return f"{name}: expected a field of this command, found none of that name{nearest(name, known)}"


def _texts(value: Any) -> list[Any]:
    """Return the list of values of a field that takes one or several; a switch that is off has no value."""
    return value if isinstance(value, list) else [value] if value else []


def _gathered(arguments: Sequence[str], flag: str) -> list[str]:
    """Merge a flag that takes several texts, given once for each of them, into one with a list."""
    values, others = list[str](), list[str]()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == flag:
            values.append(value if equals else next(rest, "--"))
        else:
            others.append(argument)
    one_list = len(values) == 1 and values[0].startswith("[")
    if not values or one_list or any(value.startswith("--") for value in values):  # the parser says what is missing
        return list(arguments)
    listed = [text for value in values for text in (yaml.safe_load(value) if value.startswith("[") else [value])]
    return [*others, f"{flag}={json.dumps(listed)}"]


def _plain(message: str, parent: str = "") -> str:
    """Return the parser's message in our form: field, expectation, value found. `parent` prefixes a nested field."""
    match = re.match(r'(?:Parser key "([^"]+)": )?(.*)', message)
    assert match is not None  # the pattern matches any text
    key, message = match.groups()
    name = f"{parent}{key or ''}".rstrip(".")
    if inner := re.search(r"Problem with given class_path '[^']*': (.*)", message):
        end = " - Expected a <class 'NoneType'> " if message.startswith("Does not validate") else "$"
        return _plain(re.split(end, inner[1])[0], f"{name}.")
    if member := re.match(r"(.*) is not a valid \w+, please select one of \[(.*)\]", message):  # of TrainingArguments
        return f"training: expected one of {member[2]}, found {member[1]!r}"
    if inner := re.match(r"Unable to load config '.*' - (Parser key \".*)", message):
        return _plain(inner[1], parent)
    if several := re.match(r"Does not validate .* Subtypes: \[(.*?)\] Errors: .*?Given value:(.*)", message):
        types, value = several.groups()
    elif one := re.match(r"Expected a (<class '[\w.]+'>)\. Got value:(.*)", message):
        types, value = one.groups()
    elif fields := re.match(r"Not a valid subclass of \S+ Got value:(.*) Subclass types", message):
        types, value = "fields", fields[1]
    elif file := re.match(r'Unable to load config "(.*)"', message):
        types, value = "fields", file[1]
    else:
        return f"{name}: {message}" if name else message
    bare = re.sub(r"<class '([^']*)'>", r"\1", re.sub(r"\[.*?\](?=, |$)", "", types))
    kinds = dict.fromkeys(KINDS.get(kind, "fields and their values") for kind in bare.split(", "))
    return f"{name}: expected {' or '.join(kinds)}, found {value.strip()[:MOST_SHOWN] or 'nothing'}"


class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # the library is untyped
    """The loader of config files: of a key that stands twice, others would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node; raise InputError for a key that it has twice."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                file = key.start_mark.name
                raise InputError(f"{name}: expected it once in {file}, found it in lines {lines[name]} and {line}")
            lines[name] = line
        return dict(super().construct_mapping(node, deep))


def fields_of(file: str) -> dict[str, Any]:
    """Return the fields that a file or text of YAML sets, by name; {} for no file, which the parser reports."""
    try:
        with io.StringIO(file) if file.lstrip().startswith("{") else open(file, encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=UniqueKeys)
    except InputError:
        raise
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise InputError(f"config: expected YAML in UTF-8 in {file}, found other bytes or characters") from error
    except yaml.MarkedYAMLError as error:
        where = f"{file}, line {error.problem_mark.line + 1}" if error.problem_mark else file
        raise InputError(f"config: expected YAML in {where}, found: {error.problem}") from error
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        found = KINDS.get(type(content).__name__, "a value")
        raise InputError(f"config: expected fields and their values in {file}, found {found}")
    return {str(name): value for name, value in content.items()}


def values_by_field(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """Return what flags and files of `--config` give each field, unparsed: it may decide on the config class."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    values = defaultdict[str, list[Any]](list)
    for flag, value in pairwise([*words, ""]):
        for name, item in (fields_of(value) if flag == "--config" else {flag.removeprefix("--"): value}).items():
            values[name] += item if isinstance(item, list) else [item]
    return values


def numbers(value: Any, kind: Callable[[Any], Any], name: str) -> list[Any]:
    """Return the numbers of a field that takes one, a list, or several with commas, each once."""
    items = value if isinstance(value, list) else str(value).split(",")
    try:
        parsed = [kind(item) for item in items if item != ""]
    except ValueError as error:
        raise InputError(f"{name}: expected numbers separated by commas, found {value!r}") from error
    if twice := [number for index, number in enumerate(parsed) if number in parsed[:index]]:
        raise InputError(f"{name}: expected each number once, found {twice[0]} again")
    BELOW_MOST.check(name, [number for number in parsed if isinstance(number, int)])
    return parsed


def flags(arguments: Sequence[str], switches: Set[str] = frozenset()) -> list[str]:
    """Return flags in the parser's form: with underscores, and `true` after a switch without a value."""
    spelled: list[str] = []
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        flag, equals, value = argument.partition("=")
        if argument.startswith("--"):
            flag = f"--{flag[2:].replace('-', '_')}"
        spelled.append(f"{flag}{equals}{value}")
        if spelled[-1] in switches and following.startswith("--"):
            spelled.append("true")
    return spelled


def run(main: Callable[[], int | None], say: Callable[[str, int], None] | None = None) -> int:
    """Run a command and return its exit code; failures that are not bugs are printed in one line, or passed to `say`.

    The code is what `main` returns, or 0; 2 for an `InputError`, an unwritable disk and a lack of memory; and a shell's
    130, 143 and 141 for an interrupt, a termination and a closed pipe. The notes of a `KeyboardInterrupt` (`add_note`)
    are printed: they name what was kept. Other exceptions are bugs and propagate.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print codes for characters that the terminal lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        with reporting():
            code = main() or 0
        sys.stdout.flush()
        return code
    except InputError as error:
        line, code = f"error: {error}", 2
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", ["nothing was kept"])
        how, code = ("terminated", TERMINATED) if isinstance(error, Terminated) else ("interrupted", INTERRUPTED)
        line = f"{how}: {'; '.join(notes)}; run the same command again"
    except BrokenPipeError:
        line, code = "", BROKEN_PIPE
    except (OSError, RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            size = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
            amount = f"too little for {size[1]}" if size else "too little"
            line = f"error: memory: expected enough for this run, found {amount}; try a smaller batch, length or model"
        elif isinstance(error, OSError) and error.errno in REFUSED:
            where = "standard output" if error.filename is None else error.filename
            line = f"error: output: expected to write {where}, found: {error.strerror}"
        else:
            raise
        code = 2
    if line:
        with suppress(BrokenPipeError):
            print(line, file=sys.stderr) if say is None else say(line, code)
    try:
        sys.stdout.flush()
    except OSError:  # or the interpreter would flush again at exit, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
