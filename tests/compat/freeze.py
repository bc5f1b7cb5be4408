"""Freezes a published artifact of the current formats into a folder that is never changed again.

    python -m tests.compat.freeze format-1          (from the checkout)

Run it once when a format gets a new number, and commit the folder, with the `marker.json` of a restore beside it. The keys that signed are forgotten: what is frozen can be
read for ever and never be made again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.packs import pack_tree, write_blob
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import lock_bytes
from cachepipe.workflows.channels import renew, write_lock
from cachepipe.workflows.publish import PackedArtifact, publish
from tests.support import authority
from tests.support.artifacts import NOW, ROOT, make_artifact
from tests.support.restoring import tree_files, write_tree

HERE = Path(__file__).parent


def freeze(folder: Path) -> None:
    """Writes `<folder>/store`, `trust.json` and `cachepipe.lock`: release demo, channel stable, two versions."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder.mkdir()
        store = LocalStore(folder / "store", authority.choice(work / "keys"))
        files = tree_files(ROOT)
        tree = write_tree(work / "tree", files)
        (work / "blobs").mkdir()
        packed = pack_tree(tree, dict.fromkeys(files, (0,)), ROOT, work / "blobs")
        explain = write_blob(b"{}\n", work / "blobs", LIMITS.explain_raw_bytes)
        statement = replace(
            make_artifact(work).statement, packs=packed.packs, table=packed.table_blob, explain=explain,
            files=len(packed.table.files), unpacked_bytes=packed.table.unpacked_bytes,
        )  # fmt: skip
        publish(store, "demo", "stable", PackedArtifact(statement, work / "blobs"), NOW)
        renew(store, "demo", "stable", NOW)
        (folder / "cachepipe.lock").write_bytes(lock_bytes(write_lock(store, "demo", "stable", work / "lock", NOW)))
        shutil.copy(work / "keys" / "trust.json", folder / "trust.json")
        shutil.rmtree(folder / "store" / ".tmp")


if __name__ == "__main__":
    freeze(HERE / sys.argv[1])
