from __future__ import annotations

from cachepipe.workflows.entry_steps import used_files

FILES = [
    "inductor/ab/cab.py",
    "inductor/ab/cxy.best_config",
    "inductor/ab/cxy.py",
    "inductor/cd/cab.so",
    "triton/0/KEY/kernel.cubin",
    "triton/0/KEY/kernel.json",
    "triton/0/KEY/__grp__kernel.json",
]


def test_files_that_nobody_opened_are_dropped() -> None:
    assert used_files(FILES, {"inductor/ab/cab.py"}) == ["inductor/ab/cab.py"]


def test_a_file_beside_an_opened_one_with_the_same_stem_is_kept() -> None:
    kept = used_files(FILES, {"triton/0/KEY/kernel.json", "inductor/ab/cxy.py"})
    assert kept == ["inductor/ab/cxy.best_config", "inductor/ab/cxy.py", *FILES[4:6]]


def test_the_same_stem_in_another_folder_does_not_count() -> None:
    assert "inductor/cd/cab.so" not in used_files(FILES, {"inductor/ab/cab.py"})
