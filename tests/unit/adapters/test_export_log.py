"""The lines of an export: what is done, which programs it starts, and where it hangs."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import subprocess, sys, time
from cachepipe.adapters import export_log
export_log.STACK_S = 0.2
with export_log.ExportLog() as log:
    log.say("traced batch=8")
    subprocess.run([sys.executable, "-c", "", "/somewhere/wrapper.cpp"])
    def hang():
        time.sleep(0.5)
    hang()
subprocess.run([sys.executable, "-c", "", "/somewhere/later.cpp"])
"""


def test_steps_programs_and_stacks_are_told_while_it_runs_and_nothing_after() -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    lines = ran.stderr.splitlines()
    steps = [line.partition(" s: ")[2] for line in lines if line.startswith("export: ")]
    assert steps[0] == "traced batch=8"
    assert steps[1].startswith("starts python") and steps[1].endswith(" /somewhere/wrapper.cpp")
    assert len(steps) == 2
    assert any("in hang" in line for line in lines)
