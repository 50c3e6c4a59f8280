"""Training on states from servers: each process that loads batches asks for the states of its own batch."""

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.features import last_norm
from draftsmith.decode.progress import phase
from draftsmith.train.job.processes import is_first
from draftsmith.train.models import DTYPES, load_config, resolve_dtype
from draftsmith.train.recipe import RecipeConfig
from draftsmith.train.teacher.feature_reader import FeatureIndex
from draftsmith.train.teacher.feature_shards import Layout
from draftsmith.train.teacher.served import ServedModel, ServedTarget, urls_of
from draftsmith.train.teacher.served_check import LENGTHS, ask_servers, compare_states, require_length, require_served
from draftsmith.train.teacher.target_ends import read_ends

WORKERS = 4
"""The most loading processes of a run that asks for none: while training computes, each asks for a batch."""


@dataclass
class ServedIndex(FeatureIndex):
    """The features of a target on servers. `norm` is its last one, on the CPU, once the target's ends are loaded."""

    urls: list[str] = field(default_factory=list)
    config: Any = None
    served: Any = None
    norm: nn.Module | None = None
    _target: ServedTarget | None = None
    """The connections of this process."""

    def load_target(self, config: RecipeConfig) -> PreTrainedModel:
        """Load the ends of the target from its files into the host's memory; nothing else of it is read."""
        code, device = config.trust_remote_code, config.training.device
        dtype = resolve_dtype(config.target_dtype, config.target, device=device, trust_remote_code=code)
        with phase(f"reading the ends of {config.target}"):
            ends = read_ends(config.target, dtype, trust_remote_code=code)
        norm = deepcopy(last_norm(ends))
        self.norm = None if norm is None else norm.to(DTYPES[self.served.dtype])
        return ends

    def of_layers(self, layer_ids: Sequence[int]) -> "ServedIndex":
        """Return the index of the features after some layers, which the servers must give."""
        target_config = load_config(self.config.target, trust_remote_code=self.config.trust_remote_code)
        require_served(self.served, self.urls[0], target_config, layer_ids)
        layout = replace(self.layout, layer_ids=tuple(layer_ids))
        return replace(self, layout=layout, layer_ids=tuple(layer_ids))

    def feed(self, trainer: Any) -> None:
        """Compare the servers' states with the target, and let the batches hold them."""
        if self._target is not None:  # a process that is forked from now on needs its own
            self._target.__exit__()
            self._target = None
        longest = max(int(part.sizes.max()) for part in (trainer.data, trainer.eval_dataset) if part is not None)
        require_length(self.served, longest)
        if is_first():
            config, data = self.config, trainer.data
            pairs = zip(data.members, data.sizes, LENGTHS, strict=False)  # there may be fewer samples
            rows = [data.texts.read(int(at), min(int(size), length))[0].tolist() for at, size, length in pairs]
            compare_states(self.urls, config.target, trainer.target_ends, rows, config.trust_remote_code)
        args = trainer.args
        args.dataloader_num_workers = args.dataloader_num_workers or min(WORKERS, os.cpu_count() or 1)
        args.dataloader_prefetch_factor = args.dataloader_prefetch_factor or 1  # a batch may have gigabytes
        super().feed(trainer)

    def read(self, texts: Sequence[tuple[int, list[int]]]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the states of texts from the servers."""
        if self._target is None:
            self._target = ServedTarget(self.urls, self.norm, served=self.served).__enter__()
        bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[self.layout.dtype]
        for _, (states,) in self._target.states(self.layout, [ids for _, ids in texts]):
            yield {name: tensor.view(bits).numpy() for name, tensor in states.items()}


def find_served(config: RecipeConfig) -> ServedIndex:
    """Ask the servers of a config what they serve, require that it is its target, and return their index."""
    urls, code = urls_of(config.teacher), config.trust_remote_code
    served: ServedModel = ask_servers(urls, config.target, code, config.any_target)
    layout = Layout((), served.hidden_size, served.feature_dtype)
    nothing = np.empty(0, np.uint64), list[Path](), np.empty((0, 2), np.int64)
    return ServedIndex(*nothing, layout, Path(os.devnull), urls=urls, config=config, served=served)
