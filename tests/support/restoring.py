"""Published releases of a few made-up files that fit this machine, and restores of them as real processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from cachepipe.adapters.dev_keys import dev_key
from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.machine import builder_fingerprint
from cachepipe.adapters.packs import pack_tree, write_blob
from cachepipe.adapters.store import NO_CHOICE, TrustChoice
from cachepipe.domain.artifact import FileTable
from cachepipe.domain.index import IndexRow, timestamp
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import FORMAT as LOCK_FORMAT
from cachepipe.domain.lock import Lock, lock_bytes
from cachepipe.domain.record import Json
from cachepipe.domain.statement import FORMAT, Statement
from cachepipe.domain.ulid import ulid
from cachepipe.workflows.publish import PackedArtifact, publish
from tests.support.artifacts import entry_record, entry_spec
from tests.support.authority import new_key

REPOSITORY = Path(__file__).resolve().parents[2]


def tree_files(root: str, number: int = 0) -> dict[str, bytes]:
    """Returns path → bytes of a small cache tree of every kind, its group file naming `root`."""
    children = {"k.cubin": f"{root}/triton/0/KEY{number}/k.cubin"}
    return {
        f"inductor/fxgraph/ab/fab{number}/hash": b"graph %d" % number * 100,
        f"inductor/aotautograd/aab{number}/hash": b"outer",
        f"inductor/cd/ccd{number}.py": b"print('wrapper')\n",
        f"inductor/cd/ccd{number}.so": bytes(range(256)) * 100,
        f"inductor/cd/ccd{number}.best_config": b'{"XBLOCK": 1024}',
        "inductor/cache/system": json.dumps({"cache": {f"op{number}": {"x": 1.5}}, "system": "s"}).encode(),
        f"triton/0/KEY{number}/k.cubin": b"\0cubin" * 50,
        f"triton/0/KEY{number}/__grp__k.json": json.dumps({"child_paths": children}).encode(),
        f"triton/0/KEY{number}/empty": b"",
    }


def write_tree(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@dataclass(frozen=True)
class Published:
    """A release in a store, its files, and the folders around it."""

    store: LocalStore
    name: str
    root: str
    row: IndexRow
    statement: Statement
    table: FileTable
    files: Mapping[str, bytes]
    lock: str

    def restored_bytes(self, folder: str) -> dict[str, bytes]:
        """Returns path → bytes as they must be after a restore into `folder`."""
        return {path: data.replace(self.root.encode(), folder.encode()) for path, data in self.files.items()}


def packed_release(
    work: Path, name: str, root: str, files: Mapping[str, bytes], explain_data: Json = None, **changes: object
) -> tuple[PackedArtifact, FileTable]:
    """Returns a release of these files that fits this machine, packed below `work`; arguments as of `publish_release`."""
    tree = write_tree(work / "tree", files)
    (work / "blobs").mkdir()
    packed = pack_tree(tree, dict.fromkeys(files, (0,)), root, work / "blobs")
    now = datetime.now(timezone.utc)
    statement = Statement(
        format=FORMAT,
        artifact=ulid(now, os.urandom(10)),
        release=name,
        root=root,
        created_at=timestamp(now),
        device="cpu",
        fingerprint=builder_fingerprint("cpu", has_native_code=False).parts,
        entries=(entry_record(entry_spec()),),
        packs=packed.packs,
        table=packed.table_blob,
        explain=write_blob(json.dumps(explain_data or {}).encode(), work / "blobs", LIMITS.explain_raw_bytes),
        files=len(packed.table.files),
        unpacked_bytes=packed.table.unpacked_bytes,
        tuned_bytes=1_000_000,
        variables={"TORCHINDUCTOR_VEC_ISA_OK": "1"},
        compiler={},
        gates={"min_hit_rate": 1.0},
        builder={"cachepipe": "0.1.0"},
    )
    return PackedArtifact(replace(statement, **changes), work / "blobs"), packed.table  # type: ignore[arg-type]


def publish_release(
    base: Path,
    name: str = "demo",
    *,
    number: int = 0,
    root: str | None = None,
    files: Mapping[str, bytes] | None = None,
    trust: TrustChoice = NO_CHOICE,
    explain_data: Json = None,
    **changes: object,
) -> Published:
    """Publishes a small release into `<base>/store`, channel stable, with a lock file beside it.

    Args:
        base: an empty or used temporary folder.
        name: of the release.
        number: another number gives other bytes.
        root: where the builder compiled; default `<base>/cache/<name>`.
        files: the tree; default `tree_files`.
        trust: of the publisher; default: development keys.
        explain_data: entry → what its misses are compared with; default: nothing.
        changes: fields of the statement in place of the usual ones.
    """
    root = root or str(base / "cache" / name)
    files = files if files is not None else tree_files(root, number)
    work = base / f"work-{name}-{number}-{time.monotonic_ns()}"
    packed, table = packed_release(work, name, root, files, explain_data, **changes)
    store = LocalStore(base / "store", trust)
    if trust == NO_CHOICE:
        dev_key(store.root, lambda: new_key("d"))  # one for all folder stores, which a policy can list
    row = publish(store, name, "stable", packed, datetime.now(timezone.utc))
    lock = base / f"{name}.lock"
    lock.write_bytes(lock_bytes(Lock(LOCK_FORMAT, name, "stable", 1, (row,), root)))
    return Published(store, name, root, row, packed.statement, table, files, str(lock))


@dataclass(frozen=True)
class Ran:
    """What a restore process left."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def line(self) -> dict[str, str]:
        """Fields of the one line on stderr; fails if there is not exactly one."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("cachepipe restore ")]
        return dict(word.partition("=")[::2] for word in shlex.split(line)[2:])


def environment(base: Path, **extra: str) -> dict[str, str]:
    """Returns a service's environment: nothing of this process that matters, temporary folders below `base`."""
    (base / "tmp").mkdir(mode=0o700, exist_ok=True)
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(base / "tmp"), "HOME": str(base)}
    return {**kept, **extra}


def restore_words(*words: str) -> list[str]:
    return [sys.executable, "-m", "cachepipe", "restore", *words]


def run_restore(
    base: Path, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 60, **settings: object
) -> Ran:
    """Runs `cachepipe restore …` to its end, in a folder that is not the checkout."""
    began = time.monotonic()
    ran = subprocess.run(  # type: ignore[call-overload]
        restore_words(*words),
        env=environment(base) if env is None else dict(env),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **settings,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr, time.monotonic() - began)


PRINT_ENVIRONMENT = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))")
"""A service that tells its environment."""


def files_below(folder: str | Path) -> dict[str, bytes]:
    """Returns path → bytes of all files of a restored tree, without what is cachepipe's own."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".cachepipe"]
        for name in names:
            if name != ".lease":
                path = os.path.join(place, name)
                found[os.path.relpath(path, folder)] = Path(path).read_bytes()
    return found


def service_environment(ran: Ran) -> dict[str, str]:
    found = json.loads(ran.out)
    assert isinstance(found, dict)
    return found


def command(words: Sequence[str] = PRINT_ENVIRONMENT) -> tuple[str, ...]:
    return ("--", *words)
