"""Quantisation by ggml itself, out of the pinned llama.cpp source.

The engine's library keeps ggml's symbols to itself, so the three files that hold the quantisers are compiled once more,
into ``~/.cache/glm-swarm/quantiser``. Nothing else is loaded with them: what they call of the rest is never reached.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from cffi import FFI
from gguf import GGMLQuantizationType as Kind

from shim import source
from shim.build import cache_dir
from shim.errors import BuildError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
FILES = (
    ("gcc", "-std=gnu11", "ggml.c"),
    ("gcc", "-std=gnu11", "ggml-quants.c"),
    ("g++", "-std=c++17", "ggml-threading.cpp"),
)
DECLARED = """
size_t ggml_quantize_chunk(int type, const float * src, void * dst, int64_t start, int64_t n_rows, int64_t n_per_row,
                           const float * imatrix);
"""


def quantise(values: Floats, kind: Kind, importance: Floats | None = None) -> Bytes:
    """``values`` [..., columns] as blocks [..., bytes of a row]. ``importance`` [columns] or, for stacked experts,
    [experts, columns] weighs the errors; without it all count alike."""
    ffi, library = _library()
    n_columns = values.shape[-1]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stack = np.ascontiguousarray(values, np.float32).reshape(-1, *values.shape[-2:])
    out = np.zeros((*stack.shape[:2], n_columns // block * size), np.uint8)
    weights = np.ones(n_columns, np.float32) if importance is None else importance  # IQ types abort without
    for number, matrix in enumerate(stack):
        row = np.ascontiguousarray(weights[number] if weights.ndim == 2 else weights, np.float32)
        pointers = (ffi.from_buffer("float[]", matrix), ffi.from_buffer("uint8_t[]", out[number]))
        library.ggml_quantize_chunk(
            int(kind), *pointers, 0, matrix.shape[0], n_columns, ffi.from_buffer("float[]", row)
        )
    return out.reshape(*values.shape[:-1], -1)


def dequantise(blocks: Bytes, kind: Kind) -> Floats:
    return np.asarray(gguf.quants.dequantize(blocks, kind), np.float32)


@cache
def _library() -> tuple[Any, Any]:
    path = cache_dir() / "quantiser" / f"libquantiser-{source.VERSION}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _compile(Path(folder)).replace(path)
    ffi: Any = FFI()
    ffi.cdef(DECLARED)
    return ffi, ffi.dlopen(str(path), ffi.RTLD_LAZY)


def _compile(folder: Path) -> Path:
    tree = folder / "llama.cpp"
    tree.mkdir()
    source.unpack(source.fetch(cache_dir() / "downloads", print), tree)
    (folder / "ggml-version.h").write_text('#define GGML_VERSION "pinned"\n#define GGML_COMMIT "pinned"\n')
    inside = tree / "ggml"
    flags = ["-O2", "-fPIC", "-D_GNU_SOURCE", f"-I{folder}", f"-I{inside / 'include'}", f"-I{inside / 'src'}"]
    objects = []
    for compiler, standard, name in FILES:
        objects.append(str(folder / f"{name}.o"))
        _run([compiler, standard, *flags, "-c", str(inside / "src" / name), "-o", objects[-1]])
    library = folder / "libquantiser.so"
    _run(["g++", "-shared", "-Wl,-z,lazy", "-o", str(library), *objects])
    return library


def _run(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise BuildError(f"{command[0]} was not found, it compiles the quantiser; install gcc and g++")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr[-500:]}; install a C compiler that can")
