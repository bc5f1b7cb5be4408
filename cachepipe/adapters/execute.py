"""Becoming the service: its environment, the compiler's stand-in, and exec.

After exec, pid, stdin, exit code and signals are the service's own; nothing of ours is left but the lease's descriptor.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from cachepipe import streams
from cachepipe.domain.variables import COMPILER, TORCH
from cachepipe.errors import IntegrityError, UsageError

NOT_EXECUTABLE, NOT_FOUND = 126, 127
NOT_HELD = "the restored cache does not hold this object"
"""Words by which a builder finds, in torch's quotation of a compiler's output, that our stub refused."""

_ALLOWED_PREFIXES = ("TORCH", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "ATEN_", "OMP_", "MKL_")
"""What an artifact may set: never PATH, LD_PRELOAD, PYTHONPATH and their kind."""
_VARIABLE_CHARACTERS = 4096
"""Of a name with its value; Linux starts nothing with one beyond 128 KiB."""


def check_variables(variables: Mapping[str, str]) -> None:
    """Returns if an artifact's variables are settings of torch and its libraries.

    Raises:
        IntegrityError: another name, or a value that no environment can hold.
    """
    for name, value in variables.items():
        is_name = name.isidentifier() and name.isascii() and name == name.upper()
        if not is_name or not name.startswith(_ALLOWED_PREFIXES):
            raise IntegrityError("statement", f"variable `{name[:64]}` is not one that an artifact may set")
        if not value.isprintable() or len(name) + len(value) > _VARIABLE_CHARACTERS:
            raise IntegrityError(
                "statement", f"variable `{name[:64]}` holds a line break or a zero byte or is too long"
            )


def folder_variables(folder: str) -> dict[str, str]:
    """Returns the two variables that point torch and Triton at a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton/0"}


def torch_folder(search_path: Sequence[str] | None = None) -> str:
    """Returns the folder of the torch that an import here would find, without importing it; empty: there is none."""
    for folder in sys.path if search_path is None else search_path:
        found = os.path.join(folder, "torch")
        if os.path.isfile(os.path.join(found, "version.py")):
            return os.path.abspath(found)
    return ""


def resolved_variables(variables: Mapping[str, str], folder: str | None = None) -> dict[str, str]:
    """Returns an artifact's variables for this machine: those that name a tool of torch get its path here.

    A tool that this torch does not have is left out, as torch itself leaves it.

    Args:
        variables: of a statement.
        folder: torch's; None: looked up if a variable asks for it.
    """
    resolved = {}
    for name, value in variables.items():
        if not value.startswith(TORCH):
            resolved[name] = value
            continue
        folder = torch_folder() if folder is None else folder
        path = folder + value.removeprefix(TORCH)
        if folder and os.path.isfile(path) and os.access(path, os.X_OK):
            resolved[name] = path
    return resolved


def isa_variables(built: str, here: str) -> dict[str, str]:
    """Returns what makes torch pick the ISA that native code was built for.

    Args:
        built: `cpu_isa` of the artifact; empty without native code.
        here: `cpu_isa` of this machine.
    """
    return {"ATEN_CPU_CAPABILITY": "avx2"} if built == "avx2" and here.startswith(("avx512", "amx")) else {}


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Tells whether the C++ compiler that torch would call is on PATH."""
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    paths = [os.path.join(folder, COMPILER) for folder in folders]
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)


def write_compiler_stub(folder: str, texts: Mapping[str, str]) -> None:
    """Writes `<folder>/g++`, which answers `--version` and `-v` as the builder's compiler did and refuses all else.

    Why: torch asks for the version on every start, also when nothing is left to compile.

    Args:
        folder: existing; the file must not exist.
        texts: `--version` → stdout, `-v` → stderr.
    """
    version, verbose = texts.get("--version", ""), texts.get("-v", "")
    refusal = f"cachepipe: there is no C++ compiler in this image, and {NOT_HELD}: "
    if os.access("/bin/sh", os.X_OK):
        script = (
            "#!/bin/sh\n"
            'if [ "$#" = 1 ] && [ "$1" = --version ]; then\n'
            f"printf %s {shlex.quote(version)}\nexit 0\nfi\n"
            'if [ "$#" = 1 ] && [ "$1" = -v ]; then\n'
            f"printf %s {shlex.quote(verbose)} >&2\nexit 0\nfi\n"
            f"printf '%s\\n' {shlex.quote(refusal)}\"g++ $*\" >&2\nexit 1\n"
        )
    else:
        script = (
            f"#!{sys.executable} -S\nimport sys\nwords = sys.argv[1:]\n"
            f"if words == ['--version']:\n    sys.stdout.write({version!r})\n"
            f"elif words == ['-v']:\n    sys.stderr.write({verbose!r})\n"
            f"else:\n    sys.exit({refusal!r} + 'g++ ' + ' '.join(words))\n"
        )
    path = os.path.join(folder, COMPILER)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(handle, 0o755)
        file.write(script)


def write_env_file(path: str, variables: Mapping[str, str]) -> str:
    """Returns the path, after writing `NAME=value` lines there that a shell, `docker --env-file` and dotenv readers take alike; whole or not at all.

    Raises:
        UsageError: the file cannot be written, is a device or a pipe, or a value has a line break, which those readers
            would take for another variable.
    """
    broken = sorted(name for name, value in variables.items() if set(value) & set("\r\n\0"))
    if broken:
        raise UsageError(f"`--env-file {path}` cannot hold `{broken[0]}`: its value has a line break")
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(variables.items()))
    temporary = f"{path}.tmp.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"`--env-file {path}` is not a regular file, and would be replaced by one")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(handle, 0o600)  # the umask may have taken our own right to read it
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"`--env-file {path}` cannot be written ({error.strerror})") from error
    return path


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `command`; if that is impossible, says why and exits 127 (not found) or 126.

    Signals that Python ignores are reset (a service must die of a broken pipe as anywhere else), and so is the mask.
    """
    for name in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT):
        if name in (signal.SIGPIPE, signal.SIGXFSZ) or signal.getsignal(name) is not signal.SIG_IGN:
            signal.signal(name, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # a closed stream is the service's affair
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        problem = error.strerror if isinstance(error, OSError) else str(error)
        streams.write(2, f"cachepipe: cannot run `{command[0]}`: {problem}\n")
        os._exit(NOT_FOUND if is_absent else NOT_EXECUTABLE)
