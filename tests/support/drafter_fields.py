"""Older names of drafters in keyword arguments, as `--drafter` spells them."""

from typing import Any

from draftsmith.scripts.kinds import KINDS


def with_drafters(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with `drafter` in place of draft, medusa, prompt_lookup and the like, as their flags are read."""
    others, texts = dict(fields), list[str]()
    for kind in sorted(KINDS, key=lambda kind: kind.name != "draft"):
        for flag in kind.flags:
            value = others.pop(flag, None)
            if value:
                paths = value if isinstance(value, list) else [value]
                texts += [kind.name] if kind.switch else [f"{kind.name}:{path}" for path in paths]
    return others | {"drafter": [*others.get("drafter", []), *texts]}
