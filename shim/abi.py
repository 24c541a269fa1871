"""The C ABI in Python: cffi in ABI mode over ``include/swarm_shim.h``, so nothing is tied to one Python version.
Calls release the GIL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cffi import FFI

from shim import errors
from shim.build import library_path

HEADER = Path(__file__).resolve().parent / "include" / "swarm_shim.h"

_STATUS_ERRORS: dict[str, type[errors.EngineError]] = {
    "SWARM_ERR_ARGUMENT": errors.BadStep,
    "SWARM_ERR_MODEL": errors.ModelError,
    "SWARM_ERR_UNSUPPORTED": errors.UnsupportedError,
    "SWARM_ERR_MEMORY": errors.EngineMemoryError,
    "SWARM_ERR_GAP": errors.StepGap,
    "SWARM_ERR_FULL": errors.SlotFull,
    "SWARM_ERR_COMPUTE": errors.ComputeError,
    "SWARM_ERR_CANCELLED": errors.LoadCancelled,
}


def declarations() -> str:
    """The part of the header between the cffi marks."""
    text = HEADER.read_text(encoding="utf-8")
    return text.split("// cffi: begin")[1].split("// cffi: end")[0].replace("SWARM_API ", "")


_loading = threading.RLock()  # a finalizer may ask while it is held


def load() -> tuple[Any, Any]:
    """(ffi, lib), loaded once per process, whoever asks first. Raises BuildError when the library is missing or does
    not fit, and UnsupportedError when this CPU can't run it."""
    with _loading:  # what belongs to one ffi is no argument for another's functions
        return _load()


@functools.cache
def _load() -> tuple[Any, Any]:
    ffi: Any = FFI()
    ffi.cdef(declarations())
    path = library_path()
    try:
        lib = ffi.dlopen(str(path))
        missing = lib.swarm_cpu_missing()
    except (OSError, AttributeError) as error:
        raise errors.BuildError(f"{path} can't be loaded ({error}); run: python -m shim.build --force") from error
    if missing != ffi.NULL:
        raise errors.UnsupportedError(
            f"this CPU lacks {ffi.string(missing).decode()}; build for it: SWARM_CMAKE_ARGS=-DGGML_NATIVE=ON "
            "pip install ."
        )
    return ffi, lib


def build_id() -> str:
    """For example "9f2c0d1e2f3a4b5c/x86-64-v3"."""
    ffi, lib = load()
    return str(ffi.string(lib.swarm_build_id()).decode())


def check(status: int) -> None:
    """Raises the error of a status that is not SWARM_OK."""
    ffi, lib = load()
    if status == lib.SWARM_OK:
        return
    text = ffi.string(lib.swarm_last_error()).decode("utf-8", "replace")
    raise error_class(status)(text)


def error_class(status: int) -> type[errors.EngineError]:
    _, lib = load()
    for name, kind in _STATUS_ERRORS.items():
        if getattr(lib, name) == status:
            return kind
    return errors.EngineError


_log_callback: Any = None  # the library keeps a pointer to it


def set_log(log: Callable[[int, str], None] | None) -> None:
    """Hands llama.cpp's log to ``log(level, text)``, from whatever thread writes it; None is quiet. Levels: 1 debug,
    2 info, 3 warning, 4 error."""
    global _log_callback
    ffi, lib = load()
    if log is None:
        lib.swarm_log_set(ffi.NULL, ffi.NULL)
        _log_callback = None
        return

    def on_line(level: int, text: Any, _: Any) -> None:
        log(level, ffi.string(text).decode("utf-8", "replace"))

    callback = ffi.callback("void(int32_t, const char *, void *)", on_line)
    lib.swarm_log_set(callback, ffi.NULL)
    _log_callback = callback
