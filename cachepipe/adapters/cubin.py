"""What of a Triton kernel's files runs: the rest names source files and lines.

Triton's key holds a kernel's source, not where it lies; its files hold both. So two graphs with the same kernel in two generated files
leave different bytes under one key, whichever is compiled first.

Source: triton/compiler/compiler.py (`ASTSource.hash`, `compile`), third_party/nvidia/backend/compiler.py (`-lineinfo`), triton 3.6.0;
section headers: the ELF-64 object file format, which cubins follow.
"""

from __future__ import annotations

import struct

from cachepipe.domain.record import digest_parts, sha256

_HEADER = struct.Struct("<4s B 27x QQ I 2x HHHHH")
"""Magic, class; offsets of the segment and the section headers; flags (the architecture); size and number of the former, of the latter;
the section that holds the names.
"""
_SECTION = struct.Struct("<II QQQQ II QQ")
"""Name, type, flags, address, offset, size, link, info, alignment, size of an entry."""
_MAGIC = b"\x7fELF"
_NO_BITS = 8
_ABOUT_SOURCES = (".debug_", ".nv_debug_", ".rela.debug_", ".rela.nv_debug_", ".rel.debug_", ".rel.nv_debug_")

HOST_MODULE = ".so"
"""Launchers and `cuda_utils`: their folder is named by their source alone, and `__FILE__` is the path of a temporary copy of it.

Source: triton/runtime/build.py (`compile_module_from_src`), triton/backends/nvidia/driver.c (`CUDA_CHECK`), triton 3.6.0.
"""
TEXTS = (".ttir", ".ttgir", ".llir", ".ptx", ".source")
"""Files of a kernel that Triton reads and never runs once there is a cubin."""


def running_digest(cubin: bytes) -> str | None:
    """Returns a digest of all sections but those about sources: code, constants, symbols, launch facts; None if this is no cubin."""
    try:
        magic, bits, segments, start, architecture, *sizes, size, number, naming = _HEADER.unpack_from(cubin)
        if magic != _MAGIC or bits != 2 or size < _SECTION.size or segments + sizes[0] * sizes[1] > len(cubin):
            return None
        headers = [_SECTION.unpack_from(cubin, start + index * size) for index in range(number)]
        names = _data(cubin, headers[naming])
        parts = {"architecture": str(architecture)}
        for index, header in enumerate(headers):
            name = names[header[0] : names.index(b"\0", header[0])].decode()
            if not name.startswith(_ABOUT_SOURCES):
                kind, flags, link, info = header[1], header[2], header[6], header[7]
                parts[f"{index} {name}"] = f"{kind} {flags} {link} {info} {sha256(_data(cubin, header))}"
    except (struct.error, ValueError, IndexError, OverflowError):
        return None
    return digest_parts(parts)


def is_object(data: bytes) -> bool:
    """Tells whether these bytes begin as a compiled object does."""
    return data.startswith(_MAGIC)


def _data(cubin: bytes, header: tuple[int, ...]) -> bytes:
    kind, offset, size = header[1], header[4], header[5]
    if kind == _NO_BITS:
        return str(size).encode()
    if offset + size > len(cubin):
        raise ValueError("a section ends behind the file")
    return cubin[offset : offset + size]
