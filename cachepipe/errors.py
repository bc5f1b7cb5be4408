"""Every error that cachepipe raises on purpose.

CachepipeError                exit code
├── UsageError                 2   the command line cannot be carried out as written
├── ManifestError             10   the manifest has problems (all of them are listed)
├── BuildError                11   tune, settle, merge or pack failed
├── MissError                 12   nothing is published under that name
├── IntegrityError            13   bytes are not what the statement says
├── TrustError                14   a signature, policy, version floor or expiry refuses
├── StoreError                15   the store failed or cannot be used
├── ConflictError             16   another publisher won, again and again
├── UnsafePathError           17   a folder is not private, not writable or not ours
├── VerificationError         18   a gate refused
├── LateCompileError          18   a compile after `ready()` in strict mode
├── FingerprintMismatchError  19   built for another machine
├── NoRoomError               20   not enough bytes or inodes
├── DeadlineError             21   time ran out
└── Interrupted              130   SIGINT
    └── Terminated           143   SIGTERM

A constructor takes data and makes the message from it; `hint` tells the operator what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class CachepipeError(Exception):
    """Base of the tree; raised itself only for a bug."""

    exit_code = 1
    hint = "this is a bug in cachepipe: report it with the whole output"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint


class UsageError(CachepipeError):
    exit_code = 2
    hint = "see `cachepipe --help`"


class ManifestError(CachepipeError):
    """All problems of one manifest, each as `file:line: field: message`."""

    exit_code = 10
    hint = "correct the lines above; the README's manifest reference lists every field"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class BuildError(CachepipeError):
    """A step of one entry failed; names entry, shape bucket and step."""

    exit_code = 11
    hint = "the worker's log is in the work directory"

    def __init__(self, entry: str, step: str, reason: str, *, shape_bucket: str = "", hint: str | None = None) -> None:
        where = f"{entry} · {shape_bucket}" if shape_bucket else entry
        super().__init__(f"{step} failed: {where}: {reason}", hint=hint)
        self.entry, self.step, self.reason, self.shape_bucket = entry, step, reason, shape_bucket


class MissError(CachepipeError):
    exit_code = 12
    hint = "`cachepipe ls` shows what is published: `build` publishes to `candidate`, `promote` copies it to `stable`"


class IntegrityError(CachepipeError):
    """Bytes are not what was promised: `what` is the object, `wanted` and `found` are the numbers."""

    exit_code = 13
    hint = "do not use these bytes: publish the release again, or check who can write the store"

    def __init__(
        self, what: str, problem: str, *, wanted: object = None, found: object = None, hint: str | None = None
    ) -> None:
        numbers = "" if wanted is None and found is None else f": wanted {wanted}, found {found}"
        super().__init__(f"{what}: {problem}{numbers}", hint=hint)
        self.what, self.problem, self.wanted, self.found = what, problem, wanted, found


class TrustError(CachepipeError):
    exit_code = 14
    hint = "the image's trust policy or lock file does not allow this artifact"


class StoreError(CachepipeError):
    """The store failed; `kind` says how, in one word that is counted and printed.

    forbidden    403: a right is missing; for a reader without the right to list, perhaps the object alone
    credentials  400 or 403: keys are missing, expired, unknown or wrong, or the clock is
    redirect     301: the S3 bucket is in another region, or the endpoint is another
    no_bucket    404 for the S3 bucket itself
    conflict     409 or 412 that stayed after all tries
    slow_down    429, 500 or 503 that stayed after all tries
    unusable     no answer, no such host, no trust in its certificate, or an answer that means nothing here
    """

    exit_code = 15
    hint = "check the store's address and rights"

    def __init__(self, message: str, *, hint: str | None = None, kind: str = "unusable") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class ConflictError(CachepipeError):
    exit_code = 16
    hint = "the statement is still valid: run the command again"


class UnsafePathError(CachepipeError):
    exit_code = 17
    hint = "give cachepipe a private folder of its own (mode 0700, owned by the user that runs it)"

    def __init__(self, path: object, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {problem}", hint=hint)
        self.path, self.problem = str(path), problem


class VerificationError(CachepipeError):
    """One or more gates refused; each violation names entry, shape bucket, gate, limit and value."""

    exit_code = 18
    hint = "nothing was published or promoted: mend what the lines name, or change the manifest's `gates`"

    def __init__(self, violations: Sequence[str], *, hint: str | None = None) -> None:
        super().__init__("\n".join(violations), hint=hint)
        self.violations = tuple(violations)


class LateCompileError(CachepipeError):
    """In strict mode a call that would compile after `ready()` ends with this error; nothing was compiled.

    torch passes it on as it is: it never becomes another error, and `suppress_errors` does not hide it.
    """

    exit_code = 18

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(f"compile after `ready()`: {what}; {hint}", hint=hint)
        self.what = what


class FingerprintMismatchError(CachepipeError):
    """Built for another machine (each difference says part, wanted and found), or a machine that cannot be matched."""

    exit_code = 19
    hint = "build the release on a machine like this one, or run the service on a machine like the builder's"

    def __init__(
        self, differences: Sequence[str], *, what: str = "built for another machine", hint: str | None = None
    ) -> None:
        super().__init__(f"{what}: {'; '.join(differences)}", hint=hint)
        self.differences = tuple(differences)


class NoRoomError(CachepipeError):
    exit_code = 20
    hint = "free the missing space, or name a folder with room by `--dest`"


class DeadlineError(CachepipeError):
    exit_code = 21
    hint = "raise `--deadline`, or look at what was slow in the line above"


class Interrupted(CachepipeError):
    exit_code = 130
    hint = "finished steps are kept in the work directory: run the same command again"


class Terminated(Interrupted):
    exit_code = 143
