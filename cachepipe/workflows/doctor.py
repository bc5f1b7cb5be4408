"""One page of facts and verdicts about a machine: would a start here be warm, and if not, why.

1 machine     fingerprint, GPUs, compiler
2 torch       version, known defects, back-ports, attach
3 variables   what loses every entry, what is harmless
4 folders     where caches really lie: mount, room, privacy, what is restored there
5 quarantine  starts that died with what is restored
6 store       reachable, rights, conditions, channels and their expiry, trust

Nothing is changed, except one object that `probes_store` writes and removes. torch is never imported.
"""

from __future__ import annotations

import os
import pwd
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

from cachepipe.adapters import cachedir
from cachepipe.adapters.gpu import visible_gpus
from cachepipe.adapters.gpu_watch import open_watch
from cachepipe.adapters.machine import compiler_texts, machine_fingerprint
from cachepipe.adapters.mounts import Mount, mount_of
from cachepipe.adapters.store import NO_CHOICE, TrustChoice
from cachepipe.domain import marker as markers
from cachepipe.domain.checkup import FAIL, NOTE, OK, WARN, Check, Checkup
from cachepipe.domain.defects import defects_of
from cachepipe.domain.fingerprint import SEVERAL, UNKNOWN
from cachepipe.domain.limits import GIB, LIMITS, MIB
from cachepipe.domain.quiet import THROTTLES
from cachepipe.errors import CachepipeError
from cachepipe.runtime import attempts, backports
from cachepipe.workflows.doctor_ask import Question, answers
from cachepipe.workflows.doctor_files import file_checks
from cachepipe.workflows.doctor_store import store_checks
from cachepipe.workflows.host import host_tag

LITTLE_ROOM = GIB
_HARMFUL = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "switches every cache off: unset it",
    "TORCHDYNAMO_DISABLE": "nothing is compiled at all: unset it",
    "TORCH_COMPILE_DISABLE": "nothing is compiled at all: unset it",
    "TORCH_COMPILE_DEBUG": "changes every key: unset it, `TORCH_LOGS` and `TORCH_TRACE` keep the keys",
    "LOG_TLPARSE": "changes every key: unset it",
    "TORCHINDUCTOR_WORKER_LOGPATH": "changes every key: unset it",
    "TORCHINDUCTOR_FILE_LOCK_TIMEOUT": "changes every key unless the builder had the same value",
    "TORCHINDUCTOR_COMPILE_WORKER_WAIT_TIMEOUT": "changes every key unless the builder had the same value",
    "TORCH_COMPILE_CACHE_KEY_TAG": "changes every key unless the builder had the same value",
    "CXX": "changes every key with `--no-attach`; else `g++` of PATH stays the compiler, as in builders",
    "TRITON_ALWAYS_COMPILE": "Triton compiles although its files are there: unset it",
    "CACHEPIPE_DISABLE": "cachepipe is switched off",
}
_SURE = ("unset it", "switched off")


@dataclass(frozen=True)
class DoctorRequest:
    """The options of `cachepipe doctor`."""

    store: str | None = None
    names: tuple[str, ...] = ()
    """Releases to look at; empty: all that lie in the cache root and in the store."""
    channel: str = "stable"
    cache_root: str = cachedir.DEFAULT_CACHE_ROOT
    state_dir: str | None = None
    """None: `<cache_root>/.state`."""
    probes_store: bool = False
    reads_files: bool = False
    """Compare every byte of the restored folders."""
    trust: TrustChoice = NO_CHOICE
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


def doctor(request: DoctorRequest, now: datetime) -> Checkup:
    """Returns every fact with its verdict; never raises for what it finds.

    Args:
        request: the options.
        now: at which channels must not have expired.
    """
    environment, root, names = request.environment, request.cache_root, request.names
    questions = [
        Question("machine", "fingerprint", _fingerprint),
        Question("machine", "compiler", lambda: _compiler(environment)),
        Question("machine", "GPUs", lambda: _gpus(environment)),
        Question("machine", "GPU state", lambda: _gpu_state(environment)),
        Question("torch", "torch", _torch),
        Question("torch", "attach", _attach_file),
        Question("variables", "torch's keys", lambda: _variables(environment)),
        Question("folders", "restores go to", lambda: _usable(root, environment)),
        *(
            Question("folders", name, partial(_cache_folder, name, path, environment))
            for name, path in _cache_folders(root, environment).items()
        ),
        Question("folders", "restored", lambda: _all_marked(root, names, environment)),
        Question("quarantine", "starts", lambda: _quarantine(request)),
    ]
    of_store = store_checks(request.store, names, request.channel, now, request.probes_store, request.trust)
    of_files = _all_files(request) if request.reads_files else []  # as long as it takes: no question with a limit
    return Checkup((*answers(questions), *of_files, *of_store))


# --- 1 machine -------------------------------------------------------------------------------------------------------


def _fingerprint() -> list[Check]:
    fingerprint = machine_fingerprint(["cpu", "cuda"])
    rows = [Check("machine", "fingerprint", fingerprint.digest[:16])]
    rows += [_part(part.name, part.value) for part in fingerprint.parts if part.name not in ("cpu_flags", "compiler")]
    flags = fingerprint.get("cpu_flags")
    if flags:
        rows.append(Check("machine", "cpu_flags", f"{len(flags.split())} flags that native code may use"))
    return rows


def _compiler(environment: Mapping[str, str]) -> list[Check]:
    compiler = compiler_texts(environment).get("--version", "").partition("\n")[0]
    if compiler:
        return [Check("machine", "compiler", compiler)]
    advice = "a start that only hits needs none; what misses cannot be compiled for CPU and runs eager"
    return [Check("machine", "compiler", "none on PATH", NOTE, advice)]


def _gpus(environment: Mapping[str, str]) -> list[Check]:
    gpus = visible_gpus(environment)
    if gpus is None:
        return [Check("machine", "NVML", "does not answer: no GPU is visible here", NOTE, "CPU targets need none")]
    rows = []
    for number, gpu in enumerate(gpus.visible):
        memory = f"{gpu.memory_bytes / GIB:.0f} GiB"
        text = f"{gpu.name}, capability {gpu.capability}, {memory}, MIG {gpu.mig_profile}"
        rows.append(Check("machine", f"GPU {number}", text))
    if len(gpus.visible) > 1:
        advice = "let each process see one (`CUDA_VISIBLE_DEVICES`): the index is part of torch's keys"
        rows.append(Check("machine", "visible GPUs", str(len(gpus.visible)), WARN, advice))
    return rows


def _gpu_state(environment: Mapping[str, str]) -> list[Check]:
    """Tells what the GPU is doing now: a build on one that is not quiet would be refused."""
    with open_watch(environment) as watch:
        if watch is None:
            return []
        look, others = watch.sample(), watch.strangers_before(0.0)
    troubles = [words for bit, words in THROTTLES.items() if look.throttle & bit]
    troubles += [f"{others} other processes use it"] if others else []
    text = f"{look.busy_percent} % busy, {look.sm_mhz} MHz, {look.temperature_c} °C, {look.power_w:.0f} W"
    if not troubles:
        return [Check("machine", "GPU state", text)]
    advice = "a start works, a build here would choose kernels by noise: wait, or see `build --allow-noisy`"
    return [Check("machine", "GPU state", f"{text}; {', '.join(troubles)}", WARN, advice)]


def _part(name: str, value: str) -> Check:
    if SEVERAL in value:
        return Check("machine", name, value, FAIL, "several models are visible: choose one by `CUDA_VISIBLE_DEVICES`")
    if value == UNKNOWN:
        return Check("machine", name, "unknown", WARN, "give the container the driver's `utility` capability (NVML)")
    return Check("machine", name, value)


# --- 2 torch ---------------------------------------------------------------------------------------------------------


def _torch() -> list[Check]:
    text = machine_fingerprint([], has_compiler_part=False).get("torch")
    if text is None:
        return [Check("torch", "torch", "not installed here", FAIL, "run the doctor in the service's own environment")]
    rows = []
    applied = {backport.name: backport for backport in backports.matching(text)}
    version = _version(text)
    for defect in defects_of(version) if version else ():
        is_mended = not defect.backport or defect.backport in applied
        how = f"{defect.remedy}{f' (back-port {defect.backport})' if defect.backport else ''}"
        rows.append(Check("torch", defect.reference, defect.what, OK if is_mended else WARN, how))
    if version is None or version > max(backport.last for backport in backports.TABLE):
        advice = "the recorder works, back-ports are left out: verify before you promote"
        rows.append(Check("torch", "version", f"{text} is newer than what was checked", NOTE, advice))
    names = ", ".join(applied) or "none applies"
    rows.append(Check("torch", "back-ports", f"{names} (torch {text})"))
    return rows


def _version(text: str) -> tuple[int, int] | None:
    try:
        major, minor = text.split("+", maxsplit=1)[0].split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None


def _attach_file() -> list[Check]:
    import site
    import sysconfig

    folders = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("*cachepipe-attach.pth"))]
    advice = "" if found else "install the wheel, or call `cachepipe.attach()`: without it nothing is recorded"
    text = found[0] if found else "no `.pth` file in site-packages"
    return [Check("torch", "attach", text, OK if found else WARN, advice)]


# --- 3 variables -----------------------------------------------------------------------------------------------------


def _variables(environment: Mapping[str, str]) -> list[Check]:
    rows = []
    for name, advice in _HARMFUL.items():
        value = environment.get(name, "")
        if value and value != "0":
            is_sure = any(word in advice for word in _SURE)
            rows.append(Check("variables", name, value, FAIL if is_sure else WARN, advice))
    known = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    others = sorted(
        name
        for name in environment
        if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_")) and name not in (*known, *_HARMFUL)
    )
    if others:
        rows.append(
            Check("variables", "others", ", ".join(others), NOTE, "they may enter the keys: the builder needs the same")
        )
    return rows or [Check("variables", "torch's keys", "nothing set that changes them")]


# --- 4 folders -------------------------------------------------------------------------------------------------------


def _cache_folders(root: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what caches of this environment lie in; empty: torch's default."""
    names = ("TORCHINDUCTOR_CACHE_DIR", *(name for name in ("TRITON_CACHE_DIR",) if environment.get(name)))
    return {"cache root": root, **{name: environment.get(name, "") for name in names}}


def _cache_folder(name: str, path: str, environment: Mapping[str, str]) -> list[Check]:
    if path:
        return _mount(name, mount_of(path))
    default = _torch_default(environment)
    if default is None:
        advice = "set it, as `cachepipe restore` does: torch looks for the user's name and ends without one"
        return [Check("folders", name, f"unset, and uid {os.geteuid()} has no name", WARN, advice)]
    advice = "torch's default, below a shared folder: `cachepipe restore` sets a private one"
    return [Check("folders", name, f"unset: {default}", NOTE, advice), *_mount(name, mount_of(default))]


def _torch_default(environment: Mapping[str, str]) -> str | None:
    """Returns the folder that torch takes by itself; None: it would find no name for the user.

    Source: torch/_inductor/runtime/cache_dir_utils.py (`default_cache_dir`), 2.11.0 and 2.13.0.
    """
    names = (environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
    try:
        user = next((name for name in names if name), None) or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return None
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _usable(root: str, environment: Mapping[str, str]) -> list[Check]:
    """Tells where a restore would put its folder, without making one."""
    candidates = (root, *cachedir.scratch_folders(environment))
    problems = []
    for number, folder in enumerate(candidates):
        try:
            if os.path.lexists(folder):
                cachedir.check_private(folder, closes=False)
                cachedir.check_usable(folder, cachedir.Need(MIB, 16))
            else:
                cachedir.check_ancestors(folder)
                cachedir.check_usable(mount_of(folder).path, cachedir.Need(MIB, 16))
        except CachepipeError as error:
            problems.append(str(error))
            continue
        if number == 0:
            return [Check("folders", "restores go to", root)]
        user = os.geteuid()
        advice = f"run once: install -d -m 0700 -o {user} {root}; elsewhere paths are rewritten at restore"
        return [Check("folders", "restores go to", f"{folder}, because {problems[0]}", WARN, advice)]
    advice = "give the service a private, writable folder that allows exec (`--dest`, a tmpfs, an emptyDir)"
    return [Check("folders", "restores go to", "; ".join(problems), FAIL, advice)]


def _mount(name: str, mount: Mount) -> list[Check]:
    inodes = "" if mount.free_inodes is None else f", {mount.free_inodes} inodes free"
    text = f"{mount.path} on {mount.point} ({mount.kind}), {mount.free_bytes / GIB:.1f} of {mount.size_bytes / GIB:.1f} GiB free{inodes}"
    rows = [Check("folders", name, text)]
    findings = (
        (mount.is_read_only, "read-only", "torch writes lock files even on a full hit: restore into a writable folder"),
        (mount.is_noexec, "noexec", "native objects cannot be loaded from it: mount it with exec"),
        (mount.is_network, "network file system", "locks and renames do not keep their promises: use a local folder"),
        (mount.free_bytes < LITTLE_ROOM, "little room", "an artifact and what late compiles add may not fit"),
    )
    rows += [Check("folders", name, what, WARN, advice) for is_so, what, advice in findings if is_so]
    if mount.kind == "tmpfs":
        advice = "its files count as the container's memory, and are gone after a restart"
        rows.append(Check("folders", name, f"tmpfs of {mount.size_bytes / GIB:.1f} GiB", NOTE, advice))
    return rows


def _restored(root: str, names: tuple[str, ...]) -> list[Path]:
    try:
        folders = sorted(path for path in Path(root).iterdir() if (path / markers.PATH).is_file())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # told by "restores go to"
    return [path for path in folders if not names or path.name in names]


def _all_marked(root: str, names: tuple[str, ...], environment: Mapping[str, str]) -> list[Check]:
    return [check for folder in _restored(root, names) for check in _marked(folder, environment)]


def _all_files(request: DoctorRequest) -> list[Check]:
    rows = []
    for folder in _restored(request.cache_root, request.names):
        with suppress(OSError, CachepipeError):  # told by "restored"
            rows += file_checks(folder, _read_marker(folder))
    return rows


def _read_marker(folder: Path) -> markers.Marker:
    return markers.read_marker(cachedir.read_own(str(folder / markers.PATH), LIMITS.table_raw_bytes))


def _marked(folder: Path, environment: Mapping[str, str]) -> list[Check]:
    name = f"restored {folder.name}"
    try:
        marker = _read_marker(folder)
    except (OSError, CachepipeError) as error:
        return [Check("folders", name, f"marker unreadable: {error}", WARN, "it is replaced at the next restore")]
    digests = ", ".join(digest[:12] for digest in marker.statements)
    text = f"{digests}, {len(marker.files)} files, {marker.channel or 'lock file'}, {marker.trust}"
    rows = [Check("folders", name, text)]
    if marker.host != host_tag(environment):
        advice = "fingerprints are compared anew at the next restore"
        rows.append(Check("folders", name, "made on another host, boot or torch than this one", NOTE, advice))
    if marker.root != str(folder):
        rows.append(
            Check("folders", name, f"was restored at {marker.root}", WARN, "restore it again where it lies now")
        )
    return rows


# --- 5 quarantine ----------------------------------------------------------------------------------------------------


def _quarantine(request: DoctorRequest) -> list[Check]:
    state = request.state_dir or os.path.join(request.cache_root, ".state")
    rows = []
    for folder in _restored(request.cache_root, request.names):
        try:
            marker = _read_marker(folder)
        except (OSError, CachepipeError):
            continue
        for digest in marker.statements:
            count = attempts.unfinished(state, digest, time.time())
            if count:
                is_out = count >= attempts.MAX_UNFINISHED
                advice = (
                    "the next start is cold once, and then it is tried again"
                    if is_out
                    else "one more, and a start is cold"
                )
                text = f"{count} starts with {digest[:12]} died before they were ready, within 15 minutes"
                rows.append(Check("quarantine", folder.name, text, FAIL if is_out else WARN, advice))
    return rows or [Check("quarantine", "starts", "none died with what is restored")]
