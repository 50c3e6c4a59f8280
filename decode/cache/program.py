"""Forwards of a model over its cache, compiled ahead of time (AOTInductor).

One program of a model serves all numbers of rows, blocks and texts: its shapes are symbols. It has no guards: changes
of the model are looked for once per call of the decoder, not once per forward. Programs are kept on disk without
weights, so that the next process loads in a moment what took half a minute to compile. No GPU has ever run this.

A `Forward` defines what a program computes.
"""

import hashlib
import inspect
import json
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode import clock
from draftsmith.decode.cache.attention import Grouped, attends_in_groups
from draftsmith.decode.cache.features import collect_states
from draftsmith.decode.cache.forward import Forward
from draftsmith.decode.cache.layers import BITS, Layer
from draftsmith.decode.cache.masks import Masks
from draftsmith.decode.cache.product import SOURCES, in_programs
from draftsmith.decode.cache.weights import lay_out_weights, lend_weights, tensors
from draftsmith.decode.errors import InputError, first_line
from draftsmith.decode.progress import phase

FOLDER = "DRAFTSMITH_PROGRAMS"  # the environment variable that names another folder for compiled programs
SMALL = 4096  # the fewest numbers of a kernel that are worth waking a thread for
LITERAL = 256  # the most numbers of a forward's own constant, which is then a literal and not a weight
UNREADABLE = OSError, RuntimeError, SafetensorError
SAMPLED = 8  # entries of a weight that are compared to detect a change


class Program:
    """A compiled `Forward` of a model, with the model's own weights."""

    def __init__(self, model: nn.Module, forward: Forward, example: Sequence[Any], weights: Mapping[str, Tensor]):
        """Read the program from disk, or compile it for inputs like `example`; `weights` are those of `use`.

        Raises:
            InputError: a forward that cannot be traced, or a folder that cannot be written.
        """
        begin, device = time.perf_counter(), device_of(model)
        path = _path(forward)
        try:
            self._load(path, device)
        except UNREADABLE:  # not there, or damaged
            with _compile_lock(path):
                try:
                    self._load(path, device)  # another process may have made it in the meantime
                except UNREADABLE:
                    # The libraries warn of their own future changes, which do not concern a user.
                    with phase(f"compiling {forward.title}"), warnings.catch_warnings(action="ignore"):
                        _write(export_program(forward, example, weights), forward, path)
                    self._load(path, device)
        clock.PROGRAMS.append(time.perf_counter() - begin)
        self.use(weights)

    def _load(self, path: Path, device: torch.device) -> None:
        own = load_file(path.with_suffix(".safetensors"), device=str(device))
        self._loader = torch._inductor.aoti_load_package(str(path)).loader
        self._constants = {name: own.get(name) for name in self._loader.get_constant_fqns()}

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights of the model, by their names in it, from now on."""
        constants = {
            name: weights[name.removeprefix("model.")] if own is None else own for name, own in self._constants.items()
        }
        self._held = constants  # keeps them alive, since the program has pointers only
        self._loader.load_constants(constants, False, True, True)

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """Run the program with the inputs of its `Forward`."""
        flat: list[Any] = []
        for value in inputs:
            flat += value if isinstance(value, list) else [value]
        return self._loader.run(flat)  # type: ignore[no-any-return]


class Programs:
    """The programs of one model."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._watch = _Watch()
        self._weights: dict[str, Tensor] = {}  # one copy for all programs
        self.templates: list[tuple[Tensor, ...] | None] = []
        """Each layer's `template`; empty before the first forward."""

    @classmethod
    def of(cls, model: nn.Module) -> "Programs":
        """Return the programs of a model, with its present weights; empty if its structure has changed."""
        programs = _PROGRAMS.setdefault(model, cls())
        new_structure, new_weights = programs._watch.look(model)
        if new_structure:
            programs._programs.clear()
            programs.templates = []
        if new_structure or new_weights:
            programs._weights = lay_out_weights(model) if programs._programs else {}
            for program in programs._programs.values():
                program.use(programs._weights)
        return programs

    def has(self, forward: Forward) -> bool:
        """Return whether the program of a forward of the model is loaded."""
        return (forward.key, torch.get_num_threads()) in self._programs

    def get(self, forward: Forward, example: Sequence[Any]) -> Program:
        """Return the program of a forward of the model, made at its first use with inputs like `example`."""
        key = forward.key, torch.get_num_threads()
        if key not in self._programs:
            self._weights = self._weights or lay_out_weights(forward.model)
            self._programs[key] = Program(forward.model, forward, example, self._weights)
        return self._programs[key]


_PROGRAMS: "weakref.WeakKeyDictionary[nn.Module, Programs]" = weakref.WeakKeyDictionary()


def folder() -> Path:
    """Return the folder of programs: $DRAFTSMITH_PROGRAMS, or draftsmith/programs in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(cache) / "draftsmith" / "programs")


def _path(forward: Forward) -> Path:
    return folder() / f"{_key(forward.model, forward)}.pt2"


def export_program(forward: Forward, example: Sequence[Any], weights: Mapping[str, Tensor]) -> Any:
    """Trace a forward into a `torch.export.ExportedProgram`, for inputs like `example` and weights as laid out."""
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    shapes: Any = _config
    # Traced sizes differ from symbol to symbol, and none is one that a trace takes for a constant.
    sizes = {"b": 3, "k": 5, "j": 6, "l": 4, "n": 32, "m": 7, "s": 64}
    model, axes = forward.model, forward.axes(example)

    def traced(tensor: Any, axes: Any) -> Any:
        if isinstance(tensor, list):
            return [traced(*pair) for pair in zip(tensor, axes, strict=True)]
        return tensor.new_zeros([sizes.get(axes.get(at), size) for at, size in enumerate(tensor.shape)])

    def symbols(axes: Any) -> Any:
        if isinstance(axes, list):
            return [symbols(inner) for inner in axes]
        # Some operators ask whether there is one row or token, to broadcast it; their general case is as right.
        return {at: Dim.DYNAMIC if axis in "bjklm" else Dim(axis, min=2, max=1 << 40) for at, axis in axes.items()}

    inputs = tuple(traced(*pair) for pair in zip(example, axes, strict=True))
    attention: Any = nullcontext()
    if isinstance(model, PreTrainedModel) and attends_in_groups(model):
        attention = Grouped(model)
    try:
        with torch.no_grad(), shapes.patch(backed_size_oblivious=True), attention, lend_weights(model, weights):
            return export(forward, inputs, dynamic_shapes=tuple(map(symbols, axes)), strict=False)
    except Exception as error:
        raise InputError(
            f"compiled: expected a forward of {type(model).__name__} that torch.export traces, found "
            f"{first_line(error)}: decode eagerly"
        ) from error


def _write(program: Any, forward: Forward, path: Path) -> None:
    """Compile an exported program, and write it with its constants that are not the model's."""
    model = forward.model
    weights = tensors(model)
    own = {
        name: tensor.contiguous()
        for name, tensor in program.constants.items()
        if isinstance(tensor, Tensor) and name.removeprefix("model.") not in weights
    }
    buffers = dict(forward.named_buffers(recurse=False))
    foreign = [name for name, tensor in own.items() if name not in buffers and tensor.numel() > LITERAL]
    if foreign:  # another model of this structure may have other numbers there
        raise InputError(
            f"compiled: expected {type(model).__name__} to compute with its own parameters and buffers, found "
            f"{foreign[0]} of {own[foreign[0]].numel()} numbers: decode eagerly"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError as error:
        raise InputError(
            f"compiled: expected a folder for programs that can be written, or another one in ${FOLDER}, found: {error}"
        ) from error
    # Both files are moved into place when they are whole: a process that reads them takes no lock.
    with folder as scratch:
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=f"{scratch}/program.pt2",
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.precompile_headers": False,  # they take as long as a program, which is no faster for them
                "cpp.min_chunk_size": SMALL,
                **in_programs(),
            },
        )
        save_file(own, f"{scratch}/own.safetensors")
        os.replace(f"{scratch}/own.safetensors", path.with_suffix(".safetensors"))
        os.replace(package, path)


def _compile_lock(path: Path) -> FileLock:
    """Return the lock for making a program: two processes would write the same files of the compiler."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # a second

    return FileLock(Path(cache_dir()) / f"{path.stem}.lock")


class _Watch:
    """Detects whether a model has changed since the last look, in a fraction of a millisecond."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._pointers: list[int] = []
        self._samples: list[np.ndarray | None] = []
        self._weights: Any = None

    def look(self, model: nn.Module) -> tuple[bool, bool]:
        """Return whether its structure has changed, and whether its weights have."""
        modules = list(model.modules())
        held = [t for m in modules for group in (m._parameters, m._buffers) for t in group.values() if t is not None]
        structure = (
            _config(model),
            [(type(module), tuple(module._modules), module.training, _numbers(module)) for module in modules],
            [(tensor.shape, tensor.dtype, tensor.device) for tensor in held],
        )
        pointers = [tensor.data_ptr() for tensor in held]
        if pointers != self._pointers:
            self._pointers, self._samples = pointers, list(map(_sampled, held))
        # An optimizer's step changes versions, a new tensor the pointers, and writing through `.data` only the numbers.
        weights = (
            pointers,
            [0 if tensor.is_inference() else tensor._version for tensor in held],
            [None if sample is None else sample.tobytes() for sample in self._samples],
        )
        changed = structure != self._structure, weights != self._weights
        self._structure, self._weights = structure, weights
        return changed


def _sampled(tensor: Tensor) -> np.ndarray | None:
    """Return a view of some entries, the only trace of a change through `.data`."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    bits = BITS.get(tensor.element_size())
    if bits is None or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1).view(bits)
    return flat[:: max(1, flat.numel() // SAMPLED)].numpy()


def _numbers(module: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's plain attributes that it may compute with, such as the scales of adapters."""
    return [
        (name, value if type(value) in PLAIN else repr(value))
        for name, value in vars(module).items()
        if name[0] != "_" and name != NAME and (type(value) in PLAIN or (type(value) in NESTED and _is_plain(value)))
    ]


def _is_plain(value: Any) -> bool:
    if type(value) in NESTED:
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return type(value) in PLAIN


NAME = "name_or_path"  # the config's field for the model's source: equal models from elsewhere have the same programs
PLAIN, NESTED = {bool, int, float, str, type(None)}, {list, tuple, dict}


def _config(model: nn.Module) -> str:
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    config.pop(f"_{NAME}", None)
    return json.dumps(config, sort_keys=True, default=str)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; a module without tensors runs on the CPU."""
    return next((tensor.device for tensor in tensors(model).values()), torch.device("cpu"))


def _key(model: nn.Module, forward: Forward) -> str:
    """Return the name of a program, a digest of everything that shapes it."""
    modules, device = list(model.named_modules()), device_of(model)
    classes = {type(module) for _, module in modules} | set(type(forward).__mro__)
    sources = {path for kind in classes if (path := _own_source(kind))} | {*_CORE, *forward.sources}
    parts = (
        torch.__version__,
        transformers.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.cpu._is_amx_tile_supported(),
        str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else "",
        torch.get_num_threads(),
        _config(model),
        model.training,
        [(name, f"{type(m).__module__}.{type(m).__qualname__}", _numbers(m)) for name, m in modules],
        [(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors(model).items()],
        [_digest(path) for path in sorted(sources)],
        forward.key,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_CORE = [
    __file__,
    *(inspect.getfile(module) for module in (Layer, Masks, Grouped, collect_states, lend_weights)),
    *SOURCES,
]


def _own_source(kind: type) -> str | None:
    """Return the file of a module class, unless a library's version identifies it."""
    if kind.__module__.partition(".")[0] in ("torch", "transformers"):
        return None
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return None


@lru_cache(maxsize=256)
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
