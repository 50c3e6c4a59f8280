"""Whether servers have the target that a run was told of: by its files, its head, the library's states.

A head that fits says that a server's last states are those before the last norm, and of this target. Only the library
can tell the other layers' states: it computes them where the target's weights are at hand.

Shape suffixes: T tokens, n layers, H hidden, L layers of the target.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.decode.cache.features import collect_features, decoder_layers, last_norm
from draftsmith.decode.errors import InputError
from draftsmith.decode.progress import phase
from draftsmith.train.checkpoint import files_of
from draftsmith.train.data.first_look import print_once
from draftsmith.train.files import identity
from draftsmith.train.losses.output_head import head_of
from draftsmith.train.models import DTYPES, load_config
from draftsmith.train.quantization import quantization_of
from draftsmith.train.teacher.served import ServedModel, ServedTarget
from draftsmith.train.teacher.target_ends import load_on_disk

AT_HAND = 8e9
"""The most bytes of weights that a training run reads only to compare states; `doctor` reads any."""
LENGTHS = (24, 64, 40, 56)
"""The tokens of the texts to compare, asked for at once: other lengths, so that no two states can be mistaken."""
NATS = {torch.float64: 0.005, torch.float32: 0.005, torch.bfloat16: 0.05, torch.float16: 0.02}
"""The most by which the median token's log probability may differ from the server's."""
SHARES = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.08, torch.float16: 0.03}
"""The most by which a layer's states may differ from the library's, as a share of their norm."""
QUANTIZED = 4.0
"""How much more they may differ for a quantised target, whose products servers and library round differently."""


@dataclass(frozen=True)
class Agreement:
    """How far a server's states agree with the target: `nats` by its head, `shares` by layer with the library's."""

    url: str
    nats: float
    shares: dict[int, float]

    def __str__(self) -> str:
        line = f"{self.url}: its log probabilities are those of the head within {self.nats:.2g} nats"
        if not self.shares:
            return f"{line}; its layers were not compared, as the target's weights are not at hand"
        return f"{line}, and its states the library's within {max(self.shares.values()):.1%}"


def ask_servers(
    urls: Sequence[str], target: str, trust_remote_code: bool = False, any_target: bool = False
) -> ServedModel:
    """Return what servers serve, which must be `target`, or `any_target` of its shape."""
    with phase("asking the servers"), ServedTarget(urls) as teacher:
        served = teacher.served
    assert served is not None
    require_served(served, urls[0], load_config(target, field="target", trust_remote_code=trust_remote_code), ())
    if not any_target and not require_files(served, urls[0], target):
        print_once(f"teacher: {served.model} at {urls[0]} cannot be compared with the files of {target}")
    return served


def compare_states(
    urls: Sequence[str], target: str, ends: PreTrainedModel, texts: Sequence[list[int]], trust_remote_code: bool = False
) -> None:
    """Compare servers' states of the first tokens of some texts with the target's, and print how far they agree."""
    rows = [ids[:length] for ids, length in zip(texts, LENGTHS, strict=False) if len(ids) > 1]
    with phase("comparing the servers' states"), ServedTarget(urls) as teacher:
        assert teacher.served is not None
        library = library_at_hand(target, teacher.served.dtype, trust_remote_code=trust_remote_code)
        for found in check_states(teacher, ends, rows, library):
            print(f"teacher: {found}", file=sys.stderr)


def require_served(served: ServedModel, url: str, config: PretrainedConfig, layer_ids: Sequence[int]) -> None:
    """Require that a server gives the states after some layers and the last one, of a target of this shape."""
    text = config.get_text_config()
    for name in ("num_hidden_layers", "hidden_size"):
        if getattr(served, name) != getattr(text, name):
            what = f"a target with {name} {getattr(text, name)} at {url}"
            raise InputError(f"teacher: expected {what}, found {served.model} with {getattr(served, name)}")
    if served.dtype not in DTYPES:
        raise InputError(f"teacher: expected states in one of {', '.join(DTYPES)} at {url}, found {served.dtype}")
    wanted = sorted({*layer_ids, text.num_hidden_layers})
    if not set(wanted) <= set(served.layer_ids) or served.layer_ids[-1] != wanted[-1]:
        what = f"states after the layers {', '.join(map(str, wanted))} from {url}"
        found = ", ".join(map(str, served.layer_ids))
        raise InputError(f"teacher: expected {what}, found those after {found}; see eagle_aux_hidden_state_layer_ids")


def require_length(served: ServedModel, longest: int) -> None:
    """Require that all servers take the longest sample."""
    if longest > served.max_model_len:
        what = f"samples of at most {served.max_model_len} tokens, the servers' max_model_len"
        raise InputError(f"teacher: expected {what}, found one of {longest}; training takes --max_length")


def require_files(served: ServedModel, url: str, target: str) -> bool:
    """Require that a server's model has the files of `target`, as far as both are known; return whether any are."""
    known = dict(served.files or {})
    known |= {"commit": served.commit} if served.commit else {}
    own = identity(target)
    for name in sorted(own.keys() & known.keys() - {"generation_config.json"}):
        if own[name] != known[name]:
            raise InputError(
                f"teacher: expected {target} at {url}, found {served.model}, whose {name} is another: another model, "
                "revision or quantisation; training on servers takes it with any_target: true"
            )
    return bool(own.keys() & known.keys())


def check_states(
    teacher: ServedTarget, ends: PreTrainedModel, texts: Sequence[list[int]], library: PreTrainedModel | None
) -> list[Agreement]:
    """Compare each server's states of some texts with the target's head and, if given, the library's own states.

    The library computes in the server's dtype, whose rounding is what its states may differ by.
    Raise InputError for a server whose states are others; it says which, if they are those of another layer.
    """
    served, found = teacher.served, list[Agreement]()
    assert served is not None
    slack = 1.0 if served.quantization is None else QUANTIZED
    for url in teacher.urls:
        answers = teacher.ask(texts, url)
        nats = _nats_of(ends, last_norm(ends), texts, answers)
        most = max(NATS[DTYPES[served.dtype]], NATS[ends.dtype]) * slack  # training may have rounded the head
        if 2 * _nats_of(ends, None, texts, answers) < nats:
            what = f"the last layer's states of {served.model} from {url}, before the last norm"
            raise InputError(f"teacher: expected {what}, found those after it")
        # Before the head: the library can say which layer's states they are.
        shares = {} if library is None else _require_layers(url, served, library, texts, answers, slack)
        if not nats <= most:
            what = f"the last layer's states of {served.model} from {url}, before the last norm, found others"
            told = f"by {nats:.2g} nats" if nats == nats else "as it gives none"
            raise InputError(
                f"teacher: expected {what}: with the head of {ends.name_or_path} they differ from the server's own log "
                f"probabilities {told} (another layer, model or revision)"
            )
        found.append(Agreement(url, nats, shares))
    return found


@torch.inference_mode()
def _nats_of(
    ends: PreTrainedModel, norm: nn.Module | None, texts: Sequence[list[int]], answers: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Return the median difference of log probabilities, in nats; NaN if the server gives none."""
    pairs = zip(texts, answers, strict=True)
    parts = [_scores(ends, norm, states[:, -1], ids) - scores for ids, (states, scores) in pairs]
    return float(torch.cat(parts).abs().nanmedian())


def _scores(ends: PreTrainedModel, norm: nn.Module | None, last_TH: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the log probability of each token but the first, (T − 1,)."""
    head = head_of(ends)
    hidden = last_TH[:-1].to(head.weight.dtype)
    hidden = hidden if norm is None else norm(hidden)
    logits = head(hidden.to(head.weight.device)).float().cpu()  # tied embeddings may be on a GPU by now
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.inference_mode()
def _require_layers(
    url: str,
    served: ServedModel,
    library: PreTrainedModel,
    texts: Sequence[list[int]],
    answers: Sequence[tuple[Tensor, Tensor]],
    slack: float,
) -> dict[int, float]:
    """Return by layer the largest difference from the library's states, as a share, and require that it is small."""
    count, most = len(decoder_layers(library)), SHARES[DTYPES[served.dtype]] * slack
    shares = dict.fromkeys(served.layer_ids, 0.0)
    for ids, (states, _) in zip(texts, answers, strict=True):
        ids_1T = torch.tensor([ids])
        with collect_features(library, range(1, count + 1)) as features:
            library(input_ids=ids_1T, use_cache=False)
        own_LTH = features[0][0].float().view(len(ids), count, -1).transpose(0, 1)
        embedded_TH = library.get_input_embeddings()(ids_1T)[0].float()
        own_LTH = torch.cat([embedded_TH[None], own_LTH])
        for place, layer in enumerate(served.layer_ids):
            given_TH = states[:, place].float()
            distances = (own_LTH - given_TH).flatten(1).norm(dim=1) / own_LTH.flatten(1).norm(dim=1)
            share = float(distances[layer])
            shares[layer] = max(shares[layer], share)
            if not share <= most:
                nearest = int(distances.argmin())
                what = f"the states of {served.model} after {layer} layers from {url}"
                other = f"those after {nearest} layers" if distances[nearest] <= most else f"others, {share:.0%} away"
                raise InputError(f"teacher: expected {what}, as the library computes them, found {other}")
    return shares


def library_at_hand(path: str, dtype: str, most: float = AT_HAND, trust_remote_code: bool = False) -> Any:
    """Return a target that reads its layers from its files, or None if those are not here or larger than `most`.

    None also for a quantised one, which the library may compute on other devices than this one alone.
    """
    files = [*files_of(path).glob("*.safetensors")]
    quantized = quantization_of(load_config(path, field="target", trust_remote_code=trust_remote_code))
    if quantized or not files or sum(file.stat().st_size for file in files) > most:
        return None
    with phase("reading the target to compare states"):
        return load_on_disk(path, dtype, trust_remote_code=trust_remote_code)
