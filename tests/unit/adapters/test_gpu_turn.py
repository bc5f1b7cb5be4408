"""Builds share a GPU, except while one of them tunes; who waits is not overtaken for ever."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cachepipe.adapters.gpu_turn import gpu_turn


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_several_share_and_another_gpu_is_another_turn() -> None:
    with gpu_turn("GPU-1", is_alone=False), gpu_turn("GPU-1", is_alone=False), gpu_turn("GPU-2", is_alone=True):
        pass


def test_one_that_tunes_waits_for_those_that_share_and_later_ones_wait_for_it() -> None:
    order: list[str] = []
    waiting, done = threading.Event(), threading.Event()

    def alone() -> None:
        with gpu_turn("GPU-1", is_alone=True, on_wait=waiting.set):
            order.append("alone")

    def later() -> None:
        with gpu_turn("GPU-1", is_alone=False, on_wait=done.set):
            order.append("later")

    tuner, sharer = threading.Thread(target=alone), threading.Thread(target=later)
    with gpu_turn("GPU-1", is_alone=False):
        tuner.start()
        assert waiting.wait(30)
        sharer.start()
        assert done.wait(30)
        order.append("first")
    tuner.join(30)
    sharer.join(30)
    assert order == ["first", "alone", "later"]
