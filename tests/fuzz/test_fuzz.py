"""Each fuzz target for a minute; an input that fails is kept in the corpus folder and named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release import REPOSITORY, clean_environment

SECONDS = int(os.environ.get("CACHEPIPE_FUZZ_SECONDS", "60"))


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["envelope", "index", "archive", "manifest"])
def test_no_input_makes_a_reader_raise_what_is_not_ours(tmp_path: Path, target: str) -> None:
    words = [sys.executable, "-m", "tests.fuzz.targets", target, "--seconds", str(SECONDS), "--corpus", str(tmp_path)]
    env = clean_environment(PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(words, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stat::number_of_executed_units" in done.stderr
    assert not list(tmp_path.glob("failed-*"))
