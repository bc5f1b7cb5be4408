"""What a service process knows beyond the ready line: every compile, every miss with its reason, settings that differ."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cachepipe.domain.engine import AOT
from cachepipe.domain.evidence import Lookup
from cachepipe.domain.explain import setting_differences
from cachepipe.runtime.events import note, say

if TYPE_CHECKING:
    from cachepipe.runtime.attach import Attached

MAX_TOLD = 20
"""Misses, and settings, that get a line of their own; all are in `cachepipe.report()`."""


def details(attached: Attached) -> dict[str, Any]:
    """Returns what was recorded as a JSON-able tree."""
    recorder, late = attached.recorder, attached.late_watch
    return {
        "phases": asdict(recorder.phases()),
        "compiles": [asdict(graph) for graph in recorder.graphs()],
        "work_items": [asdict(item) for item in recorder.work_items()],
        "tuned": [asdict(kernel) for kernel in recorder.tuned],
        "late_seconds": round(late.seconds, 3),
        "late_captures": late.captures,
        "is_strict": late.is_strict,
        "dropped": recorder.dropped,
        "uncounted": [asdict(one) for one in recorder.uncounted],
    }


def tell_misses(attached: Attached) -> None:
    """Says each miss of the start with torch's reason, and beside them the settings in which this process differs from the
    builder; nothing on a start that only hit, except for the file of events."""
    start = os.environ.get("CACHEPIPE_START_ID", "-")
    missed = [lookup for lookup in attached.recorder.lookups if lookup.outcome != "hit"]
    is_restored = bool(os.environ.get("CACHEPIPE_ROOT"))
    places = {graph.graph: graph for graph in attached.recorder.graphs()}
    for lookup in missed[:MAX_TOLD] if is_restored else ():
        graph = places.get(lookup.graph)
        facts = {"place": graph.place, "inputs": _sizes(graph.sizes)} if graph else {}
        say("miss", start=start, **_facts(lookup), **facts)
    for line in differing_settings(attached)[:MAX_TOLD] if missed and is_restored else ():
        say("setting", start=start, differs=line)
    for graph in places.values():
        note("compile", start=start, **asdict(graph))
    note(
        "evidence",
        start=start,
        settings=dict(attached.settings),
        lookups=[asdict(lookup) for lookup in attached.recorder.lookups],
        components=attached.recorder.components,
        entries=_entries(),
        device=restored_device(),
        **details(attached),
    )


def differing_settings(attached: Attached) -> list[str]:
    """Returns the ambient settings in which this process differs from the builder of the restored entries, in words (A14)."""
    from cachepipe.runtime.service import statements

    found: set[str] = set()
    for statement in statements() if attached.settings else ():
        for record in statement.entries:
            for name, built, called in setting_differences(record.environment, attached.settings):
                found.add(f"{record.spec.id}: {name}: built {built}, called {called}")
    return sorted(found)


def expected_graphs() -> int:
    """Returns how many graphs a warm start looks up, all shape buckets together: none where native functions answer."""
    from cachepipe.runtime.service import statements

    traced = (record for one in statements() for record in one.entries if record.spec.engine != AOT)
    return sum(row.graphs for record in traced for row in record.shape_buckets)


def restored_device() -> str:
    """Returns for which device this process restored; empty: nothing. Of both, the GPU, since what serves on it has to be fast."""
    from cachepipe.runtime.service import statements

    return max((one.device for one in statements()), default="")


def _entries() -> list[str]:
    from cachepipe.runtime.service import statements

    return sorted({record.spec.id for statement in statements() for record in statement.entries})


def _facts(lookup: Lookup) -> dict[str, str]:
    facts = {
        "layer": lookup.layer,
        "outcome": lookup.outcome,
        "graph": lookup.graph,
        "shape_bucket": lookup.shape_bucket,
        "reason": lookup.reason,
        "key": lookup.key[:64],
    }
    return {name: value for name, value in facts.items() if value}


def _sizes(sizes: dict[str, Any]) -> str:
    return " ".join(f"{name}:{'x'.join(map(str, size))}" for name, size in sizes.items())
