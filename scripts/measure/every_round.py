"""The content of `rounds.jsonl`: every round that a server may begin on the target's texts, replayed."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode.measurement.replay import replay_drafters
from draftsmith.decode.progress import phase, track
from draftsmith.decode.replay.texts import WrittenText, chunks, contexts_of, teacher_forced
from draftsmith.decode.sampling import Sampler
from draftsmith.scripts.measure.replays import replayed_proposers
from draftsmith.scripts.measure.state import Measured
from draftsmith.scripts.report.rounds import SCHEMA, ExpectedText, NamedDrafter, RoundsSettings
from draftsmith.scripts.report.types import Verifier
from draftsmith.train.data.decoding import complete
from draftsmith.train.models import default_device

DIGITS = 4


def deepest(measured: Measured) -> int:
    """Return the greatest draft length of any drafter."""
    lengths = measured.config.draft_length
    return max(*lengths, 0, *(k for drafter in measured.pair.drafters for k in drafter.draft_lengths))


def rounds_settings(measured: Measured) -> RoundsSettings:
    """Return the first line of a measurement's file."""
    config, pair = measured.config, measured.pair
    drafters: dict[str, NamedDrafter] = {
        drafter.name: {"kind": drafter.kind, "path": drafter.path} for drafter in pair.drafters
    }
    filters: Any = config.filters()
    return RoundsSettings(
        SCHEMA, config.target, pair.dtype, config.max_new_tokens, deepest(measured), drafters, filters
    )


def expected_texts(measured: Measured, temperature: float) -> list[ExpectedText]:
    """Replay a temperature's texts and their continuations; texts that leave the models no room are left out."""
    pair, draft_length = measured.pair, deepest(measured)
    sampler = measured.sampler(temperature)
    rows = list(zip(measured.prompts, measured.prompt_ids, measured.texts[temperature], strict=True))
    fitting = [(prompt, ids, text) for prompt, ids, text in rows if pair.holds(len(ids) + len(text) + draft_length)]
    if not fitting:
        return []
    prompts, encoded, texts = zip(*fitting, strict=True)
    longer = _continued(measured, temperature, encoded, texts, draft_length)
    device = default_device()
    sequences = [torch.tensor(ids + text, device=device) for ids, text in zip(encoded, longer, strict=True)]
    lengths = [len(ids) for ids in encoded]
    proposers = replayed_proposers(pair, sampler)
    most = max(map(len, longer)) + draft_length + 1  # no round is cut by a limit
    replays = replay_drafters(
        pair.target, proposers, sequences, lengths, [draft_length], sampler, most, True, rounds_of=draft_length
    )
    by_tokens = {drafter.name: drafter.family.by_token for drafter in pair.drafters}
    margins = None if sampler.do_sample else _margins(pair.target, sequences, lengths, sampler)
    expected = []
    for index, (prompt, ids, text, continued) in enumerate(zip(prompts, encoded, texts, longer, strict=True)):
        accepted: dict[str, dict[Verifier, list[Any]]] = {}
        drafted: dict[str, list[int]] = {}
        for (name, verifier), replay in replays.items():
            rounds = replay.texts[index].rounds
            if rounds is not None:
                values = rounds.astype(int) if not sampler.do_sample else rounds.round(DIGITS)
                by_token = by_tokens[name]
                accepted.setdefault(name, {})[verifier] = (values[:, 0] if by_token else values).tolist()
                if (lengths_T := replay.texts[index].drafted) is not None:
                    drafted[name] = lengths_T.tolist()
        text_margins = None if margins is None else margins[index][: len(text)]
        expected.append(
            ExpectedText(prompt.id, temperature, ids, continued, len(text), text_margins, accepted, drafted)
        )
    return expected


def _continued(
    measured: Measured, temperature: float, encoded: Sequence[list[int]], texts: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Return texts continued for `tokens` more tokens past any end."""
    target, seed = measured.pair.target, measured.config.seed
    base: Any = target.generation_config
    kwargs = measured.config.at(temperature).generate_kwargs()
    never = target.config.get_text_config().vocab_size  # an id that no text has: None would be filled from the model's
    generation = GenerationConfig(eos_token_id=[never], pad_token_id=base.pad_token_id, max_new_tokens=tokens, **kwargs)
    prefixed = [ids + text for ids, text in zip(encoded, texts, strict=True)]
    with phase("further tokens of each text", tokens * len(prefixed), "tokens") as bar:
        extra = complete(target, generation, prefixed, seed, rows=64, observer=lambda _, new, __: bar.advance(len(new)))
    return [text + completion.ids for text, completion in zip(texts, extra, strict=True)]


@torch.inference_mode()
def _margins(
    target: PreTrainedModel, sequences: Sequence[torch.Tensor], lengths: Sequence[int], sampler: Sampler
) -> list[list[float]]:
    """Return the likeliest token's margin over the second at each token, as a share of the largest logit."""
    margins = []
    for sequence, length in track(list(zip(sequences, lengths, strict=True)), "margins", "texts"):
        text = WrittenText(sequence, length, len(sequence) - length)
        (logits,), text_margins = teacher_forced(target, [text]), list[float]()
        for first, end in chunks(len(text), target.config.get_text_config().vocab_size):
            logits_CV = logits(first, end)
            top_C2 = sampler.scores(logits_CV, contexts_of(text, sampler, first, end)).topk(2, dim=-1).values.float()
            scale_C = logits_CV.abs().amax(-1).float().clamp_min(1e-30)
            text_margins += ((top_C2[:, 0] - top_C2[:, 1]) / scale_C).tolist()
        margins.append([float(f"{x:.{DIGITS}g}") for x in text_margins])
    return margins
