"""``--explain``: which layers a node would serve and why, without joining, fetching or loading anything."""

from __future__ import annotations

from contextlib import AsyncExitStack

from swarm.artifact import available_memory
from swarm.node.config import NodeConfig
from swarm.node.identity import known_peer_id
from swarm.node.intent import check, intent
from swarm.node.network import identity_folder, look
from swarm.node.plan import Planner
from swarm.node.reporter import Reporter
from swarm.node.stored_parts import open_parts
from swarm.node.translate import as_swarm_error


async def explain(config: NodeConfig, reporter: Reporter) -> None:
    """Looks at the swarm as a stranger would and raises what a start would, as far as that can be known."""
    with as_swarm_error():
        async with AsyncExitStack() as stack:
            parts = await open_parts(stack, config.model, reporter, only_look=True)
            planner = Planner(parts.manifest, config.model, available_memory(), parts)
            plan = planner.explicit()
            if plan is None:
                records = await look(config.network, parts.manifest)
                peer_id = known_peer_id(config.network.identity_path, parts.manifest.name, identity_folder())
                plan = planner.choose(records, peer_id, parts.held_spans())
            for line in intent(plan, parts, runners_up=True):
                reporter.line(line)
            check(plan, parts)
