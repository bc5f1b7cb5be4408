"""What a restored start must not do and some versions of torch still do: one table, applied in the service's process.

A back-port acts only on files of the restored folder (`templates` and `triton-digest` on what a hit does not need of torch and Triton) and only on the versions it was checked against; on every other
version nothing is changed and the service is told in one line which version it is. None of them enters a cache key.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cachepipe.domain.variables import COMPILER
from cachepipe.importing import when_imported
from cachepipe.runtime.deferred import Deferred
from cachepipe.runtime.recorded_digest import recorded_digest, with_known_digest

Version = tuple[int, int]


@dataclass(frozen=True)
class Backport:
    name: str
    first: Version
    last: Version
    """Versions `first` to `last`, both included."""
    reference: str
    what: str
    module: str
    """Patched right after its import."""
    patch: Callable[[ModuleType, str], None]
    """Called with the module and the restored folder."""
    is_for_builder: bool
    """Acts also while the builder settles and finds out which files a start opens: it must not hide one of them."""


def _skip_isa_probe(module: ModuleType, root: str) -> None:
    """The builder's probe object was loaded once on a CPU with the same flags (the fingerprint says so) and its bytes are
    the signed ones; loading it again costs one process with the whole of libtorch for each instruction set."""
    probe: Callable[[Any, str], bool] = module.VecISA._probe_load
    folder = os.path.join(os.path.realpath(root), "")
    applied_ns = time.time_ns()

    @functools.wraps(probe)
    def probe_load(self: Any, output_path: str) -> bool:
        try:
            is_restored = os.path.realpath(output_path).startswith(folder)
            if is_restored and os.stat(output_path).st_mtime_ns < applied_ns:
                return True
        except OSError:
            pass
        return probe(self, output_path)

    module.VecISA._probe_load = probe_load


def _honour_tuning_record(module: ModuleType, root: str) -> None:
    """A settled kernel is pickled with its one config, without the mark that coordinate descent chose it, and torch passes
    over its record: the hash in it is that of all candidates, and a single config is not looked up at all. So it is tuned
    again at every start. Here the record decides, read below the restored folder and not at the builder's path.

    Why the file is not keyed anew: for a shape that was not built the same kernel comes from source, and looks there for the hash of all."""
    original: Callable[[Any, Callable[[], Any]], None] = module.CachingAutotuner.recheck_autotune_cache

    @functools.wraps(original)
    def recheck_autotune_cache(self: Any, reload_kernel_from_src: Callable[[], Any]) -> None:
        record = _tuning_record(module.AutotuneCache, self, root)
        for result in self.compile_results if record else ():
            if _is_config(result.config, record):
                result.config.found_by_coordesc = bool(record.get("found_by_coordesc"))
                self.compile_results = [result]
                self.autotune_cache_info = {"autotune_cache_state": "hit"}
                return
        original(self, reload_kernel_from_src)

    module.CachingAutotuner.recheck_autotune_cache = recheck_autotune_cache


def _tuning_record(records: Any, kernel: Any, root: str) -> dict[str, Any]:
    if not kernel.filename:
        return {}
    kernel.filename = _live(kernel.filename, root)
    cache = records.create(kernel.inductor_meta, kernel.filename, "")
    record: Any = cache._read() if cache else None
    return dict(record) if isinstance(record, dict) else {}


def _live(path: str, root: str) -> str:
    """Returns the place below the live folder of a file that a pickle names where the builder had it."""
    live = os.path.join(root, "inductor", "")
    if path.startswith(live):
        return path
    folder, name = os.path.split(path)
    return os.path.join(live, os.path.basename(folder), name)


def _keep_records(module: ModuleType, root: str) -> None:
    """A pickled kernel holds the path of its record as the builder had it: tuned again, it would write there. And a damaged record is
    none: torch fails on one without `num_warps`, on no JSON (2.13: on other JSON), at kernels whose record only we read too."""
    save: Callable[..., None] = module.AutotuneCache.save

    def or_none(read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def read_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return read(self, *args, **kwargs)
            except (ValueError, TypeError, LookupError, AssertionError, OSError, RecursionError):
                return None

        return read_whole

    @functools.wraps(save)  # its name is pickled: kernels hold the bound method
    def save_live(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.local_cache:
            cache, path = self.local_cache
            self.local_cache = (cache, _live(path, root))
        save(self, *args, **kwargs)

    module.AutotuneCache.save = save_live
    module.AutotuneCache._read = or_none(module.AutotuneCache._read)
    module.AutotuneCache.read_best = or_none(module.AutotuneCache.read_best)


def _accept_scaled_winner(module: Any, root: str) -> None:
    """The winner may be a config that torch added while it tuned (a reduction with half the block); at the next start it
    stands in no list, its record is passed over, and all is timed again."""
    load: Callable[..., Any] = module._load_cached_autotuning

    @functools.wraps(load)
    def load_cached_autotuning(best: Any, configs_hash: str, configs: Any, inductor_meta: Any) -> Any:
        record = dict(best or {})
        found = load(best, configs_hash, configs, inductor_meta)
        if found is not None or not configs or record.pop("configs_hash", None) != configs_hash:
            return found
        for name in ("found_by_coordesc", "time_taken_ms", "triton_cache_hash"):
            record.pop(name, None)
        if "XBLOCK" in configs[0].kwargs:
            record.setdefault("XBLOCK", 1)  # torch drops it from kernels that have none, but after this look-up
        options = {name: record.pop(name) for name in _LAUNCH_OPTIONS if name in record}
        launch = {name: value for name, value in options.items() if name in _ALWAYS or module.HAS_WARP_SPEC}
        if not launch.keys() >= _ALWAYS or record.keys() != configs[0].kwargs.keys():
            return None
        config = module.Config(record, **launch)
        config.found_by_coordesc = False
        return config

    module._load_cached_autotuning = load_cached_autotuning


_ALWAYS = frozenset({"num_warps", "num_stages"})
_LAUNCH_OPTIONS = (*sorted(_ALWAYS), "num_consumer_groups", "num_buffers_warp_spec")


def _record_single_config(module: Any, root: str) -> None:
    """torch keeps no record for a kernel with one config, though it may add one with half the reduction block and time both:
    at every start. With a record it is done once."""
    check: Callable[..., Any] = module.check_autotune_cache

    @functools.wraps(check)
    def check_autotune_cache(configs: Any, filename: Any, inductor_meta: Any) -> Any:
        found, cache, info = check(configs, filename, inductor_meta)
        is_off = filename is None or inductor_meta.get("force_disable_caches", False) or _interprets()
        if cache is not None or len(configs) != 1 or is_off:
            return found, cache, info
        cache = module.AutotuneCache.create(inductor_meta, filename, module.hash_configs(configs))
        best = cache.read_best(inductor_meta, configs) if cache else None
        return ([best], cache, {"autotune_cache_state": "hit"}) if best else (found, cache, info)

    module.check_autotune_cache = check_autotune_cache


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _keep_recorded_block(module: ModuleType, root: str) -> None:
    """A kernel whose record was found is tuned: torch would still add a config with half the block, and time both."""
    scale: Callable[[Any], None] = module.CachingAutotuner._dynamic_scale_rblock

    @functools.wraps(scale)
    def dynamic_scale_rblock(self: Any) -> None:
        if (getattr(self, "autotune_cache_info", None) or {}).get("autotune_cache_state") != "hit":
            scale(self)

    module.CachingAutotuner._dynamic_scale_rblock = dynamic_scale_rblock


def _load_here(module: Any, root: str) -> None:
    """A compile worker has none of these back-ports, and a kernel that it sends back is pickled: the mark that coordinate
    descent chose its config is lost, and the kernel is tuned again at every start whose workers are up in time. So what a hit
    loads is loaded in this process, for which no worker is started; what a miss compiles has the workers."""
    module.compile_threads = 1

    def compile_with_workers(compiler: Any) -> None:
        codegen: Callable[..., Any] = compiler.fx_codegen_and_compile

        @functools.wraps(codegen)
        def fx_codegen_and_compile(*args: Any, **kwargs: Any) -> Any:
            module.compile_threads = module.decide_compile_threads()
            try:
                return codegen(*args, **kwargs)
            finally:
                module.compile_threads = 1

        compiler.fx_codegen_and_compile = fx_codegen_and_compile

    when_imported("torch._inductor.compile_fx", compile_with_workers)


def _ignore_ci(module: Any, root: str) -> None:
    """The default of one key part follows the variable CI, and this version has no variable of its own for it."""
    if module.error_on_custom_op_aliasing:
        module.error_on_custom_op_aliasing = False


def _name_compiler(module: Any, root: str) -> None:
    """An image's CXX enters the key of every graph, GPU graphs too, and builders have none: what they build would miss."""
    module.cpp.cxx = (None, COMPILER)


def _compile_templates_later(module: Any, root: str) -> None:
    """torch compiles the source templates of all its kernels when it is imported: a quarter of that time; a hit generates no source."""
    compiled: Callable[[str], Any] = module.KernelTemplate._template_from_string

    @functools.wraps(compiled)
    def template_from_string(source: str) -> Any:
        return Deferred(compiled, source) if module.jinja2_env() is not None else compiled(source)

    module.KernelTemplate._template_from_string = staticmethod(template_from_string)


def _take_recorded_digest(module: Any, root: str) -> None:
    """A part of every key on a GPU is the digest of Triton's library, 415 MB in 3.6: each process reads all of it, from a cold
    disk for seconds. Whoever installed it has written the digest down; it is taken if the file is as it was then."""
    library = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(module.__file__))), "_C", "libtriton.so")
    digest = recorded_digest(library, "triton")
    if digest is not None:
        module.triton_key = with_known_digest(module.triton_key, library, digest)


def _is_config(config: Any, record: dict[str, Any]) -> bool:
    chosen = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return all(name in record and record[name] == value for name, value in chosen.items())


_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_RECORDS = "torch._inductor.runtime.autotune_cache"

TABLE = (
    Backport(
        name="tuning-record",
        first=(2, 11),
        last=(2, 13),
        reference="pytorch/pytorch#172819; torch/_inductor/runtime/triton_heuristics.py: recheck_autotune_cache, in 2.11.0 to 2.13.0",
        what="takes the tuning record of a restored kernel with one config for what it is: the end of its tuning",
        module=_HEURISTICS,
        patch=_honour_tuning_record,
        is_for_builder=True,
    ),
    Backport(
        name="record-path",
        first=(2, 11),
        last=(2, 13),
        reference="torch/_inductor/runtime/autotune_cache.py: AutotuneCache.save, _read, read_best; 2.11.0 to 2.13.0",
        what="writes the record of a kernel that is tuned after all below the live folder, never where the builder had it; a damaged record counts as none",
        module=_RECORDS,
        patch=_keep_records,
        is_for_builder=True,
    ),
    Backport(
        name="scaled-winner",
        first=(2, 11),
        last=(2, 12),
        reference="pytorch/pytorch#181789; torch/_inductor/runtime/autotune_cache.py: _load_cached_autotuning, mended in 2.13.0",
        what="accepts the record of a winner that torch added to its list while tuning",
        module=_RECORDS,
        patch=_accept_scaled_winner,
        is_for_builder=True,
    ),
    Backport(
        name="single-record",
        first=(2, 11),
        last=(2, 13),
        reference="torch/_inductor/runtime/triton_heuristics.py: check_autotune_cache, in 2.11.0 to 2.13.0",
        what="keeps a tuning record also for a kernel with one config, to which torch may add another",
        module=_HEURISTICS,
        patch=_record_single_config,
        is_for_builder=True,
    ),
    Backport(
        name="recorded-block",
        first=(2, 11),
        last=(2, 12),
        reference="pytorch/pytorch#181789; torch/_inductor/runtime/triton_heuristics.py: _dynamic_scale_rblock, mended in 2.13.0",
        what="adds no config with a smaller reduction block to a kernel whose tuning record was found",
        module=_HEURISTICS,
        patch=_keep_recorded_block,
        is_for_builder=True,
    ),
    Backport(
        name="load-here",
        first=(2, 11),
        last=(2, 13),
        reference="torch/_inductor/async_compile.py: AsyncCompile.triton; triton/runtime/autotuner.py: Config.__setstate__; 2.11.0 to 2.13.0",
        what="loads restored kernels in the service's own process; compile workers are started at the first miss",
        module="torch._inductor.config",
        patch=_load_here,
        is_for_builder=True,
    ),
    Backport(
        name="custom-op-aliasing",
        first=(2, 11),
        last=(2, 12),
        reference="torch/_functorch/config.py: error_on_custom_op_aliasing, in 2.11.0 and 2.12.1; 2.13 has a variable for it",
        what="sets a key part as builders have it, also in a process that has CI in its environment",
        module="torch._functorch.config",
        patch=_ignore_ci,
        is_for_builder=True,
    ),
    Backport(
        name="compiler-name",
        first=(2, 11),
        last=(2, 13),
        reference="torch/_inductor/config.py: cpp.cxx, whose default follows the variable CXX, in 2.11.0 to 2.13.0",
        what="sets a key part as builders have it, also in an image that names its compiler in CXX",
        module="torch._inductor.config",
        patch=_name_compiler,
        is_for_builder=True,
    ),
    Backport(
        name="templates",
        first=(2, 11),
        last=(2, 13),
        reference="torch/_inductor/codegen/common.py: KernelTemplate._template_from_string, in 2.11.0 to 2.13.0",
        what="compiles the source templates of torch's kernels when one is rendered, not when torch is imported",
        module="torch._inductor.codegen.common",
        patch=_compile_templates_later,
        is_for_builder=False,
    ),
    Backport(
        name="triton-digest",
        first=(2, 11),
        last=(2, 13),
        reference="triton/runtime/cache.py: triton_key, in 3.6.0 and 3.7.1",
        what="takes the digest of Triton's library from the installer's record, if the file is as it was installed",
        module="triton.runtime.cache",
        patch=_take_recorded_digest,
        is_for_builder=False,
    ),
    Backport(
        name="isa-probe",
        first=(2, 13),
        last=(2, 13),
        reference="torch/_inductor/cpu_vec_isa.py: VecISA._probe_load, read in 2.13.0",
        what="does not load the restored probe objects of the vector instruction sets in processes of their own",
        module="torch._inductor.cpu_vec_isa",
        patch=_skip_isa_probe,
        is_for_builder=False,
    ),
)

_applied: list[str] = []


def apply(root: str, torch_version: str, is_builder: bool = False) -> list[str]:
    """Applies the back-ports of a version once per process, each when its module is imported.

    Args:
        root: the restored folder; empty on a cold start, which is left alone.
        torch_version: e.g. `2.13.0+cpu`.
        is_builder: this is the builder's settle or trim step.

    Returns:
        The names of those that apply.
    """
    if not root or _applied:
        return _applied
    for backport in matching(torch_version):
        if is_builder and not backport.is_for_builder:
            continue
        _applied.append(backport.name)
        when_imported(backport.module, _with_root(backport, root))
    return _applied


def matching(torch_version: str) -> tuple[Backport, ...]:
    """Returns the back-ports of a version; none for a text that is no version."""
    try:
        major, minor = (int(part) for part in torch_version.split("+", maxsplit=1)[0].split(".")[:2])
    except ValueError:
        return ()
    return tuple(backport for backport in TABLE if backport.first <= (major, minor) <= backport.last)


def _with_root(backport: Backport, root: str) -> Callable[[ModuleType], None]:
    return lambda module: backport.patch(module, root)
