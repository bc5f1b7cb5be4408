"""One child process that calls one entry: `python -m cachepipe.adapters.worker JOB.json`.

It builds the model, calls every shape bucket in the job's order with the very functions that services use, counts the
work, and writes an `EntryEvidence` file. On stdout it prints one JSON object a line for progress. It exits 0 iff the
evidence was written without an error.

 1 read the job, import torch         4 take the counts
 2 build and prepare the model        5 compare with eager
 3 call every shape bucket            6 write the evidence
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import dataclasses  # noqa: E402  (the clock starts before the imports that it measures)
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from cachepipe.adapters.outside import OutsideWatch, folder_files, kind_sizes  # noqa: E402
from cachepipe.adapters.processwatch import ProcessWatch  # noqa: E402
from cachepipe.domain.engine import AOT, FILE_BYTES, LAYER, Description, replays_graphs  # noqa: E402
from cachepipe.domain.entry import EntrySpec, bucket_label, traced_bucket  # noqa: E402
from cachepipe.domain.evidence import BucketEvidence, EntryEvidence, Work, kind_of, words_of  # noqa: E402
from cachepipe.domain.job import UNTIMED_CALLS, Job  # noqa: E402
from cachepipe.domain.phases import Phases  # noqa: E402
from cachepipe.domain.record import canonical_bytes, escaped, read_record, to_json  # noqa: E402
from cachepipe.runtime import backports  # noqa: E402
from cachepipe.runtime.calling import (  # noqa: E402
    build_model,
    call,
    call_once,
    called,
    calling_context,
    compile_model,
    flatten,
    gradients,
    prepare,
    timed,
)
from cachepipe.runtime.garbage import rarely_collected  # noqa: E402
from cachepipe.runtime.inputs import example_inputs  # noqa: E402

if TYPE_CHECKING:
    import torch

    from cachepipe.runtime.recorder import Recorder


class Session:
    """The state of one worker between its steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.spec: EntrySpec = job.spec
        self.is_eager = job.step == "eager"
        self.processes = ProcessWatch()
        self.outside = OutsideWatch(job.root, os.environ, (job.result, f"{job.result}.tmp"))
        self.recorder: Recorder | None = None
        self.settings: dict[str, str] = {}
        self.results: dict[int, BucketEvidence] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self.import_s = self.build_s = self.ready_s = 0.0
        self.load_s = 0.0
        """Of `torch.compile` or the native functions, until a first call has counted it."""

    def start(self) -> Any:
        """Steps 1 and 2: returns the prepared model."""
        import torch

        self.import_s = time.perf_counter() - STARTED
        is_builder = self.job.step in ("settle", "trim")
        root = self.job.root if is_builder else os.environ.get("CACHEPIPE_ROOT", "")
        backports.apply(root, torch.__version__, is_builder)
        if not self.is_eager:
            from cachepipe.runtime.recorder import Recorder

            self.recorder = Recorder(self.job.record_components)
            self.recorder.start()
        begin = time.perf_counter()
        pid = os.getpid()
        model = prepare(self.spec, build_model(self.spec))
        if os.getpid() != pid:
            os._exit(0)  # the factory forked and its child came back too: a second worker would write into the cache
        self.build_s = time.perf_counter() - begin
        if self.job.compare_with_eager and isinstance(model, torch.nn.Module):
            self.buffers = [
                (module._buffers, name, None if tensor is None else tensor.detach().clone())
                for module in model.modules()
                for name, tensor in module._buffers.items()
            ]
        if not self.is_eager:
            from cachepipe.adapters.torch_settings import fail_on_recompile_limit

            fail_on_recompile_limit()
            self.outside.begin()
        tell(event="ready", i=0, seconds=self.import_s + self.build_s)
        return model

    def compiled(self, model: Any) -> Any:
        """Returns what is called: torch.compile's, or the native functions of an entry with the engine `aot` that are restored."""
        if self.is_eager:
            return called(self.spec, model)
        begin, spec, is_served = time.perf_counter(), self.spec, self.job.is_served
        function, traced = None, partial(compile_model, spec, model, is_served=is_served)
        if self.recorder is not None and spec.engine == AOT and self.job.engine:
            from cachepipe.runtime.engine_module import engine_model

            folder, replays = Path(self.job.root, self.job.engine), replays_graphs(spec.device, spec.mode, spec.options)
            function = engine_model(model, folder, spec.device, self.recorder, traced, replays)
        function = traced() if function is None else function
        self.load_s = time.perf_counter() - begin  # torch's compile stack may be imported here
        return function

    def call_bucket(self, position: int, index: int, function: Any, model: Any) -> None:
        """Step 3 for one shape bucket: several calls, timed apart, counted together."""
        spec, shape_bucket = self.spec, self.spec.shape_buckets[index]
        label = bucket_label(shape_bucket)
        facts = {"index": position, "of": len(self.job.bucket_order), "shape_bucket": label}
        tell(event="bucket_start", seconds=0.0, **facts)
        from cachepipe.adapters.torch_compare import digest_of

        args, kwargs = example_inputs(spec, shape_bucket)
        before, traced = folder_files(self.job.root), 0
        seconds: list[float] = []
        load_s, self.load_s = self.load_s, 0.0
        with Attributed(self.recorder, label) as log:
            for _ in range(self.job.calls_per_bucket):
                traced = log.traced()
                begin = time.perf_counter()
                outputs = call(spec, function, args, kwargs)
                seconds.append(time.perf_counter() - begin)
                gradient = gradients(model)
        # copies: a later call may write into what an earlier one returned (buffers, CUDA graphs)
        found = [tensor.detach().clone() for tensor in flatten(outputs)] + gradient
        self.ready_s = time.perf_counter() - STARTED
        phases = log.phases(seconds[0])
        self.outputs[index] = found
        new_files = len(folder_files(self.job.root) - before)
        self.results[index] = BucketEvidence(
            shape_bucket=shape_bucket,
            calls=len(seconds),
            first_call_s=seconds[0] + load_s,
            phases=dataclasses.replace(phases, load_s=phases.load_s + load_s),
            graphs=len(log.graphs),
            graph_breaks=len(log.graph_breaks),
            work=dataclasses.replace(log.work, new_files=new_files),
            output_digest=digest_of(found),
            later_call_s=statistics.median(seconds[1:]) if len(seconds) > 1 else 0.0,
            problems=()
            if self.is_eager
            else tuple(self.problems(index, log, len(seconds) > 1 and len(log.graphs) > traced)),
        )
        tell(event="bucket_done", seconds=seconds[0], **facts)

    def problems(self, index: int, log: Attributed, is_unsettled: bool) -> list[str]:
        """Returns what makes this shape bucket unusable, in words; unsettled: its last call was still traced."""
        from cachepipe.adapters.torch_settings import why_nothing_compiles

        assert self.recorder is not None
        label = bucket_label(self.spec.shape_buckets[index])
        lookups = [lookup for lookup in self.recorder.lookups if lookup.shape_bucket == label]
        traced = traced_bucket(self.spec, self.spec.shape_buckets[index])
        earlier = {traced_bucket(self.spec, self.spec.shape_buckets[done]) for done in self.results}
        cause = why_nothing_compiles()
        because = f": {cause}" if cause else ""
        found = []
        is_native = any(lookup.layer == LAYER and lookup.outcome == "hit" for lookup in lookups)
        if not log.graphs and traced not in earlier and not is_native:
            found.append(f"no graph was compiled, it ran eager{because}")
        if log.graphs and not any(lookup.layer == "aotautograd" for lookup in lookups):
            found.append(f"{len(log.graphs)} graphs were traced but none was looked up in torch's cache{because}")
        if is_unsettled:
            found.append(
                f"every call is traced anew, {len(log.graphs)} graphs so far: a service would compile for ever"
            )
        reasons = sorted({" ".join(lookup.reason.split()) for lookup in lookups if lookup.outcome == "bypass"})
        found += [f"torch refuses to cache a graph: {reason or 'no reason given'}" for reason in reasons]
        return found

    def compare(self, model: Any) -> None:
        """Step 5: makes the same calls in eager, from the same inputs and buffers, after the counts were taken."""
        from cachepipe.adapters.torch_compare import compare_outputs

        spec = self.spec
        for owner, name, tensor in self.buffers:
            owner[name] = tensor
        for index, found in self.outputs.items():
            args, kwargs = example_inputs(spec, spec.shape_buckets[index])
            for _ in range(self.job.calls_per_bucket):
                outputs = call(spec, called(spec, model), args, kwargs)
                gradient = gradients(model)
            wanted = [tensor.detach() for tensor in flatten(outputs)] + gradient
            verdict = compare_outputs(found, wanted, spec.rtol, spec.atol)
            result = self.results[index]
            self.results[index] = dataclasses.replace(
                result,
                max_abs_diff=verdict.max_abs_diff,
                is_close=verdict.is_close,
                problems=(*result.problems, *verdict.problems),
            )

    def serve(self, function: Any, model: Any) -> None:
        """Times calls as stdin asks for, `{"index": …, "calls": …}` a line, until it is closed; answers in milliseconds."""
        spec = self.spec
        for line in sys.stdin:
            wish = json.loads(line)
            args, kwargs = example_inputs(spec, spec.shape_buckets[wish["index"]])
            milliseconds, issue_s = [], 0.0
            for number in range(wish["calls"]):
                call_ms, asked_s = timed(spec, lambda: call_once(spec, function, args, kwargs), issue_s)  # noqa: B023
                milliseconds.append(call_ms)
                if number < UNTIMED_CALLS:
                    issue_s = min(max(issue_s, 1.5 * asked_s), 0.1)
                gradients(model)
            tell(event="timed", milliseconds=milliseconds)

    def evidence(self, error: BaseException | None = None) -> EntryEvidence:
        """Steps 4 and 6: returns all that was seen."""
        recorder = self.recorder
        new_files = sum(result.work.new_files for result in self.results.values())
        work = (recorder.work() if recorder else Work()) + self.processes.work + Work(new_files=new_files)
        breaks = [reason for log in recorder.logs.values() for reason in log.graph_breaks] if recorder else []
        return EntryEvidence(
            entry=self.spec.id,
            step=self.job.step,
            torch_version=str(getattr(sys.modules.get("torch"), "__version__", "")),
            shape_buckets=tuple(self.results.values()),
            lookups=tuple(recorder.lookups) if recorder else (),
            work=work,
            tuned_kernels=tuple(recorder.tuned_kernels) if recorder else (),
            import_s=self.import_s,
            build_s=self.build_s,
            ready_s=self.ready_s,
            settings=self.settings,
            graph_breaks=tuple(breaks),
            components=self.components(),
            error="" if error is None else words_of(error)[:4000],
            error_kind="" if error is None else kind_of(error),
            traceback="" if error is None else "".join(traceback.format_exception(error))[-16000:],
            file_sizes=kind_sizes(self.job.root),
            outside_files=self.outside.found(),
            device=self.spec.device,
            **(recorder.evidence() if recorder else {}),
        )

    def components(self) -> Any:
        if self.recorder is None or not self.job.record_components:
            return {}
        from cachepipe.adapters.torch_settings import config_components

        return {**self.recorder.components, **config_components()}


class Attributed:
    """A shape bucket's log, or empty numbers for an eager process, which has no recorder."""

    def __init__(self, recorder: Recorder | None, label: str) -> None:
        self._context = recorder.shape_bucket(label) if recorder else None
        self.graphs: list[str] = []
        self.graph_breaks: list[str] = []
        self.work = Work()

    def __enter__(self) -> Attributed:
        if self._context is not None:
            self._log = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
            self.graphs, self.graph_breaks, self.work = self._log.graphs, self._log.graph_breaks, self._log.work

    def traced(self) -> int:
        """Returns how many graphs there are so far."""
        return len(self._log.graphs) if self._context is not None else 0

    def phases(self, wall_s: float) -> Phases:
        from cachepipe.runtime.recorder import phases_of

        return phases_of(self._log, wall_s) if self._context is not None else Phases(run_s=wall_s)


def run(job: Job) -> EntryEvidence:
    """Returns the evidence of one job; a failure of the entry is part of it, never an exception."""
    session = Session(job)
    try:
        model = session.start()
        if job.step == "export":
            from cachepipe.adapters.torch_export import export_entry

            elsewhere = read_record(Description, Path(job.description).read_bytes(), job.description, FILE_BYTES)
            export_entry(session.spec, model, Path(job.root, job.engine), elsewhere.texts)
            session.ready_s = time.perf_counter() - STARTED
            return session.evidence()
        if job.description:
            from cachepipe.adapters.torch_structure import write_description

            write_description(model, Path(job.description))
        function = session.compiled(model)
        with calling_context(session.spec):
            from cachepipe.adapters.torch_settings import ambient_settings

            session.settings = ambient_settings(session.spec.device)
            for position, index in enumerate(job.bucket_order):
                session.call_bucket(position, index, function, model)
            if session.recorder is not None:
                session.recorder.stop()
            if job.compare_with_eager:
                session.compare(model)
            if job.step == "latency":
                write_evidence(job, session.evidence())
                tell(event="serving")
                session.serve(function, model)
        if job.bundle:
            save_bundle(Path(job.bundle))
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # the boundary of the child: whatever the user's code raises becomes evidence for the builder
        return session.evidence(error)
    return session.evidence()


def save_bundle(path: Path) -> None:
    """Writes torch's own bundle of what this process compiled; a second call in one process would lose entries (F13)."""
    import torch

    saved = torch.compiler.save_cache_artifacts()
    path.write_bytes(saved[0] if saved is not None else b"")


def tell(**facts: Any) -> None:
    """Prints one progress line; a closed pipe must not end the work."""
    try:
        os.write(PROGRESS_FD, (json.dumps(facts) + "\n").encode())
    except OSError:
        pass


def write_evidence(job: Job, evidence: EntryEvidence) -> None:
    temporary = f"{job.result}.tmp"
    Path(temporary).write_bytes(canonical_bytes(escaped(to_json(evidence))))
    os.replace(temporary, job.result)


def main(path: str) -> int:
    job = read_record(Job, Path(path).read_bytes(), path, 1 << 26)
    sys.path[:0] = job.python_path
    with rarely_collected() if job.is_served else nullcontext():  # as a service is until it is ready
        evidence = run(job)
    write_evidence(job, evidence)
    return 1 if evidence.error else 0


PROGRESS_FD = 1
if __name__ == "__main__":
    if "cachepipe.runtime.pth" in sys.modules:
        sys.modules["cachepipe.runtime.pth"].disarm()  # this process records by itself
    # the model's code may print: its stdout becomes stderr, progress keeps the real one
    PROGRESS_FD = os.dup(1)
    os.dup2(2, 1)
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's worker pools can hold an orderly exit for minutes; the evidence is on disk
