"""Tables that a person reads on a terminal of any width: columns where they fit, else one line per field."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from cachepipe.cli.output import print_table
from tests.support.evidence_files import ENTRIES, write_release
from tests.support.release import cachepipe_argv, clean_environment


def on_terminal(columns: int, *words: str) -> str:
    """Returns what cachepipe prints on a terminal of that width."""
    reader, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = clean_environment(TERM="xterm", NO_COLOR="1", COLUMNS="")
    running = subprocess.Popen(cachepipe_argv(*words), stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    data = b""
    try:
        while chunk := os.read(reader, 1 << 16):
            data += chunk
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    assert running.wait() in (0, 18)
    return data.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_narrow_terminal_every_field_is_a_line_with_its_name(tmp_path: Path, columns: int) -> None:
    text = on_terminal(columns, "report", str(write_release(tmp_path)))
    lines, whole = [line.strip("- ") for line in text.splitlines()], " ".join(text.split())
    assert "shape bucket: batch=8,seq=512" in lines and f"entry: {ENTRIES[0]}" in whole
    assert "hits: aotautograd 1/1 · fxgraph 1/1 · triton 1/1" in whole and "restored s: 1.42" in lines
    assert "verdict: not warm" in lines


def test_where_columns_fit_they_stay(tmp_path: Path) -> None:
    text = on_terminal(220, "report", str(write_release(tmp_path)))
    assert any(ENTRIES[0] in line and "batch=8,seq=512" in line for line in text.splitlines())
    assert "shape bucket: " not in text


def test_a_small_table_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _self: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    print_table("sizes", ("kind", ">files"), [("triton", 96), ("tuning", 2)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [["sizes"], ["kind", "files"], ["triton", "96"], ["tuning", "2"]]


def test_a_table_without_rows_is_its_head_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("nothing", ("kind", ">files"), [])
    assert capsys.readouterr().out.split() == ["nothing", "kind", "files"]
