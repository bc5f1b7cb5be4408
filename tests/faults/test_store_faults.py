"""Every fault of a store × everything that is asked of it (T-FAULT), each with its written outcome, once and for ever.

12 faults × (hint, index, statement, pack read; pack and index written) = 72 cells, and the write whose answer is lost. A real
server stands behind the proxy, so signatures, conditions and checksums are real. In every cell: what is restored is whole, what
is published can be restored, and time is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from cachepipe.adapters import s3 as s3_boto3
from cachepipe.adapters import s3_read
from cachepipe.adapters.packs import open_blob
from cachepipe.adapters.store import Store
from cachepipe.domain.layout import pack_key
from cachepipe.errors import CachepipeError, StoreError
from cachepipe.workflows import publish as publishing
from cachepipe.workflows.fetch import newest, read_artifact, read_file_table
from cachepipe.workflows.outcome import RestoreOutcome, RestoreRequest
from cachepipe.workflows.publish import publish
from cachepipe.workflows.restore import restore_absent
from cachepipe.workflows.restore_options import Options
from cachepipe.workflows.serve import _bounded
from tests.support import authority, s3, seaweed
from tests.support.artifacts import NOW, make_artifact
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.restoring import Published, files_below, publish_release

DEADLINE_S = 12.0
SILENCE_S = 0.3
"""In place of `READ_S`; a fault is silent for three times as long."""

FAULTS = {
    "timeout": Fault("hang", seconds=3 * SILENCE_S),
    "reset": Fault("reset", at=1),
    "403": Fault("status", status=403, code="AccessDenied"),
    "404": Fault("absent"),
    "412": Fault("status", status=412, code="PreconditionFailed"),
    "409": Fault("status", status=409, code="ConditionalRequestConflict"),
    "500": Fault("status", status=500, code="InternalError"),
    "503": Fault("status", status=503, code="SlowDown"),
    "short": Fault("shorter", at=1),
    "long": Fault("longer", at=3),
    "wrong": Fault("flip", at=20),
    "stale": Fault("absent"),
}
HINT, INDEX, STATEMENT = r"/hint$", r"/\d{10}\.dsse\.json$", r"/statement\.dsse\.json$"


class Cell(NamedTuple):
    """What comes of a fault: once, and for ever."""

    once: str
    always: str


# --- reading: the error that a cold start reports, or which version is restored ------------------------------------------

LOST = Cell("newest", "unusable")
BUSY = Cell("newest", "slow_down")
FALSE = Cell("newest", "IntegrityError")
READS: dict[tuple[str, str], Cell] = {
    ("hint", "timeout"): LOST,
    ("hint", "reset"): LOST,
    ("hint", "403"): Cell("forbidden", "forbidden"),
    ("hint", "404"): Cell("newest", "newest"),
    ("hint", "412"): Cell("conflict", "conflict"),
    ("hint", "409"): Cell("conflict", "conflict"),
    ("hint", "500"): BUSY,
    ("hint", "503"): BUSY,
    ("hint", "short"): Cell("newest", "newest"),
    ("hint", "long"): Cell("newest", "newest"),
    ("hint", "wrong"): Cell("newest", "newest"),
    ("hint", "stale"): Cell("newest", "newest"),
    ("index", "timeout"): LOST,
    ("index", "reset"): LOST,
    ("index", "403"): Cell("forbidden", "forbidden"),
    ("index", "404"): Cell(
        "older", "MissError"
    ),  # S3 has no stale reads; whoever hides versions can freeze, until expiry
    ("index", "412"): Cell("conflict", "conflict"),
    ("index", "409"): Cell("conflict", "conflict"),
    ("index", "500"): BUSY,
    ("index", "503"): BUSY,
    ("index", "short"): FALSE,
    ("index", "long"): FALSE,
    ("index", "wrong"): FALSE,
    ("index", "stale"): Cell("older", "older"),
    ("statement", "timeout"): LOST,
    ("statement", "reset"): LOST,
    ("statement", "403"): Cell("forbidden", "forbidden"),
    ("statement", "404"): FALSE,
    ("statement", "412"): Cell("conflict", "conflict"),
    ("statement", "409"): Cell("conflict", "conflict"),
    ("statement", "500"): BUSY,
    ("statement", "503"): BUSY,
    ("statement", "short"): FALSE,
    ("statement", "long"): FALSE,
    ("statement", "wrong"): FALSE,
    ("statement", "stale"): FALSE,
    ("pack", "timeout"): LOST,
    ("pack", "reset"): LOST,
    ("pack", "403"): Cell("newest", "forbidden"),  # four tries of any kind around read and verify
    ("pack", "404"): FALSE,
    ("pack", "412"): Cell("newest", "conflict"),
    ("pack", "409"): Cell("newest", "conflict"),
    ("pack", "500"): BUSY,
    ("pack", "503"): BUSY,
    ("pack", "short"): FALSE,
    ("pack", "long"): FALSE,
    ("pack", "wrong"): FALSE,
    ("pack", "stale"): FALSE,
}

# --- writing -------------------------------------------------------------------------------------------------------------

WRITTEN = Cell("published", "published")
WRITES: dict[tuple[str, str], Cell] = {
    ("pack put", "timeout"): Cell("published", "unusable"),
    ("pack put", "reset"): Cell("published", "unusable"),
    ("pack put", "403"): Cell("forbidden", "forbidden"),
    ("pack put", "404"): Cell("no_bucket", "no_bucket"),
    ("pack put", "412"): Cell("conflict", "conflict"),  # "something is there", and nothing is
    ("pack put", "409"): Cell("published", "conflict"),
    ("pack put", "500"): Cell("published", "slow_down"),
    ("pack put", "503"): Cell("published", "slow_down"),
    ("pack put", "short"): Cell("unusable", "unusable"),
    ("pack put", "long"): Cell("unusable", "unusable"),
    ("pack put", "wrong"): Cell("unusable", "unusable"),
    ("pack put", "stale"): Cell("IntegrityError", "IntegrityError"),
    ("pack put", "answer lost"): WRITTEN,
    ("index put", "timeout"): Cell("published", "unusable"),
    ("index put", "reset"): Cell("published", "unusable"),
    ("index put", "403"): Cell("forbidden", "forbidden"),
    ("index put", "404"): Cell("no_bucket", "no_bucket"),
    ("index put", "412"): Cell("published", "ConflictError"),
    ("index put", "409"): Cell("published", "conflict"),
    ("index put", "500"): Cell("published", "slow_down"),
    ("index put", "503"): Cell("published", "slow_down"),
    ("index put", "short"): Cell("unusable", "unusable"),
    ("index put", "long"): Cell("unusable", "unusable"),
    ("index put", "wrong"): Cell("unusable", "unusable"),
    ("index put", "stale"): Cell("published", "ConflictError"),
    ("index put", "answer lost"): WRITTEN,
}
CELLS = [(target, fault, times) for target, fault in (*READS, *WRITES) for times in ("once", "always")]


def test_no_cell_is_missing() -> None:
    assert len(FAULTS) == 12
    assert set(READS) == {(target, fault) for target in ("hint", "index", "statement", "pack") for fault in FAULTS}
    assert set(WRITES) == {(t, f) for t in ("pack put", "index put") for f in (*FAULTS, "answer lost")}


# --- the bench -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shop:
    proxy: FaultProxy
    url: str
    releases: dict[str, Published]
    """`older` and `newest`: versions 1 and 2 of the channel stable."""


@pytest.fixture(scope="module")
def shop(s3_server: seaweed.Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    base = tmp_path_factory.mktemp("shop")
    releases = {"older": publish_release(base, number=0), "newest": publish_release(base, number=1)}
    with pytest.MonkeyPatch.context() as patch, FaultProxy(s3_server.ports[0]) as proxy:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        url = s3.address(proxy.url)
        s3.copy_store(releases["newest"].store, s3.opened(url))
        yield Shop(proxy, url, releases)


@pytest.fixture(params=["obstore", pytest.param("boto3", marks=pytest.mark.nightly)])
def reader(
    request: pytest.FixtureRequest, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Reads with one of the clients, whose patience is short."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    if request.param == "boto3":
        (tmp_path / "config").write_text("[default]\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(s3_read, "READ_S", SILENCE_S)
    monkeypatch.setattr(s3_boto3, "READ_S", SILENCE_S)
    monkeypatch.setattr(publishing, "DEADLINE_S", 1.0)
    s3_read._one_reader.cache_clear()
    shop.proxy.clear()
    yield
    s3_read._one_reader.cache_clear()
    shop.proxy.clear()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries instead of five: what does not pass is as wrong, and botocore's pauses grow to 8 s."""
    monkeypatch.setattr(s3_read, "TRIES", 2)
    monkeypatch.setattr(s3_boto3, "TRIES", 2)


def restored(shop: Shop, folder: Path) -> str:
    options = Options(
        trust=authority.shared().policy_file,
        store=shop.url,
        names=("demo",),
        dest=str(folder),
        command=("true",),
        deadline_s=DEADLINE_S,
    )
    deadline = time.monotonic() + DEADLINE_S
    request = RestoreRequest(options, {"TMPDIR": str(folder.parent)}, datetime.now(timezone.utc), deadline, "")
    result = _bounded(lambda: restore_absent(request), deadline)
    assert time.monotonic() < deadline + 2
    if not isinstance(result, RestoreOutcome):
        assert not folder.exists()
        return named(result)
    result.lease.close()
    found = files_below(folder)
    return next(name for name, release in shop.releases.items() if release.restored_bytes(str(folder)) == found)


def named(error: CachepipeError | None) -> str:
    """Returns an error's kind, or its class."""
    return error.kind if isinstance(error, StoreError) else type(error).__name__


def armed(fault: str, target: str, times: str, shop: Shop) -> Fault:
    pack = shop.releases["newest"].statement.packs[0].digest
    path = {"hint": HINT, "index": INDEX, "statement": STATEMENT, "pack": pack}[target]
    ready = replace(FAULTS[fault], method="GET", path=path, times=1 if times == "once" else None)
    if (target, fault) == ("hint", "reset"):
        return replace(ready, at=0)  # one byte a try would be enough for its two
    if (target, fault) == ("hint", "stale"):
        return replace(ready, action="stale", content=b"1\n")
    if (target, fault) == ("index", "stale"):
        return replace(ready, path=r"/0000000002\.dsse\.json$")
    return ready


@pytest.mark.parametrize(("target", "fault", "times"), [cell for cell in CELLS if cell[:2] in READS])
def test_a_fault_while_reading(
    target: str, fault: str, times: str, shop: Shop, reader: None, hasty: None, tmp_path: Path
) -> None:
    hit = shop.proxy.add(armed(fault, target, times, shop))
    outcome = restored(shop, tmp_path / "dest")
    assert hit.hits, "the fault was never met"
    assert outcome == getattr(READS[target, fault], times)
    shop.proxy.clear()
    assert restored(shop, tmp_path / "again") == "newest", "a fault leaves nothing behind"


def armed_put(fault: str, target: str, times: str) -> Fault:
    path = r"/packs/" if target == "pack put" else INDEX
    if fault == "answer lost":
        ready = Fault("lost", method="PUT")
    elif fault == "reset":
        ready = Fault("drop", method="PUT")
    elif fault == "404":
        ready = Fault("status", method="PUT", status=404, code="NoSuchBucket")
    elif fault == "stale":
        ready = Fault("absent", method="HEAD" if target == "pack put" else "GET")
    else:
        ready = replace(FAULTS[fault], method="PUT")
    return replace(ready, path=path, times=1 if times == "once" else None)


@pytest.mark.parametrize(("target", "fault", "times"), [cell for cell in CELLS if cell[:2] in WRITES])
def test_a_fault_while_writing(
    target: str, fault: str, times: str, shop: Shop, reader: None, hasty: None, tmp_path: Path
) -> None:
    url = s3.address(shop.proxy.url)
    store = s3.opened(url)
    first = publish(store, "demo", "candidate", make_artifact(tmp_path, 1), NOW)
    shop.proxy.clear()
    hit = shop.proxy.add(armed_put(fault, target, times))
    second = make_artifact(tmp_path, 2)
    try:
        publish(s3.opened(url), "demo", "candidate", second, NOW)
        outcome = "published"
    except CachepipeError as error:
        outcome = named(error)
    assert hit.hits, "the fault was never met"
    assert outcome == getattr(WRITES[target, fault], times)
    shop.proxy.clear()
    assert current(store) == (second.statement.artifact if outcome == "published" else first.artifact)
    if outcome != "published":
        publish(store, "demo", "candidate", second, NOW)
        assert current(store) == second.statement.artifact, "the next run succeeds"


def current(store: Store) -> str:
    """Returns the channel's one artifact, of which every byte was read and found right."""
    found = newest(store, "demo", "candidate")
    assert found is not None
    (row,) = found.index.rows
    statement = read_artifact(store, row, "demo").statement
    read_file_table(store, statement)
    for blob in (*statement.packs, statement.explain):
        data = store.get(pack_key(statement.artifact, blob.digest), blob.size_bytes)
        assert data is not None
        open_blob(data, blob)
    return row.artifact
