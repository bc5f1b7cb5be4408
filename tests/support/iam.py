"""IAM policies, read as AWS reads them, as far as those in ci/aws go; an unknown element is an error, not a pass.

Source: IAM User Guide, "Policy evaluation logic" and "IAM JSON policy elements: Condition operators".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request as AWS sees it."""

    action: str
    resource: str
    context: Mapping[str, str]


def listed(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def like(pattern: str, text: str) -> bool:
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.fullmatch("".join(parts), text) is not None


def _holds(operator: str, key: str, wanted: Sequence[str], context: Mapping[str, str]) -> bool:
    found = context.get(key)
    if operator == "Null":
        return (found is None) == (wanted[0] == "true")
    if operator == "StringLikeIfExists":
        return found is None or any(like(pattern, found) for pattern in wanted)
    if operator == "ArnNotEquals":
        return found not in wanted
    if operator in ("Bool", "StringEquals"):
        return found is not None and found in wanted
    raise NotImplementedError(operator)


def applies(statement: Mapping[str, Any], ask: Ask) -> bool:
    unknown = set(statement) - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    if unknown:
        raise NotImplementedError(str(unknown))
    return (
        any(like(pattern, ask.action) for pattern in listed(statement["Action"]))
        and any(like(pattern, ask.resource) for pattern in listed(statement["Resource"]))
        and all(
            _holds(operator, key, listed(wanted), ask.context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def is_allowed(ask: Ask, *policies: Mapping[str, Any]) -> bool:
    """Tells whether some statement allows the request and none denies it."""
    effects = {
        statement["Effect"] for policy in policies for statement in policy["Statement"] if applies(statement, ask)
    }
    return effects == {"Allow"}
