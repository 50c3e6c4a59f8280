"""Warnings of a server's report: the limits of its figures, and disturbances."""

from collections.abc import Mapping
from itertools import combinations

from draftsmith.decode.measurement.intervals import format_estimate
from draftsmith.scripts.report.types import Setting
from draftsmith.scripts.serving.measure.estimates import Acceptance, written_by_us
from draftsmith.scripts.serving.measure.observe import Observed

COUNTED_BY = {
    "counters": "the server counts all requests together, so that τ and α have no interval over prompts, and "
    "`--min-alpha` cannot pass",
    "means": "the server gives a mean of its last steps only (`sglang:spec_accept_length`), which is not the τ of "
    "these texts; give `--target`, and its answers are counted",
}
EACH = (
    "vLLM counts each answer with `--per-request-spec-decode-metrics summary`, SGLang each that is asked for by tokens "
    "(`--target`), and since 0.5.19 chats"
)


def warnings_of(observed: Observed, accepted: Mapping[Setting, Acceptance]) -> list[str]:
    """Return one sentence for each warning, in the order of the settings."""
    warnings = []
    if observed.resumed:
        warnings.append(
            "Some turns are of an earlier run of this command; whether the servers are still the same is not seen from "
            "outside."
        )
    for setting, figures in accepted.items():
        where = f"T = {setting[0]:g}, {setting[1]} at once"
        if figures.source in COUNTED_BY and observed.config.draft_length != 0:
            warnings.append(f"{where}: {COUNTED_BY[figures.source]}.")
        if figures.tree:
            warnings.append(f"{where}: the server drafts trees, so α is not known.")
        elif figures.source in ("answers", "parts") and figures.steps.readings and figures.steps.alpha_bounds() is None:
            warnings.append(f"{where}: drafts had different lengths, so that tried positions, and α, are not known.")
        warnings += [f"{where}: {sentence}" for sentence in _within_bounds(observed, setting, figures)]
        for role in observed.servers:
            warnings += [f"{where}: {sentence}" for sentence in _disturbed(observed, setting, role)]
        if "baseline_server" in observed.servers:
            drafted = sum(block.counters.num_drafts for block in observed.blocks[setting]["baseline_server"])
            drafted += sum(
                record.counts.num_drafts
                for record in observed.records(setting, "baseline_server")
                if record.counts is not None
            )
            if drafted:
                warnings.append(f"{where}: the baseline server drafts too, so that the speed-up is over its drafter.")
    return warnings + _by_load(accepted)


def _within_bounds(observed: Observed, setting: Setting, figures: Acceptance) -> list[str]:
    """Return sentences on figures that the counts do not determine, and their bounds."""
    if figures.total is None or not figures.total.num_drafts:
        return []
    if figures.source == "counters" and not written_by_us(observed.blocks[setting]["server"]):
        return ["others' tokens are in the server's counts, so that τ and α are not known."]
    if not figures.steps.readings:
        records = observed.records(setting, "server")
        return [
            f"{figures.total.num_drafts:,} drafts for {sum(record.tokens for record in records):,} tokens in "
            f"{len(records)} answers fit no way of counting that is known, so that τ and α are not known."
        ]
    sentences, counted = [], figures.steps.convention()
    for name, bounds in (("τ", figures.steps.length_bounds()), ("α", figures.steps.alpha_bounds())):
        if bounds is not None and bounds[1] - bounds[0] > 1e-12:
            sentences.append(
                f"{name} lies between {bounds[0]:.3f} and {bounds[1]:.3f}; the counts tell no more ({counted}). {EACH}."
            )
    return sentences


def _by_load(accepted: Mapping[Setting, Acceptance]) -> list[str]:
    """Return where α differs beyond chance between numbers of requests at once, a sign of a server's mistake.

    Two 95 % intervals of one α are apart in fewer than one case of a hundred.
    """
    sentences = []
    for (first, first_figures), (second, second_figures) in combinations(accepted.items(), 2):
        alphas = first_figures.steps.alpha(), second_figures.steps.alpha()
        bounds = [alpha.ci95 for alpha in alphas if alpha.ci95 is not None]
        if first[0] == second[0] and len(bounds) == 2 and max(b[0] for b in bounds) > min(b[1] for b in bounds):
            values = [format_estimate(alpha, spread="interval") for alpha in alphas]
            sentences.append(
                f"T = {first[0]:g}: α is {values[0]} at {first[1]} at once and {values[1]} at {second[1]}. What a "
                "server accepts should not depend on its load: have it tested by `draftsmith certify --server`."
            )
    return sentences


def _disturbed(observed: Observed, setting: Setting, role: str) -> list[str]:
    """Return signs that others used a server meanwhile."""
    blocks = next(blocks for name, blocks in observed.blocks[setting].items() if name == role)
    name, sentences = role.replace("_", " "), []
    if any(block.busy for block in blocks):
        sentences.append(f"others' requests were under way on the {name} when a turn began or ended.")
    written = sum(record.tokens for block in blocks for record in block.records)
    generated = [block.generated_tokens for block in blocks if block.generated_tokens is not None]
    if len(generated) == len(blocks) and sum(generated) != written:
        sentences.append(f"the {name} wrote {sum(generated):,} tokens; {written:,} were ours.")
    # A step that verifies a draft emits a token at least, and the first token of a text comes without one.
    drafts = sum(block.counters.num_drafts for block in blocks)
    own_tokens = sum(record.tokens - 1 for block in blocks for record in block.records)
    if drafts > own_tokens:
        sentences.append(f"the {name} counted {drafts:,} drafts; ours explain {own_tokens:,} at most.")
    return sentences
