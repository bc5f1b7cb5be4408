"""What every command prints, where stdout, locale and terminal are odd, and where what it quotes is hostile."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.cli import output
from cachepipe.cli.main import VERBS
from cachepipe.domain.fingerprint import Part
from cachepipe.domain.printable import printable, printable_json
from tests.support.artifacts import entry_record, entry_spec
from tests.support.odd_streams import Ran, run_lines
from tests.support.release import MANIFEST, REPOSITORY, cachepipe_argv, clean_environment
from tests.support.restoring import publish_release

HOSTILE = "é\x1b[2J\x9b31m\u202e\x00\r\n\u2028\x7f→\U000e0041"
"""Clears a screen, colours it, turns the direction of writing, begins lines, and is not ASCII."""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = {
    "C": {**C_LOCALE, "PYTHONIOENCODING": "ascii:strict"},
    "ascii streams": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """A command line of each verb, in text and in JSON, on a store and a manifest whose texts are hostile."""
    base = tmp_path_factory.mktemp("hostile")
    first = publish_release(base)
    parts = tuple(replace(part, value=part.value + HOSTILE) for part in first.statement.fingerprint)
    second = publish_release(base, number=1, fingerprint=parts)
    odd = entry_record(entry_spec("nét" + HOSTILE))
    third = publish_release(base, number=2, entries=(odd,), builder={"host": HOSTILE}, gates={HOSTILE: 1.0})
    publish_release(base, "foreign", number=3, fingerprint=(Part("device", "cpu"), Part("torch", HOSTILE)))
    publish_release(base, "revoked", number=4)
    Path(base, "store", "v1", "index", "foreign", "é\x1b[2J").write_text("x")
    manifest = base / "manifest.yaml"
    manifest.write_text(
        MANIFEST.read_text().replace("/var/cache/cachepipe", str(base / "root"))
        + '\nbad\x85key: "\\e[2J\\u202e"\n'.replace("\x85", "\\N")
    )
    url = first.store.url
    words = [
        ["ls", url],
        ["show", url, "demo@stable"],
        ["show", url, "demo@stable:2"],
        ["diff", url, first.row.artifact, second.row.artifact],
        ["diff", url, first.row.artifact, third.row.artifact],
        ["plan", str(manifest)],
        ["plan", str(MANIFEST), "--cache-root", str(base / f"root{HOSTILE.replace(chr(0), '')}")],
        ["build", str(manifest)],
        ["verify", str(manifest)],
        ["doctor", url, "--cache-root", str(base)],
        ["doctor", url, "--name", "demo", "--name", "foreign", "--cache-root", str(base)],
        ["gc", url],
        ["fsck", url],
        ["lock", url, "--name", "demo", "--output", str(base / "lé.lock")],
        ["promote", url, "--name", "demo", "--from", "stable", "--to", "canary"],
        ["renew", url, "--name", "demo"],
        ["rollback", url, "--name", "demo", "--to-version", "1"],
        ["revoke", url, "--name", "revoked", "revoked@stable"],
        ["copy", url, f"file://{base}/copy", "demo@stable"],
        ["keygen", "--key", str(base / "é.key"), "--role", "index", "--policy", str(base / "policy.json")],
        ["report", str(base / "none\x1b[2Jé.json")],
        ["explain", str(base / "none\x1b[2Jé.json")],
    ]
    plain = [["--help"], ["--version"], ["completion", "bash"], ["restore", "--help"], ["ls", "-h"]]
    in_json = [
        [*line, "--json"] for line in words if line[0] in ("ls", "show", "diff", "plan", "doctor", "fsck", "report")
    ]
    return [*words, *in_json, *plain]


def test_every_verb_is_among_the_lines(lines: list[list[str]]) -> None:
    assert {line[0] for line in lines} >= set(VERBS)


def shown(line: list[str], ran: Ran) -> str:
    return f"{line}: {ran.code}\n{ran.out!r}\n{ran.err}"


@pytest.mark.parametrize(("sink", "code"), [("full", 20), ("pipe", 141), ("closed", 2)])
def test_an_answer_that_cannot_be_printed_is_one_error_and_never_a_success(
    lines: list[list[str]], sink: str, code: int
) -> None:
    asked = [line for line in lines if sink != "closed" or line[0] in ("ls", "promote", "--help")]
    for line, ran in zip(asked, run_lines(asked, sink), strict=True):
        said = [text for text in ran.err.splitlines() if text.startswith(("error:", "hint:"))]
        assert "Traceback" not in ran.err and "bug" not in ran.err and "Exception ignored" not in ran.err, shown(
            line, ran
        )
        assert ran.code == code or (ran.code not in (0, 1, 120) and sink != "closed"), shown(line, ran)
        if ran.code != 141:
            assert len(said) >= 2 and said[-1].startswith("hint:"), shown(line, ran)
        if ran.code == 141:
            assert not said, shown(line, ran)


@pytest.mark.parametrize("sink", ["2>/dev/full", "2>&-", "2> >(exec true)"])
def test_talk_that_nobody_takes_changes_neither_answer_nor_exit_code(tmp_path: Path, sink: str) -> None:
    """Also that of rich: a progress line that fails must not end a build."""
    code = (
        "import sys; from cachepipe import streams; streams.occupy();"
        "from cachepipe.cli.stdout import guard; guard();"
        "from cachepipe.adapters.progress import open_progress; from cachepipe.cli.main import main;"
        "open_progress(sys.stderr).say('x' * 9999); sys.exit(main(['show', sys.argv[1], 'demo@stable', '--json']))"
    )
    words = shlex.join([sys.executable, "-c", code, f"file://{tmp_path}"])
    done = subprocess.run(
        ["bash", "-c", f"{words} {sink}; echo code $?"],
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("code 12\n") and json.loads(done.stdout.removesuffix("code 12\n"))["error"]


@pytest.mark.parametrize("name", LOCALES)
def test_no_locale_keeps_a_command_from_answering(lines: list[list[str]], name: str) -> None:
    for line, ran in zip(lines, run_lines(lines, "file", LOCALES[name]), strict=True):
        assert "Traceback" not in ran.err and "bug" not in ran.err and "Unicode" not in ran.err, shown(line, ran)
        assert ran.code not in (1, 120), shown(line, ran)
        is_help = line[-1] in ("-h", "--help")  # printed by click, which writes UTF-8 where ASCII is asked for
        text = ran.out.decode("latin-1" if name == "latin-1" else "utf-8" if is_help else "ascii")
        if "--json" in line and text:
            json.loads(text)


def test_nothing_that_a_terminal_obeys_is_printed_and_json_keeps_its_meaning(lines: list[list[str]]) -> None:
    texts, hostile = set(), set()
    for line, ran in zip(lines, run_lines(lines, "file"), strict=True):
        for text in (ran.out.decode(), ran.err):
            left = {char for char in text if not char.isprintable() and char != "\n"}
            assert not left or line[-2:-1] == ["completion"], f"{left!r} in {shown(line, ran)}"
        if "--json" in line and ran.out:
            texts.add(json.dumps(json.loads(ran.out)))
        hostile |= {line[0] for mark in (b"\\x1b[2J", b"\\u001b[2J") if mark in ran.out + ran.err.encode()}
    assert hostile >= {"ls", "show", "diff", "doctor", "fsck", "report", "explain"}, (
        "shown, not left out; plan refuses such paths"
    )
    assert any(json.dumps(HOSTILE)[1:-1] in text for text in texts), "the value itself, in a reader's hands"


@pytest.mark.parametrize(
    "char", ["\x00", "\x1b", "\x7f", "\x9b", "\n", "\r", "\t", "\u202e", "\u2066", "\u200b", "\udcff", "\U000e0041"]
)
def test_printable_leaves_no_control_and_json_the_same_value(char: str) -> None:
    assert printable(f"a{char}é") == f"a{ascii(char)[1:-1]}é"
    document = {"k": [f"a{char}é→"]}
    for is_ascii in (False, True):
        safe = printable_json(document, is_ascii)
        assert all(one.isprintable() or one == "\n" for one in safe) and json.loads(safe) == document
        assert safe.isascii() == is_ascii


def on_terminal(columns: int, *words: str) -> str:
    """Returns what a command prints on a terminal of that many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**clean_environment(NO_COLOR="1", TERM="xterm"), "COLUMNS": ""}
    with subprocess.Popen(
        cachepipe_argv(*words), env=env, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                piece = b""  # EIO: the last writer is gone
            if not piece:
                break
            pieces.append(piece)
    os.close(ours)
    assert process.returncode in (0, 18)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def test_forty_columns_are_enough_to_read_ls_show_plan_and_doctor(tmp_path: Path) -> None:
    published = publish_release(tmp_path, "encoder")
    cases: list[tuple[list[str], list[str]]] = [
        (["ls", published.store.url], ["encoder@stable:1", published.row.artifact]),
        (["show", published.store.url, "encoder@stable"], ["restored", "0.50", published.row.statement]),
        (["plan", str(MANIFEST), "--cache-root", str(tmp_path)], ["shape bucket:", "key:"]),
        (["doctor", published.store.url, "--cache-root", str(tmp_path)], ["verdict: ok", "fits this machine"]),
    ]
    for words, wanted in cases:
        text = on_terminal(40, *words)
        for part in wanted:
            assert part in " ".join(text.split()), f"{part!r} in {text}"
        for line in text.splitlines():
            assert len(line) <= 40 or " " not in line.strip(), f"{line!r} is broken by the terminal in {text}"


def test_a_wide_table_stays_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[Any, ...]] = [("a", 1.5, None), ("bb", 22.25, "x")]
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    for width in (None, 40, 200):
        monkeypatch.setattr(output, "terminal_width", lambda width=width: width)
        output.print_table("title", ("name", ">seconds", "why"), rows)
        assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
            ["title"],
            ["name", "seconds", "why"],
            ["a", "1.50", "–"],
            ["bb", "22.25", "x"],
        ]
