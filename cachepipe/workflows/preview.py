"""What a build would do, without doing it: `plan`.

1 read the manifest, with the command line's store and cache root
2 plan every declared device
3 (with a store) see which entry keys the channel's artifact for this machine holds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.manifest_file import load_manifest
from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.manifest import Manifest, with_cache_root
from cachepipe.errors import BuildError, FingerprintMismatchError
from cachepipe.workflows.carry import earlier_artifact
from cachepipe.workflows.plan import Plan, plan_release, release_fingerprint
from cachepipe.workflows.targets import matching_devices


@dataclass(frozen=True)
class Preview:
    """One target of a manifest."""

    plan: Plan
    store: str | None
    is_buildable: bool
    """This machine matches the target."""
    held: Mapping[str, str]
    """Entry key → id of the artifact that holds it already."""


def preview(
    manifest_path: Path, store: str | None, cache_root: str | None, now: datetime, trust: TrustChoice = NO_CHOICE
) -> tuple[Preview, ...]:
    """Returns every declared target with its entries, and what the store already has of them.

    Args:
        manifest_path: of the manifest.
        store: in place of the manifest's.
        cache_root: in place of the manifest's.
        now: an expired index holds nothing.
        trust: under which the store is read.

    Raises:
        ManifestError: the manifest has problems.
        UsageError: `cache_root` cannot be one.
        StoreError, IntegrityError: the store fails, or holds bytes that are not what they should be.
    """
    # 1
    manifest = load_manifest(manifest_path)
    if cache_root is not None:
        manifest = with_cache_root(manifest, cache_root)
    url = store or manifest.store
    opened = open_store(url, trust, now) if url else None
    try:
        matching = matching_devices(manifest, lambda _line: None)
    except BuildError:
        matching = ()
    # 2
    plans = [plan_release(manifest, manifest_path, device) for device in _devices(manifest)]
    # 3
    found = []
    for plan in plans:
        is_buildable = plan.device in matching
        held = _held(opened, plan, manifest.channel, now) if opened and is_buildable else {}
        found.append(Preview(plan, url, is_buildable, held))
    return tuple(found)


def _devices(manifest: Manifest) -> tuple[str, ...]:
    return tuple(dict.fromkeys(target.device for target in manifest.targets))


def _held(store: Store, plan: Plan, channel: str, now: datetime) -> Mapping[str, str]:
    earlier = earlier_artifact(store, plan, channel, _fingerprints(plan), now)
    if earlier is None:
        return {}
    artifact = earlier.artifact.statement.artifact
    return {entry.key: artifact for entry in plan.entries if entry.key in earlier.numbers}


def _fingerprints(plan: Plan) -> tuple[Fingerprint, ...]:
    """Returns what an artifact built here would have; none where a part cannot be read: nothing is carried over then."""
    found = []
    for has_native_code in (True, False):
        try:
            found.append(release_fingerprint(plan, has_native_code))
        except FingerprintMismatchError:
            continue
    return tuple(found)
