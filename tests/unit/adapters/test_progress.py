from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cachepipe.adapters.progress import Lines, _Bars, open_progress
from cachepipe.errors import Interrupted


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def event(name: str, shape_bucket: str) -> str:
    return json.dumps({"event": name, "index": 0, "of": 3, "shape_bucket": shape_bucket, "seconds": 1.0})


def test_a_log_gets_at_most_one_line_per_ten_seconds_and_one_per_finished_step() -> None:
    stream, clock = io.StringIO(), Clock()
    with Lines(stream, clock).step("mlp/float32/default", "tune", 3, 80.0) as step:
        for second in range(25):
            clock.now_s = float(second)
            step.line(event("bucket_done" if second % 10 == 9 else "bucket_start", f"batch={second}"))
    lines = stream.getvalue().splitlines()
    assert [line.split()[-3:] for line in lines[1:]] == [
        ["about", "80", "s"],
        ["about", "80", "s"],
        ["done", "24.0", "s"],
    ]
    assert "1/3" in lines[1] and "batch=10" in lines[1] and "mlp/float32/default" in lines[1]


def test_what_is_not_an_event_is_ignored() -> None:
    stream = io.StringIO()
    with Lines(stream, Clock()).step("mlp", "tune", 1, 0.0) as step:
        for text in ("", "hello", "[1]", '"x"', '{"event": 1}'):
            step.line(text)
    assert stream.getvalue().splitlines() == ["tune      mlp  done  0.0 s"]


def test_a_pipe_gets_lines_without_control_characters() -> None:
    stream = io.StringIO()
    progress = open_progress(stream)
    progress.say("[bold]carried over[/bold]")
    assert stream.getvalue() == "[bold]carried over[/bold]\n"


@pytest.mark.parametrize("made", [lambda stream: Lines(stream, Clock()), _Bars], ids=["lines", "bars"])
def test_what_a_terminal_obeys_is_shown_whoever_says_it(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    progress = made(stream)
    hostile = "a\x1b]0;x\x07\x9b31m\u202e\nfake"
    progress.say(hostile)
    with progress.step(hostile, "tune", 2, 0.0) as step:
        step.line(event("bucket_start", hostile))
    assert {char for char in stream.getvalue() if not char.isprintable()} <= {"\n"}
    assert "\nfake" not in stream.getvalue()


def test_bars_leave_one_line_per_finished_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    progress = _Bars(stream)
    progress.say("a [b] c")
    with progress.step("mlp/float32/default", "tune", 2, 5.0) as step:
        step.line(event("bucket_done", "batch=1"))
    assert stream.getvalue().startswith("a [b] c\n")
    assert stream.getvalue().rstrip().splitlines()[-1].startswith("tune      mlp/float32/default  done")


def test_a_step_that_failed_is_not_called_done() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Lines(stream, Clock()).step("mlp", "tune", 1, 0.0):
        raise RuntimeError
    assert stream.getvalue().splitlines() == ["tune      mlp  failed  0.0 s"]


def test_an_interrupted_step_leaves_its_one_line_to_the_interrupt() -> None:
    stream = io.StringIO()
    with pytest.raises(Interrupted), Lines(stream, Clock()).step("mlp", "tune", 1, 0.0):
        raise Interrupted("interrupted")
    assert stream.getvalue() == ""
