"""Looking at what is published: `ls`, `show` and `diff` as JSON trees, and the lines that a person reads.

Signatures are judged, and nothing else: an expired index or another machine's artifact is shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachepipe.adapters.store import Store
from cachepipe.domain.entry import bucket_label
from cachepipe.domain.fingerprint import Fingerprint, describe, differences
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import INDEXES, place_of
from cachepipe.domain.names import check_name
from cachepipe.domain.record import Json
from cachepipe.domain.statement import EntryRecord, Statement
from cachepipe.errors import CachepipeError
from cachepipe.workflows.fetch import Artifact, Channel, check_format, newest, read_artifact, resolve_ref, resolve_rows


def ls(store: Store, name: str | None = None) -> Json:
    """Returns every channel of the store, or of one release, with its newest version and targets.

    A channel whose newest index cannot be read stands in `unreadable` with the reason; it hides no other.

    Raises:
        UsageError: not a name.
        StoreError: the store fails, or has another format.
    """
    if name is not None:
        check_name(name, "the release name")
    check_format(store)
    channels = set()
    for key in store.list(f"{INDEXES}{name}/" if name else INDEXES):
        place = place_of(key)
        if place is not None and place.kind == "index":
            channels.add((place.name, place.channel))
    rows, unreadable = [], []
    for release, channel in sorted(channels):
        try:
            found = newest(store, release, channel)
        except CachepipeError as error:
            facts = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
            unreadable.append({"name": release, "channel": channel, **facts})
            continue
        if found is not None:
            rows.append(_channel_row(found))
    return {"store": store.url, "channels": rows, "unreadable": unreadable}


def _channel_row(found: Channel) -> Json:
    index = found.index
    return {
        "name": index.name,
        "channel": index.channel,
        "version": index.version,
        "created_at": index.created_at,
        "expires_at": index.expires_at,
        "status": found.status,
        "revoked": list(index.revoked),
        "targets": [_target(row) for row in index.rows],
    }


def ls_lines(tree: Json) -> list[str]:
    """Returns the text of `ls`: one line per channel, one per target below it."""
    lines = []
    for channel in tree["channels"]:
        lines.append(
            f"{channel['name']}@{channel['channel']}:{channel['version']}  "
            f"{channel['created_at']}, expires {channel['expires_at']}, {channel['status']}"
        )
        lines += [
            f"  {target['artifact']}  {target['device']}  {target['target']}  "
            f"{size_text(target['packs_bytes'])}  {target['statement'][:12]}"
            for target in channel["targets"]
        ]
        if channel["revoked"]:
            lines.append(f"  revoked: {', '.join(digest[:12] for digest in channel['revoked'])}")
    lines += [f"{bad['name']}@{bad['channel']}  cannot be read: {bad['message']}" for bad in tree["unreadable"]]
    return lines or [f"nothing is published: {tree['store']}"]


def _target(row: IndexRow) -> Json:
    parts = Fingerprint(row.fingerprint)
    names = ("gpu_name", "driver") if row.device == "cuda" else ("cpu_isa", "threads")
    facts = [f"torch {parts.get('torch')}", *(f"{parts.get(name)}" for name in names if parts.get(name) is not None)]
    return {
        "artifact": row.artifact,
        "statement": row.statement,
        "device": row.device,
        "target": ", ".join(facts),
        "packs_bytes": row.packs_bytes,
        "created_at": row.created_at,
    }


def show(store: Store, ref: str) -> Json:
    """Returns sizes, fingerprint, coverage and evidence of every artifact that a reference names.

    Raises:
        UsageError, MissError: as `resolve_rows`.
        IntegrityError, TrustError, StoreError: as `read_artifact`.
    """
    artifacts = [read_artifact(store, row) for row in resolve_rows(store, ref)]
    return {"ref": ref, "store": store.url, "artifacts": [_artifact(artifact) for artifact in artifacts]}


def _artifact(artifact: Artifact) -> Json:
    statement = artifact.statement
    return {
        "artifact": statement.artifact,
        "statement": artifact.digest,
        "status": artifact.status,
        "release": statement.release,
        "root": statement.root,
        "device": statement.device,
        "created_at": statement.created_at,
        "sizes": _sizes(statement),
        "fingerprint": {part.name: part.value for part in statement.fingerprint},
        "entries": [_entry(entry) for entry in statement.entries],
        "gates": dict(statement.gates),
        "builder": dict(statement.builder),
    }


def _sizes(statement: Statement) -> dict[str, int]:
    return {
        "tuned_bytes": statement.tuned_bytes,
        "unpacked_bytes": statement.unpacked_bytes,
        "packs_bytes": sum(blob.size_bytes for blob in statement.packs),
        "packs": len(statement.packs),
        "files": statement.files,
        "explain_bytes": statement.explain.size_bytes,
    }


def _entry(entry: EntryRecord) -> Json:
    return {
        "entry": entry.spec.id,
        "key": entry.key,
        "files": dict(entry.kinds),
        "graph_breaks": entry.graph_breaks,
        "shape_buckets": [
            {
                "shape_bucket": bucket_label(facts.shape_bucket),
                "graphs": facts.graphs,
                "cold_s": facts.cold_s,
                "restored_s": facts.restored_s,
                "eager_s": facts.eager_s,
                "max_abs_diff": facts.max_abs_diff,
            }
            for facts in entry.shape_buckets
        ],
    }


def show_lines(tree: Json) -> list[str]:
    """Returns the text of `show`."""
    lines: list[str] = []
    for artifact in tree["artifacts"]:
        sizes = artifact["sizes"]
        lines += [
            f"artifact {artifact['artifact']} of {artifact['release']} for {artifact['device']}",
            f"  statement   {artifact['statement']}, {artifact['status']}",
            f"  created     {artifact['created_at']} at {artifact['root']}",
            f"  sizes       tuned {size_text(sizes['tuned_bytes'])}, settled {size_text(sizes['unpacked_bytes'])} "
            f"in {sizes['files']} files, packed {size_text(sizes['packs_bytes'])} in {sizes['packs']} packs",
            "  fingerprint",
            *(f"    {name:<15} {value}" for name, value in artifact["fingerprint"].items()),
        ]
        for entry in artifact["entries"]:
            kinds = ", ".join(f"{count} {kind}" for kind, count in entry["files"].items())
            lines += [f"  entry {entry['entry']}  key {entry['key'][:12]}", f"    files: {kinds}"]
            lines.append(f"    {'shape bucket':<28} {'cold':>8} {'restored':>9} {'eager':>8} {'graphs':>7}")
            lines += [
                f"    {facts['shape_bucket']:<28} {facts['cold_s']:>7.2f}s {facts['restored_s']:>8.2f}s "
                f"{facts['eager_s']:>7.2f}s {facts['graphs']:>7}"
                for facts in entry["shape_buckets"]
            ]
    return lines


def diff(store: Store, left: str, right: str) -> Json:
    """Returns what differs between two artifacts, in words: fingerprint parts, entries with their key parts, sizes.

    Raises:
        UsageError, MissError, IntegrityError, TrustError, StoreError: as `resolve_ref`.
    """
    one, other = (resolve_ref(store, ref).statement for ref in (left, right))
    before = {entry.spec.id: entry for entry in one.entries}
    after = {entry.spec.id: entry for entry in other.entries}
    return {
        "left": {"ref": left, "artifact": one.artifact},
        "right": {"ref": right, "artifact": other.artifact},
        "settings": _changed({"device": one.device, "root": one.root}, {"device": other.device, "root": other.root}),
        "fingerprint": _changed(
            {part.name: part.value for part in one.fingerprint}, {part.name: part.value for part in other.fingerprint}
        ),
        "fits": [
            describe(difference)
            for difference in differences(Fingerprint(one.fingerprint), Fingerprint(other.fingerprint))
        ],
        "added": [entry for entry in after if entry not in before],
        "removed": [entry for entry in before if entry not in after],
        "changed": {
            name: changes for name in before if name in after and (changes := _entry_changes(before[name], after[name]))
        },
        "sizes": _changed(_sizes(one), _sizes(other)),
    }


def _changed(before: Mapping[str, Json], after: Mapping[str, Json]) -> Json:
    names = [*before, *(name for name in after if name not in before)]
    return {name: [before.get(name), after.get(name)] for name in names if before.get(name) != after.get(name)}


def _entry_changes(before: EntryRecord, after: EntryRecord) -> Json:
    buckets = [[bucket_label(facts.shape_bucket) for facts in entry.shape_buckets] for entry in (before, after)]
    changes = {
        "key_parts": sorted(_changed(before.key_parts, after.key_parts)),
        "shape_buckets_added": [label for label in buckets[1] if label not in buckets[0]],
        "shape_buckets_removed": [label for label in buckets[0] if label not in buckets[1]],
        "files": _changed(before.kinds, after.kinds),
        "environment": _changed(before.environment, after.environment),
    }
    return {what: value for what, value in changes.items() if value}


def diff_lines(tree: Json) -> list[str]:
    """Returns the text of `diff`; equal artifacts give one line."""
    lines = [f"{name}: {old} → {new}" for name, (old, new) in tree["settings"].items()]
    lines += [
        f"fingerprint {name}: {_or_none(old)} → {_or_none(new)}" for name, (old, new) in tree["fingerprint"].items()
    ]
    lines += [f"entry added: {name}" for name in tree["added"]]
    lines += [f"entry removed: {name}" for name in tree["removed"]]
    for name, changes in tree["changed"].items():
        if "key_parts" in changes:
            lines.append(f"entry {name}: key differs in {', '.join(changes['key_parts'])}")
        lines += [f"entry {name}: shape bucket added: {label}" for label in changes.get("shape_buckets_added", ())]
        lines += [f"entry {name}: shape bucket removed: {label}" for label in changes.get("shape_buckets_removed", ())]
        lines += [
            f"entry {name}: {kind} files: {old or 0} → {new or 0}"
            for kind, (old, new) in changes.get("files", {}).items()
        ]
        lines += [
            f"entry {name}: {setting}: {_or_none(old)} → {_or_none(new)}"
            for setting, (old, new) in changes.get("environment", {}).items()
        ]
    for name, (old, new) in tree["sizes"].items():
        is_bytes = name.endswith("_bytes")
        lines.append(f"{name}: {size_text(old) if is_bytes else old} → {size_text(new) if is_bytes else new}")
    return lines or ["no differences"]


def _or_none(value: Json) -> str:
    return "none" if value is None else str(value)


def size_text(size_bytes: int) -> str:
    """Returns `6.1 MB`: powers of ten, one digit after the point from kB on."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95 or unit == "GB":
            break
    return f"{size:.1f} {unit}"
