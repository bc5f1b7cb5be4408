"""Field cases of stores, replayed against a real S3 server behind the fault proxy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import s3, seaweed
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.restoring import (
    Published,
    Ran,
    command,
    environment,
    files_below,
    publish_release,
    run_restore,
    tree_files,
)

COUNT_FILES = (
    sys.executable,
    "-c",
    "import os; root = os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/..'; "
    "print(sum(len(files) for place, _, files in os.walk(root) if '.cachepipe' not in place and 'lease' not in place))",
)
"""A service that tells how many files it found when it started."""


@pytest.fixture
def proxy(s3_server: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    with FaultProxy(s3_server.ports[0]) as started:
        yield started


def published(base: Path, proxy: FaultProxy, **settings: object) -> tuple[Published, str]:
    demo = publish_release(base, **settings)  # type: ignore[arg-type]
    url = s3.address(proxy.url)
    s3.copy_store(demo.store, s3.opened(url))
    proxy.clear()
    return demo, url


def restore(base: Path, url: str, *more: str) -> Ran:
    return run_restore(base, url, "--name", "demo", *more, env=environment(base, **s3.environment()))


def test_case_c3_cut_kernel_files_are_restored_anew(tmp_path: Path, proxy: FaultProxy) -> None:
    demo, url = published(tmp_path, proxy)
    restore(tmp_path, url, *command(["true"]))
    wanted = demo.restored_bytes(demo.root)
    cut = [path for path in wanted if path.endswith((".json", ".cubin")) and "triton" in path]
    assert len(cut) == 2
    for path in cut:
        os.truncate(Path(demo.root, path), 5)
    assert restore(tmp_path, url, *command(["true"])).line["outcome"] == "restored"
    assert files_below(demo.root) == wanted


def test_case_c16_a_service_starts_only_when_the_fetch_is_complete(tmp_path: Path, proxy: FaultProxy) -> None:
    demo, url = published(tmp_path, proxy)
    proxy.add(Fault("delay", path="/packs/", seconds=0.7, times=None))
    ran = restore(tmp_path, url, *command(COUNT_FILES))
    assert (ran.line["outcome"], int(ran.out) >= len(demo.files)) == ("restored", True)
    assert float(ran.line["seconds"]) > 0.7


def test_case_c16_a_fetch_that_is_too_slow_is_logged_and_leaves_nothing_half_done(
    tmp_path: Path, proxy: FaultProxy
) -> None:
    demo, url = published(tmp_path, proxy)
    proxy.add(Fault("delay", path="/packs/", seconds=30, times=None))
    ran = restore(tmp_path, url, "--deadline", "1.5", *command(COUNT_FILES))
    assert (ran.line["outcome"], ran.out.strip()) == ("cold", "0")
    assert not Path(demo.root, "inductor").exists()


def test_case_k6_a_page_in_place_of_a_pack_is_refused_with_the_pack_named(tmp_path: Path, proxy: FaultProxy) -> None:
    demo, url = published(tmp_path, proxy)
    digest = demo.statement.packs[0].digest
    proxy.add(Fault("stale", path=digest, content=b"<html>Please log in</html>", times=None))
    ran = restore(tmp_path, url, "--strict")
    assert (ran.code, ran.line["outcome"]) == (13, "refused")
    assert digest[:12] in ran.line["reason"]


def test_case_k9_a_big_object_comes_in_parts_at_the_same_time(tmp_path: Path, proxy: FaultProxy) -> None:
    root = str(tmp_path / "cache" / "demo")
    files = {**tree_files(root), "inductor/aoti/weights.bin": os.urandom(40 << 20)}
    demo, url = published(tmp_path, proxy, files=files)
    assert len(demo.statement.packs) >= 5
    proxy.add(Fault("delay", path="/packs/", seconds=1.0, times=None))
    began = time.monotonic()
    ran = restore(tmp_path, url, *command(["true"]))
    assert ran.line["outcome"] == "restored", ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    times = [row.at for row in proxy.requests("GET", "/packs/")]
    assert max(sum(0 <= at - other < 0.9 for other in times) for at in times) >= 3, "answered one after another"
    assert int(ran.line["bytes"]) > 40 << 20
    assert 0 < float(ran.line["seconds"]) <= time.monotonic() - began
