"""Faults at chosen moments of a chosen node, for the proof that sessions survive them.

    async with watched_swarm(model, spans, folder, options) as swarm:
        before = await idle_accounts(swarm)
        node = swarm.nodes[1]
        await node_door(node).hold_at(Moment.MID_DECODE.position(n_prompt, n_tokens))
        answer = asyncio.create_task(generation.finish())
        await node_door(node).held()  # its next step is not computed, and so nobody's is
        async with injected(Fault.LINK_CUT, swarm, node):
            await node_door(node).release()
            await answer
        await until_accounts(swarm, before)

A swarm of ``watched_swarm`` runs ``bench.faults.watched_node``: the node's own command line, with a side door through
which it tells what it holds, keeps steps waiting, and sends garbage. Moments are places in the sequence, not times: a
node that is told to holds the first step that reaches a position, and all after it, until it is released.
"""

from bench.faults.accounting import Accounting, idle_accounts, until_accounts
from bench.faults.fault import Fault, injected
from bench.faults.moment import Moment
from bench.faults.side_door import SideDoor, node_door, watched_swarm

__all__ = [
    "Accounting",
    "Fault",
    "Moment",
    "SideDoor",
    "idle_accounts",
    "injected",
    "node_door",
    "until_accounts",
    "watched_swarm",
]
