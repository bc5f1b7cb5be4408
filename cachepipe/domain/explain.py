"""Why a lookup missed, in words: the components of its key, compared with those of the builder's key.

torch's keys are digests over named components. The builder keeps `layer/key` → component → [hash, text] of every key;
a process that missed has the same of its own keys. A miss is compared with the builder's lookup of the same layer,
shape bucket and turn.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachepipe.domain.evidence import EntryEvidence, Lookup
from cachepipe.domain.record import Json

MAX_COMPONENTS = 12
"""Differing components that are named per miss: more mean that everything differs."""
_TEXT_CHARS = 120


def explain_misses(entry: str, evidence: EntryEvidence, built: Json) -> tuple[str, ...]:
    """Returns one line per lookup that was no hit, and per setting that differs, with the built and the found value.

    Args:
        entry: its id.
        evidence: of the process that missed, recorded with components.
        built: the entry's part of the artifact's explain data.
    """
    lines = []
    turns: dict[tuple[str, str], int] = {}
    for lookup in evidence.lookups:
        place = (lookup.layer, lookup.shape_bucket)
        turn = turns[place] = turns.get(place, -1) + 1
        if lookup.outcome == "hit":
            continue
        where = f"{entry} · {lookup.shape_bucket}: {lookup.layer} {lookup.outcome}"
        reason = f" ({lookup.reason})" if lookup.reason else ""
        lines.append(f"{where}{reason}: {_difference(lookup, turn, evidence, built)}")
    if lines:
        lines += [f"{entry}: {text}" for text in _setting_differences(evidence.settings, built)]
        lines += [f"{entry}: {text}" for text in _config_differences(evidence.components, built)]
    return tuple(lines)


def _difference(lookup: Lookup, turn: int, evidence: EntryEvidence, built: Json) -> str:
    wanted_key = _built_key(lookup, turn, built)
    if wanted_key is None:
        return "the builder looked up nothing here"
    if wanted_key == lookup.key:
        return "the key is the builder's own: its file is missing or was refused"
    wanted = _components(built, lookup.layer, wanted_key)
    found = evidence.components.get(f"{lookup.layer}/{lookup.key}", {})
    if not wanted or not found:
        return f"key {lookup.key[:16]}, built {wanted_key[:16]}: components of this layer are not recorded"
    return "; ".join(_component_differences(wanted, found)) or "the keys differ, but no named component does"


def _built_key(lookup: Lookup, turn: int, built: Json) -> str | None:
    rows = [
        row
        for row in built.get("lookups", [])
        if row.get("layer") == lookup.layer and row.get("shape_bucket") == lookup.shape_bucket
    ]
    return str(rows[turn].get("key", "")) if turn < len(rows) else None


def _components(built: Json, layer: str, key: str) -> Mapping[str, Json]:
    found = built.get("components", {}).get(f"{layer}/{key}", {})
    return found if isinstance(found, dict) else {}


def _component_differences(wanted: Mapping[str, Json], found: Mapping[str, Json]) -> list[str]:
    names = sorted(name for name in {*wanted, *found} if _digest(wanted, name) != _digest(found, name))
    lines = [f"{name}: built {_text(wanted, name)}, found {_text(found, name)}" for name in names[:MAX_COMPONENTS]]
    return [*lines, f"and {len(names) - MAX_COMPONENTS} more"] if len(names) > MAX_COMPONENTS else lines


def _digest(components: Mapping[str, Json], name: str) -> str:
    value = components.get(name)
    return str(value[0]) if isinstance(value, list) and value else ""


def _text(components: Mapping[str, Json], name: str) -> str:
    value = components.get(name)
    if not isinstance(value, list) or len(value) < 2:
        return "nothing"
    text = " ".join(str(value[1]).split())
    return f"`{text[:_TEXT_CHARS]}`"


def _setting_differences(settings: Mapping[str, str], built: Json) -> list[str]:
    before = built.get("settings", {})
    names = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
    return [f"setting {name}: built `{before.get(name, '')}`, found `{settings.get(name, '')}`" for name in names]


def _config_differences(components: Json, built: Json) -> list[str]:
    lines = []
    for name in sorted(components):
        wanted = built.get("components", {}).get(name)
        if name.startswith("config/") and isinstance(wanted, dict):
            lines += [f"{name}: {line}" for line in _component_differences(wanted, components[name])]
    return lines
