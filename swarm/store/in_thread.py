"""Calls that block, in a thread, so that nobody closes a file under them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """As ``asyncio.to_thread``, but cancelling waits until the call has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # again, by an impatient user: the call ends all the same
        if not task.cancelled():
            task.exception()  # retrieved: the cancelling is what is reported
        raise
