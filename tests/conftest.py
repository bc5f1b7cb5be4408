"""Fixtures of all tests. The checkout is appended to sys.path for `tests.support`: an installed cachepipe comes first."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.append(str(REPOSITORY))

from tests.support import motoserver, seaweed
from tests.support.counting import Record, write_counts
from tests.support.process_state import state_of_process
from tests.support.release import Release, build_quickstart
from tests.support.torch_state import state_of_torch

settings.register_profile("change", max_examples=1_000, deadline=None)
settings.load_profile("change")
settings.register_profile("nightly", max_examples=20_000, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    # A script's background job ignores SIGINT, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that all processes of this test run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = len(terminalreporter.stats.get("passed", ()))
    write_counts({"part": "tests", "store": "all", "passed": passed})


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    """A real S3 server, started when the first test of the run asks for it, for all its processes."""
    with seaweed.shared(run_folder(tmp_path_factory) / "seaweed") as server:
        yield server


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[motoserver.Moto]:
    """moto's S3 server, started when the first test of the run asks for it."""
    server = motoserver.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    """Fails a test that leaves torch, or this process, in another state than it found: the next one would see it."""
    torch, process = state_of_torch(), state_of_process()
    yield
    assert not torch or state_of_torch() == torch
    assert state_of_process() == process


@pytest.fixture
def record() -> Callable[[Record], None]:
    """Keeps what a test counted, when `ci/nightly` asks for it."""
    return write_counts


@pytest.fixture(scope="session")
def quickstart_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """The quickstart, built and published once per run; a lock file keeps parallel test processes from building twice.

    Tests must not change it: restore to another folder, or copy the store.
    """
    base = run_folder(tmp_path_factory)
    record = base / "quickstart.json"
    made = None
    with (base / "quickstart.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            made = Path(tempfile.mkdtemp(prefix="cachepipe-quickstart-"))
            made.chmod(0o755)  # a service under another user id reads the store
            record.write_text(json.dumps(asdict(build_quickstart(made))))
    yield Release(**json.loads(record.read_text()))
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)
