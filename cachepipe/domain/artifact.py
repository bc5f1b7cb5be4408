"""The file table of an artifact: which files, at which paths, cut from which packs.

A pack is one zstd frame of at most 8 MiB raw; its name is the SHA-256 of its compressed bytes. Files are sorted by
(extension, base name), laid one after another, larger ones cut into segments. The table is a zstd object itself,
covered by the statement. Its raw form is canonical JSON:

    {"files":[["inductor/ab/cab.py",420,12,"<sha256>",[[0,0,12]],[0],false],…],"format":1,"root":"/var/cache/cachepipe/demo"}

A row is path, mode (0644 or 0755), size in bytes, SHA-256, segments (pack number, offset, length: all in the raw
pack), numbers of the statement's entries that it serves, and whether its text holds `ROOT_TOKEN` in the place of the
folder where the artifact lies (Triton's group files): then size and digest are those of the text with the token.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import Json, canonical_bytes, is_digest, parse_json
from cachepipe.errors import IntegrityError

FORMAT = 1
MODES = (0o644, 0o755)
ROOT_TOKEN = "@CACHEPIPE_ROOT@"

_NAME = r"[A-Za-z0-9._+=-]{1,255}"  # longer names no file system takes
_PART = re.compile(_NAME, re.ASCII)
_SAFE = re.compile(rf"(?!\.\.?(?:/|$)){_NAME}(?:/(?!\.\.?(?:/|$)){_NAME})*", re.ASCII)
"""All of a path at once, for tables of thousands; what it does not take is looked at part by part."""


@dataclass(frozen=True)
class Blob:
    """A zstd object of an artifact under `packs/`: one frame."""

    digest: str
    """SHA-256 of the compressed bytes; also the object's name."""
    size_bytes: int
    """Compressed."""
    raw_bytes: int


class Segment(NamedTuple):
    pack: int
    offset: int
    length: int


class FileRow(NamedTuple):
    path: str
    mode: int
    size_bytes: int
    sha256: str
    segments: tuple[Segment, ...]
    entries: tuple[int, ...]
    has_root_token: bool


@dataclass(frozen=True)
class FileTable:
    """All files of an artifact."""

    root: str
    """The folder at which the builder compiled; another folder means relocation."""
    files: tuple[FileRow, ...]

    @property
    def unpacked_bytes(self) -> int:
        return sum(row.size_bytes for row in self.files)


def check_path(path: str, limits: Limits = LIMITS) -> None:
    """Refuses every path that could leave the target or mean two things.

    Raises:
        IntegrityError: absolute, empty part, `.`, `..`, a character outside `A-Za-z0-9._+=-`, too long, too deep.
    """
    if len(path) <= limits.path_bytes and path.count("/") < limits.path_parts and _SAFE.fullmatch(path) is not None:
        return
    if len(path.encode()) > limits.path_bytes:
        raise IntegrityError("file table", "path too long", wanted=f"<= {limits.path_bytes} bytes", found=len(path))
    parts = path.split("/")
    if len(parts) > limits.path_parts:
        raise IntegrityError("file table", "path too deep", wanted=f"<= {limits.path_parts} parts", found=len(parts))
    for part in parts:
        if part in ("", ".", "..") or _PART.fullmatch(part) is None:
            raise IntegrityError("file table", f"unsafe path {path!r}")


def table_bytes(table: FileTable) -> bytes:
    """Returns the canonical raw bytes of a table; equal tables have equal bytes."""
    return canonical_bytes({"files": table.files, "format": FORMAT, "root": table.root})


def read_table(data: bytes, packs: tuple[Blob, ...], entries: int, limits: Limits = LIMITS) -> FileTable:
    """Returns the table in `data`, after checking that it fits its packs exactly.

    Args:
        data: raw bytes, already covered by the statement's digest.
        packs: the statement's packs, in its order.
        entries: how many entries the statement has.
        limits: sizes and counts that are refused beyond.

    Raises:
        IntegrityError: any field of a wrong type or range, an unsafe or repeated path, a file that is a prefix of
            another, segments that overlap, leave a gap, or do not add up to a file's or a pack's size.
    """
    tree = parse_json(data, "file table", limits.table_raw_bytes)
    if not isinstance(tree, dict) or set(tree) != {"files", "format", "root"}:
        raise IntegrityError("file table", "not an object with files, format and root")
    if tree["format"] != FORMAT:
        raise IntegrityError("file table", "unknown format", wanted=FORMAT, found=tree["format"])
    rows, root = tree["files"], tree["root"]
    if not isinstance(rows, list) or not isinstance(root, str) or not root.startswith("/"):
        raise IntegrityError("file table", "files or root of a wrong type")
    if len(rows) > limits.files:
        raise IntegrityError("file table", "too many files", wanted=f"<= {limits.files}", found=len(rows))
    table = FileTable(root, tuple(_read_row(row, len(packs), entries, limits) for row in rows))
    _check_names(table)
    _check_segments(table, packs)
    if table.unpacked_bytes > limits.unpacked_bytes:
        raise IntegrityError(
            "file table", "too large unpacked", wanted=f"<= {limits.unpacked_bytes} bytes", found=table.unpacked_bytes
        )
    return table


def _is_count(value: Json, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def _read_row(row: Json, packs: int, entries: int, limits: Limits) -> FileRow:
    if not isinstance(row, list) or len(row) != 7 or not isinstance(row[0], str):
        raise IntegrityError("file table", "a row does not have its seven fields")
    path, mode, size, digest, segments, serves, has_token = row
    check_path(path, limits)
    if type(mode) is not int or mode not in MODES:
        raise IntegrityError("file table", f"mode of {path}", wanted="0644 or 0755", found=mode)
    if not _is_count(size, limits.file_bytes):
        raise IntegrityError("file table", f"size of {path}", wanted=f"0..{limits.file_bytes}", found=size)
    if not isinstance(digest, str) or not is_digest(digest):
        raise IntegrityError("file table", f"digest of {path} is not SHA-256")
    if type(has_token) is not bool:
        raise IntegrityError("file table", f"token flag of {path} is not true or false")
    if not isinstance(serves, list) or not all(_is_count(number, entries - 1) for number in serves):
        raise IntegrityError("file table", f"entries of {path} are not in the statement")
    if not isinstance(segments, list) or len(segments) > limits.segments:
        raise IntegrityError("file table", f"segments of {path} are not a list, or more than {limits.segments}")
    cut = tuple(_read_segment(segment, path, packs, limits) for segment in segments)
    found = sum(segment.length for segment in cut)
    if found != size:
        raise IntegrityError("file table", f"segments of {path} do not add up", wanted=size, found=found)
    return FileRow(path, mode, size, digest, cut, tuple(serves), has_token)


def _read_segment(segment: Json, path: str, packs: int, limits: Limits) -> Segment:
    if isinstance(segment, list) and len(segment) == 3:
        pack, offset, length = segment
        are_counts = type(pack) is type(offset) is type(length) is int
        cap = limits.pack_raw_bytes
        if are_counts and 0 <= pack < packs and 0 <= offset <= cap and 0 < length <= cap:
            return Segment(pack, offset, length)
    raise IntegrityError("file table", f"a segment of {path} is not within a pack")


def _check_names(table: FileTable) -> None:
    paths = [row.path for row in table.files]
    names = set(paths)
    if len(names) != len(paths):
        twice = min(path for path, count in Counter(paths).items() if count > 1)
        raise IntegrityError("file table", f"path {twice} is given twice")
    seen = {""}
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent not in seen:
            if parent in names:
                raise IntegrityError("file table", f"{parent} is a file and a folder")
            seen.add(parent)
            parent = parent.rpartition("/")[0]


def _check_segments(table: FileTable, packs: tuple[Blob, ...]) -> None:
    used: list[list[Segment]] = [[] for _ in packs]
    for row in table.files:
        for segment in row.segments:
            used[segment.pack].append(segment)
    for number, segments in enumerate(used):
        position = 0
        for segment in sorted(segments):
            if segment.offset != position:
                raise IntegrityError(f"pack {number}", "gap or overlap", wanted=position, found=segment.offset)
            position += segment.length
        if position != packs[number].raw_bytes:
            raise IntegrityError(f"pack {number}", "raw size", wanted=packs[number].raw_bytes, found=position)
