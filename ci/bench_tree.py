"""Trees of real cache content for `ci/bench --store`, of a wanted size.

What the files are, by bytes, and where they come from:

    40 %  Triton's entries: made here by Triton itself, ahead of time for sm_90, which needs no GPU
    34 %  shared objects: pieces of torch's own libraries, 0.2 to 0.9 MB and one large one
    13 %  constants that hardly compress: half-precision weights
    13 %  pickles with source texts and shapes, and generated Python wrappers: from torch's own modules

Triton compiles each kernel once, at most `KERNELS` of them (three minutes); above that the shares of the others grow.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

KERNELS = 200
_MB = 1_000_000
_UNARY = (
    "tl.exp({0})",
    "tl.sigmoid({0})",
    "({0} * {0})",
    "tl.maximum({0}, 0.0)",
    "tl.log({0} * {0} + 1.0)",
    "tl.sqrt(tl.abs({0}))",
    "tl.erf({0})",
    "({0} * tl.sigmoid({0}))",
)
_KERNEL = """
import triton
import triton.language as tl

@triton.jit
def triton_red_fused_{number}(in_ptr0, in_ptr1, out_ptr0, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    total = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    square = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        r = roffset + rbase
        mask = (r < rnumel) & xmask
        a = tl.load(in_ptr0 + r + {width} * xindex, mask, other=0.0).to(tl.float32)
        total = tl.where(mask, total + {first}, total)
        square = tl.where(mask, square + {second}, square)
    mean = tl.sum(total, 1)[:, None] / {width}.0
    variance = tl.sum(square, 1)[:, None] / {width}.0
    for roffset in range(0, rnumel, RBLOCK):
        r = roffset + rbase
        mask = (r < rnumel) & xmask
        a = tl.load(in_ptr0 + r + {width} * xindex, mask, other=0.0).to(tl.float32)
        b = tl.load(in_ptr1 + r, r < rnumel, other=0.0).to(tl.float32)
        v = (a - mean) * tl.rsqrt(variance + 1e-05) * b
        tl.store(out_ptr0 + r + {width} * xindex, {third}, mask)
"""


def make_tree(folder: Path, size_mb: int, kernels: Path) -> None:
    """Fills an empty folder with about `size_mb` megabytes of cache content.

    Args:
        folder: becomes a cache root with `inductor/` and `triton/0/`.
        size_mb: 10^6 bytes each.
        kernels: folder of compiled Triton entries, filled by `compile_kernels`.
    """
    source = random.Random(size_mb)
    left = size_mb * _MB
    left -= _copy_kernels(kernels, folder / "triton" / "0", int(0.4 * left))
    shares = {"objects": 0.57, "weights": 0.215, "texts": 0.215}
    for name, share in shares.items():
        for path, data in _GENERATORS[name](int(share * left), source):
            target = folder / "inductor" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def _copy_kernels(kernels: Path, target: Path, limit: int) -> int:
    copied = 0
    for entry in sorted(kernels.iterdir()):
        files = [path for path in entry.rglob("*") if path.is_file()]
        if copied > limit:
            break
        for path in files:
            place = target / path.relative_to(kernels)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes().replace(str(kernels).encode(), str(target).encode()))
            copied += path.stat().st_size
    return copied


def _name(data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    return f"{digest[:2]}/c{digest[:51]}"


def _torch() -> Path:
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _objects(limit: int, source: random.Random) -> Iterator[tuple[str, bytes]]:
    library = _torch() / "lib" / "libtorch_cpu.so"
    size = library.stat().st_size
    with library.open("rb") as file:
        file.seek(20 * _MB)
        large = file.read(min(limit // 2, size // 2))
        yield "aoti/model.wrapper.so", large
        done = len(large)
        while done < limit:
            wanted = source.randint(200, 900) << 10
            if file.tell() + wanted > size:
                file.seek(
                    source.randrange(_MB, 20 * _MB)
                )  # from the start again, cut elsewhere: no two files are equal
            data = file.read(wanted)
            done += len(data)
            yield f"{_name(data)}.so", data


def _weights(limit: int, source: random.Random) -> Iterator[tuple[str, bytes]]:
    import numpy as np

    numbers = np.random.default_rng(source.randrange(1 << 30)).normal(size=limit // 2)
    yield "aoti/weights.bin", numbers.astype(np.float16).tobytes()


def _texts(limit: int, source: random.Random) -> Iterator[tuple[str, bytes]]:
    modules = sorted(_torch().glob("**/*.py"), key=lambda path: (path.stat().st_size % 997, str(path)))
    done, copy = 0, 0
    while done < limit:
        code = marshal.dumps(compile(f"x = {copy}\n" * 200, "wrapper", "exec"))
        for module in modules:
            text = module.read_text(errors="replace")
            if not 8_000 < len(text) < 400_000:
                continue
            wrapper = f"# {copy}\n{text}".encode()
            shapes = [(source.randint(1, 4096), 64) for _ in range(400)]
            graph = pickle.dumps({"source": text, "tokens": text.split()[:4000], "shapes": shapes, "code": code})
            yield f"{_name(wrapper)}.py", wrapper
            name = _name(graph)
            yield f"fxgraph/{name[:2]}/f{name[4:]}/{name[4:30]}", graph
            done += len(wrapper) + len(graph)
            if done >= limit:
                return
        copy += 1


_GENERATORS = {"objects": _objects, "weights": _weights, "texts": _texts}


def compile_kernels(folder: Path, count: int = KERNELS) -> None:
    """Compiles kernels for sm_90 into `folder`, with Triton from a folder of its own: torch must not find it here.

    Raises:
        CalledProcessError: pip or Triton failed.
    """
    library = folder.with_name("triton-library")
    if not library.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(library), "triton"]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    env = {**os.environ, "PYTHONPATH": str(library), "TRITON_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, __file__, str(count)], check=True, env=env)


def _compile(count: int) -> None:
    """The child of `compile_kernels`."""
    import importlib.util
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = random.Random(1)

    def expression(name: str, depth: int) -> str:
        for _ in range(depth):
            name = source.choice(_UNARY).format(name)
        return name

    with tempfile.TemporaryDirectory() as texts:
        for number in range(count):
            words = {"first": expression("a", 1), "second": expression("a", 2), "third": expression("v", 2)}
            text = _KERNEL.format(number=number, width=source.choice((768, 1024, 4096, 5120, 11008)), **words)
            path = Path(texts, f"k{number}.py")
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            pointers = {name: source.choice(("*fp32", "*bf16", "*fp16")) for name in ("in_ptr0", "in_ptr1", "out_ptr0")}
            signature = {**pointers, "xnumel": "i32", "rnumel": "i32", "XBLOCK": "constexpr", "RBLOCK": "constexpr"}
            blocks = {"XBLOCK": source.choice((1, 2, 4, 8)), "RBLOCK": source.choice((512, 1024, 2048))}
            kernel = getattr(module, f"triton_red_fused_{number}")
            options = {"num_warps": source.choice((2, 4, 8)), "num_stages": source.choice((1, 2, 3))}
            triton.compile(
                ASTSource(kernel, signature, constexprs=blocks), target=GPUTarget("cuda", 90, 32), options=options
            )


if __name__ == "__main__":
    _compile(int(sys.argv[1]))
