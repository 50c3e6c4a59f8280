"""Distillation of a draft model from a frozen target."""

from typing import TYPE_CHECKING

from draftsmith.decode.lazy import lazy_exports

if TYPE_CHECKING:
    from draftsmith.train.losses.chunked import lean_divergence as lean_divergence
    from draftsmith.train.losses.divergences import divergence as divergence
    from draftsmith.train.losses.divergences import lk_hybrid as lk_hybrid
    from draftsmith.train.losses.divergences import nla as nla

_MODULES = {
    "lean_divergence": "draftsmith.train.losses.chunked",
    "divergence": "draftsmith.train.losses.divergences",
    "lk_hybrid": "draftsmith.train.losses.divergences",
    "nla": "draftsmith.train.losses.divergences",
}
__all__ = list(_MODULES)
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, _MODULES)
