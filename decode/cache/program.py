"""Forwards of a model over its cache, compiled ahead of time (AOTInductor).

One program of a model serves all numbers of rows, blocks and texts: its shapes are symbols. It has no guards: a change
of the model is looked for once a call of the decoder, not once a forward. Programs are kept on disk without weights,
so that the next process reads in a moment what took half a minute to compile. On a GPU this has never been run.

Shape suffixes: B rows, K tokens of a block, N slots that are attended to, S slots.
"""

import hashlib
import inspect
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from draftsmith.decode import clock
from draftsmith.decode.cache.attention import Grouped, attends_in_groups
from draftsmith.decode.cache.features import watched
from draftsmith.decode.cache.layers import Block, Layer
from draftsmith.decode.cache.masks import Masks
from draftsmith.decode.cache.product import SOURCES, in_programs
from draftsmith.decode.cache.weights import laid_out, lent, tensors
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase

FOLDER = "DRAFTSMITH_PROGRAMS"
"""The environment variable that names another folder for compiled programs."""
STEP = 16
"""The slots that are attended to are a multiple of it, as kernels like their masks."""
LITERAL = 256
"""Numbers of a constant at most that a forward may have beside the model's weights: a literal, not a weight."""
UNREADABLE = OSError, RuntimeError, SafetensorError
SAMPLED = 8
"""Entries of a weight that are compared to see whether it was changed."""


@dataclass(frozen=True)
class Variant:
    """What a program takes and gives that not every program of its model does."""

    further: tuple[str, ...] = ()
    """The model's inputs beside tokens, by name."""
    depths: tuple[int, ...] = ()
    """Gives the features of the model's layers at these depths."""


class BlockForward(nn.Module):
    """The forward that is traced: a block of tokens behind the slots of each row.

    Args:
        model: a causal LM.
        variant: what it takes and gives.
        written: whether each layer has keys of its own; others read an earlier layer's.
    """

    def __init__(self, model: PreTrainedModel, variant: Variant, written: Sequence[bool]):
        super().__init__()
        self.model, self._variant, self._written = model, variant, list(written)
        config = model.config.get_text_config()
        self._types = sorted(set(getattr(config, "layer_types", None) or ()))
        self.window: int = getattr(config, "sliding_window", None) or 0

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        slots_N: Tensor,
        last: Tensor,
        visible: Tensor,
        depths: Tensor,
        extras: list[Tensor],
        cached: list[Tensor],
    ) -> list[Tensor]:
        """Run the model over a block.

        Args:
            tokens: (B, K) int64.
            starts: the slot of each row's first token, (B,) int64.
            slots_N: 0 … N − 1.
            last: the greatest position, () int64.
            visible: which of the last M ≥ K slots up to the block's end each token attends to, (B, K, M) bool.
            depths: each token's position beyond its row's start, (B, K) int64.
            extras: further inputs, (B, K, …), and with sliding layers the positions of the tokens in all slots, (B, S)
                int64, which are written.
            cached: the keys and values of the layers that have their own, (B, H, S, D), which are written.

        Returns:
            Logits, (B, K, V); the head's input, (B, K, H), where the model has a head; the features that are wanted.
        """
        extras, cached = list(extras), list(cached)
        rows, k = tokens.shape
        further = {name: extras.pop(0) for name in self._variant.further}
        block = Block()
        block.start, block.width, block.slots = None, slots_N.shape[0], starts[:, None] + slots_N[:k]
        positions = torch.minimum(starts[:, None] + depths, last)
        cached_BS = extras[0] if self.window else None
        if cached_BS is not None:
            cached_BS.scatter_(1, block.slots, positions)
        masks = Masks(self.model, self._types, self.window, slots_N)
        layers: list[Any] = []
        for written in self._written:
            layers.append(layer := Layer(block, rows, 0, False))
            if written:
                layer.keys, layer.values, layer.is_initialized = cached.pop(0), cached.pop(0), True
        with watched(self.model, has_head(self.model), self._variant.depths) as states:
            output = self.model(
                input_ids=tokens,
                attention_mask=masks.by_slot(block, positions, cached_BS, visible),
                position_ids=positions,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                **further,
            )
        return [output.logits, *([] if states.hidden is None else [states.hidden]), *states.features]


class Program:
    """A compiled `BlockForward` of a model, with the model's own weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        variant: Variant,
        written: Sequence[bool],
        example: Sequence[Any],
        weights: Mapping[str, Tensor],
    ):
        """Read the program from disk, or compile it.

        Args:
            model: see `BlockForward`.
            variant: see there.
            written: see there.
            example: arguments of any sizes.
            weights: see `use`.

        Raises:
            InputError: a forward that cannot be traced, or a folder that cannot be written.
        """
        path = folder() / f"{_key(model, variant, written)}.pt2"
        try:
            self._load(path, model.device)
        except UNREADABLE:  # not there, or damaged
            with _alone(path):
                try:
                    self._load(path, model.device)  # another process may have made it meanwhile
                except UNREADABLE:
                    # The libraries' own warnings of what they will change say nothing to a user.
                    title = f"compiling the forward of {type(model).__name__}"
                    with phase(title), warnings.catch_warnings(action="ignore"):
                        _write(exported(model, variant, written, example, weights), model, path)
                    self._load(path, model.device)
        clock.PROGRAMS.append(path.stem)
        self.use(weights)

    def _load(self, path: Path, device: torch.device) -> None:
        own = load_file(path.with_suffix(".safetensors"), device=str(device))
        self._loader = torch._inductor.aoti_load_package(str(path)).loader
        self._constants = {name: own.get(name) for name in self._loader.get_constant_fqns()}

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights of the model, by their names in it, from now on."""
        given = {
            name: weights[name.removeprefix("model.")] if own is None else own for name, own in self._constants.items()
        }
        self._held = given  # the program has pointers alone
        self._loader.load_constants(given, False, True, True)

    def __call__(self, *inputs: Any) -> list[Tensor]:
        """Run it: see `BlockForward.forward`."""
        return self._run(*inputs)

    def _run(self, *inputs: Any) -> list[Tensor]:
        *first, extras, cached = inputs
        return self._loader.run([*first, *extras, *cached])  # type: ignore[no-any-return]


class Programs:
    """The programs of one model."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Variant, int], Program] = {}
        self._seen: tuple[Any, Any] = (None, None)
        self._weights: dict[str, Tensor] = {}  # one copy for all programs

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Programs":
        """Return the programs of a model, with its present weights; none where its structure has changed."""
        programs = _PROGRAMS.setdefault(model, cls())
        weights = [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, _sample(tensor))
            for tensor in tensors(model).values()
        ]
        before, programs._seen = programs._seen, (_structure(model), weights)
        if before[0] != programs._seen[0]:
            programs._programs.clear()
        if before != programs._seen:
            programs._weights = laid_out(model) if programs._programs else {}
            for program in programs._programs.values():
                program.use(programs._weights)
        return programs

    def get(self, model: PreTrainedModel, variant: Variant, written: Sequence[bool], example: Sequence[Any]) -> Program:
        """Return a program of the model; it is made at its first use."""
        key = variant, torch.get_num_threads()
        if key not in self._programs:
            self._weights = self._weights or laid_out(model)
            self._programs[key] = Program(model, variant, written, example, self._weights)
        return self._programs[key]


_PROGRAMS: "weakref.WeakKeyDictionary[PreTrainedModel, Programs]" = weakref.WeakKeyDictionary()


def has_head(model: PreTrainedModel) -> bool:
    """Whether a model has an output head of its own, whose input a program gives."""
    return model.get_output_embeddings() is not None


def folder() -> Path:
    """Return where programs are kept: $DRAFTSMITH_PROGRAMS, or draftsmith/programs in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(cache) / "draftsmith" / "programs")


def exported(
    model: PreTrainedModel,
    variant: Variant,
    written: Sequence[bool],
    example: Sequence[Any],
    weights: Mapping[str, Tensor],
) -> Any:
    """Trace a `BlockForward`, with symbols for B, K, N and S; its linear layers have their weights laid out for it.

    Args:
        model: see `BlockForward`.
        variant: see there.
        written: see there.
        example: arguments of any sizes.
        weights: the model's, as `laid_out` gives them.

    Returns:
        A `torch.export.ExportedProgram`.

    Raises:
        InputError: a forward that cannot be traced, such as one that decides by its tokens.
    """
    from torch.export import Dim, export
    from torch.fx.experimental import _config

    shapes: Any = _config
    # What is traced has sizes that no two symbols share, and none that a trace takes for a constant.
    sizes = {"b": 3, "k": 5, "n": 32, "m": 7, "s": 64}
    forward, extras = BlockForward(model, variant, written), [{0: "b", 1: "k"} for _ in example[-2]]
    if forward.window:
        extras[-1] = {0: "b", 1: "s"}
    cached = [{0: "b", 2: "s"} for _ in example[-1]]
    block = {0: "b", 1: "k"}
    axes: tuple[Any, ...] = block, {0: "b"}, {0: "n"}, {}, block | {2: "m"}, block, extras, cached

    def traced(tensor: Any, axes: Any) -> Any:
        if isinstance(tensor, list):
            return [traced(*each) for each in zip(tensor, axes, strict=True)]
        return tensor.new_zeros([sizes.get(axes.get(at), size) for at, size in enumerate(tensor.shape)])

    def symbols(axes: Any) -> Any:
        if isinstance(axes, list):
            return [symbols(each) for each in axes]
        # Some operators ask whether there is one row or one token, to broadcast it: what they do otherwise is as right.
        return {at: Dim.DYNAMIC if axis in "bkm" else Dim(axis, min=2, max=1 << 40) for at, axis in axes.items()}

    inputs = tuple(traced(*each) for each in zip(example, axes, strict=True))
    attention: Any = Grouped(model) if attends_in_groups(model) else nullcontext()
    try:
        with torch.no_grad(), shapes.patch(backed_size_oblivious=True), attention, lent(model, weights):
            return export(forward, inputs, dynamic_shapes=tuple(map(symbols, axes)), strict=False)
    except Exception as error:
        said = str(error).strip().splitlines()
        raise InputError(
            f"compiled: expected a forward of {type(model).__name__} that torch.export traces, found "
            f"{said[0] if said else type(error).__name__}: decode eagerly"
        ) from error


def _write(program: Any, model: PreTrainedModel, path: Path) -> None:
    """Compile what was exported, and write it, and beside it the constants that are not the model's."""
    known = tensors(model)
    own = {
        name: tensor.contiguous()
        for name, tensor in program.constants.items()
        if isinstance(tensor, Tensor) and name.removeprefix("model.") not in known
    }
    foreign = [name for name, tensor in own.items() if tensor.numel() > LITERAL]
    if foreign:  # the next model of this structure may have another
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
    with folder as aside:
        made = torch._inductor.aoti_compile_and_package(
            program,
            package_path=f"{aside}/program.pt2",
            inductor_configs={"aot_inductor.package_constants_in_so": False, **in_programs()},
        )
        save_file(own, f"{aside}/own.safetensors")
        os.replace(f"{aside}/own.safetensors", path.with_suffix(".safetensors"))
        os.replace(made, path)


def _alone(path: Path) -> FileLock:
    """Return a lock for the process that makes a program: two that do would write the same files of the compiler's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # a second

    return FileLock(Path(cache_dir()) / f"{path.stem}.lock")


def _sample(tensor: Tensor) -> tuple[float, ...]:
    """Return some entries: a change through `.data` leaves no other trace."""
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // SAMPLED)].tolist()) if tensor.device.type == "cpu" else ()


def _structure(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return what a program is made for: a change of it needs another program."""
    return (
        json.dumps(model.config.to_dict(), sort_keys=True, default=str),
        model.training,
        tuple((name, type(module), _plain(module)) for name, module in model.named_modules()),
        tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors(model).items()),
    )


def _plain(module: nn.Module) -> str:
    """Return what a module computes with beside tensors, such as the scales of adapters: numbers and words in it."""
    return repr({name: value for name, value in vars(module).items() if name[0] != "_" and _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _key(model: PreTrainedModel, variant: Variant, written: Sequence[bool]) -> str:
    """Return the name of a program: another one for whatever would make another program."""
    config, training, modules, tensors = _structure(model)
    classes = {kind for _, kind, _ in modules}
    sources = sorted({path for kind in classes if (path := _own_source(kind))} | {__file__, *_CORE})
    parts = (
        torch.__version__,
        transformers.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.cpu._is_amx_tile_supported(),
        str(torch.cuda.get_device_properties(model.device)) if model.device.type == "cuda" else "",
        torch.get_num_threads(),
        config,
        training,
        [(name, f"{kind.__module__}.{kind.__qualname__}", plain) for name, kind, plain in modules],
        tensors,
        [_digest(path) for path in sources],
        asdict(variant),
        list(written),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_CORE = [inspect.getfile(module) for module in (Layer, Masks, Grouped, watched, lent)] + SOURCES


def _own_source(kind: type) -> str | None:
    """Return the file of a module class that no library's version stands for."""
    if kind.__module__.partition(".")[0] in ("torch", "transformers"):
        return None
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return None


@lru_cache(maxsize=256)
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
