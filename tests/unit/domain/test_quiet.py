"""A GPU is quiet or not, decided from samples."""

from __future__ import annotations

import dataclasses

import pytest

from cachepipe.domain.quiet import GpuSample, noises, summary

BUSY = GpuSample(
    busy_percent=90, sm_mhz=1980, memory_mhz=3201, temperature_c=45, power_w=400.0, throttle=0, strangers=0
)
IDLE = dataclasses.replace(BUSY, busy_percent=0, sm_mhz=345, power_w=75.0, throttle=0x1)


def changed(**facts: int) -> GpuSample:
    return dataclasses.replace(BUSY, **facts)


def test_work_between_idle_times_is_quiet_although_the_clock_rises_with_it() -> None:
    ramp = changed(sm_mhz=1200)
    assert noises([IDLE, IDLE, ramp, BUSY, BUSY, BUSY, IDLE, ramp, BUSY, BUSY]) == ()
    assert noises([]) == ()


@pytest.mark.parametrize(
    ("disturbed", "words"),
    [
        ([changed(strangers=1)], "1 other process used it"),
        ([IDLE, changed(strangers=3)], "3 other processes used it"),
        ([changed(throttle=0x40, temperature_c=91)], "throttled: too hot (hardware), up to 91 °C"),
        ([changed(throttle=0x20)], "throttled: too hot (driver), up to 45 °C"),
        ([changed(throttle=0x80)], "throttled: power brake, up to 45 °C"),
        ([changed(throttle=0x8)], "throttled: slowed down by the hardware, up to 45 °C"),
        ([changed(throttle=0x4)] * 5, "throttled: at its power limit in 4 of 14 samples"),
        ([changed(sm_mhz=1400)] * 5, "its clock moved: 1400 to 1980 MHz under load"),
    ],
)
def test_what_disturbs_a_search_is_named(disturbed: list[GpuSample], words: str) -> None:
    assert noises([*disturbed, *[BUSY] * 10]) == (words,)


def test_one_dip_and_a_moment_at_the_power_limit_disturb_nothing() -> None:
    assert noises([BUSY, changed(sm_mhz=1400), *[BUSY] * 20]) == ()
    assert noises([BUSY, changed(throttle=0x4), *[BUSY] * 20]) == ()


def test_bursts_that_the_mean_load_does_not_show_are_looked_at_and_idle_dips_are_not() -> None:
    burst = changed(busy_percent=0)
    dip = changed(busy_percent=0, sm_mhz=345, throttle=0x1)
    assert noises([*[burst] * 10, dip, dip, *[burst] * 10]) == ()
    slow = changed(busy_percent=0, sm_mhz=1400)
    assert noises([*[burst] * 10, *[slow] * 5]) == ("its clock moved: 1400 to 1980 MHz under load",)
    assert summary([burst, burst, dip])["busy_samples"] == 1


def test_the_summary_tells_the_clock_under_load_and_every_reason() -> None:
    found = summary([IDLE, BUSY, changed(sm_mhz=1965, throttle=0x4), IDLE])
    assert found["samples"] == 4 and found["busy_samples"] == 1
    assert found["sm_mhz"] == [1965, 1965, 1965]
    assert found["temperature_c"] == [45, 45, 45]
    assert found["throttle"] == ["0x1", "0x4"]
    assert summary([])["sm_mhz"] == []
