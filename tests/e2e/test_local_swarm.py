"""Swarms of child processes: what starts them must be able to end them."""

from __future__ import annotations

import os
import signal

import pytest

from swarm.local_swarm import postponed_signals


def test_a_signal_waits_until_the_child_is_known() -> None:
    known: list[int] = []
    with pytest.raises(KeyboardInterrupt), postponed_signals():
        os.kill(os.getpid(), signal.SIGINT)
        known.append(1)  # not reached when the signal is handled at once
    assert known == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with postponed_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # a child inherits that
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
