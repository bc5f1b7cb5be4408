"""Settling: rounds until one of them tunes nothing, then a tree that holds only what a start opens.

The rounds' processes are played: each leaves the files and the evidence that its round is about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.workdir import Binding, BuildRoot, EntryDir, WorkDir, build_root
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.domain.job import Job
from cachepipe.domain.record import record_bytes
from cachepipe.errors import BuildError
from cachepipe.workflows import entry_steps
from cachepipe.workflows.entry_steps import MAX_ROUNDS, TreeFacts
from cachepipe.workflows.jobs import Shop
from tests.support.restoring import write_tree
from tests.unit.domain.test_gates import GOOD, spec
from tests.unit.domain.test_gates import evidence as whole_evidence

SPEC = spec()
RECORD, KERNEL = "inductor/ab/{}.best_config", "inductor/ab/{}.py"


class Talk:
    def say(self, text: str) -> None:
        raise AssertionError(text)


def evidence(step: str, work: Work, kernels: tuple[str, ...] = ()) -> EntryEvidence:
    return replace(whole_evidence(*GOOD, work=work), step=step, tuned_kernels=kernels)


@dataclass
class Played:
    """What every round does, and what it was given."""

    entry: EntryDir
    root: BuildRoot
    rounds: dict[str, EntryEvidence] = field(default_factory=dict)
    use: Callable[[Path], object] = lambda _: None
    seen: list[tuple[str, str, str, list[str]]] = field(default_factory=list)
    """Name, the job's step, compile processes, files at the begin."""

    def run_job(
        self, shop: Shop, job: Job, name: str, entry: EntryDir, env: Mapping[str, str], before: object = ()
    ) -> EntryEvidence:
        self.seen.append((name, job.step, env["TORCHINDUCTOR_COMPILE_THREADS"], files(self.root.path)))
        write_tree(self.root.path, {RECORD.format(name): b"{}", KERNEL.format(name): b""})
        self.use(self.root.path)
        entry.pending(name).write_bytes(record_bytes(self.rounds[name]))
        return self.rounds[name]

    @property
    def shop(self) -> Shop:
        return Shop(WorkDir(self.entry.path.parent.parent), self.root, (), Talk())  # type: ignore[arg-type]

    def tuned(self, work: Work) -> EntryEvidence:
        write_tree(self.root.path, {RECORD.format("tune"): b"{}", KERNEL.format("tune"): b""})
        found = evidence("tune", work)
        self.entry.pending("tune").write_bytes(record_bytes(found))
        return self.entry.finish("tune", self.root)

    def settle(self, tune: EntryEvidence, **changes: Any) -> tuple[EntryEvidence | None, int]:
        return entry_steps._settle(self.shop, replace(SPEC, **changes), self.entry, tune, ())


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    entry = WorkDir(tmp_path / "work").entry(Binding("a" * 64, "f" * 64, str(tmp_path / "cache" / "demo")))
    (tmp_path / "cache").mkdir(mode=0o700)
    with build_root(tmp_path / "cache" / "demo") as root:
        found = Played(entry, root)
        monkeypatch.setattr(entry_steps, "run_job", found.run_job)
        yield found


def test_what_tuned_nothing_has_nothing_to_settle(played: Played) -> None:
    assert played.settle(played.tuned(Work(native_builds=3))) == (None, 0)
    assert played.seen == []


@pytest.mark.parametrize("work", [Work(benchmarks=4), Work(tuning_runs=1)])
def test_rounds_follow_until_one_neither_benchmarks_nor_tunes(played: Played, work: Work) -> None:
    played.rounds = {
        "settle-1": evidence("settle-1", work, ("triton_mm",)),
        "settle-2": evidence("settle-2", Work(triton_compiles=5)),
    }
    assert played.settle(played.tuned(work)) == (played.rounds["settle-2"], 2)
    assert [row[:3] for row in played.seen] == [("settle-1", "settle", "1"), ("settle-2", "settle", "1")]


def test_every_round_has_the_records_of_all_before_it_and_no_kernel_of_theirs(played: Played) -> None:
    played.rounds = {
        f"settle-{number}": evidence(f"settle-{number}", Work(benchmarks=3 - number)) for number in (1, 2, 3)
    }
    assert played.settle(played.tuned(Work(benchmarks=9)))[1] == 3
    records = [[RECORD.format(name) for name in names] for names in (["tune"], ["settle-1", "tune"])]
    assert [row[3] for row in played.seen] == [*records, sorted([RECORD.format("settle-2"), *records[1]])]


@pytest.mark.parametrize(
    ("kernels", "named"),
    [(("triton_mm", "cpp_gemm", "triton_mm"), "kernels: triton_mm, cpp_gemm"), ((), "kernels: not named by torch")],
)
def test_what_never_settles_is_refused_after_three_rounds_with_its_kernels(
    played: Played, kernels: tuple[str, ...], named: str
) -> None:
    played.rounds = {name: evidence(name, Work(benchmarks=7), kernels) for name in ("settle-1", "settle-2", "settle-3")}
    with pytest.raises(BuildError) as caught:
        played.settle(played.tuned(Work(benchmarks=9)))
    text = str(caught.value)
    assert MAX_ROUNDS == 3 and [row[0] for row in played.seen] == list(played.rounds)
    assert text.startswith(f"settle-3 failed: {SPEC.id}: ") and "still tuning after 3 rounds: 7 benchmarks" in text
    assert text.count("triton_mm") <= 1 and named in text
    assert "pin it by `options`" in caught.value.hint


def test_a_round_that_was_finished_before_a_kill_is_not_made_again(played: Played) -> None:
    played.rounds = {"settle-1": evidence("settle-1", Work(benchmarks=1))}
    tune = played.tuned(Work(benchmarks=9))
    with pytest.raises(KeyError, match="settle-2"):
        played.settle(tune)
    played.rounds = {"settle-2": evidence("settle-2", Work())}
    played.seen.clear()
    assert played.settle(tune) == (played.rounds["settle-2"], 2)
    assert [row[0] for row in played.seen] == ["settle-2"]


# --- trim -----------------------------------------------------------------------------------------------------------

TREE = {
    "inductor/ab/opened.py": b"1",
    "inductor/ab/opened.best_config": b"22",
    "inductor/ab/loser.py": b"333",
    "inductor/ab/loser.best_config": b"4444",
    "inductor/cd/opened.so": b"55555",
}
KEPT = ["inductor/ab/opened.best_config", "inductor/ab/opened.py"]


def settled(played: Played) -> None:
    played.tuned(Work(benchmarks=1))
    write_tree(played.root.path, TREE)
    played.entry.pending("settle-1").write_bytes(record_bytes(evidence("settle-1", Work())))
    played.entry.finish("settle-1", played.root)
    played.rounds = {"trim": evidence("trim", Work())}
    played.use = lambda root: (root / "inductor/ab/opened.py").read_bytes()


def trimmed(played: Played, **changes: Any) -> TreeFacts:
    shop = replace(played.shop, **changes)
    return entry_steps._trim(shop, SPEC, played.entry, 1)


def test_what_a_start_does_not_open_is_not_packed(played: Played) -> None:
    settled(played)
    before = files(played.entry.tree("settle-1"))
    sizes = {step: entry_steps._size(played.entry.tree(step)) for step in ("tune", "settle-1")}
    facts = trimmed(played)
    # what the process itself writes is opened by it
    own = [RECORD.format("trim"), KERNEL.format("trim")]
    assert files(played.entry.tree("trim")) == sorted([*KEPT, *own])
    assert facts == TreeFacts(sizes["tune"], sizes["settle-1"], 1, len(before) - len(KEPT), watched=True)
    assert [row[:3] for row in played.seen] == [("trim", "trim", "1")]
    assert not played.entry.tree("tune").exists() and not played.entry.tree("settle-1").exists()


def test_where_nobody_can_tell_what_was_opened_everything_is_packed(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(played)
    before = files(played.entry.tree("settle-1"))
    monkeypatch.setattr("cachepipe.adapters.openwatch.OpenWatch.opened", lambda _: None)
    facts = trimmed(played, keeps_tuned=True)
    assert not facts.watched and facts.dropped_files == 0
    assert set(before) < set(files(played.entry.tree("trim")))
    assert played.entry.tree("tune").exists()
