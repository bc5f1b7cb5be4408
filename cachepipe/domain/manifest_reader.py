"""Reads a manifest from the tree of a YAML file, or gives every problem with its place."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cachepipe.domain.manifest import (
    CommandModel,
    CompileSettings,
    ContextSettings,
    DynamicBounds,
    FactoryModel,
    Gates,
    Manifest,
    Target,
    Tolerance,
    ToleranceBounds,
    Trust,
)
from cachepipe.domain.manifest_rules import Place, Problem, nearest
from cachepipe.domain.record import Json


def read_manifest(tree: Json) -> Manifest | tuple[Problem, ...]:
    """Returns the manifest in a tree of plain values, or all its problems, in the order of their places."""
    try:
        return Manifest.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    return tuple(problem for detail in details if not _is_echo(detail, details) for problem in _problems(detail))


def _is_echo(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Tells whether a list is only too short because its items were refused."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in details
    )


_FIELDS: Mapping[Place, type[BaseModel]] = {
    (): Manifest,
    ("targets",): Target,
    ("gates",): Gates,
    ("trust",): Trust,
    ("models", "factory"): FactoryModel,
    ("models", "command"): CommandModel,
    ("models", "factory", "compile"): CompileSettings,
    ("models", "factory", "context"): ContextSettings,
    ("models", "factory", "tolerance"): Tolerance,
    ("models", "factory", "tolerance", "by_dtype"): ToleranceBounds,
    ("models", "factory", "dynamic_dims"): DynamicBounds,
}
_WORDS = {
    "missing": "required",
    "int_type": "not an integer",
    "float_type": "not a number",
    "string_type": "not text (quote it)",
    "bool_type": "not `true` or `false`",
    "tuple_type": "not a list",
    "mapping_type": "not a mapping",
    "dict_type": "not a mapping",
    "model_type": "not a mapping",
    "too_short": "at least one is needed",
    "string_pattern_mismatch": "not an identifier",
}


def _problems(detail: ErrorDetails) -> list[Problem]:
    place = detail["loc"]
    if place[:1] == ("models",) and len(place) > 2:
        place = (*place[:2], *place[3:])  # without the tag of the union
    place = tuple(part for part in place if part != "[key]")  # pydantic's word for the name itself
    if detail["type"] == "problems":
        return [Problem((*place, *problem.place), problem.message) for problem in detail["ctx"]["problems"]]
    return [Problem(place, _message(detail))]


def _message(detail: ErrorDetails) -> str:
    kind, place = detail["type"], detail["loc"]
    if kind == "extra_forbidden":
        owner = tuple(part for part in place[:-1] if isinstance(part, str))
        named = (("models", "factory", "dynamic_dims"), ("models", "factory", "tolerance", "by_dtype"))
        owner = next((fields for fields in named if owner[: len(fields)] == fields), owner)
        if owner == ("models", "factory") and place[-1] == "command":
            return "a model has `factory` or `command`, not both"
        return f"unknown field{nearest(str(place[-1]), _FIELDS[owner].model_fields)}"
    if place == ("version",) and kind == "literal_error":
        given = detail["input"]
        as_text = " as text" if isinstance(given, str) else ""
        return f"unknown version `{str(given)[:80]}`{as_text}: this release reads version 1"
    text = _WORDS.get(kind) or detail["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
