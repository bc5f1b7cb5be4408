"""What a crash, race or stress test counted: one line of JSON per test, for `ci/nightly` to sum up."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TypeAlias

Record: TypeAlias = Mapping[str, str | int | float]

VARIABLE = "CACHEPIPE_TEST_COUNTS"
"""Names the file; without it nothing is written."""


def write_counts(counts: Record) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(counts, sort_keys=True) + "\n")
