"""The engine's child process: ``python -m shim.worker FD PARENT_PID``.

One thread does everything: what the parent sends during a step waits in the socket, and handing requests from a reading
thread to a computing one would cost a wake-up each. It leaves when its parent does: at once through the kernel's
parent-death signal, or at the end of the socket. It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or a service
manager sends to the whole group: the parent decides when to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from shim import abi, messages, wire
from shim.engine import Engine
from shim.errors import EngineError

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500  # the kernel should take this process before its parent
_LOG_WARNING = 3


@dataclass(frozen=True)
class Request:
    fields: wire.Fields
    arrays: wire.Arrays


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _bind_to_parent(parent)
    with socket.socket(fileno=descriptor) as connection:
        try:
            _serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _bind_to_parent(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if os.getppid() != parent:  # it died before the signal was set up
        sys.exit(0)
    # writing gigabytes of core would hold up the restart
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _log(level: int, text: str) -> None:
    if level >= _LOG_WARNING and text.strip():
        print(text.rstrip(), file=sys.stderr, flush=True)


def _next_request(connection: socket.socket) -> Request:
    """Raises EOFError when the parent has closed the socket."""
    head = bytearray(wire.HEAD_BYTES)
    _receive(connection, memoryview(head))
    text, data = wire.new_body(head)
    _receive(connection, memoryview(text))
    _receive(connection, data.data)
    return Request(*wire.decode(text, data))


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        n = connection.recv_into(view)
        if n == 0:
            raise EOFError
        view = view[n:]


def _serve(connection: socket.socket) -> None:
    try:
        abi.set_log(_log)
        engine = _open(connection, _next_request(connection))
    except EngineError as error:
        connection.sendall(messages.error_reply(error))
        return
    with engine:
        connection.sendall(messages.info_reply(engine.info))
        while True:
            request = _next_request(connection)
            try:
                reply = _answer(engine, request)
            except EngineError as error:
                reply = messages.error_reply(error)
            connection.sendall(reply)


def _open(connection: socket.socket, request: Request) -> Engine:
    sent = -1

    def progress(fraction: float) -> bool:
        nonlocal sent
        percent = int(fraction * 100)
        if percent > sent:
            sent = percent
            connection.sendall(wire.encode({"progress": fraction}))
        return True

    return Engine.open(messages.read_config(request.fields), progress)


def _answer(engine: Engine, request: Request) -> bytes:
    fields = request.fields
    match fields["op"]:
        case "step":
            return messages.step_reply(engine.step(*messages.read_step(fields, request.arrays)))
        case "row":
            return wire.encode({"ok": True}, {"row": engine.row(fields["slot"])})
        case "truncate":
            engine.truncate(fields["slot"], fields["position"])
            return wire.encode({"ok": True})
        case "position":
            return wire.encode({"ok": True, "position": engine.position(fields["slot"])})
        case "draft":
            return wire.encode({"ok": True}, {"ids": engine.draft(fields["slot"], fields["count"])})
        case "kv_row_bytes":
            return wire.encode({"ok": True, "kv_row_bytes": asdict(engine.kv_row_bytes(fields["layer"]))})
        case "kv_read":
            rows = engine.kv_read(fields["slot"], fields["layer"], fields["first"], fields["count"])
            return wire.encode({"ok": True}, {"rows": rows})
        case "kv_write":
            engine.kv_write(fields["slot"], fields["layer"], fields["first"], request.arrays["rows"])
            return wire.encode({"ok": True})
        case "kv_copy":
            engine.kv_copy(fields["source"], fields["target"], fields["layer"], fields["first"], fields["count"])
            return wire.encode({"ok": True})
        case "info":
            return messages.info_reply(engine.info)
        case _:
            raise EngineError(f"unknown request {fields['op']!r}")


if __name__ == "__main__":
    main()
