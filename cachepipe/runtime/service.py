"""The service's side of an entry: the very settings that were built, warm-up, coverage, report.

    entry = cachepipe.entry("bert-base")
    model = entry.compile(build_model())
    with entry.context():
        entry.warmup(model)
    cachepipe.ready()

Without a restored artifact (a cold start) the same lines work: the model is compiled by torch.compile with its
defaults, and there is nothing to warm up. In an image without a compiler, what the artifact lacks runs eager. A cache may
be missing, it may not be a reason to stay down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cachepipe.domain.engine import AOT, engine_folder, replays_graphs
from cachepipe.domain.entry import EntrySpec, bucket_label, is_covered
from cachepipe.domain.evidence import layer_counts_of
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.statement import EntryRecord, Statement, read_statement
from cachepipe.errors import CachepipeError, UsageError
from cachepipe.runtime import attach as attaching
from cachepipe.runtime.calling import call, calling_context, compile_model, prepare
from cachepipe.runtime.details import details, differing_settings
from cachepipe.runtime.garbage import rarely_collected
from cachepipe.runtime.inputs import example_inputs

WARMUP_CALLS = {"cpu": 1, "cuda": 3}
"""CUDA graphs are recorded on the second and third call and cannot be cached."""


class Entry:
    """One entry of the restored artifact; `record` is None on a cold start."""

    def __init__(self, name: str, record: EntryRecord | None) -> None:
        self.name = name
        self.record = record

    def __repr__(self) -> str:
        return f"<cachepipe entry {self.spec.id if self.spec else f'{self.name} (cold)'}>"

    @property
    def spec(self) -> EntrySpec | None:
        return self.record.spec if self.record else None

    def compile(self, model: Any) -> Callable[..., Any]:
        """Returns the compiled model, prepared and compiled as the builder did; a module is changed in place.

        Device, dtype, train or eval mode, `requires_grad` and memory format become those of the manifest: all of them are part
        of torch's keys. On a cold start: `torch.compile(model)`, nothing else changed; where nothing can be compiled (no GPU, and
        no C++ compiler in the image) the model as it is, and one line on stderr: a slow answer is better than none.
        """
        from cachepipe.adapters.torch_settings import can_compile

        is_able = can_compile(os.environ.get("CACHEPIPE_ROOT", ""))
        if self.spec is not None:
            return self._compile_prepared(prepare(self.spec, model), is_able)
        if not is_able:
            attaching.say(
                "compile", entry=self.name, outcome="eager", reason="no artifact, and no C++ compiler on PATH"
            )
            return model  # type: ignore[no-any-return]
        import torch

        compiled_cold: Callable[..., Any] = torch.compile(model)
        return compiled_cold

    def _compile_prepared(self, prepared: Any, is_able: bool) -> Callable[..., Any]:
        spec, record = self.spec, self.record
        assert spec is not None
        assert record is not None

        def traced() -> Callable[..., Any]:
            with rarely_collected():  # torch.compile imports torch._dynamo
                compiled = compile_model(spec, prepared, is_served=True)
            if not is_able:
                _run_uncompilable_graphs()
            return compiled

        if spec.engine != AOT:
            return traced()
        from cachepipe.runtime.engine_module import engine_model

        folder = Path(os.environ.get("CACHEPIPE_ROOT", ""), engine_folder(record.key))
        listener = attaching.engine_listener(spec.id)
        replays = replays_graphs(spec.device, spec.mode, spec.options)
        return engine_model(prepared, folder, spec.device, listener, traced, replays)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Sets grad mode, autocast, matmul precision and determinism as they were built; inference mode on a cold start."""
        if self.spec is None:
            import torch

            with torch.inference_mode():
                yield
        else:
            with calling_context(self.spec):
                yield

    def inputs(self, **dims: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns example arguments (args, kwargs) for a shape bucket.

        Raises:
            UsageError: a cold start, which knows no inputs.
        """
        if self.spec is None:
            raise UsageError(f"no artifact is restored, so `{self.name}` has no example inputs")
        return example_inputs(self.spec, dims)

    def warmup(self, compiled: Callable[..., Any]) -> float:
        """Calls every shape bucket in the manifest's order, one line each on stderr; returns the seconds it took.

        Call it inside `context()`. On a cold start there is nothing to call: 0.0.
        """
        begin = time.monotonic()
        if self.spec is None:
            attaching.say("warmup", entry=self.name, outcome="cold")
            return 0.0
        for number, shape_bucket in enumerate(self.spec.shape_buckets):
            started = time.monotonic()
            with _attributed(bucket_label(shape_bucket)):
                for _ in range(WARMUP_CALLS[self.spec.device]):
                    args, kwargs = example_inputs(self.spec, shape_bucket)
                    call(self.spec, compiled, args, kwargs)
            attaching.say(
                "warmup",
                entry=self.spec.id,
                shape_bucket=bucket_label(shape_bucket),
                number=f"{number + 1}/{len(self.spec.shape_buckets)}",
                seconds=round(time.monotonic() - started, 2),
            )
        return time.monotonic() - begin

    def covered(self, **dims: int) -> bool:
        """Tells whether a call with these sizes finds its graphs in the artifact; False on a cold start."""
        return self.spec is not None and is_covered(self.spec, dims)


def _run_uncompilable_graphs() -> None:
    """For images without a compiler: what the artifact lacks runs eager, the first of the process with a line on stderr."""
    from cachepipe.adapters.torch_settings import run_uncompilable_graphs

    said: list[bool] = []

    def tell() -> None:
        if not said:
            said.append(True)
            reason = "not in the artifact, and there is no C++ compiler on PATH"
            attaching.say("compile", outcome="eager", reason=reason)

    run_uncompilable_graphs(tell)


def entry(name: str, *, dtype: str | None = None, mode: str | None = None) -> Entry:
    """Returns the entry of a model from the restored artifact, or a cold one that only compiles.

    A name that no restored artifact has, or that fits several entries, is a cold entry and one line on stderr, because a
    release that was built without it, or with one more dtype or mode of it, must not take the service down.

    Args:
        name: the model's name in the manifest.
        dtype, mode: needed where the artifact holds several of one model.
    """
    found = [
        record
        for statement in statements()
        for record in statement.entries
        if record.spec.model == name and dtype in (None, record.spec.dtype) and mode in (None, record.spec.mode)
    ]
    if len(found) > 1:
        fitting = ",".join(sorted(record.spec.id for record in found))
        attaching.say("entry", problem=f"several entries fit `{name}`: name dtype and mode", entries=fitting)
    elif not found and os.environ.get("CACHEPIPE_ROOT"):
        known = sorted({record.spec.id for statement in statements() for record in statement.entries})
        wish = " ".join(f"{key}={value}" for key, value in (("dtype", dtype), ("mode", mode)) if value is not None)
        problem = f"`{name}`{f' with {wish}' if wish else ''} is not in the restored artifact"
        attaching.say("entry", problem=problem, entries=",".join(known))
    return Entry(name, found[0] if len(found) == 1 else None)


def statements() -> tuple[Statement, ...]:
    """Returns the statements of the restored artifacts of this process; none on a cold start."""
    root = os.environ.get("CACHEPIPE_ROOT")
    if not root:
        return ()
    found = []
    for path in sorted(Path(root, ".cachepipe", "statements").glob("*.json")):
        try:
            with path.open("rb") as file:
                found.append(read_statement(file.read(LIMITS.statement_bytes + 1)))
        except (OSError, CachepipeError) as error:
            attaching.say("entry", problem=f"statement unreadable: {error}")
    return tuple(found)


def ready() -> None:
    """Says that every first call is done: the attempt has succeeded, recording ends, a later compile is late."""
    attaching.finish("ready")


def covered(name: str, **dims: int) -> bool:
    """Tells whether a call of a model with these sizes finds its graphs in the artifact."""
    return any(
        record.spec.model == name and is_covered(record.spec, dims)
        for statement in statements()
        for record in statement.entries
    )


def report() -> dict[str, Any]:
    """Returns what this process did with the cache, as a JSON-able tree; `attached` is False where nothing records."""
    attached = attaching.state()
    restored = [statement.artifact for statement in statements()]
    if attached is None:
        return {"attached": False, "artifacts": restored}
    recorder = attached.recorder
    return {
        "attached": True,
        "artifacts": restored,
        "is_ready": attached.is_ready,
        **attaching.summary(attached),
        **details(attached),
        "layers": layer_counts_of(recorder.lookups),
        "lookups": [asdict(lookup) for lookup in recorder.lookups if lookup.outcome != "hit"],
        "recompiles": [reason for log in recorder.logs.values() for reason in log.recompiles],
        "graph_break_reasons": [reason for log in recorder.logs.values() for reason in log.graph_breaks],
        "late_compiles": [asdict(late) for late in attached.late],
        "settings": attached.settings,
        "setting_differences": setting_differences(),
    }


def setting_differences() -> list[str]:
    """Returns the ambient settings in which this process differs from the builder, in words (A14)."""
    attached = attaching.state()
    return differing_settings(attached) if attached is not None else []


@contextmanager
def _attributed(label: str) -> Iterator[None]:
    attached = attaching.state()
    if attached is None or attached.is_ready:
        yield
        return
    with attached.recorder.shape_bucket(label):
        yield
