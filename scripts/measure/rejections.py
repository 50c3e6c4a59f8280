"""Where tokens are rejected: the tokens that a drafter misses most, and texts token by token."""

from collections import defaultdict

from draftsmith.scripts.measure.state import PROBABILISTIC, Measured
from draftsmith.scripts.report.types import RejectedToken, Rejections, TextAcceptance, TokenAcceptance

TEXTS, TOKENS = 8, 30


def rejections_of(measured: Measured) -> Rejections | None:
    """Return what the first drafter that replay applies to misses, at T=0 if measured; None where none is replayed."""
    temperatures = sorted({t for t, _, _ in measured.replays})
    keys = ((t, d.name) for t in temperatures for d in measured.pair.drafters)
    chosen = next((key for key in keys if (*key, PROBABILISTIC) in measured.replays), None)
    if chosen is None:
        return None
    temperature, name = chosen
    replay, texts = measured.replays[temperature, name, PROBABILISTIC], measured.texts[temperature]
    seen: defaultdict[int, int] = defaultdict(int)
    rejected: defaultdict[int, float] = defaultdict(float)
    for text, replayed in zip(texts, replay.texts, strict=True):
        for token, accepted in zip(text, replayed.acceptance, strict=True):
            seen[token] += 1
            rejected[token] += 1 - accepted
    most = sorted(rejected, key=lambda token: -rejected[token])[:TOKENS]
    return Rejections(
        temperature,
        name,
        [_text(measured, place, texts[place], replay.texts[place].acceptance) for place in _spread(measured)],
        [RejectedToken(str(measured.pair.tokenizer.decode([t])), seen[t], rejected[t]) for t in most],
    )


def _spread(measured: Measured) -> list[int]:
    """Return the places of some prompts, of as many categories as can be."""
    first = [places[0] for places in measured.categories().values()]
    return sorted(dict.fromkeys([*first, *range(len(measured.prompts))]), key=lambda i: (i not in first, i))[:TEXTS]


def _text(measured: Measured, place: int, tokens: list[int], acceptance: tuple[float, ...]) -> TextAcceptance:
    return TextAcceptance(
        measured.prompts[place].category,
        str(measured.pair.tokenizer.decode(measured.prompt_ids[place])),
        [TokenAcceptance(piece, a) for piece, a in zip(_pieces(measured, tokens), acceptance, strict=True)],
    )


def _pieces(measured: Measured, tokens: list[int]) -> list[str]:
    """Return what each token adds to the text: characters of several tokens appear with their last."""
    pieces: list[str] = []
    written = ""
    for end in range(1, len(tokens) + 1):
        text = str(measured.pair.tokenizer.decode(tokens[:end]))
        whole = text.rstrip("\ufffd") if end < len(tokens) else text
        pieces.append(whole[len(written) :] if whole.startswith(written) else "")
        written = whole if whole.startswith(written) else written
    return pieces
