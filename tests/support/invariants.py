"""Checks a store's folder against the promises of its layout, by the layout alone: imports nothing of cachepipe.

As a program it prints the newest restorable version of every channel, or what is broken, and exits 1.

1 no object has a name that the layout does not know
2 index versions are contiguous from 1, each names itself, and the hint names no version that does not exist
3 every row of every version names a statement with these very bytes, of that artifact
4 every subject of such a statement is there, with that SHA-256 and size
5 an artifact without a statement is named by nobody

With `--collected`, where gc has run: a version that is not its channel's newest may name an artifact that has no statement any more.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

KEYS = re.compile(
    r"v1/(format\.json"
    r"|artifacts/[0-9A-Z]{26}/(packs/[0-9a-f]{64}|statement\.dsse\.json)"
    r"|index/[a-z0-9._-]+/[a-z0-9._-]+/([0-9]{10}\.dsse\.json|hint)"
    r"|(pins|tombs)/[0-9A-Z]{26}/[0-9a-f]+)"
)


def _payload(path: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))


def check(root: Path, is_collected: bool = False) -> tuple[dict[str, int], list[str]]:
    """Returns channel → newest version, and everything that is broken."""
    problems = []
    files = [path for path in root.rglob("*") if path.is_file()]
    keys = {path.relative_to(root).as_posix() for path in files}
    keys = {key for key in keys if not key.startswith((".tmp/", ".keys/"))}
    problems += [f"unknown object {key}" for key in keys if KEYS.fullmatch(key) is None]
    versions: dict[str, list[int]] = {}
    for key in sorted(keys):
        if key.startswith("v1/index/") and key.endswith(".dsse.json"):
            folder, _, name = key.rpartition("/")
            versions.setdefault(folder, []).append(int(name[:10]))
    for folder, numbers in versions.items():
        for number in numbers:
            may_lack = is_collected and number != numbers[-1]
            problems += _check_index(root, root / folder / f"{number:010d}.dsse.json", may_lack)
        if numbers != list(range(1, len(numbers) + 1)):
            problems.append(f"{folder}: versions {numbers}")
        hint = root / folder / "hint"
        if hint.exists() and int(hint.read_text()) > len(numbers):
            problems.append(f"{folder}: the hint is ahead")
    return {folder.removeprefix("v1/index/"): numbers[-1] for folder, numbers in versions.items()}, problems


def _check_index(root: Path, path: Path, may_lack: bool) -> list[str]:
    index = _payload(path)
    name, channel = path.parts[-3:-1]
    problems = []
    if (index["name"], index["channel"], index["version"]) != (name, channel, int(path.name[:10])):
        problems.append(f"{path.name}: names something else")
    for row in index["rows"]:
        artifact = root / "v1/artifacts" / row["artifact"]
        envelope = artifact / "statement.dsse.json"
        if not envelope.exists():
            if not may_lack:
                problems.append(f"{path.name}: {row['artifact']} has no statement")
            continue
        if hashlib.sha256(envelope.read_bytes()).hexdigest() != row["statement"]:
            problems.append(f"{path.name}: {row['artifact']} has another statement")
        statement = _payload(envelope)
        if statement["predicate"]["artifact"] != row["artifact"]:
            problems.append(f"{path.name}: {row['artifact']} is another artifact")
        problems += _check_subjects(artifact, statement)
    return problems


def _check_subjects(artifact: Path, statement: Any) -> list[str]:
    problems = []
    predicate = statement["predicate"]
    blobs = [*predicate["packs"], predicate["table"], predicate["explain"]]
    sizes = {blob["digest"]: blob["size_bytes"] for blob in blobs}
    for subject in statement["subject"]:
        path, digest = artifact / subject["name"], subject["digest"]["sha256"]
        data = path.read_bytes() if path.exists() else None
        if data is None or hashlib.sha256(data).hexdigest() != digest or len(data) != sizes[digest]:
            problems.append(f"{artifact.name}: {subject['name']} is missing or damaged")
    return problems


if __name__ == "__main__":
    newest, broken = check(Path(sys.argv[1]), "--collected" in sys.argv)
    print(json.dumps(broken or newest))
    sys.exit(1 if broken else 0)
