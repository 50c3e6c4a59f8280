"""The kind: what commands ask."""

import shutil
from pathlib import Path

from draftsmith.train.kinds.export import put_in_place
from draftsmith.train.kinds.kind import DrafterKind, Recipe


class Toy(DrafterKind):
    name, title = "toy", "toy table"
    recipe = Recipe("toy", "a table", "toy_kind", "toy_kind.__main__:ToyConfig", "toy_kind.__main__:ToyPlan")
    formats = ("own",)
    by_token = True

    def recognises(self, config):
        return config.get("model_type") == "toy_table"

    def load(self, spec, loading):
        from toy_kind.table import Table, TableProposer

        table = Table.from_pretrained(str(spec.path), dtype=loading.target.dtype).to(loading.target.device).eval()
        return self.drafter(spec, TableProposer(table), model=table)

    def inspect(self, spec, target, trust_remote_code):
        from draftsmith.train.kinds.parts import Part
        from toy_kind.table import Table

        return Part(spec.name or spec.kind, spec.path, Table.from_pretrained(spec.path), "a table of pairs", "F32", 0)

    def export(self, config, path):
        with put_in_place(Path(config.output)) as output:
            shutil.copytree(path, output, dirs_exist_ok=True)
        return [f"# wrote {config.output}"]
