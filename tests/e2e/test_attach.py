"""The `.pth` file attaches to every kind of Python process that serves, and to no other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.services import DIGEST, forked, ready_lines, run


def marks(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "state" / "attempts" / DIGEST
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    "words",
    [
        (sys.executable,),
        (sys.executable, "-I"),
        (sys.executable, "-X", "utf8"),
        ("bash", "-c", f'"{sys.executable}" "$0"'),
        (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
    ],
    ids=["plain", "isolated", "options", "shell", "torchrun"],
)
def test_one_line_says_what_the_start_did(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, "serve()\ncachepipe.ready()", *words)
    assert done.returncode == 0, done.stderr
    lines = ready_lines(done)
    assert len(lines) == 1 and "start=start1" in lines[0] and "graphs=1" in lines[0] and "how=ready" in lines[0]
    assert marks(tmp_path) == []


@pytest.mark.parametrize("root", ["", "/restored"])
def test_garbage_is_collected_rarely_while_a_restored_graph_is_loaded_and_as_ever_before_after_and_in_a_late_compile(
    tmp_path: Path, root: str
) -> None:
    body = """
import gc
from torch._dynamo.callback import on_compile_start
inside = []
on_compile_start(lambda args: inside.append(gc.get_threshold()))
usual = gc.get_threshold()
serve()
cachepipe.ready()
with torch.inference_mode():
    model(torch.ones(5, 8))
print(usual[0], inside[0][0], gc.get_threshold() == usual, inside[0][1:] == usual[1:], inside[1] == usual)
"""
    done = forked(tmp_path, body, **({"CACHEPIPE_ROOT": root} if root else {}))
    usual, inside, *same = done.stdout.split()
    assert same == ["True"] * 3 and inside == ("50000" if root else usual), done.stdout + done.stderr


def test_a_sitecustomize_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.users_own = 1\n")
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    done = run(tmp_path, "serve()\nassert sys.users_own == 1\ncachepipe.ready()", PYTHONPATH=path)
    assert done.returncode == 0 and len(ready_lines(done)) == 1, done.stderr


def test_a_forked_server_reports_from_its_worker(tmp_path: Path) -> None:
    body = """
pid = os.fork()
if pid == 0:
    serve()
    cachepipe.ready()
    os._exit(0)
os.waitpid(pid, 0)
os._exit(0)
"""
    done = run(tmp_path, body)
    assert len(ready_lines(done)) == 1 and "graphs=1" in ready_lines(done)[0], done.stderr


def test_a_spawned_worker_attaches_by_itself(tmp_path: Path) -> None:
    body = """
def child():
    serve()
    cachepipe.ready()
if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    os._exit(process.exitcode)
"""
    done = run(tmp_path, body)
    assert done.returncode == 0 and len(ready_lines(done)) == 1, done.stderr


def test_torchs_compile_worker_is_left_alone(tmp_path: Path) -> None:
    code = "import sys, torch._inductor\nassert 'cachepipe.runtime.attach' not in sys.modules, sys.orig_argv\n"
    done = run(tmp_path, "", sys.executable, "-c", f"exec({code!r})", "torch/_inductor/compile_worker/__main__.py")
    assert done.returncode == 0, done.stderr


def test_without_the_variable_nothing_is_attached(tmp_path: Path) -> None:
    body = "serve()\nassert cachepipe.report()['attached'] is False\ncachepipe.ready()"
    done = run(tmp_path, body, CACHEPIPE_ATTACH="0")
    assert done.returncode == 0 and ready_lines(done) == [], done.stderr


def test_an_orderly_exit_without_ready_is_reported_and_ends_the_trial(tmp_path: Path) -> None:
    done = run(tmp_path, "serve()")
    assert "how=exit" in ready_lines(done)[0] and marks(tmp_path) == []


ENDS = ("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)", "raise RuntimeError('bad')")


def workers(work: str, ends: tuple[str, ...]) -> str:
    """Returns the code of a server that forks a worker for every end and prints how each one ended."""
    return f"""
for end in {ends!r}:
    pid = os.fork()
    if pid == 0:
        {work}
        exec(end)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_death_in_the_first_calls_leaves_the_mark(tmp_path: Path) -> None:
    done = run(tmp_path, workers("serve()", ENDS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGKILL), str(-signal.SIGSEGV), "1"]
    assert len(marks(tmp_path)) == 3


def test_a_process_that_loads_the_compiler_and_compiles_nothing_is_no_trial(tmp_path: Path) -> None:
    # a data loader's worker, a script of the entrypoint, a service that is stopped while it loads its weights
    attached = "assert cachepipe.report()['attached']"
    done = run(tmp_path, f"import torch._inductor\n{attached}\n{workers(attached, ('sys.exit(1)', ENDS[0]))}")
    assert (done.returncode, done.stdout.split()) == (0, ["1", str(-signal.SIGKILL)]), done.stderr
    assert marks(tmp_path) == []


def test_case_f4_a_late_compile_is_logged_with_its_shape_and_the_setting_that_caused_it(tmp_path: Path) -> None:
    body = """
serve()
cachepipe.ready()
model(torch.ones(4, 8))
print(cachepipe.report()["late_compiles"][0]["settings"])
with torch.inference_mode():
    model(torch.ones(5, 8))
print(cachepipe.report()["late"])
"""
    done = forked(tmp_path, body)
    changed, unchanged = [line for line in done.stderr.splitlines() if line.startswith("cachepipe late_compile")]
    assert 'settings="grad mode: inference_mode to grad"' in changed and "x:4x8" in changed
    assert "x:5x8" in unchanged and "settings" not in unchanged
    settings, late = done.stdout.splitlines()
    assert "grad mode: inference_mode to grad" in settings and late == "2"


OLD_GUARDS = """
def call(is_old, mark, **bounds):
    torch._dynamo.reset()
    model = torch.compile(case_models.mm_asks_for_sizes(is_old).eval().requires_grad_(False))
    sample = torch.ones(8, 8)
    mark(sample, 0, **bounds)
    with torch.inference_mode():
        model(sample)

call(True, torch._dynamo.maybe_mark_dynamic)
try:
    call(False, torch._dynamo.mark_dynamic, min=2, max=64)
except Exception as error:
    print(type(error).__name__)
"""


def test_case_b7_a_graph_of_other_code_that_breaks_a_correct_program_names_the_cache_as_suspect(tmp_path: Path) -> None:
    done = forked(tmp_path, OLD_GUARDS)
    assert done.stdout.strip() == "ConstraintViolationError", done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cachepipe suspect")]
    assert "came from the cache" in line and "case_models.py" in line and "Constraints violated" in line
    own = forked(
        tmp_path, OLD_GUARDS.replace("call(True", "0 and call(True"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty")
    )
    assert own.stdout.strip() == "" and "cachepipe suspect" not in own.stderr


def test_after_ready_no_frame_of_ours_runs_on_a_warm_call(tmp_path: Path) -> None:
    body = """
seen = []
def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(os.path.dirname(cachepipe.__file__)):
        seen.append(frame.f_code.co_name)
def count():
    seen.clear()
    sys.setprofile(profile)
    serve()
    sys.setprofile(None)
    return list(seen)
assert count() != []  # the recorder at work: what is counted is seen
cachepipe.ready()
assert count() == [], seen
"""
    done = forked(tmp_path, body)
    assert done.returncode == 0, done.stderr
