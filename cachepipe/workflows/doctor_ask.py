"""Asks the questions of a checkup: all at the same time, each within its limit, and none can end the others.

A name server, a driver or a mount that hangs holds one thread, which is never joined; what breaks, in whatever way, is
the verdict of that one question.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachepipe.domain.checkup import FAIL, Check
from cachepipe.errors import CachepipeError

LIMIT_S = 20.0
"""For one question: a store that is asked again and again for it gives up earlier."""


class Question(NamedTuple):
    section: str
    name: str
    ask: Callable[[], list[Check]]


def answers(questions: Sequence[Question]) -> list[Check]:
    """Returns the checks of all questions, in their order; one that hangs or breaks is one failed check."""
    until = time.monotonic() + LIMIT_S
    asked = [(question, _started(question)) for question in questions]
    return [check for question, (thread, box) in asked for check in _awaited(question, thread, box, until)]


def _started(question: Question) -> tuple[threading.Thread, list[list[Check]]]:
    box: list[list[Check]] = []

    def guarded() -> None:
        try:
            box.append(question.ask())
        except BaseException as error:  # noqa: BLE001 - the boundary: also a panic of a native library is a finding
            box.append([_broken(question, error)])

    thread = threading.Thread(target=guarded, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        box.append([Check(question.section, question.name, str(error), FAIL, "raise the limit of processes or memory")])
    return thread, box


def _awaited(question: Question, thread: threading.Thread, box: list[list[Check]], until: float) -> list[Check]:
    if not box:
        thread.join(max(0.0, until - time.monotonic()))
    late = f"no answer within {LIMIT_S:.0f} s"
    return box[0] if box else [Check(*question[:2], late, FAIL, "a mount, name server or driver hangs")]


def _broken(question: Question, error: BaseException) -> Check:
    if isinstance(error, CachepipeError):
        return Check(*question[:2], str(error), FAIL, error.hint)
    if isinstance(error, OSError):
        return Check(*question[:2], str(error), FAIL, "look at the path and its rights")
    return Check(*question[:2], f"{type(error).__name__}: {error}", FAIL, "not expected here: report it with this page")
