"""Warnings of a server's report: what its figures rest on, and what may have disturbed them."""

from collections.abc import Mapping
from itertools import combinations

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.measure.server.estimates import Acceptance
from draftsmith.scripts.measure.server.observe import Observed, Setting

COUNTED_BY = {
    "counters": "the server counts all requests together, so that τ and α have no interval over prompts, and "
    "`--min-alpha` cannot pass. vLLM counts each answer with `--per-request-spec-decode-metrics summary`, SGLang each "
    "that is asked for by tokens (`--target`)",
    "means": "the server gives a mean of its last steps only (`sglang:spec_accept_length`), so that τ is a mean of "
    "means, not of all steps, and α is unknown; give `--target`, and its answers are counted",
}


def warnings_of(observed: Observed, accepted: Mapping[Setting, Acceptance]) -> list[str]:
    """Return a sentence for each thing, in the order of the settings."""
    warnings = []
    if observed.resumed:
        warnings.append(
            "Some turns are of an earlier run of this command; whether the servers are still the same is not seen from "
            "outside."
        )
    for setting, each in accepted.items():
        where = f"T = {setting[0]:g}, {setting[1]} at once"
        if each.source in COUNTED_BY and observed.config.draft_length != 0:
            warnings.append(f"{where}: {COUNTED_BY[each.source]}.")
        if each.tree:
            warnings.append(f"{where}: the server drafts trees, so α is not known.")
        elif each.source in ("answers", "parts") and not each.one_length:
            warnings.append(f"{where}: drafts had different lengths, so that tried positions, and α, are not known.")
        for role in observed.engines:
            warnings += [f"{where}: {sentence}" for sentence in _disturbed(observed, setting, role)]
        if "baseline_server" in observed.engines:
            drafted = sum(block.counters.num_drafts for block in observed.blocks[setting]["baseline_server"])
            drafted += sum(
                record.counts.num_drafts
                for record in observed.records(setting, "baseline_server")
                if record.counts is not None
            )
            if drafted:
                warnings.append(f"{where}: the baseline server drafts too, so that the speed-up is over its drafter.")
    return warnings + _by_load(accepted)


def _by_load(accepted: Mapping[Setting, Acceptance]) -> list[str]:
    """Return where α differs beyond chance between numbers of requests at once, which tells of a mistake of the server.

    Two 95 % intervals of one α are apart in fewer than one case of a hundred.
    """
    found = []
    for (first, one), (second, other) in combinations(accepted.items(), 2):
        alphas = one.alpha(), other.alpha()
        bounds = [alpha.ci95 for alpha in alphas if alpha.ci95 is not None]
        if first[0] == second[0] and len(bounds) == 2 and max(b[0] for b in bounds) > min(b[1] for b in bounds):
            values = [format_estimate(alpha, spread="interval") for alpha in alphas]
            found.append(
                f"T = {first[0]:g}: α is {values[0]} at {first[1]} at once and {values[1]} at {second[1]}. What a "
                "server accepts should not depend on its load: have it tested by `draftsmith certify --server`."
            )
    return found


def _disturbed(observed: Observed, setting: Setting, role: str) -> list[str]:
    """Return what shows that others used a server meanwhile."""
    blocks = next(blocks for name, blocks in observed.blocks[setting].items() if name == role)
    name, found = role.replace("_", " "), []
    if any(block.busy for block in blocks):
        found.append(f"others' requests were under way on the {name} when a turn began or ended.")
    written = sum(record.tokens for block in blocks for record in block.records)
    generated = [block.generated_tokens for block in blocks if block.generated_tokens is not None]
    if len(generated) == len(blocks) and sum(generated) != written:
        found.append(f"the {name} wrote {sum(generated):,} tokens; {written:,} were ours.")
    # A step that verifies a draft emits a token at least, and the first token of a text comes without one.
    drafts = sum(block.counters.num_drafts for block in blocks)
    ours = sum(record.tokens - 1 for block in blocks for record in block.records)
    if drafts > ours:
        found.append(f"the {name} counted {drafts:,} drafts; ours explain {ours:,} at most.")
    return found
