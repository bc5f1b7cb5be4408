"""Compiles after `ready()`: logged with shape, guard and place of the call, or refused in strict mode.

Until a service is ready nothing here acts. Afterwards torch's compile callback is the only thing of ours that is left, so a
warm call runs none of our frames.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachepipe.domain.remedies import late_remedy
from cachepipe.runtime.events import say
from cachepipe.runtime.recorder import Recorder

MAX_LATE = 1_000
"""That are kept; further ones are counted and logged."""


@dataclass
class LateCompile:
    """A compile after `ready()`."""

    graph: str
    sizes: dict[str, Any]
    """Input → size."""
    seconds: float
    settings: tuple[str, ...] = ()
    """Ambient settings that are not those of the first compile, in words: each makes torch trace again."""
    place: str = ""
    """What was compiled: function, file and line."""
    call_site: str = ""
    """The call that needed it, outside of torch."""
    reason: str = ""
    """The guard that failed."""
    outcome: str = "compiled"
    """`compiled`, `hit` (everything came from the cache), `failed` (the call raises), `refused` in strict mode, or `eager`: torch could
    not trace it, or its recompile limit was reached and whatever else this function is called with runs eager unseen."""


class LateWatch:
    """Sees late compiles through torch's start and end callbacks."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: LateCompile | None = None
        self._handled: BaseException | None = None
        """What the caller was handling already when the compile began."""
        self._began = 0.0
        self._lookups = 0
        self.is_strict = os.environ.get("CACHEPIPE_STRICT", "").lower() in ("1", "true", "yes", "on")
        self.compiles: list[LateCompile] = []
        self.count = 0
        self.seconds = 0.0
        self.captures = 0

    def begin(self, args: Any, changed: tuple[str, ...]) -> None:
        """At the start callback.

        Raises:
            LateCompileError: in strict mode; torch passes it on as it is.
        """
        from cachepipe.adapters.torch_compiling import CAPTURES, compiling, late_compile_error

        if args.callback_trigger.name in CAPTURES:
            self.captures += 1
            return
        what = compiling()
        self._began, self._lookups = time.monotonic(), len(self._recorder.lookups)
        self._open = LateCompile(
            str(args.compile_id), dict(what.sizes), 0.0, changed, what.place, what.call_site, what.reason
        )
        self._handled = sys.exc_info()[1]
        if self.is_strict:
            self._open.outcome = "refused"
            raise late_compile_error(what, self._remedy(what.reason, changed))
        self._recorder.start()

    def limit(self, changed: tuple[str, ...], is_ready: bool) -> None:
        """At torch's recompile limit.

        Raises:
            LateCompileError: as `begin`.
        """
        from cachepipe.adapters.torch_compiling import compiling, late_compile_error

        what, is_refused = compiling(), self.is_strict and is_ready
        outcome = "refused" if is_refused else "eager"
        found = LateCompile("-", dict(what.sizes), 0.0, changed, what.place, what.call_site, what.reason, outcome)
        if not is_ready:
            _tell(found, say, "compile")
            return
        self._keep(found)
        if is_refused:
            raise late_compile_error(what, self._remedy(what.reason, changed))

    def _remedy(self, reason: str, changed: tuple[str, ...]) -> str:
        is_restored = bool(os.environ.get("CACHEPIPE_RESTORED"))
        return f"{late_remedy(reason, changed, is_restored)}, or unset CACHEPIPE_STRICT"

    def end(self) -> None:
        """At the end callback, which torch also calls after `begin` has raised."""
        from cachepipe.adapters.torch_compiling import runs_eager

        late, self._open = self._open, None
        if late is None:
            return
        if late.outcome != "refused":
            self._recorder.stop()
            late.seconds = time.monotonic() - self._began
            seen = self._recorder.lookups[self._lookups :]
            late.outcome = "hit" if seen and all(one.outcome == "hit" for one in seen) else "compiled"
            error = sys.exc_info()[1]
            if error is not None and error is not self._handled:
                late.outcome = "eager" if runs_eager(error) else "failed"
            log = self._recorder.logs.get("-")
            late.sizes = late.sizes or (dict(log.sizes) if log else {})
        self._keep(late)

    def _keep(self, late: LateCompile) -> None:
        self.count += 1
        self.seconds += late.seconds
        if len(self.compiles) < MAX_LATE:
            self.compiles.append(late)
        _tell(late, say)


def _tell(late: LateCompile, tell: Callable[..., None], event: str = "late_compile") -> None:
    sizes = " ".join(f"{name}:{'x'.join(map(str, size))}" for name, size in late.sizes.items())
    facts = {
        "start": os.environ.get("CACHEPIPE_START_ID", "-"),
        "graph": late.graph,
        "inputs": sizes,
        "seconds": round(late.seconds, 2),
        "outcome": late.outcome,
        "place": late.place,
        "call_site": late.call_site,
        "reason": late.reason,
        "settings": "; ".join(late.settings),
    }
    tell(event, **{name: value for name, value in facts.items() if value != ""})
