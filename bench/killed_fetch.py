"""``swarm-artifact fetch`` in another process, which is killed and starts again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from bench.range_server import RangeServer
from swarm.artifact.digest import SUFFIX
from swarm.artifact.manifest import Manifest
from swarm.store.partial_copy import PartialCopy

COMMAND = (sys.executable, "-m", "swarm.store.cli", "fetch")
SECONDS = 300


@dataclass(frozen=True)
class Death:
    """``sent_bytes`` went out to a process that was killed, ``kept_bytes`` of them counted when the next one began."""

    sent_bytes: int
    kept_bytes: int
    returncode: int
    err: str

    @property
    def lost_bytes(self) -> int:
        return max(0, self.sent_bytes - self.kept_bytes)


class KilledFetch:
    """Of ``layers`` from ``server`` into ``folder``. ``manifest`` has the files' names; ``path`` is its file."""

    def __init__(
        self, server: RangeServer, manifest: Manifest, path: Path, folder: Path, layers: tuple[int, int]
    ) -> None:
        self._server = server
        self._manifest = manifest
        self._folder = folder
        self._layers = layers
        where = ("--manifest", str(path), "--source", server.url, "--data-dir", str(folder))
        self.command = (*COMMAND, *where, "--layers", f"{layers[0]}:{layers[1]}")

    @property
    def held_bytes(self) -> int:
        if not self._folder.exists():
            return 0
        copy = PartialCopy.look(self._folder, self._manifest)
        return copy.held_bytes(copy.table.of_span(*self._layers))

    def kill_at(self, n_bytes: int, how: signal.Signals = signal.SIGKILL) -> Death:
        """Once the server has sent ``n_bytes`` to it, or when it ended before that."""
        reached, held, begun = threading.Event(), self.held_bytes, len(self._server.asked)

        def sent_bytes() -> int:
            return sum(asked.sent_bytes for asked in self._server.asked[begun:])

        self._server.on_bytes = lambda _asked: reached.set() if sent_bytes() >= n_bytes else None
        with subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while n_bytes and not reached.wait(0.02) and process.poll() is None:
                pass
            process.send_signal(how)
            _, err = process.communicate(timeout=SECONDS)
        return Death(sent_bytes(), self.held_bytes - held, process.returncode, err)

    def finish(self) -> str:
        """Undisturbed, to its end; what it said."""
        done = subprocess.run(self.command, capture_output=True, text=True, check=True, timeout=SECONDS)
        return done.stdout


def same_files(folder: Path, other: Path) -> bool:
    """Whether two folders hold the same names with the same bytes, those of the states too."""
    names, others = _compared(folder), _compared(other)
    return names == others and all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def _compared(folder: Path) -> list[str]:
    """Without what tells the time or a process."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock" and not path.name.endswith(SUFFIX))
