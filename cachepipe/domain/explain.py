"""Why a lookup missed, in words: the components of its key, compared with those of the builder's nearest key.

torch's keys are digests over named components. The builder keeps `layer/key` → component → [hash, text] of every key;
a process that missed has the same of its own keys. A miss is compared with the builder's key of the same layer that differs
least, and what differs is put into words by `domain/explain_rules.py`.

    encoder/float32/default · batch=8: aotautograd, fxgraph miss of graph 0/1
      grad mode: built inference_mode, called grad
      fix: call inside `entry.context()`, which sets what was built
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from cachepipe.domain.components import (
    Cause,
    Differences,
    digest_of,
    fewest_differences,
    short,
    sizes,
    source_paths,
    tensor_facts,
    text_of,
)
from cachepipe.domain.evidence import EntryEvidence, Explanation, Lookup
from cachepipe.domain.explain_rules import causes, shape_distance
from cachepipe.domain.record import Json
from cachepipe.domain.remedies import bypass_remedy

_LAYER_FIXES = {
    "native": "the C++ object was built here: compiler, its version and the virtual environment's path must be the builder's",
    "tuning": "the search ran here: the tuning record is not in the artifact; build again with `--fresh`",
    "triton": "the kernel was compiled here: its files are not in the artifact, or lie at another path",
}
FREE_VARIABLES = {
    f"variable {name}"
    for name in (
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_WORKER_START",
        "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING",
        "TORCH_COMPILE_JOB_ID",
    )
}
"""In no key, measured: builder and service may differ in them."""
LATE = "late"
"""Stands for a layer where a service compiled after `ready()`, which no lookup tells."""
_RECORD_FIX = "`verify` and `build` record them, a service does with CACHEPIPE_EXPLAIN=1"
_SETTING_FIX = "make it equal, or call inside `entry.context()`"


def explain(evidence: EntryEvidence, built: Json) -> tuple[Explanation, ...]:
    """Returns one explanation per cause of every lookup that was no hit; causes that several layers share are told once.

    Args:
        evidence: of the process that missed, recorded with components.
        built: the entry's part of the artifact's explain data.
    """
    found: dict[tuple[str, str, str], Explanation] = {}
    misses = [lookup for lookup in evidence.lookups if lookup.outcome != "hit"]
    outer = {
        (one.shape_bucket, one.graph): one for one in misses if one.layer == "aotautograd" and one.outcome == "miss"
    }
    inner = {(one.shape_bucket, one.graph): one.outcome for one in evidence.lookups if one.layer == "fxgraph"}
    compiled = {graph[0] for graph in {*outer, *inner} if inner.get(graph, "miss") != "hit"}
    for lookup in sorted(misses, key=lambda lookup: lookup.layer):  # the outer layer first
        graph = (lookup.shape_bucket, lookup.graph)
        is_compiled = (
            inner.get(graph, "miss" if graph in outer else "hit") != "hit" if lookup.graph else graph[0] in compiled
        )
        if lookup.layer in _LAYER_FIXES and is_compiled:
            continue  # what a graph that missed builds and tunes, also at its first call, needs no reason of its own
        for cause in _causes(lookup, outer.get(graph), evidence, built):
            place = (*graph, cause.cause)
            one = Explanation(lookup.shape_bucket, lookup.graph, lookup.layer, *cause)
            known = found.get(place)
            found[place] = one if known is None else _joined(known, one)
    told = " ".join(explanation.cause for explanation in found.values())
    if found:
        for name, before, after in setting_differences(built.get("settings", {}), evidence.settings):
            if f"{name}: " not in told:
                sentence = f"{name}: built {before}, called {after}"
                found["", "", sentence] = Explanation("", "", "settings", sentence, _SETTING_FIX)
    return tuple(found.values())


def _joined(one: Explanation, other: Explanation) -> Explanation:
    layers = one.layer if other.layer in one.layer.split(", ") else f"{one.layer}, {other.layer}"
    return replace(one, layer=layers, components=tuple(dict.fromkeys((*one.components, *other.components))))


def explain_misses(entry: str, evidence: EntryEvidence, built: Json) -> tuple[str, ...]:
    """Returns `explain` as lines; see the module's docstring."""
    return explanation_lines(entry, explain(evidence, built))


def explanation_lines(entry: str, explanations: Iterable[Explanation], has_names: bool = False) -> tuple[str, ...]:
    """Returns explanations as lines: where, then each cause with its fix, and the names of torch's key components."""
    lines: list[str] = []
    before = ""
    for one in explanations:
        graph = f" of graph {one.graph}" if one.graph else ""
        where = f"{entry} · {one.shape_bucket}: {one.layer} miss{graph}"
        if one.layer == LATE:
            where = f"{entry} · late compile{graph}"
        if one.layer == "settings":
            where = f"{entry}: settings of the calls"
        if where != before:
            lines.append(where)
        before = where
        lines.append(f"  {one.cause}")
        if one.fix:
            lines.append(f"  fix: {one.fix}")
        if has_names and one.components:
            more = f" and {len(one.components) - 6} more" if len(one.components) > 6 else ""
            lines.append(f"  key: {', '.join(one.components[:6])}{more}")
    return tuple(lines)


def setting_differences(built: Mapping[str, str], found: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Returns (name, built, called) of every ambient setting that differs; what one side does not know is left out,
    except environment variables, which are unset there."""
    rows = []
    for name in sorted({*built, *found} - FREE_VARIABLES):
        is_variable = name.startswith("variable ")
        before, after = built.get(name, ""), found.get(name, "")
        if before != after and (is_variable or (name in built and name in found)):
            rows.append((name, before or "unset", after or "unset"))
    return rows


def _causes(lookup: Lookup, outer: Lookup | None, evidence: EntryEvidence, built: Json) -> list[Cause]:
    """Returns why one lookup was no hit; `outer` is the outer layer's miss of the same graph, which this one follows."""
    if lookup.outcome == "bypass":
        reason = lookup.reason or "no reason given"
        return [Cause(f"torch refuses to cache the graph: {short(reason)}", bypass_remedy(reason), ())]
    if lookup.layer in _LAYER_FIXES:
        return [Cause(f"{lookup.layer} lookup of {short(lookup.key)}", _LAYER_FIXES[lookup.layer], ())]
    keys = _built_keys(lookup.layer, built)
    if not keys:
        return [Cause("the builder looked up nothing here", "build again with this cachepipe", ())]
    if lookup.key in keys:
        guard = f": {lookup.reason}" if lookup.reason.startswith("guard_miss") else ""
        sentence = f"the key is the builder's own{guard}, but its file is missing, was refused, or holds other guards"
        return [Cause(sentence, "`cachepipe verify --files` compares every file; restore again", ())]
    everything = built.get("components", {})
    found = evidence.components.get(f"{lookup.layer}/{lookup.key}", {})
    nearest = fewest_differences(found, [f"{lookup.layer}/{key}" for key in keys], everything) if found else None
    if nearest is None:
        return [Cause("the components of this layer are not recorded", _RECORD_FIX, ())]
    outermost = evidence.components.get(f"{outer.layer}/{outer.key}", {}) if outer else {}
    differences = Differences(
        built=everything[nearest],
        found=found,
        built_settings=built.get("settings", {}),
        found_settings=evidence.settings,
        configs=_configs(evidence.components, everything),
        paths=tuple(source_paths(text_of(outermost or found, "aot_config"))),
    )
    told = [_with_coverage(cause, lookup.layer, differences, built) for cause in causes(differences)]
    if outer is not None and outermost and outer is not lookup:
        # The inner graph is made from the outer one, whose causes are told; its code and inputs follow from them.
        first = _causes(outer, None, evidence, built)
        known = {one.cause for one in first}
        return first + [one for one in told if one.cause not in known and not _is_consequence(one)]
    return told or [Cause("the keys differ, but no named component does", "build again", ())]


def _is_consequence(cause: Cause) -> bool:
    return any(name == "gm" or name.startswith("example_inputs") for name in cause.components)


def _built_keys(layer: str, built: Json) -> dict[str, str]:
    """Returns the builder's keys of a layer → shape bucket."""
    rows = [row for row in built.get("lookups", []) if row.get("layer") == layer and row.get("key")]
    return {str(row["key"]): str(row.get("shape_bucket", "-")) for row in rows}


def _configs(found: Json, built: Json) -> dict[str, dict[str, tuple[str, str]]]:
    configs: dict[str, dict[str, tuple[str, str]]] = {}
    for module in ("dynamo", "functorch", "inductor"):
        before, after = built.get(f"config/{module}", {}), found.get(f"config/{module}", {})
        names = {name for name in {*before, *after} if digest_of(before, name) != digest_of(after, name)}
        configs[module] = {name: (short(text_of(before, name)), short(text_of(after, name))) for name in names}
    return configs


def _with_coverage(cause: Cause, layer: str, here: Differences, built: Json) -> Cause:
    """Turns a differing shape into what is covered: the builder's nearest shape of that argument."""
    if not cause.cause.startswith("shape ("):
        return cause
    shape, _, rest = cause.cause.removeprefix("shape ").partition(" of ")
    place = rest.partition(":")[0].partition(" and ")[0]
    wanted = sizes(shape)
    nearest, label = "", ""
    best = float("inf")
    for key, shape_bucket in _built_keys(layer, built).items():
        components = built.get("components", {}).get(f"{layer}/{key}", {})
        known = _shape_of(place, here.paths, components)
        numbers = sizes(known) if known else None
        if wanted is not None and numbers is not None and (far := shape_distance(wanted, numbers)) < best:
            best, nearest, label = far, known, shape_bucket
    if not nearest:
        return Cause(
            f"shape {shape} of {place} not in coverage", "add it to the manifest's `shape_buckets`", cause.components
        )
    sentence = f"shape {shape} of {place} not in coverage, nearest bucket {label} {nearest}"
    fix = "add it to the manifest's `shape_buckets`, pad to a covered shape, or ask `entry.covered` before the call"
    return Cause(sentence, fix, cause.components)


def _shape_of(place: str, paths: tuple[str, ...], components: Mapping[str, Json]) -> str:
    """Returns the shape that an argument has in the builder's components; arguments are found by their number here."""
    number = paths.index(place) if place in paths else place.removeprefix("input ")
    return tensor_facts(text_of(components, f"example_inputs[{number}]")).get("shape", "")
