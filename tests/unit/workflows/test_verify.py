from __future__ import annotations

from dataclasses import replace

import pytest

from cachepipe.domain.evidence import BucketEvidence, Work
from cachepipe.domain.phases import Phases
from cachepipe.domain.statement import BucketFacts
from cachepipe.workflows.verify import outputs_word

BUILT = BucketFacts({"batch": 1}, 1, 5.0, 0.5, 0.1, 0.0, "d" * 64)
FOUND = BucketEvidence({"batch": 1}, 3, 0.5, Phases(), 1, 0, Work(), "d" * 64, 0.0, True)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (FOUND, "as built"),
        (replace(FOUND, output_digest="e" * 64, max_abs_diff=1e-7), "close"),
        (replace(FOUND, is_close=False), "differ"),
        (replace(FOUND, is_close=None), "differ"),
    ],
)
def test_case_b4_outputs_are_compared_with_eager_and_with_the_digest_of_the_build(
    found: BucketEvidence, word: str
) -> None:
    assert outputs_word(BUILT, found) == word
