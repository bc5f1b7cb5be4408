"""A release that an earlier start put into scratch space goes where it belongs, as soon as that can be used.

Only asked when the folder that was found lies in scratch space: a start that finds its own folder never comes here. What
was found is kept until its better is there, so a store that does not answer costs `LIMIT_S` and not the warm start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from cachepipe.adapters import cachedir
from cachepipe.domain import marker as marks
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.statement import read_statement
from cachepipe.errors import CachepipeError, UnsafePathError
from cachepipe.workflows import present
from cachepipe.workflows.outcome import RestoreOutcome, RestoreRequest
from cachepipe.workflows.place import candidates, reserve

LIMIT_S, SPARE_S = 2.0, 0.5
"""For the whole way home, and what is left of the deadline to start with what was found, which is warm already."""
Bounded = Callable[[Callable[[], RestoreOutcome], float], "RestoreOutcome | CachepipeError | None"]


def come_home(
    request: RestoreRequest,
    found: RestoreOutcome,
    restore: Callable[[RestoreRequest], RestoreOutcome],
    bounded: Bounded,
) -> RestoreOutcome:
    """Returns the release in its own folder if that can be used by now, else what was found, with the reason.

    Args:
        request: of this start.
        found: in scratch space, its lease held.
        restore: puts the release into the best folder.
        bounded: runs it until a moment of `time.monotonic`; None: it was not done by then.
    """
    until = min(request.deadline - SPARE_S, time.monotonic() + LIMIT_S)

    def go() -> RestoreOutcome:
        if (reason := _why_not_home(request, found)) is not None:
            raise UnsafePathError(found.folder, f"kept: {reason}")
        return restore(replace(request, deadline=until))

    # all of it, the look at the folders too: a mount may hang, or fail in a way that nobody foresaw
    better = bounded(go, until)
    if isinstance(better, RestoreOutcome):
        if found.lease is not better.lease:
            found.lease.close()
        return better
    reason = str(better) if better is not None else "not restored in its own folder in time"
    return replace(found, notes=(*found.notes, f"in scratch space: {reason}"))


def _why_not_home(request: RestoreRequest, found: RestoreOutcome) -> str | None:
    """Returns why none of the better folders can be filled; None: one can."""
    try:
        final = os.path.abspath(request.options.dest or _root(found))
    except (CachepipeError, OSError) as error:
        return str(error)
    own_name = present.folder_name(found.names, found.statements)
    better = candidates(final, own_name, True, request.environment)
    reasons = []
    for folder in better[: better.index(found.folder)] if found.folder in better else ():
        try:
            place = reserve(folder, cachedir.Need(0, 0), time.monotonic())
        except CachepipeError as error:
            reasons.append(str(error))
            continue
        try:
            place.hold()
            return None
        except CachepipeError as error:
            reasons.append(str(error))
        finally:
            place.release()
    return "; ".join(dict.fromkeys(reasons)) or "there is no better folder"


def _root(found: RestoreOutcome) -> str:
    """Returns where the release was built to lie, as its statement says."""
    path = os.path.join(found.folder, marks.STATEMENTS, f"{found.statements[0]}.json")
    root = read_statement(cachedir.read_own(path, LIMITS.statement_bytes)).root
    own_name = present.folder_name(found.names, found.statements)
    return root if len(found.statements) == 1 else os.path.join(os.path.dirname(root), own_name)
