"""Acceptance of drafted tokens: the rules, and the exact rule's arithmetic for a row and for a batch."""

from draftsmith.decode.rules.rule import RULES, Cascade, Exact, Rule, Threshold, Typical, as_rule

__all__ = ["RULES", "Cascade", "Exact", "Rule", "Threshold", "Typical", "as_rule"]
