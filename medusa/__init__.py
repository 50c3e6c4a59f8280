"""Medusa and EAGLE-3 heads: trained on a frozen target, or with it, searched for a tree, decoded and exported."""

from typing import TYPE_CHECKING

from draftsmith.decode.lazy import lazy_exports

if TYPE_CHECKING:
    from draftsmith.medusa.block.model import BlockDrafter as BlockDrafter
    from draftsmith.medusa.block.proposer import BlockProposer as BlockProposer
    from draftsmith.medusa.eagle.heads import EagleHeads as EagleHeads
    from draftsmith.medusa.eagle.proposer import EagleProposer as EagleProposer
    from draftsmith.medusa.heads.formats.importing import import_heads as import_heads
    from draftsmith.medusa.heads.model import MedusaConfig as MedusaConfig
    from draftsmith.medusa.heads.model import MedusaHeads as MedusaHeads
    from draftsmith.medusa.heads.proposer import MedusaProposer as MedusaProposer

_MODULES = {
    "BlockDrafter": "draftsmith.medusa.block.model",
    "BlockProposer": "draftsmith.medusa.block.proposer",
    "EagleHeads": "draftsmith.medusa.eagle.heads",
    "EagleProposer": "draftsmith.medusa.eagle.proposer",
    "MedusaConfig": "draftsmith.medusa.heads.model",
    "MedusaHeads": "draftsmith.medusa.heads.model",
    "MedusaProposer": "draftsmith.medusa.heads.proposer",
    "import_heads": "draftsmith.medusa.heads.formats.importing",
}
__all__ = list(_MODULES)
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, _MODULES)
