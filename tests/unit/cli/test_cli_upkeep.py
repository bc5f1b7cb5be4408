"""`gc`, `fsck`, `copy`, `revoke`, `renew` through the real command line: what they print, where, and how they end."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.cli.main import main
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import statement_key
from cachepipe.workflows.publish import publish
from tests.support.aging import age
from tests.support.artifacts import make_artifact

Output = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def rows(store: LocalStore, tmp_path: Path) -> list[IndexRow]:
    """Twelve releases, published 40 days ago: the first two are named by no version that counts."""
    now = datetime.now(timezone.utc)
    found = [publish(store, "demo", "candidate", make_artifact(tmp_path, number), now) for number in range(12)]
    age(store, "v1/", 40)
    return found


def document(capsys: Output, *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gc_says_what_it_would_remove_and_removes_with_delete(
    store: LocalStore, rows: list[IndexRow], capsys: Output
) -> None:
    assert main(["gc", store.url]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [
        *(["remove", row.artifact] for row in rows[:2]),
        *(["keep", row.artifact] for row in rows[2:]),
    ]
    assert "published 40 days ago, no index that counts names it" in out
    assert "2 of 12 artifacts" in err and "nothing was removed" in err
    assert store.get(statement_key(rows[0].artifact), 1 << 20) is not None
    done = document(capsys, "gc", store.url, "--delete")
    assert [found["artifact"] for found in done["decisions"] if found["is_removed"]] == [
        row.artifact for row in rows[:2]
    ]
    assert store.get(statement_key(rows[0].artifact), 1 << 20) is None
    assert main(["gc", store.url, "--delete"]) == 0
    assert "0 of 10 artifacts, 0 B removed" in capsys.readouterr().err


def test_gc_keeps_what_lock_files_name(
    store: LocalStore, rows: list[IndexRow], capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["rollback", store.url, "--name", "demo", "--channel", "candidate", "--to-version", "1"]) == 0
    locks = [str(tmp_path / name) for name in ("a.lock", "b.lock")]
    assert main(["lock", store.url, "--name", "demo", "--channel", "candidate", "--output", locks[0]]) == 0
    assert main(["rollback", store.url, "--name", "demo", "--channel", "candidate", "--to-version", "2"]) == 0
    assert main(["lock", store.url, "--name", "demo", "--channel", "candidate", "--output", locks[1]]) == 0
    for _ in range(11):
        assert main(["renew", store.url, "--name", "demo", "--channel", "candidate"]) == 0
    age(store, "v1/", 99)
    capsys.readouterr()
    words = ["gc", store.url, *(word for lock in locks for word in ("--keep-lock", lock))]
    kept = {found["artifact"] for found in document(capsys, *words)["decisions"] if not found["is_removed"]}
    assert kept == {rows[0].artifact, rows[1].artifact}
    kept = {found["artifact"] for found in document(capsys, "gc", store.url)["decisions"] if not found["is_removed"]}
    assert kept == {rows[1].artifact}


def test_gc_refuses_floors_below_the_promised_ones_and_locks_that_it_cannot_read(
    store: LocalStore, rows: list[IndexRow], capsys: Output, tmp_path: Path
) -> None:
    assert main(["gc", store.url, "--keep-days", "29"]) == 2
    assert main(["gc", store.url, "--keep-versions", "9"]) == 2
    broken = tmp_path / "broken.lock"
    broken.write_text("{}")
    assert main(["gc", store.url, "--delete", "--keep-lock", str(broken)]) == 13
    assert main(["gc", store.url, "--delete", "--keep-lock", str(tmp_path / "absent.lock")]) == 2
    assert store.get(statement_key(rows[0].artifact), 1 << 20) is not None
    capsys.readouterr()
    assert main(["gc", store.url, "--keep-days", "41"]) == 0
    assert "0 of 12 artifacts, 0 B: nothing to remove" in capsys.readouterr().err
    assert main(["gc", store.url, "--keep-versions", "11"]) == 0
    assert "1 of 12 artifacts" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["gc", "fsck"])
def test_a_store_that_is_not_there_is_a_miss(verb: str, tmp_path: Path, capsys: Output) -> None:
    assert main([verb, f"file://{tmp_path}/nothing"]) == 12
    assert "there is no store" in capsys.readouterr().err


def test_fsck_says_what_it_read_and_exits_with_13_for_a_problem(
    store: LocalStore, rows: list[IndexRow], capsys: Output
) -> None:
    assert main(["fsck", store.url, "--deep"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "1 channels with 12 versions, 12 artifacts, 48 objects" in err and "every byte read: 0 problems" in err
    store.delete(statement_key(rows[11].artifact))
    assert main(["fsck", store.url]) == 13
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith(f"problem  demo@candidate:12: is current and names {rows[11].artifact}")
    assert "hint: publish the releases again" in err
    assert main(["fsck", store.url, "--json"]) == 13
    found = json.loads(capsys.readouterr().out)
    assert found["error"]["exit_code"] == 13 and found["findings"][0]["is_problem"]


def test_copy_is_a_mirror_and_prints_what_arrived(
    store: LocalStore, rows: list[IndexRow], capsys: Output, tmp_path: Path
) -> None:
    target = f"file://{tmp_path}/target"
    assert main(["copy", store.url, target]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "demo@candidate:12" and rows[11].artifact in out.splitlines()[1]
    assert "12 versions" in err
    done = document(capsys, "copy", store.url, target, "demo@candidate", rows[0].artifact)
    assert [found["objects"] for found in done["artifacts"]] == [4, 0]
    assert main(["renew", target, "--name", "demo", "--channel", "candidate"]) == 0
    capsys.readouterr()
    assert main(["copy", store.url, target]) == 16
    assert "history of its own" in capsys.readouterr().err
    assert main(["copy", store.url]) == 2


def test_promoting_the_same_again_says_unchanged(store: LocalStore, rows: list[IndexRow], capsys: Output) -> None:
    assert main(["promote", store.url, "--name", "demo"]) == 0
    assert "unchanged" not in capsys.readouterr().err
    assert main(["promote", store.url, "--name", "demo"]) == 0
    out, err = capsys.readouterr()
    assert out == "demo@stable:1\n"
    assert "cachepipe renew" in err


def test_a_reference_of_another_release_is_a_usage_error_that_names_it(
    store: LocalStore, rows: list[IndexRow], capsys: Output, tmp_path: Path
) -> None:
    other = make_artifact(tmp_path / "other", 99, release="other")
    row = publish(store, "other", "candidate", other, datetime.now(timezone.utc))
    for verb in ("promote", "revoke"):
        assert main([verb, store.url, "--name", "demo", row.artifact]) == 2
        assert "of the release `other`, not `demo`\nhint: use --name other" in capsys.readouterr().err


def test_revoke_takes_an_artifact_out_of_every_channel_and_renew_dates_a_channel_anew(
    store: LocalStore, rows: list[IndexRow], capsys: Output
) -> None:
    assert main(["promote", store.url, "--name", "demo"]) == 0
    capsys.readouterr()
    assert main(["revoke", store.url, "--name", "demo", rows[11].artifact]) == 0
    assert capsys.readouterr().out == "demo@candidate:13\ndemo@stable:2\n"
    assert main(["show", store.url, "demo@stable"]) in (0, 12)
    assert main(["promote", store.url, "--name", "demo", rows[11].artifact]) == 14
    assert main(["revoke", store.url, "--name", "demo", "--channel", "stable", "nonsense!"]) == 2
    assert main(["revoke", store.url, "--name", "demo"]) == 2
    capsys.readouterr()
    before = datetime.now(timezone.utc)
    found = document(capsys, "renew", store.url, "--name", "demo", "--channel", "stable", "--channel", "candidate")
    assert [(index["channel"], index["version"]) for index in found["indexes"]] == [("stable", 3), ("candidate", 14)]
    expiry = datetime.strptime(found["indexes"][0]["expires_at"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert expiry - before > timedelta(days=13)
    assert main(["renew", store.url, "--name", "demo", "--channel", "nothing"]) == 12


def test_ls_with_a_name_that_cannot_be_one_is_a_usage_error(
    store: LocalStore, rows: list[IndexRow], capsys: Output
) -> None:
    for name in ("../demo", "Demo", "a/b", "", "demo/"):
        assert main(["ls", store.url, "--name", name]) == 2, name
        assert "1-64 characters" in capsys.readouterr().err
    assert main(["ls", store.url, "--name", "demo"]) == 0


def test_ls_is_not_confused_by_foreign_objects(store: LocalStore, rows: list[IndexRow], capsys: Output) -> None:
    for key in ("v1/index/stray", "v1/index/demo/stray", "v1/index/a/b/c/d"):
        store.put_if_absent(key, b"x")
    assert [found["channel"] for found in document(capsys, "ls", store.url)["channels"]] == ["candidate"]


@pytest.mark.parametrize("verb", ["gc", "fsck"])
def test_names_that_others_chose_are_shown_and_not_obeyed(
    verb: str, store: LocalStore, rows: list[IndexRow], capsys: Output
) -> None:
    for name in (b"\xff\xfe", b"\x1b[2Jx", b"a\nkeep  fake"):
        with open(os.path.join(os.fsencode(store.root), b"v1", name), "wb"):
            pass
    assert main([verb, store.url]) == 0
    text = "".join(capsys.readouterr())
    assert "\x1b" not in text and "\nkeep  fake" not in text
    assert "v1/\\udcff\\udcfe" in text and "v1/\\x1b[2Jx" in text and "v1/a\\nkeep  fake" in text
    assert document(capsys, verb, store.url)
