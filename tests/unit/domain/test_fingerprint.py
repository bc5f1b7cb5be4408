"""A fingerprint refuses by name, never passes what it does not know, and says the difference in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.fingerprint import RULES, UNKNOWN, Fingerprint, Part, describe, differences, notes
from cachepipe.errors import IntegrityError
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, fingerprint_of

values = st.text(max_size=12).filter(lambda text: " + " not in text)
fingerprints = st.dictionaries(st.sampled_from(sorted(RULES)), values).map(
    lambda facts: Fingerprint(tuple(Part(name, value) for name, value in facts.items()))
)
free_parts = st.dictionaries(st.text(max_size=6), st.text(max_size=6))


def digest_of(facts: dict[str, str]) -> str:
    return Fingerprint(tuple(Part(name, value) for name, value in facts.items())).digest


def reasons(wanted: str, found: str, part: str) -> list[str]:
    return [describe(d) for d in differences(Fingerprint((Part(part, wanted),)), Fingerprint((Part(part, found),)))]


@given(fingerprints)
def test_a_fingerprint_fits_itself(fingerprint: Fingerprint) -> None:
    assert differences(fingerprint, fingerprint) == ()


@given(free_parts, free_parts)
def test_digests_are_equal_exactly_when_the_parts_are(one: dict[str, str], other: dict[str, str]) -> None:
    assert (digest_of(one) == digest_of(other)) == (one == other)


@given(free_parts, st.randoms(use_true_random=False))
def test_the_order_of_parts_does_not_count(facts: dict[str, str], random: object) -> None:
    assert digest_of(facts) == digest_of(dict(reversed(facts.items())))


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_moving_a_letter_between_name_and_value_changes_the_digest(name: str, middle: str, value: str) -> None:
    if middle:
        assert digest_of({name + middle: value}) != digest_of({name: middle + value})


@pytest.mark.parametrize("part", sorted(RULES))
def test_each_parts_name_and_value_change_the_digest(part: str) -> None:
    facts = {**CPU_PARTS, **CUDA_PARTS}
    assert digest_of(facts) != digest_of({**facts, part: facts[part] + "x"})
    assert Part(part, "1").digest not in {Part(other, "1").digest for other in RULES if other != part}


def test_a_part_given_twice_is_refused() -> None:
    with pytest.raises(IntegrityError):
        Fingerprint((Part("torch", "1"), Part("torch", "2")))


@pytest.mark.parametrize("part", sorted(set(RULES) - {"compiler"}))
def test_a_part_that_the_machine_lacks_differs(part: str) -> None:
    (difference,) = differences(Fingerprint((Part(part, "2"),)), Fingerprint(()))
    assert (difference.part, difference.wanted, difference.found) == (part, "2", None)
    assert describe(difference).startswith(f"{part}: wanted ")
    assert "found none" in describe(difference)


def test_a_part_that_the_artifact_lacks_is_not_compared() -> None:
    assert differences(Fingerprint(()), fingerprint_of(CPU_PARTS)) == ()


def test_a_part_without_a_rule_never_passes() -> None:
    newer = Fingerprint((Part("npu_firmware", "7"),))
    (difference,) = differences(newer, newer)
    assert describe(difference) == (
        "npu_firmware: wanted 7, found 7 (this cachepipe has no rule for it: upgrade cachepipe)"
    )


def test_a_lower_driver_refuses_and_a_higher_one_is_noted() -> None:
    assert reasons("580.65", "570.10", "driver") == [
        "driver: wanted >= 580.65, found 570.10 (lower than the builder's)"
    ]
    assert reasons("580.65", "580.65.06", "driver") == []
    newer = fingerprint_of(CUDA_PARTS, driver="1000.1")
    assert differences(fingerprint_of(CUDA_PARTS), newer) == ()
    assert notes(fingerprint_of(CUDA_PARTS), newer) == ("driver: built with 580.65.06, here 1000.1",)


def test_libc_must_be_of_the_same_family_and_not_older() -> None:
    assert reasons("glibc 2.36", "glibc 2.36", "libc") == []
    assert reasons("glibc 2.9", "glibc 2.36", "libc") == []
    assert reasons("glibc 2.36", "glibc 2.9", "libc") == [
        "libc: wanted >= glibc 2.36, found glibc 2.9 (lower than the builder's)"
    ]
    assert reasons("glibc 2.36", "musl", "libc") == ["libc: wanted >= glibc 2.36, found musl"]
    assert reasons("glibc 2.36", "glibc x", "libc") != []


def test_case_b1_a_cpu_without_the_flags_refuses_by_name() -> None:
    assert reasons("avx2 avx512f fma", "avx avx2 fma", "cpu_flags") == [
        "cpu_flags: wanted avx2 avx512f fma, found avx avx2 fma (missing avx512f)"
    ]
    assert reasons("avx2 fma", "avx avx2 fma", "cpu_flags") == []


@pytest.mark.parametrize(
    ("wanted", "found", "fits"),
    [
        ("avx2", "avx2", True),
        ("avx2", "avx512_vnni+bf16", True),
        ("avx2", "amx+bf16", True),
        ("avx2", "default", False),
        ("avx2", "asimd", False),
        ("avx512", "avx2", False),
        ("avx512", "avx512_vnni", False),
        ("avx512+bf16", "avx512", False),
        ("default", "avx2", False),
    ],
)
def test_only_avx2_code_is_accepted_on_a_higher_cpu(wanted: str, found: str, fits: bool) -> None:
    assert (reasons(wanted, found, "cpu_isa") == []) == fits


def test_case_a6_another_thread_count_is_announced_as_an_expected_miss() -> None:
    assert reasons("1", "2", "threads") == [
        "expected miss: threads 1 to 2 (set OMP_NUM_THREADS=1, or build with this thread count or `cpp.dynamic_threads`)"
    ]


def test_case_b11_another_build_of_the_same_torch_version_differs() -> None:
    rebuilt = fingerprint_of(CPU_PARTS, torch_build="0" * 40)
    (difference,) = differences(fingerprint_of(CPU_PARTS), rebuilt)
    assert difference.part == "torch_build"


def test_an_absent_compiler_fits_and_another_one_does_not() -> None:
    without = {name: value for name, value in CPU_PARTS.items() if name != "compiler"}
    assert differences(fingerprint_of(CPU_PARTS), fingerprint_of(without)) == ()
    assert [d.part for d in differences(fingerprint_of(CPU_PARTS), fingerprint_of(CPU_PARTS, compiler="clang"))] == [
        "compiler"
    ]


def test_several_gpu_models_never_fit() -> None:
    mixed = "NVIDIA H200 + NVIDIA L4"
    assert len(reasons("NVIDIA H200", mixed, "gpu_name")) == 1
    assert len(reasons(mixed, mixed, "gpu_name")) == 1
    assert "CUDA_VISIBLE_DEVICES" in reasons("NVIDIA H200", mixed, "gpu_name")[0]


def test_a_gpu_fact_that_cannot_be_read_here_is_left_to_the_service() -> None:
    assert reasons("16896", UNKNOWN, "gpu_cores") == []
    assert reasons("9.0", UNKNOWN, "torch") != []
    blind = fingerprint_of(CUDA_PARTS, gpu_cores=UNKNOWN)
    assert notes(fingerprint_of(CUDA_PARTS), blind) == ("gpu_cores: built with 16896, here unknown",)


def test_a_machine_that_serves_both_devices_fits_artifacts_of_each() -> None:
    assert reasons("cpu", "cpu cuda", "device") == []
    assert reasons("cuda", "cpu", "device") == ["device: wanted cuda, found cpu"]


def test_every_difference_is_reported_not_the_first() -> None:
    found = fingerprint_of(CPU_PARTS, torch="2.11.0", python="cpython 3.12", venv="/venv")
    assert [d.part for d in differences(fingerprint_of(CPU_PARTS), found)] == ["torch", "python", "venv"]
