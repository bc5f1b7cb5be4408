"""Plans a release for one device.

1 expand the manifest into entries
2 digest each model's sources; look up the versions of what they import
3 give every entry its key
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachepipe.adapters.machine import builder_fingerprint
from cachepipe.adapters.manifest_file import manifest_error
from cachepipe.adapters.sources import Sources, absolute, distribution_versions, is_folder, model_sources
from cachepipe.domain.engine import AOT, JIT
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.manifest import CommandModel, FactoryModel, Manifest
from cachepipe.domain.manifest_rules import Problem
from cachepipe.domain.plan import entry_key, expand
from cachepipe.errors import UsageError


@dataclass(frozen=True)
class PlannedEntry:
    spec: EntrySpec
    key: str
    key_parts: Mapping[str, str]
    """Named part → its own digest."""


@dataclass(frozen=True)
class Plan:
    """What a build of one release × target does."""

    name: str
    root: str
    """`<cache_root>/<name>`."""
    device: str
    entries: tuple[PlannedEntry, ...]
    python_path: tuple[Path, ...]
    """Absolute folders, prepended to sys.path of the workers."""

    @property
    def has_host_code(self) -> bool:
        """Whether the artifact may hold objects that the host's compiler built."""
        return self.device == "cpu" or any(entry.spec.engine == AOT for entry in self.entries)


DYNAMIC_THREADS = "cpp.dynamic_threads"
"""Option of torch with which kernels ask for the thread count when they run, and keys leave it out (A6; read in 2.13.0)."""


def release_fingerprint(plan: Plan, has_native_code: bool) -> Fingerprint:
    """Returns what an artifact of a plan that is built here depends on: on the thread count only if some entry does.

    Raises:
        FingerprintMismatchError: as `builder_fingerprint`.
    """
    whole = builder_fingerprint(plan.device, has_native_code)
    if all(one.spec.engine == JIT and one.spec.options.get(DYNAMIC_THREADS) is True for one in plan.entries):
        return Fingerprint(tuple(part for part in whole.parts if part.name != "threads"))
    return whole


def plan_release(manifest: Manifest, manifest_path: Path, device: str) -> Plan:
    """Returns the entries of a release for a device, each with its key.

    Raises:
        UsageError: the manifest has no target for this device.
        ManifestError: a folder, module, attribute or source file that the manifest names does not exist, or a model
            is of a kind that this release cannot build; all of them are listed.
    """
    declared = list(dict.fromkeys(target.device for target in manifest.targets))
    if device not in declared:
        raise UsageError(f"the manifest has no target for device `{device}`: declared: {', '.join(declared)}")
    manifest_dir = manifest_path.absolute().parent
    python_path = tuple(absolute(manifest_dir / folder) for folder in manifest.python_path)
    problems = [
        Problem(("python_path", i), f"no such folder: {folder}")
        for i, folder in enumerate(python_path)
        if not is_folder(folder)
    ]
    # 1
    specs = expand(manifest, device)
    # 2
    found: dict[str, tuple[Sources, Mapping[str, str]]] = {}
    for i, model in enumerate(manifest.models):
        if isinstance(model, CommandModel):
            text = "building a whole program is not in this release: give a `factory`"
            problems.append(Problem(("models", i, "command"), text))
            continue
        sources = model_sources(_references(model), model.sources, manifest_dir.resolve(), python_path)
        problems += [Problem(("models", i, *problem.place), problem.message) for problem in sources.problems]
        found[model.name] = (sources, distribution_versions(sources.imports))
    if problems:
        raise manifest_error(manifest_path, problems)
    # 3
    entries = []
    for spec in specs:
        sources, versions = found[spec.model]
        entries.append(PlannedEntry(spec, *entry_key(spec, sources.digests, versions)))
    return Plan(manifest.name, manifest.root, device, tuple(entries), python_path)


def _references(model: FactoryModel) -> dict[str, str]:
    named = {"factory": model.factory, "inputs": model.inputs, "loss": model.loss}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def chosen_entries(plan: Plan, only: Sequence[str]) -> frozenset[str]:
    """Returns the ids of the entries to build: all, or those of `MODEL` or `MODEL:MODE`.

    Raises:
        UsageError: a choice that names no entry.
    """
    if not only:
        return frozenset(planned.spec.id for planned in plan.entries)
    found: set[str] = set()
    for choice in only:
        model, _, mode = choice.partition(":")
        ids = {p.spec.id for p in plan.entries if p.spec.model == model and mode in ("", p.spec.mode)}
        if not ids:
            known = ", ".join(sorted({f"{planned.spec.model}:{planned.spec.mode}" for planned in plan.entries}))
            raise UsageError(f"`--only {choice}` names no entry", hint=f"known: {known}")
        found |= ids
    return frozenset(found)
