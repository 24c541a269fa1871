"""Becomes the libp2p daemon, after asking the kernel to end it together with the process that started it.

Run as a file by ``dht.daemon``: ``python -I -S _launch.py PARENT_PID P2PD ARGUMENTS...``
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for its parent, which says goodbye through the daemon
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    if "HIVEMIND_LOGLEVEL" not in os.environ:
        os.environ["GOLOG_LOG_LEVEL"] = "error"  # the daemon warns of every peer that went away
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
