"""Each back-port: applies to its versions alone, acts on restored files alone, changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from cachepipe.runtime.backports import TABLE, Backport, matching


def _is_for_this_torch(backport: Backport) -> bool:
    has_triton = find_spec("triton") is not None
    return backport in matching(version("torch")) and (has_triton or not backport.module.startswith("triton"))


@pytest.mark.parametrize("backport", [row for row in TABLE if _is_for_this_torch(row)], ids=lambda row: row.name)
def test_the_patched_module_exists_on_the_version_it_names(backport: Backport) -> None:
    assert import_module(backport.module)


def test_trim_opens_every_file_that_a_start_may_open() -> None:
    assert [row.name for row in TABLE if not row.is_for_builder] == ["templates", "triton-digest", "isa-probe"]


@pytest.mark.parametrize("other", ["2.7.0", "2.10.0", "2.14.0", "3.0", "", "main", "2"])
def test_other_versions_are_left_alone(other: str) -> None:
    assert matching(other) == ()


PROBE = """
import sys, os, time
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import torch
import torch._inductor.cpu_vec_isa as module
calls = []
module.VecISA._probe_load = lambda self, path: calls.append(path) or False
backports.apply({root!r}, torch.__version__)
isa = module.VecAVX2()
new = os.path.join({root!r}, "new.so")
open(new, "w").close()
os.utime(new, ns=(time.time_ns() + 10**9,) * 2)
print(isa._probe_load({old!r}), isa._probe_load(new), isa._probe_load({outside!r}), isa._probe_load("/nonexistent"))
print(len(calls))
"""


def test_isa_probe_trusts_restored_objects_and_probes_every_other(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    old, outside = root / "old.so", tmp_path / "outside.so"
    for file in (old, outside):
        file.touch()
        os.utime(file, (1, 1))
    code = PROBE.format(path=sys.path, root=str(root), old=str(old), outside=str(outside))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False", "False", "False", "3"], done.stderr


KERNEL = """
import json, os, sys, types
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import torch._inductor.runtime.triton_heuristics as module
import torch._inductor.runtime.autotune_cache as records

calls = []
class Autotuner:
    def recheck_autotune_cache(self, reload):
        calls.append(self.filename)
stand_in = types.SimpleNamespace(CachingAutotuner=Autotuner, AutotuneCache=records.AutotuneCache)
backports._honour_tuning_record(stand_in, {root!r})

def config(**kwargs):
    return types.SimpleNamespace(kwargs=kwargs, num_warps=4, num_stages=1)

def kernel(*configs):
    made = Autotuner()
    made.filename = "/builder/inductor/ab/cabc.py"
    made.inductor_meta = dict(autotune_local_cache=True, is_fbcode=False)
    made.compile_results = [types.SimpleNamespace(config=one) for one in configs]
    return made

def record(**facts):
    live = os.path.join({root!r}, "inductor", "ab", "cabc.py")
    cache, key = records.AutotuneCache.create(dict(autotune_local_cache=True), live, "all").local_cache
    with open(key, "w") as file:
        json.dump(facts, file)

os.makedirs(os.path.join({root!r}, "inductor", "ab"))
alone = kernel(config(XBLOCK=64))
alone.recheck_autotune_cache(None)
print(len(calls))
record(XBLOCK=64, num_warps=4, num_stages=1, found_by_coordesc=True, configs_hash="other")
alone.recheck_autotune_cache(None)
print(len(calls), alone.compile_results[0].config.found_by_coordesc, alone.filename.startswith({root!r}))
two = kernel(config(XBLOCK=32), config(XBLOCK=64))
two.recheck_autotune_cache(None)
print(len(calls), len(two.compile_results), two.compile_results[0].config.kwargs["XBLOCK"])
other = kernel(config(XBLOCK=128))
other.recheck_autotune_cache(None)
print(len(calls), hasattr(other.compile_results[0].config, "found_by_coordesc"))
"""


def test_tuning_record_decides_for_its_own_config_and_leaves_every_other_kernel_to_torch(tmp_path: Path) -> None:
    code = KERNEL.format(path=sys.path, root=str(tmp_path / "root"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=120)
    assert done.stdout.split() == ["1", "1", "True", "True", "1", "1", "64", "2", "False"], done.stderr + done.stdout


DAMAGED = """
import os, sys
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import torch._inductor.runtime.autotune_cache as records
(row,) = [row for row in backports.TABLE if row.name == "record-path"]
row.patch(records, {root!r})
cache = records.AutotuneCache.create(dict(autotune_local_cache=True), os.path.join({root!r}, "inductor", "ab", "cabc.py"), "all")
place = cache.local_cache[1]
os.makedirs(os.path.dirname(place))
found = []
for data in (b"", b"{{", b"\\xff", b"null", b"[1]", b"7", b"[" * 100000, b'{{"XBLOCK": 64}}'):
    with open(place, "wb") as file:
        file.write(data)
    found.append(cache._read())
for data in (b'{{"configs_hash": "all"}}', b'{{"configs_hash": "all", "num_warps": 4, "num_stag": 3}}'):
    with open(place, "wb") as file:
        file.write(data)
    found.append(cache.read_best(dict(coordinate_descent_tuning=True), []))
os.unlink(place)
os.mkdir(place)
print([*found, cache._read()])
"""


def test_a_damaged_record_is_none_and_no_fault_of_the_service(tmp_path: Path) -> None:
    code = DAMAGED.format(path=sys.path, root=str(tmp_path / "root"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=120)
    assert done.stdout == f"{[*[None] * 7, {'XBLOCK': 64}, None, None, None]}\n", done.stderr


LOADING = """
import sys
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import torch._inductor.config as config
import torch._inductor.compile_fx as compiler
def codegen(fails):
    if fails:
        raise ValueError
    return config.compile_threads
compiler.fx_codegen_and_compile = codegen
backports.apply("/restored", "2.13.0")
print(config.compile_threads, compiler.fx_codegen_and_compile(False), config.compile_threads)
try:
    compiler.fx_codegen_and_compile(True)
except ValueError:
    print(config.compile_threads)
"""


def test_a_hit_loads_without_compile_workers_and_a_miss_has_as_many_as_are_wanted() -> None:
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    code = LOADING.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3", "1", "1"]


NAMING = """
import sys
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
backports.apply("/restored", "2.13.0")
import torch._inductor.config as config
print(config.cpp.cxx, config.save_config_portable()["cpp.cxx"])
"""


def test_case_a14_an_image_that_names_its_compiler_has_the_builders_key_part() -> None:
    env = {**os.environ, "CXX": "/opt/gcc/bin/g++"}
    done = subprocess.run(
        [sys.executable, "-c", NAMING.format(path=sys.path)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(None, 'g++') (None, 'g++')"


TEMPLATES = """
import sys
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import jinja2
made = []
original = jinja2.Environment.from_string
jinja2.Environment.from_string = lambda self, source, *words: made.append(source) or original(self, source, *words)
if {applies!r}:
    backports.apply("/restored", "2.13.0")
import torch._inductor.select_algorithm
from torch._inductor.codegen.common import KernelTemplate
print(len(made))
template = KernelTemplate._template_from_string("{{{{ x }}}}!")
if {applies!r}:
    import copy
    hollow = type(template).__new__(type(template))
    assert copy.copy(template).render(x=1) == "1!" and not hasattr(hollow, "_compiled")
    made.clear()
    template = KernelTemplate._template_from_string("{{{{ x }}}}!")
print(template.render(x=2), template.render(x=3), made.count("{{{{ x }}}}!"), bool(template), template.name)
KernelTemplate._template_from_string("{{{{").render()
"""


@pytest.mark.parametrize("applies", [False, True])
def test_templates_are_compiled_when_one_is_rendered_and_not_when_torch_is_imported(applies: bool) -> None:
    code = TEMPLATES.format(path=sys.path, applies=applies)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    imported, *rest = done.stdout.split()
    assert rest[:5] == ["2!", "3!", "1", "True", "None"], done.stdout
    assert "TemplateSyntaxError" in done.stdout + done.stderr and done.returncode == 1
    assert imported == "0" if applies else int(imported) > 10
