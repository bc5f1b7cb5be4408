"""Makes `import cachepipe` work in this interpreter and its children: a bare host has torch, not what we need beside it."""

from __future__ import annotations

import importlib
import os
import site
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from code_digest import digest_of

REPOSITORY = Path(__file__).resolve().parent.parent
_TRIED = "GPU_WHEELS_INSTALLED"
"""A variable of the process that goes on after the install: it does not install again."""


class NotInstalled(Exception):
    """cachepipe cannot be imported here; the text says how it can."""


def install(wheels: Path) -> None:
    """Installs those wheels of the folder that are missing, and this checkout where cachepipe is; then starts this process anew.

    Raises:
        NotInstalled: there is neither cachepipe nor a folder of wheels, or they cannot be installed.
    """
    is_there = find_spec("cachepipe") is not None
    if is_there and (os.environ.get(_TRIED) or not _is_ours()):
        return
    missing = [str(path) for path in sorted(wheels.glob("*.whl")) if not _is_installed(path)]
    if is_there and not missing and _text(_packages() / _CHECKOUT) == f"{REPOSITORY}\n":
        return
    if not is_there and not wheels.is_dir():
        raise NotInstalled(
            f"{sys.executable} has no cachepipe: `{sys.executable} -m pip install {REPOSITORY}`, or, without a registry, "
            f"collect wheels by ci/gpu-wheels on a host with one and bring them here as {wheels}"
        )
    if os.environ.get(_TRIED):
        raise NotInstalled(f"{sys.executable} does not find what was installed: use a virtual environment")
    try:
        if missing:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
            subprocess.run([*pip, *missing], check=True)
        packages = _packages()
        packages.mkdir(parents=True, exist_ok=True)
        (packages / _CHECKOUT).write_text(f"{REPOSITORY}\n")
        (packages / "cachepipe-attach.pth").write_text((REPOSITORY / "cachepipe-attach.pth").read_text())
    except (subprocess.CalledProcessError, OSError) as error:
        raise NotInstalled(
            f"the wheels of {wheels} cannot be installed ({error}): run ci/gpu by the Python of a virtual environment that sees "
            "the host's torch: `python3 -m venv --system-site-packages .venv`"
        ) from error
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, _TRIED: "1"})


def require_this_code() -> None:
    """Raises `NotInstalled` unless this interpreter's cachepipe is this checkout's code: lines name the checkout's digest, and what
    is started here by `-m` may find either."""
    found = find_spec("cachepipe")
    package = Path(found.origin).parent if found is not None and found.origin else REPOSITORY
    if sources_digest(package) != sources_digest(REPOSITORY / "cachepipe"):
        raise NotInstalled(
            f"{package} is not the code of this checkout: `{sys.executable} -m pip install {REPOSITORY}` brings it there"
        )


def sources_digest(package: Path = REPOSITORY / "cachepipe") -> str:
    """Returns the digest of the package, wherever it lies: which code was measured."""
    return digest_of(sorted(package.rglob("*.py")), package.parent)


_CHECKOUT = "a-cachepipe-checkout.pth"


def _packages() -> Path:
    """Returns where pip installs: a user that may not write the interpreter's folder has one of its own."""
    folder = site.getsitepackages()[0]
    return Path(folder if os.access(folder, os.W_OK) else site.getusersitepackages())


def _is_ours() -> bool:
    """Tells whether an earlier call, of any checkout, made cachepipe known here; else its packages are someone else's."""
    return (_packages() / _CHECKOUT).exists()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_installed(wheel: Path) -> bool:
    name, _, rest = wheel.name.partition("-")
    wanted, _, tags = rest.partition("-")
    if not name or not wanted or not tags:
        raise NotInstalled(f"{wheel}: not the name of a wheel: remove it, or give it back its own")
    importlib.invalidate_caches()
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False
