"""The process that `ci/bench` and `ci/gpu` measure: calls every shape bucket once and prints its seconds as one JSON line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    """Calls every shape bucket once and prints seconds as one JSON line; only its own imports are in its clock."""
    begin = time.monotonic()
    job = json.loads(Path(job_file).read_text())
    import torch

    from cachepipe.domain.entry import EntrySpec
    from cachepipe.domain.record import from_json
    from cachepipe.runtime.calling import build_model, call, called, calling_context, compile_model, prepare
    from cachepipe.runtime.inputs import example_inputs

    imported = time.monotonic()
    spec: EntrySpec = from_json(EntrySpec, job["spec"], "spec")
    sys.path[:0] = job["python_path"]
    model = prepare(spec, build_model(spec))
    is_native = job["variant"].startswith("restored") and spec.engine == "aot"
    if job["variant"] != "eager" and not is_native:
        import torch._dynamo  # which every other variant needs, some in `torch.compile` and some in the first call
    built = time.monotonic()
    if job["variant"] == "mega-cache bundle":
        torch.compiler.load_cache_artifacts(Path(job["bundle"]).read_bytes())
    if job["variant"].startswith("restored"):
        import cachepipe

        entry = cachepipe.entry(spec.model, dtype=spec.dtype, mode=spec.mode)
        if entry.spec is None:
            sys.exit("bench: nothing was restored")
        function = entry.compile(model)
    elif job["variant"] == "eager":
        function = called(spec, model)
    elif job["variant"] == "trace":  # what no cache can save: Dynamo's tracing, then the graph as it is
        function = torch.compile(
            called(spec, model),
            backend=lambda graph, _: graph.forward,
            fullgraph=spec.fullgraph,
            dynamic=spec.dynamic,
        )
    else:
        function = compile_model(spec, model, is_served=False)
    prepared = time.monotonic()
    calls = []
    with calling_context(spec):
        for shape_bucket in spec.shape_buckets:
            args, kwargs = example_inputs(spec, shape_bucket)
            started = time.monotonic()
            call(spec, function, args, kwargs)
            calls.append(time.monotonic() - started)
    end = time.monotonic()
    work = work_done() if job["variant"].startswith("restored") else {}
    if job["save_bundle"]:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(job["bundle"]).write_bytes(saved[0])
    if job["variant"] != "eager":
        calls[0] += (
            prepared - built
        )  # part of torch is imported in `torch.compile` or in the first call; native functions load
    print(
        json.dumps(
            {
                "first_calls_s": sum(calls),
                "calls_s": calls,
                "import_s": imported - begin,
                "build_s": built - imported,
                "import_to_last_s": end - begin,
                "ready_s": end - job["started"],
                "torch": torch.__version__,
                "work": work,
            }
        )
    )


def work_done() -> dict[str, Any]:
    """Returns what the recorder counted in this restored process."""
    import cachepipe

    cachepipe.ready()
    report = cachepipe.report()
    names = ("hits", "misses", "bypasses", "benchmarks", "tuning_runs", "triton_compiles", "native_builds")
    found = {name: report.get(name) for name in names}
    if report.get("misses"):  # what a reader of the record asks next
        found |= {"lookups": report["lookups"][:8], "differences": report["setting_differences"]}
    return found


if __name__ == "__main__":
    main(sys.argv[1])
