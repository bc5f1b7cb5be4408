"""The properties of what a restore trusts (T-PROP), 20,000 examples each: ci/test runs the same ones with fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.release import REPOSITORY, clean_environment

FILES = [
    *(f"tests/unit/domain/test_{name}.py" for name in ("properties", "record", "fingerprint", "layout", "ulid")),
    *(f"tests/unit/domain/test_{name}.py" for name in ("trust", "lock", "collect", "kms_log")),
    "tests/unit/adapters/test_packs.py",
]


def test_no_file_of_properties_is_left_out() -> None:
    """All but those that say their own number of examples."""
    found = {path: path.read_text() for path in (REPOSITORY / "tests/unit").rglob("test_*.py")}
    with_properties = {str(path.relative_to(REPOSITORY)) for path, text in found.items() if "\n@given(" in text}
    own_number = {str(path.relative_to(REPOSITORY)) for path, text in found.items() if "max_examples=" in text}
    assert with_properties - own_number == set(FILES)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_a_property_holds_for_many_examples(file: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=nightly"]
    words += ["--timeout", "3600", file]
    done = subprocess.run(words, env=clean_environment(), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
