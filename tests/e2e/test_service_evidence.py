"""What a running service tells: late compiles, strict mode, JSON lines, metrics; each script is a real process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachepipe.domain.statement import statement_bytes
from cachepipe.domain.variables import cache_variables
from tests.support.artifacts import CPU_PARTS, CUDA_PARTS, entry_record, entry_spec, make_artifact
from tests.support.jobs import MODELS
from tests.support.restoring import command, environment, publish_release, run_restore
from tests.support.services import SERVICE, forked, ready_lines, run

WARM = """
x = torch.ones(4, 8)
def ask(size, grad=False):
    with torch.inference_mode(not grad):
        return model(torch.ones(size, 8))
serve()
cachepipe.ready()
"""


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def late_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("cachepipe late_compile")]


def test_case_f11_l2_a_late_compile_tells_shape_guard_and_call_in_logfmt_json_and_metrics(tmp_path: Path) -> None:
    body = f"""{WARM}
from prometheus_client import CollectorRegistry, generate_latest
registry = CollectorRegistry()
cachepipe.register_metrics(registry)
def handle_request():
    return ask(5)
handle_request()
ask(4)
found = cachepipe.report()
assert found["late"] == 1 and found["late_compiles"][0]["sizes"] == {{"x": [5, 8]}}, found["late_compiles"]
print(generate_latest(registry).decode())
"""
    done = forked(tmp_path, body, CACHEPIPE_EVENTS=str(tmp_path / "events.jsonl"))
    assert done.returncode == 0, done.stderr
    (line,) = late_lines(done)
    assert "inputs=x:5x8" in line and "outcome=compiled" in line and "start=start1" in line
    assert "service.py:" in line and "in ask" in line and "case_models.py" in line
    assert "size mismatch at index 0. expected 4, actual 5" in line
    rows = {row["event"]: row for row in events(tmp_path / "events.jsonl")}
    assert set(rows) >= {"ready", "compile", "evidence", "late_compile"}
    assert rows["ready"]["start"] == rows["late_compile"]["start"] == "start1"
    assert rows["compile"]["phases"]["trace_s"] > 0 and "case_models.py" in rows["compile"]["place"]
    assert rows["evidence"]["settings"]["grad mode"] == "inference_mode"
    metrics = dict(line.rpartition(" ")[::2] for line in done.stdout.splitlines() if line and line[0] != "#")
    assert metrics["cachepipe_late_compiles_total"] == "1.0" and metrics["cachepipe_ready"] == "1.0"
    assert metrics['cachepipe_lookups_total{layer="aotautograd",outcome="miss"}'] == "2.0"
    assert float(metrics['cachepipe_phase_seconds_total{phase="trace"}']) > 0
    assert float(metrics["cachepipe_late_compile_seconds_total"]) > 0


def test_strict_mode_raises_a_clear_error_that_torch_neither_wraps_nor_hides(tmp_path: Path) -> None:
    body = f"""{WARM}
from cachepipe.errors import LateCompileError
import torch._dynamo
def refused(hides, size, **settings):
    torch._dynamo.config.suppress_errors = hides
    try:
        ask(size, **settings)
    except LateCompileError as error:
        assert type(error).__name__ == "LateCompileError"
        return str(error)
    raise AssertionError("it was compiled, or ran eager")
for hides in (False, True):
    text = refused(hides, 5)
    assert "compile after `ready()`: forward (" in text and "x 5×8" in text, text
    assert "in ask" in text and "size mismatch" in text and "TORCHDYNAMO_VERBOSE" not in text, text
text = refused(False, 4, grad=True)
assert "x 4×8" in text and "inside `entry.context()`" in text and "grad mode: inference_mode to grad" in text, text
torch._dynamo.config.suppress_errors = False
assert ask(4).shape == (4, 8)  # what is warm goes on
assert [late["outcome"] for late in cachepipe.report()["late_compiles"]] == ["refused"] * 3
torch.compiler.reset()  # which empties torch's own list of callbacks
assert "x 4×8" in refused(False, 4) and len(cachepipe.report()["late_compiles"]) == 4
cachepipe.attach(strict=False)
ask(5)
assert cachepipe.report()["late_compiles"][-1]["outcome"] == "compiled"
"""
    done = forked(tmp_path, body, CACHEPIPE_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert len(late_lines(done)) == 5


def keys(root: Path) -> set[str]:
    """Returns torch's keys of the graphs in a cache folder: the names of the folders that hold their entries."""
    cache = root / "inductor"
    found = {path.name for path in (*cache.glob("aotautograd/*"), *cache.glob("fxgraph/*/*"))}
    assert {name[0] for name in found} == {"a", "f"}
    return found


def test_beyond_torchs_limit_a_call_is_eager_and_told_once_or_refused_in_strict_mode_and_a_failed_one_is_no_compile(
    tmp_path: Path,
) -> None:
    body = f"""{WARM}
import json, torch._dynamo
torch._dynamo.config.recompile_limit = 1
answers = [tuple(ask(size).shape)[0] for size in (5, 6, 4, 5)]
cachepipe.attach(strict=True)
torch._dynamo.reset()
torch._dynamo.config.recompile_limit = 0
for size in (5, 6):
    try:
        ask(size)
    except Exception as error:
        answers.append(type(error).__name__)
cachepipe.attach(strict=False)
torch._dynamo.reset()
torch._dynamo.config.recompile_limit = 8
try:
    raise KeyError  # which the service is about to handle when the next call compiles
except KeyError:
    ask(4)
try:
    model(torch.ones(4, 7))
except Exception as error:
    answers.append(isinstance(error, (RuntimeError, torch._dynamo.exc.TorchRuntimeError)))
class Breaks(torch.nn.Module):
    def forward(self, x):
        for one in [1, 2]:
            with torch.no_grad() if len(x) > 3 else torch.enable_grad():
                try:
                    torch._dynamo.graph_break()
                finally:
                    x = x + one
        return x
for fullgraph in (False, True):
    torch._dynamo.reset()
    try:
        answers.append(torch.compile(Breaks(), fullgraph=fullgraph)(torch.ones(4)).sum().item())
    except torch._dynamo.exc.Unsupported:
        answers.append("unsupported")
print(json.dumps([answers, [late["outcome"] for late in cachepipe.report()["late_compiles"]]]))
"""
    done = forked(tmp_path, body)
    assert done.returncode == 0, done.stderr
    answers, outcomes = json.loads(done.stdout)
    assert answers == [5, 6, 4, 5, "LateCompileError", "LateCompileError", True, 16.0, "unsupported"]
    assert outcomes[:3] == ["eager", "refused", "refused"]
    assert outcomes[3] in ("hit", "compiled") and outcomes[4] == "failed", outcomes
    assert "eager" in outcomes[5:-1] and outcomes[-1] == "failed", outcomes


def test_case_m2_a_recorded_process_finds_what_plain_torch_built_and_builds_the_same_keys(tmp_path: Path) -> None:
    plain = run(tmp_path, "serve()\nassert 'cachepipe.runtime.recorder' not in sys.modules", CACHEPIPE_ATTACH="")
    assert plain.returncode == 0, plain.stderr
    before = keys(tmp_path / "root")
    body = "serve()\ncachepipe.ready()"
    warm = forked(tmp_path, body)
    assert warm.returncode == 0 and "misses=0" in ready_lines(warm)[0], warm.stderr
    assert keys(tmp_path / "root") == before
    for explains in ("", "1"):
        own = tmp_path / f"own{explains}"
        cold = forked(tmp_path, body, CACHEPIPE_EXPLAIN=explains, **cache_variables(str(own)))
        assert cold.returncode == 0 and "hits=0" in ready_lines(cold)[0], cold.stderr
        assert keys(own) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_case_a14_autocast_is_compared_for_the_device_that_was_restored(tmp_path: Path, device: str) -> None:
    record = replace(entry_record(entry_spec(device=device)), environment={"autocast": "off", "threads": "1"})
    parts = CUDA_PARTS if device == "cuda" else CPU_PARTS
    statement = make_artifact(tmp_path, facts=parts, entries=(record,)).statement
    folder = tmp_path / "restored" / ".cachepipe" / "statements"
    folder.mkdir(parents=True)
    (folder / "one.json").write_bytes(statement_bytes(statement))
    body = """
torch.set_autocast_enabled("cuda", True)
torch.set_autocast_dtype("cuda", torch.bfloat16)
torch.set_num_threads(1)
serve()
cachepipe.ready()
"""
    variables = {"CACHEPIPE_ROOT": str(tmp_path / "restored"), "CACHEPIPE_EVENTS": str(tmp_path / "events.jsonl")}
    done = forked(tmp_path, body, **variables)
    assert done.returncode == 0, done.stderr
    (evidence,) = (row for row in events(tmp_path / "events.jsonl") if row["event"] == "evidence")
    assert (evidence["device"], evidence["uncounted"]) == (device, [])
    wanted = [f"{record.spec.id}: autocast: built off, called bfloat16"] if device == "cuda" else []
    told = [row["differs"] for row in events(tmp_path / "events.jsonl") if row["event"] == "setting"]
    assert [text for text in told if "variable" not in text] == wanted


def test_a_restored_start_says_each_miss_and_an_unwritable_file_of_events_costs_one_line(tmp_path: Path) -> None:
    file, root = str(tmp_path / "absent" / "events.jsonl"), str(tmp_path / "root")
    done = forked(tmp_path, "serve()\ncachepipe.ready()", CACHEPIPE_EVENTS=file, CACHEPIPE_ROOT=root)
    missed = [line for line in done.stderr.splitlines() if line.startswith("cachepipe miss ")]
    assert ["layer=aotautograd" in missed[0], "layer=fxgraph" in missed[1]] == [True, True], done.stderr
    assert all("inputs=x:4x8" in line and "case_models.py" in line and "reason=full_miss" in line for line in missed)
    assert done.returncode == 0 and len(ready_lines(done)) == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("cachepipe events problem=")]) == 1


def test_case_a14_a_restored_service_that_misses_says_every_setting_that_is_not_the_builders(tmp_path: Path) -> None:
    built = {
        "grad mode": "no_grad",
        "autocast": "off",
        "matmul precision": "highest",
        "default dtype": "float32",
        "deterministic algorithms": "False",
        "threads": "77",
        "variable LOG_TLPARSE": "1",
        "variable TORCHINDUCTOR_VEC_ISA_OK": "1",
        "known to the builder alone": "1",
    }
    record = replace(entry_record(entry_spec()), environment=built)
    published = publish_release(tmp_path, entries=(record,))
    script = tmp_path / "service.py"
    body = """
torch.set_float32_matmul_precision("high")
torch.set_num_threads(3)
serve()
cachepipe.ready()
print(json.dumps(cachepipe.report()["setting_differences"]))
"""
    script.write_text("import json\n" + SERVICE.format(models=str(MODELS), body=body))
    env = environment(tmp_path, CACHEPIPE_EVENTS=str(tmp_path / "events.jsonl"))
    words = (published.store.url, "--name", "demo", "--dest", str(tmp_path / "dest" / "demo"))
    ran = run_restore(tmp_path, *words, *command((sys.executable, str(script))), env=env, timeout_s=120)
    assert ran.code == 0 and ran.line["outcome"] == "restored", ran.err
    wanted = [
        f"{record.spec.id}: grad mode: built no_grad, called inference_mode",
        f"{record.spec.id}: matmul precision: built highest, called high",
        f"{record.spec.id}: threads: built 77, called 3",
        f"{record.spec.id}: variable LOG_TLPARSE: built 1, called unset",
    ]
    lines = [line for line in ran.err.splitlines() if line.startswith("cachepipe setting ")]
    assert [dict(word.partition("=")[::2] for word in shlex.split(line)[2:])["differs"] for line in lines] == wanted
    assert all(f"start={ran.line['start']} " in line for line in lines) and json.loads(ran.out) == wanted
    told = [row["differs"] for row in events(tmp_path / "events.jsonl") if row["event"] == "setting"]
    assert told == wanted
