"""``swarm-node`` that takes other layers within seconds, where a real one lets minutes pass."""

from __future__ import annotations

import sys
from dataclasses import replace

from swarm.node import cli
from swarm.node import node as node_module
from swarm.node.config import NodeConfig
from swarm.node.node import SwarmNode
from swarm.node.reporter import Reporter
from swarm.placement.moving import MoveRules
from swarm.placement.turns import Turns

HASTE = MoveRules(
    join_delay_seconds=0.5,
    second_look_seconds=1.0,
    recheck_seconds=2.0,
    turns=Turns(turn_seconds=4.0, settle_seconds=0.0),
    patience_seconds=2.0,
    repair_step_seconds=5.0,
)


class HastyNode(SwarmNode):
    def __init__(self, config: NodeConfig, reporter: Reporter | None = None) -> None:
        super().__init__(replace(config, moves=HASTE, look_seconds=1.0), reporter)


if __name__ == "__main__":
    node_module.SwarmNode = HastyNode  # type: ignore[misc]
    sys.exit(cli.main())
