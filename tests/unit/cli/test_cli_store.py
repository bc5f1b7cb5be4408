"""The commands on a store, through the real command line: what they print, where, and how they end."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.cli.main import main
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import index_key
from cachepipe.domain.lock import read_lock
from cachepipe.workflows.publish import publish
from tests.support.artifacts import make_artifact

Output = pytest.CaptureFixture[str]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def rows(tmp_path: Path, url: str) -> list[IndexRow]:
    """Two artifacts of the release demo, the second of which is current in the channel candidate."""
    now = datetime.now(timezone.utc)
    store = LocalStore(tmp_path / "store")
    return [publish(store, "demo", "candidate", make_artifact(tmp_path, number), now) for number in (1, 2)]


def document(capsys: Output, *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ls_shows_channels_versions_and_targets(url: str, rows: list[IndexRow], capsys: Output) -> None:
    assert main(["ls", url]) == 0
    out = capsys.readouterr().out
    assert "demo@candidate:2" in out
    assert rows[1].artifact in out
    (channel,) = document(capsys, "ls", url)["channels"]
    assert (channel["name"], channel["channel"], channel["version"]) == ("demo", "candidate", 2)


@pytest.mark.parametrize(
    ("odd", "code"),
    [(b"{}", 13), (b"", 13), (b"\xff\x00", 13), (None, 13), (b"a" * 2_000_000, 13)],
    ids=["empty object", "empty", "bytes", "fifo", "too long"],
)
def test_ls_shows_the_others_beside_an_index_that_is_none(
    url: str, rows: list[IndexRow], capsys: Output, tmp_path: Path, odd: bytes | None, code: int
) -> None:
    for name in ("aaa", "zzz"):
        place = tmp_path / "store" / index_key(name, "stable", 1)
        place.parent.mkdir(parents=True)
        os.mkfifo(place) if odd is None else place.write_bytes(odd)
    foreign = tmp_path / "store" / "v1/index/-x/.hidden"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"")
    assert main(["ls", url]) == code
    out, err = capsys.readouterr()
    assert "demo@candidate:2" in out and "aaa@stable  cannot be read" in out and "zzz@stable  cannot be read" in out
    assert "2 of 3 channels" in err
    assert main(["ls", url, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["channels"]] == ["demo"]
    assert [one["name"] for one in document["unreadable"]] == ["aaa", "zzz"]
    assert main(["ls", url, "--name", "demo"]) == 0, "what is not asked for does not count"


def test_the_store_may_come_from_the_environment(
    url: str, rows: list[IndexRow], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEPIPE_STORE", url)
    assert document(capsys, "ls")["channels"]
    assert document(capsys, "show", "demo@candidate")["artifacts"][0]["artifact"] == rows[1].artifact
    assert document(capsys, "diff", "demo@candidate:1", "demo@candidate:2")["right"]["artifact"] == rows[1].artifact
    assert document(capsys, "promote", "--name", "demo")["channel"] == "stable"


@pytest.mark.parametrize("by", ["channel", "version", "artifact", "digest"])
def test_show_takes_every_kind_of_ref(url: str, rows: list[IndexRow], capsys: Output, by: str) -> None:
    ref = {
        "channel": "demo@candidate",
        "version": "demo@candidate:2",
        "artifact": rows[1].artifact,
        "digest": rows[1].statement[:12],
    }[by]
    (artifact,) = document(capsys, "show", url, ref)["artifacts"]
    assert artifact["statement"] == rows[1].statement
    assert artifact["status"] == "development key"


def test_show_names_what_is_missing(url: str, rows: list[IndexRow], capsys: Output) -> None:
    assert main(["show", url, "demo@stable"]) == 12
    assert "demo@stable" in capsys.readouterr().err
    assert main(["show", url]) == 2
    assert "1 REF wanted, 0 given" in capsys.readouterr().err


def test_promote_rollback_and_lock_are_one_line_of_data(
    url: str, rows: list[IndexRow], capsys: Output, tmp_path: Path
) -> None:
    assert main(["promote", url, "--name", "demo", rows[0].artifact]) == 0
    assert capsys.readouterr().out == "demo@stable:1\n"
    assert main(["promote", url, "--name", "demo", "--from", "candidate", "--to", "stable"]) == 0
    assert capsys.readouterr().out == "demo@stable:2\n"
    assert main(["rollback", url, "--name", "demo"]) == 0
    assert capsys.readouterr().out == "demo@stable:3\n"
    assert document(capsys, "show", url, "demo@stable")["artifacts"][0]["artifact"] == rows[0].artifact
    lock_file = tmp_path / "cachepipe.lock"
    assert main(["lock", url, "--name", "demo", "--output", str(lock_file)]) == 0
    assert capsys.readouterr().out == f"{lock_file}\n"
    lock = read_lock(lock_file.read_bytes())
    assert (lock.version, [row.artifact for row in lock.rows]) == (3, [rows[0].artifact])


def test_a_lock_file_is_overwritten_whole(url: str, rows: list[IndexRow], capsys: Output, tmp_path: Path) -> None:
    lock_file = tmp_path / "cachepipe.lock"
    for version in ("1", "2"):
        promoted = main(["promote", url, "--name", "demo", f"demo@candidate:{version}"])
        assert promoted == 0
        assert main(["lock", url, "--name", "demo", "--output", str(lock_file)]) == 0
    assert read_lock(lock_file.read_bytes()).version == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_rollback_beyond_the_first_version_says_so(url: str, rows: list[IndexRow], capsys: Output) -> None:
    assert main(["promote", url, "--name", "demo"]) == 0
    assert main(["rollback", url, "--name", "demo"]) == 12
    assert "no earlier version" in capsys.readouterr().err


def test_no_color_and_a_pipe_give_plain_text(
    url: str, rows: list[IndexRow], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    manifest = Path(__file__).parents[3] / "manifests" / "quickstart.yaml"
    for words in (["ls", url], ["show", url, "demo@candidate"], ["plan", str(manifest), "--store", url]):
        assert main(words) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_plan_says_what_the_store_holds_and_where_it_would_build(capsys: Output, tmp_path: Path) -> None:
    manifest = Path(__file__).parents[3] / "manifests" / "transformers.yaml"
    words = ["plan", str(manifest), "--store", f"file://{tmp_path}/none", "--cache-root", str(tmp_path)]
    targets = document(capsys, *words)["targets"]
    assert [target["device"] for target in targets] == ["cpu", "cuda"]
    assert targets[0]["root"] == f"{tmp_path}/transformers"
    assert targets[0]["is_buildable"]
    entries = targets[0]["entries"]
    assert len({entry["key"] for entry in entries}) == len(entries)
    assert all(entry["held_by"] is None for entry in entries)


def test_a_relative_cache_root_is_made_absolute_and_the_root_folder_is_refused(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Path(__file__).parents[3] / "manifests" / "quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    (target,) = document(capsys, "plan", str(manifest), "--cache-root", "cache")["targets"]
    assert target["root"] == f"{tmp_path}/cache/quickstart"
    assert main(["plan", str(manifest), "--cache-root", "/"]) == 2


def test_verify_and_build_refuse_another_kind_of_store_by_name(capsys: Output) -> None:
    manifest = Path(__file__).parents[3] / "manifests" / "quickstart.yaml"
    for verb in ("plan", "build", "verify"):
        assert main([verb, str(manifest), "--store", "gs://ml-cache/prod"]) == 15
        assert "file:///" in capsys.readouterr().err
