"""Every path that a command is given, and every object of a folder store, may be something else than it should be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from cachepipe.cli.main import main
from cachepipe.domain.layout import FORMAT_KEY, hint_key, index_key, pack_key, statement_key
from tests.support.release import MANIFEST
from tests.support.restoring import Published, publish_release, run_restore

LIMIT_S = 20
Output = pytest.CaptureFixture[str]


class Hung(BaseException):
    """No Exception, so that no boundary takes it for a failure of the command."""


@contextmanager
def limited() -> Iterator[None]:
    def hung(_number: int, _frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the address has 108 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "socket": a_socket,
    "terabyte": a_sparse_file,
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
}


def put(kind: str, path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    ODD[kind](path)
    return path


def ends_well(capsys: Output, *words: str) -> int:
    """Returns the exit code of a command that ended in time, with words of its own if it failed."""
    with limited():
        code = main(list(words))
    out, err = capsys.readouterr()
    told = f"{words}: {code}\n{out}\n{err}"
    assert code != 1 and "Traceback" not in err and "bug in cachepipe" not in err, told
    assert code == 0 or "error: " in err or "fail" in out or "cannot be read" in out, told
    return code


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish_release(tmp_path_factory.mktemp("published"))


@pytest.fixture
def copied(published: Published, tmp_path: Path) -> Path:
    """A store of its own, with the release `demo`."""
    return Path(shutil.copytree(published.store.root, tmp_path / "store"))


def objects(published: Published) -> dict[str, str]:
    artifact = published.row.artifact
    return {
        "format": FORMAT_KEY,
        "hint": hint_key("demo", "stable"),
        "index": index_key("demo", "stable", 1),
        "statement": statement_key(artifact),
        "table": pack_key(artifact, published.statement.table.digest),
        "pack": pack_key(artifact, published.statement.packs[0].digest),
        "development key": ".keys/dev.key",
        "list of development keys": ".keys",
    }


@pytest.mark.parametrize("kind", ODD)
def test_an_object_that_is_no_file_holds_no_command_and_eats_no_memory(
    published: Published, copied: Path, capsys: Output, kind: str, tmp_path: Path
) -> None:
    url = f"file://{copied}"
    for number, (what, key) in enumerate(objects(published).items()):
        saved = tmp_path / f"saved{number}"
        os.rename(copied / key, saved)
        put(kind, copied / key)
        codes = [
            ends_well(capsys, "ls", url),
            ends_well(capsys, "show", url, "demo@stable"),
            ends_well(capsys, "fsck", url, "--deep"),
            ends_well(capsys, "gc", url),
            ends_well(capsys, "doctor", url, "--name", "demo", "--cache-root", str(tmp_path)),
            ends_well(capsys, "copy", url, f"file://{tmp_path}/copy{number}"),
            ends_well(capsys, "promote", url, "--name", "demo", "--from", "stable", "--to", f"c{number}"),
        ]
        if what in ("index", "format"):
            assert any(codes), f"{what} as {kind}: {codes}"
        put("folder", copied / key).rmdir()
        os.rename(saved, copied / key)


@pytest.mark.parametrize("what", ["hint", "index", "statement", "table", "pack"])
def test_a_start_from_a_store_of_pipes_is_cold_in_time(
    published: Published, copied: Path, tmp_path: Path, what: str
) -> None:
    put("fifo", copied / objects(published)[what])
    (tmp_path / "cache").mkdir(mode=0o700)
    words = ("--name", "demo", "--dest", str(tmp_path / "cache" / "demo"), "--deadline", "8", "--", "true")
    ran = run_restore(tmp_path, f"file://{copied}", *words)
    assert ran.code == 0
    assert ran.line["outcome"] == ("restored" if what == "hint" else "cold"), ran.err
    assert what == "hint" or "not a regular file" in ran.line["reason"]


def file_options(base: Path, odd: str, url: str) -> dict[str, list[str]]:
    """Command lines that read the file `odd`."""
    sources = base / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    sources.mkdir()
    (sources / "model.py").write_text("def net():\n    return None\n")
    (sources / "data.txt").symlink_to(odd)
    text = "version: 1\nname: demo\ncache_root: /var/cache/x\npython_path: [.]\ntargets: [{device: cpu}]\nmodels:\n"
    row = "  - {name: net, factory: 'model:net', sources: ['*.txt'], dtypes: [float32], modes: [default], inputs: "
    (sources / "m.yaml").write_text(f"{text}{row}{{x: {{shape: [b], dtype: float32}}}}, shape_buckets: [{{b: 1}}]}}\n")
    return {
        "plan's manifest": ["plan", odd],
        "build's manifest": ["build", odd],
        "verify's manifest": ["verify", odd],
        "a source file": ["plan", str(sources / "m.yaml")],
        "gc's lock": ["gc", url, "--keep-lock", odd],
        "copy's lock": ["copy", url, f"file://{base}/copy", "--lock", odd],
        "verify's lock": ["verify", str(MANIFEST), "--store", url, "--lock", odd],
        "trust policy": ["ls", url, "--trust", odd],
        "index key": ["renew", url, "--name", "demo", "--index-key", f"file:{odd}"],
        "keygen's key": ["keygen", "--role", "index", "--key", odd, "--policy", str(base / "policy.json")],
        "keygen's policy": ["keygen", "--role", "index", "--key", str(base / "new.key"), "--policy", odd],
        "lock's output": ["lock", url, "--name", "demo", "--output", odd],
    }


@pytest.mark.parametrize("kind", ODD)
def test_a_file_of_the_command_line_that_is_none_is_refused_in_time(
    published: Published, tmp_path: Path, capsys: Output, kind: str
) -> None:
    odd = put(kind, tmp_path / "odd")
    for what, words in file_options(tmp_path, str(odd), published.store.url).items():
        code = ends_well(capsys, *words)
        is_replaceable = kind in ("terabyte", "loop") and what == "lock's output"
        assert code or is_replaceable, f"{what} as {kind} was taken for good"


PATHS: dict[str, str] = {
    "a file": "{base}/file",
    "below a file": "{base}/file/below",
    "below a device": "/dev/null/below",
    "a device": "/dev/null",
    "a name too long": "{base}/" + "n" * 300,
    "a path too long": "{base}" + "/deep" * 1000,
    "a loop of links": "{base}/loop",
    "a link to nothing": "{base}/dangling",
    "where nobody can write": "/proc/sys/none",
    "no UTF-8": "{base}/\udcff\udcfe",
    "a control character": "{base}/\x1b[2J\n",
    "empty": "",
    "not absolute": "relative",
    "the root of processes": "/proc/self/fd",
}


@pytest.mark.parametrize("field", ["cache_root", "store", "python_path", "sources", "factory"])
@pytest.mark.parametrize("odd", ["/x\0y", "/x" + "/deep" * 1000, "/dev/null/x", "/x\ud800", "\x1b[2J"], ids=ascii)
def test_an_odd_path_in_a_manifest_is_an_error_in_words(tmp_path: Path, capsys: Output, field: str, odd: str) -> None:
    (tmp_path / "model.py").write_text("def net():\n    return None\n")
    model: dict[str, object] = {"name": "net", "factory": "model:net", "sources": [], "dtypes": ["float32"]}
    model |= {"modes": ["default"], "inputs": {"x": {"shape": ["b"], "dtype": "float32"}}, "shape_buckets": [{"b": 1}]}
    tree: dict[str, object] = {"version": 1, "name": "demo", "cache_root": str(tmp_path), "python_path": ["."]}
    tree |= {"targets": [{"device": "cpu"}], "models": [model]}
    place = model if field in ("sources", "factory") else tree
    place[field] = [odd] if field in ("sources", "python_path") else f"{odd}:net" if field == "factory" else odd
    (tmp_path / "m.yaml").write_text(json.dumps(tree))
    assert ends_well(capsys, "plan", str(tmp_path / "m.yaml")) or field != "factory", "plan looks at no cache root"
    ends_well(capsys, "verify", str(tmp_path / "m.yaml"), "--work", str(tmp_path / "work"))


STORE_LINES: list[list[str]] = [
    ["ls", "{}"],
    ["show", "{}", "demo@stable"],
    ["diff", "{}", "demo@stable:1", "demo@stable:2"],
    ["plan", str(MANIFEST), "--store", "{}"],
    ["verify", str(MANIFEST), "--store", "{}"],
    ["doctor", "{}"],
    ["gc", "{}"],
    ["fsck", "{}"],
    ["lock", "{}", "--name", "demo"],
    ["promote", "{}", "--name", "demo"],
    ["rollback", "{}", "--name", "demo"],
    ["revoke", "{}", "--name", "demo", "demo@stable"],
    ["renew", "{}", "--name", "demo"],
    ["copy", "{}", "{base}/target"],
    ["copy", "{url}", "{}"],
]
OTHER_LINES: list[list[str]] = [
    ["plan", "{}"],
    ["build", "{}"],
    ["verify", "{}"],
    ["plan", str(MANIFEST), "--cache-root", "{}"],
    ["verify", str(MANIFEST), "--store", "{url}", "--work", "{}"],
    ["verify", str(MANIFEST), "--store", "{url}", "--cache-root", "{}"],
    ["doctor", "--cache-root", "{}"],
    ["doctor", "--state-dir", "{}"],
    ["ls", "{url}", "--trust", "{}"],
    ["gc", "{url}", "--keep-lock", "{}"],
    ["copy", "{url}", "{base}/target", "--lock", "{}"],
    ["lock", "{url}", "--name", "demo", "--output", "{}"],
    ["renew", "{url}", "--name", "demo", "--index-key", "file:{}"],
    ["keygen", "--role", "index", "--key", "{}", "--policy", "{base}/p.json"],
    ["keygen", "--role", "index", "--key", "{base}/k.key", "--policy", "{}"],
    ["keygen", "--retire", "0123456789", "--policy", "{}"],
]


@pytest.mark.parametrize("case", PATHS)
def test_an_odd_path_is_an_answer_or_an_error_in_words_for_every_command(
    published: Published, tmp_path: Path, capsys: Output, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    path = PATHS[case].replace("{base}", str(tmp_path))
    for form in ("{}", "file://{}"):
        for line in STORE_LINES if form != "{}" else [*STORE_LINES, *OTHER_LINES]:
            words = [
                word.replace("{url}", published.store.url)
                .replace("{base}", str(tmp_path))
                .replace("{}", form.replace("{}", path))
                for word in line
            ]
            ends_well(capsys, *words)
