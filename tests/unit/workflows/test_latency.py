"""The comparison with the tuned process: two processes called in turns, their first calls of a turn left out, medians of 200."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachepipe.adapters.children import Command
from cachepipe.adapters.dialogue import Dialogue
from cachepipe.domain.job import UNTIMED_CALLS
from cachepipe.errors import DeadlineError
from cachepipe.workflows import latency
from cachepipe.workflows.latency import BLOCKS, CALLS, TARGET, TRIES
from tests.unit.domain.test_gates import spec

SPEC = spec(shape_buckets=({"batch": 8}, {"batch": 16}))
CHILD = """
import json, sys
who, log, rounds, untimed, blocks = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *map(int, sys.argv[4:])
for number, line in enumerate(sys.stdin):
    wish = json.loads(line)
    with open(log, "a") as file:
        print(who, wish["index"], wish["calls"], file=file)
    call = rounds[number // blocks]
    print(json.dumps({"event": "timed", "milliseconds": [1000.0] * untimed + [call] * (wish["calls"] - untimed)}), flush=True)
"""
"""A process whose calls take as long as it is told for every measurement; what is not timed takes a second."""

Pair = tuple[Dialogue, Dialogue]
Start = Callable[[Sequence[float], Sequence[float]], Pair]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def started(*rounds: Sequence[float]) -> Pair:
            pair = []
            for who, own in zip(("tuned", "restored"), rounds, strict=True):
                words = [who, str(tmp_path / "asked"), json.dumps(own), str(UNTIMED_CALLS), str(BLOCKS)]
                command = Command(
                    [sys.executable, "-I", "-S", "-c", CHILD, *words], {}, tmp_path, 60, tmp_path / f"{who}.log"
                )
                pair.append(stack.enter_context(Dialogue(command)))
            return pair[0], pair[1]

        yield started


def asked(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "asked").read_text().splitlines()]


def test_both_are_called_in_turns_and_who_begins_changes(start: Start, tmp_path: Path) -> None:
    row = latency._measured(SPEC, 1, start([2.0], [2.02]))
    rows = asked(tmp_path)
    assert [who for who, _, _ in rows] == ["tuned", "restored", "restored", "tuned"] * (BLOCKS // 2)
    assert {(index, calls) for _, index, calls in rows} == {("1", str(CALLS + UNTIMED_CALLS))}
    assert row == {"shape_bucket": {"batch": 16}, "calls": 200, "tuned_ms": 2.0, "restored_ms": 2.02, "ratio": 1.01}


def test_the_untimed_calls_of_a_turn_count_for_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "CALLS", 1)  # fewer timed ones than untimed ones: they would decide the median
    row = latency._measured(SPEC, 0, start([2.0], [2.0]))
    assert (row["calls"], row["tuned_ms"], row["restored_ms"]) == (BLOCKS, 2.0, 2.0)


@pytest.mark.parametrize(
    ("restored", "measured", "ratio"),
    [
        ([TARGET], 1, TARGET),
        ([0.5], 1, 0.5),
        ([1.5, 1.01], 2, 1.01),
        ([1.5, 1.2, 1.3], 3, 1.2),
        ([1.2, 1.5, 1.3], 3, 1.2),
        ([1.5, 1.3, 1.02], 3, 1.02),
    ],
)
def test_what_misses_the_target_is_measured_again_at_most_twice_and_its_best_counts(
    start: Start, tmp_path: Path, restored: list[float], measured: int, ratio: float
) -> None:
    row = latency._row(SPEC, 0, start([1.0] * TRIES, restored))
    assert row["ratio"] == ratio and row["restored_ms"] == ratio
    assert len(asked(tmp_path)) == 2 * BLOCKS * measured


def test_a_process_that_ends_in_the_midst_is_no_measurement(start: Start) -> None:
    with pytest.raises(DeadlineError, match="the process ended before it answered"):
        latency._row(SPEC, 0, start([1.0] * TRIES, [1.5]))
