"""MTP layers as a kind of drafter: a target's own, or trained ones in a directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.decode.errors import InputError
from draftsmith.train.kinds.drafter import Drafter, DrafterSpec, Loading
from draftsmith.train.kinds.kind import DrafterKind, Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from draftsmith.decode.proposers.base import Proposer
    from draftsmith.train.kinds.export import ExportOptions, Served
    from draftsmith.train.kinds.parts import Part, Side

GAMMA = 4
"""Tokens that one layer drafts in a launch line, if nobody says how many."""


class Mtp(DrafterKind):
    """The layers for multi-token prediction of a target: in its own files, or trained; they draft chains."""

    name, title, stored = "mtp", "MTP layers", False
    recipe = Recipe(
        "mtp",
        "trains the MTP layers that a target ships with, or new ones",
        "draftsmith.medusa.mtp",
        "draftsmith.medusa.mtp.config:MtpTrainingConfig",
        "draftsmith.medusa.mtp.__main__:MtpPlan",
        made=("num_layers",),
    )
    formats = launched = verifiable = ("target",)
    gguf = "target"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether these are layers that draftsmith trained."""
        return config.get("architectures") == ["MtpHeads"]

    def candidates(self, target: "PretrainedConfig", server: str | None) -> dict[str, dict[str, Any]]:
        """Return one candidate: the layers that the target ships with, if it has some."""
        from draftsmith.train.checkpoint import mtp_layers

        return {"mtp": {}} if mtp_layers(target) else {}

    def check(self, spec: DrafterSpec, loading: Loading) -> None:
        """Require chains, and without a directory a target whose files have the layers that its config promises."""
        from draftsmith.medusa.mtp.native import check_files

        if spec.tree is not None:
            raise InputError("width: expected chains from mtp, found a tree")
        if spec.path is None:
            check_files(loading.path, loading.trust_remote_code)

    def load(self, spec: DrafterSpec, loading: Loading) -> Drafter:
        """Load the layers, in the target's dtype."""
        from draftsmith.medusa.mtp.heads import MtpHeads
        from draftsmith.medusa.mtp.proposer import MtpProposer

        target, path = loading.target, spec.path
        heads = MtpHeads.native_to(target) if path is None else MtpHeads.from_directory(path, target)
        proposer, greedy = MtpProposer(heads), MtpProposer(heads, greedy=True)
        return Drafter(spec.name or spec.kind, spec.kind, self, path, proposer, greedy, heads, spec.draft_lengths)

    def inspect(self, spec: DrafterSpec, target: "Side | None", trust_remote_code: bool) -> "Part | None":
        """Find the layers in the target's directory, and whether all their tensors map; or those in their own."""
        import torch

        from draftsmith.medusa.mtp.heads import MtpHeads
        from draftsmith.medusa.mtp.native import stored_layers
        from draftsmith.train.checkpoint import files_of, stored_tensors
        from draftsmith.train.kinds.parts import UNSEEN, Part, widely_stored
        from draftsmith.train.kinds.quantities import count, count_of

        if target is None:
            return None
        path, model = spec.path or target.path, target.model
        with torch.device("meta"):
            heads = MtpHeads.as_shipped(path, model) if spec.path is None else MtpHeads.as_stored(path, model)
        stored = stored_layers(path, model.config) if spec.path is None else stored_tensors(path, "mtp")
        text = f"{count_of(len(heads.layers), 'MTP layer')}, {count(heads.num_parameters())} parameters"
        text += "" if files_of(path).is_dir() else UNSEEN
        return Part(spec.name or spec.kind, path, heads, text, widely_stored(stored), heads.cached_numbers)

    def format_for(self, server: str | None) -> str:
        """Return the only format: both servers read the target's files."""
        return "target"

    def check_export(self, config: "ExportOptions") -> None:
        """Raise InputError for options that have no meaning where the target's files give names and dtypes."""
        super().check_export(config)
        if config.dtype is not None:
            raise InputError("dtype: expected none with format target, whose files have their own, found one")

    def export(self, config: "ExportOptions", path: str) -> list[str]:
        """Write the target with trained layers in place of its own, and return the lines that serve it."""
        from transformers import PretrainedConfig

        from draftsmith.medusa.mtp.stitching import stitch
        from draftsmith.train.kinds.export import sglang_command, vllm_command

        raw = PretrainedConfig.get_config_dict(path)[0]
        target, output = config.target or str(raw.get("base_model_name_or_path")), str(config.output)
        layers = stitch(path, target, Path(output), config.trust_remote_code)
        length = config.draft_length or (layers if layers > 1 else GAMMA)
        served = vllm_command(output, {"method": "mtp", "num_speculative_tokens": length})
        note = f"# wrote {output}: {target} with the MTP layers of {path}; all other tensors are the target's"
        return [note, f"# in SGLang: {sglang_command(output, None, length, 'NEXTN')}", served]

    def served(
        self, config: "ExportOptions", path: str
    ) -> "tuple[list[Served], Callable[[PreTrainedModel], Proposer]]":
        """Return vLLM's config for the target that was written, and our proposer of the same layers."""
        from draftsmith.medusa.mtp.heads import MtpHeads
        from draftsmith.medusa.mtp.proposer import MtpProposer
        from draftsmith.train.kinds.export import Served

        speculative = {"method": "mtp", "num_speculative_tokens": config.draft_length or GAMMA}
        served = Served("the MTP layers", speculative, target=str(config.output))
        return [served], lambda target: MtpProposer(MtpHeads.from_directory(path, target))
