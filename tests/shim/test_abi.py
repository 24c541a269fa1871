"""The library in one process."""

from __future__ import annotations

import subprocess
import sys

# each thread's first need of the library is the same moment
AT_ONCE = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from shim import abi
read = abi.declarations
def slowly():
    time.sleep(0.2)
    return read()
abi.declarations = slowly
start = threading.Barrier(4)
def load(_):
    start.wait()
    return abi.load()
with ThreadPoolExecutor(4) as threads:
    loaded = list(threads.map(load, range(4)))
print(len({id(ffi) for ffi, _ in loaded}), len({id(lib) for _, lib in loaded}))
"""


def test_threads_that_load_at_once_get_the_same() -> None:
    ran = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("1 1\n", "")
