"""The properties of what a restore trusts (T-PROP), 20,000 examples each: ci/test runs the same ones with fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.release import REPOSITORY, clean_environment

FILES = [f"tests/unit/domain/test_{name}.py" for name in ("properties", "record", "fingerprint", "layout", "ulid")]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_a_property_holds_for_many_examples(file: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=nightly", file]
    done = subprocess.run(words, env=clean_environment(), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
