"""Reads the evidence that `report` and `explain` are given: files, and folders that `--report DIR` filled.

1 take each file once, however often it is named
2 read it; a file of a folder that is JSON of somebody else is left out and said
3 refuse two files for the same process: which of them counts must not depend on their order
4 tell the targets of a manifest apart where an entry was called on several
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cachepipe.adapters.given_file import files_in, is_folder, read_given
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.evidence_reader import EVIDENCE_BYTES, STEPS, read_told
from cachepipe.domain.record import Json
from cachepipe.errors import UsageError

Say = Callable[[str], None]


def silent(_text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Found:
    evidences: tuple[EntryEvidence, ...]
    summaries: tuple[Mapping[str, Json], ...]
    """What `build` and `verify` summed up, with `kind`."""


def read_files(paths: Sequence[Path], say: Say = silent) -> Found:
    """Returns what the files, and all in the folders, hold.

    Raises:
        UsageError: a path that cannot be read or is no regular file; two files for one entry and step.
        IntegrityError: a file that is no whole evidence.
    """
    evidences: dict[tuple[str, str], dict[str, tuple[Path, EntryEvidence]]] = {}
    summaries = []
    # 1
    for path, is_named in _once(paths):
        # 2
        is_ours = is_named or path.name.removesuffix(".json").rpartition(".")[2] in STEPS
        told = read_told(read_given(path, EVIDENCE_BYTES), str(path), is_ours)
        if told.summary is not None:
            summaries.append(told.summary)
        elif told.evidence is None:
            say(f"left out: {path}: JSON, but no evidence")
        else:
            # 3
            one = told.evidence
            devices = evidences.setdefault((one.entry, one.step), {})
            # evidence of an earlier release does not say its device: it may be of any
            same = [path for device, (path, _) in devices.items() if one.device == device or "" in (one.device, device)]
            devices[one.device] = (path, one)
            if same:
                raise UsageError(
                    f"two files for step `{one.step}` of {one.entry}: {same[0]} and {path}",
                    hint="name one of them; to compare two releases, give one by `--against`",
                )
    # 4
    found = [evidence for devices in evidences.values() for _, evidence in devices.values()]
    return Found(_by_target(found), tuple(summaries))


def _by_target(evidences: Sequence[EntryEvidence]) -> tuple[EntryEvidence, ...]:
    """Returns evidence whose entries have their device behind the name, where one name was called on several devices."""
    devices: dict[str, set[str]] = {}
    for one in evidences:
        devices.setdefault(one.entry, set()).add(one.device)
    return tuple(
        replace(one, entry=f"{one.entry} on {one.device}") if len(devices[one.entry]) > 1 and one.device else one
        for one in evidences
    )


def _once(paths: Iterable[Path]) -> Iterable[tuple[Path, bool]]:
    """Returns (file, whether it was named itself); each file once, also where a link or its folder names it again."""
    seen = set()
    for path in paths:
        is_named = not is_folder(path)
        for file in [path] if is_named else files_in(path, ".json"):
            place = os.path.realpath(file)
            if place not in seen:
                seen.add(place)
                yield file, is_named
