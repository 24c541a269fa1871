"""``swarm-node`` that writes its engine calls down, beside its identity file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from bench.crowd.calls import Call, log_path
from shim.types import StepBatch, StepResult, SummarySpec
from swarm.ids import SessionId
from swarm.node import cli
from swarm.node import node as node_module
from swarm.node.config import NodeConfig
from swarm.node.node import SwarmNode
from swarm.node.reporter import Reporter


class LoggingNode(SwarmNode):
    """Logs from the moment it serves. A line takes some ten microseconds, which count against the swarm. Its own speed
    is not measured: what an earlier run has found would be measured again in the first quiet moment, which may be one
    between two rounds."""

    def __init__(self, config: NodeConfig, reporter: Reporter | None = None) -> None:
        super().__init__(replace(config, measure_speed=False), reporter)

    async def __aenter__(self) -> LoggingNode:
        await super().__aenter__()
        identity, host = self.config.network.identity_path, self.shared.host
        if identity is None:
            raise SystemExit("a logging node needs --identity: its log is beside it")
        self._files = ExitStack()
        log = self._files.enter_context(log_path(identity).open("w", buffering=1))
        step = host.step

        async def logged(
            sessions: tuple[SessionId, ...], batch: StepBatch, summaries: Sequence[SummarySpec]
        ) -> tuple[StepResult, float]:
            log.write(Call.of(sessions, batch).line())
            return await step(sessions, batch, summaries)

        host.step = logged  # type: ignore[method-assign]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._files.close()


def main() -> int:
    node_module.SwarmNode = LoggingNode  # type: ignore[misc]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
