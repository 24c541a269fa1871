"""Which process a connection of this machine belongs to: what a proxy can know of who dialled it."""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

import psutil

DAEMON = "p2pd"
_ESTABLISHED = "01"


def daemon_of(node_pid: int) -> int | None:
    """The libp2p daemon of a node, through which all its traffic with others goes; None before it has started."""
    try:
        children = psutil.Process(node_pid).children()
        return next((child.pid for child in children if child.name() == DAEMON), None)
    except psutil.NoSuchProcess:
        return None


def listening_port(pid: int) -> int | None:
    """The first port that a process listens on at loopback."""
    inodes = _socket_inodes(pid)
    for local, _, state, inode in _table():
        if inode in inodes and state == "0A":
            return local[1]
    return None


def socket_inode(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The socket at ``local`` that is connected to ``remote``; None when it is closed already."""
    return next((inode for here, there, _, inode in _table() if (here, there) == (local, remote) and inode), None)


def holds_socket(pid: int, inode: int) -> bool:
    return inode in _socket_inodes(pid)


def connections(pid: int) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Both ends, own first, of what a process is connected to."""
    inodes = _socket_inodes(pid)
    return [(here, there) for here, there, state, inode in _table() if inode in inodes and state == _ESTABLISHED]


def _table() -> list[tuple[tuple[str, int], tuple[str, int], str, int]]:
    """Local and remote end, state, inode of every IPv4 TCP socket."""
    rows = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        rows.append((_address(fields[1]), _address(fields[2]), fields[3], int(fields[9])))
    return rows


def _address(text: str) -> tuple[str, int]:
    """As the kernel prints it: the four bytes as one number of this machine's byte order."""
    host, _, port = text.partition(":")
    order = "<I" if sys.byteorder == "little" else ">I"
    return socket.inet_ntoa(struct.pack(order, int(host, 16))), int(port, 16)


def _socket_inodes(pid: int) -> set[int]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:  # the process has ended
        return set()
    return found
