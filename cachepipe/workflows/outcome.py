"""What a restore is asked, and what it answers: a folder in use with the variables of its user."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cachepipe.adapters.execute import folder_variables, has_compiler, isa_variables, resolved_variables
from cachepipe.adapters.lease import Lease
from cachepipe.domain import marker as marks
from cachepipe.domain.marker import Marker
from cachepipe.errors import CachepipeError, DeadlineError, VerificationError
from cachepipe.runtime import attempts
from cachepipe.workflows.restore_options import Options


@dataclass(frozen=True)
class RestoreRequest:
    """One restore: what is wanted and the moment at which it is over."""

    options: Options
    environment: Mapping[str, str]
    """Of this process; what the service inherits."""
    now: datetime
    deadline: float
    """In seconds of `time.monotonic`."""
    start_id: str
    refused: list[str] = field(default_factory=list)
    """Why a folder that holds what may be wanted was not taken; for the words of a start that found no other."""


@dataclass(frozen=True)
class RestoreOutcome:
    """A folder that can be used, and what its user needs in the environment."""

    outcome: str
    """`restored` or `present`."""
    folder: str
    names: tuple[str, ...]
    statements: tuple[str, ...]
    trust: str
    bytes: int
    """Compressed bytes that this restore fetched."""
    variables: Mapping[str, str]
    notes: tuple[str, ...]
    lease: Lease
    """Shared; the folder is not replaced while it is held."""


def state_dir(options: Options, folder: str) -> str:
    return os.path.abspath(options.state_dir or os.path.join(os.path.dirname(folder), ".state"))


def refuse_quarantined(options: Options, folder: str, statements: Sequence[str]) -> None:
    """Returns if no statement is quarantined; else clears its marks, so that the next start tries it again.

    Raises:
        VerificationError: two starts within 15 minutes never became ready.
    """
    state, now = state_dir(options, folder), time.time()
    for digest in statements:
        if attempts.unfinished(state, digest, now) >= attempts.MAX_UNFINISHED:
            attempts.clear(state, digest)
            what = f"{attempts.MAX_UNFINISHED} starts with {digest[:12]} within 15 minutes did not become ready"
            error = VerificationError([f"quarantined for this start: {what}"])
            error.hint = "the next start tries it again: find what ended the service after its first compile began"
            raise error


def outcome_of(
    request: RestoreRequest, outcome: str, folder: str, marker: Marker, lease: Lease, notes: Sequence[str] = ()
) -> RestoreOutcome:
    """Returns the outcome for a complete folder.

    Raises:
        VerificationError: its statements are quarantined.
        DeadlineError: time ran out.
    """
    options = request.options
    try:
        refuse_quarantined(options, folder, marker.statements)
        if time.monotonic() > request.deadline:
            raise DeadlineError("time ran out")
    except CachepipeError:
        lease.close()
        raise
    variables = {
        **resolved_variables(marker.variables),
        **_isa(marker.cpu_isa),
        **folder_variables(folder),
        "CACHEPIPE_ROOT": folder,
        "CACHEPIPE_RESTORED": ",".join(marker.statements),
        "CACHEPIPE_STATE_DIR": state_dir(options, folder),
    }
    if marker.index_created_at and not options.locks:
        variables["CACHEPIPE_INDEX_DATES"] = f"{marker.index_created_at}/{marker.index_ends_at}"
    if marker.has_compiler_stub and not has_compiler(request.environment):
        path = request.environment.get("PATH", os.defpath)
        variables["PATH"] = os.pathsep.join([os.path.join(folder, marks.BIN), path])
    fetched = 0 if outcome == "present" else marker.bytes
    return RestoreOutcome(
        outcome, folder, marker.names, marker.statements, marker.trust, fetched, variables, tuple(notes), lease
    )


def _isa(built: str) -> dict[str, str]:
    if built != "avx2":
        return {}
    from cachepipe.adapters.machine import Host, cpu_flags, vector_isa

    return isa_variables(built, vector_isa(cpu_flags(Host())))
