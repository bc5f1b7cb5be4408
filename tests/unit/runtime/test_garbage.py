"""The collector is held back while torch compiles, and is as it was before, whatever happens meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest

from cachepipe.runtime import garbage
from cachepipe.runtime.garbage import THRESHOLD, begin, end, rarely_collected

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before, is_on = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    if is_on:
        gc.enable()


def test_compiles_at_once_hold_it_back_until_the_last_one_ends() -> None:
    begin()
    begin()
    assert gc.get_threshold() == (THRESHOLD, 10, 10)
    end()
    assert gc.get_threshold() == (THRESHOLD, 10, 10)
    end()
    assert gc.get_threshold() == USUAL


def test_a_compile_that_fails_lets_it_go() -> None:
    with pytest.raises(ValueError, match="no"), rarely_collected():
        raise ValueError("no")
    assert gc.get_threshold() == USUAL


def test_it_is_not_off_a_long_compile_is_still_swept() -> None:
    with rarely_collected():
        before = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(3 * THRESHOLD)]
        assert gc.get_stats()[0]["collections"] > before
    assert kept and gc.isenabled()


def test_an_end_without_a_beginning_changes_nothing() -> None:
    end()
    with rarely_collected():
        assert gc.get_threshold()[0] == THRESHOLD
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 10, 10), (THRESHOLD, 5, 5), (1_000_000, 10, 10)])
def test_a_service_that_wants_fewer_collections_keeps_its_own(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rarely_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with rarely_collected():
        assert not gc.isenabled() and gc.get_threshold() == USUAL
    assert not gc.isenabled()


@pytest.mark.parametrize("own", [(2_000, 10, 10), (THRESHOLD, 3, 3)])
def test_what_the_service_sets_meanwhile_stays(own: tuple[int, int, int]) -> None:
    with rarely_collected():
        gc.set_threshold(*own)
    assert gc.get_threshold() == own


def test_a_child_that_is_forked_while_a_compile_is_open_or_the_lock_is_held_collects_as_ever_and_can_compile() -> None:
    with rarely_collected(), garbage._lock:
        child = os.fork()
        if not child:
            usual = gc.get_threshold() == USUAL
            with rarely_collected():
                held = gc.get_threshold()[0] == THRESHOLD
            os._exit(0 if usual and held and gc.get_threshold() == USUAL else 1)
    deadline = time.monotonic() + 20
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child waits for ever")
    assert status[1] == 0 and gc.get_threshold() == USUAL
