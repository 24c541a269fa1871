"""``--mtp``: who may load the block, what it takes, and that a node with it serves as one without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shim.engine import Engine
from shim.types import ContextSpec, SummarySpec
from swarm.artifact import load_manifest
from swarm.errors import UsageError
from swarm.node.config import ModelOptions, NodeConfig
from swarm.node.node import SwarmNode
from swarm.node.own_record import make_record
from swarm.node.plan import Plan, Planner
from tests.node.harness import client_peer, config, session
from tests.shim import steps


def plan(path: Path, layers: str, *, mtp: bool = True) -> Plan:
    options = ModelOptions(path, layers, contexts=(ContextSpec(2, 512),), mtp=mtp)
    planner = Planner(load_manifest(path), options, 8 << 30)
    return planner.explicit() or planner.choose([], "nobody")


def test_the_span_to_the_last_layer_may_draft(glm_random_ud_path: Path) -> None:
    with_block = plan(glm_random_ud_path, "6:10").memory
    without = plan(glm_random_ud_path, "6:10", mtp=False).memory
    assert with_block.weights_bytes > without.weights_bytes
    assert with_block.kv_bytes - without.kv_bytes == 2 * 512 * 320 * 2
    assert with_block.compute_bytes > without.compute_bytes
    assert with_block.output_bytes > without.output_bytes
    assert plan(glm_random_ud_path, "auto").last == 10


def test_others_may_not(glm_random_ud_path: Path, llama_untied_path: Path) -> None:
    with pytest.raises(UsageError, match="--layers 6:10"):
        plan(glm_random_ud_path, "0:6")
    with pytest.raises(UsageError, match="has no MTP block; leave --mtp out"):
        plan(llama_untied_path, "3:6")


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_the_estimate_covers_the_block(glm_random_ud_path: Path, chunk_tokens: int) -> None:
    options = ModelOptions(
        glm_random_ud_path, "6:10", contexts=(ContextSpec(2, 512),), mtp=True, chunk_tokens=chunk_tokens
    )
    planned = Planner(load_manifest(glm_random_ud_path), options, 8 << 30).explicit()
    assert planned is not None
    loaded = replace(
        steps.config(glm_random_ud_path, 6, None, slots=2, tokens=512, chunk_tokens=chunk_tokens),
        load_mtp=True,
        wanted_rows=planned.wanted_rows,
    )
    with Engine.open(loaded) as engine:
        info = engine.info
        hidden = np.zeros((chunk_tokens, 256), np.float32)
        rows = steps.token_rows((0, 6), [1] * chunk_tokens, tiled=True)
        engine.step(replace(steps.with_hidden(rows, (6, 10), hidden, want=[0]), tokens=rows.tokens), [SummarySpec()])
        used = engine.info
    assert used.kv_bytes == planned.memory.kv_bytes
    assert info.compute_bytes <= used.compute_bytes <= planned.memory.compute_bytes <= 1.6 * used.compute_bytes
    assert used.output_bytes <= planned.memory.output_bytes


async def test_a_chain_with_the_block_answers_the_same(glm_random_ud_path: Path, tmp_path: Path) -> None:
    tokens = steps.prompt(12, 200)
    with Engine.open(steps.config(glm_random_ud_path, tokens=64, chunk_tokens=16)) as engine:
        batch = steps.token_rows((0, 10), tokens, want=[11], tiled=True)
        [expected] = engine.step(batch, [SummarySpec(top=5)]).summaries
    entry_config = config(glm_random_ud_path, "0:6", tmp_path)
    async with (
        SwarmNode(entry_config) as entry,
        SwarmNode(_drafting(config(glm_random_ud_path, "6:10", tmp_path, entry.addresses))) as last,
    ):
        assert last.shared.host.info.n_mtp == 1
        assert [make_record(node.shared, node.peer_id, ()).has_mtp for node in (entry, last)] == [False, True]
        async with client_peer(entry, last) as peer, session(peer, entry, last) as chain:
            answer = await chain.compute(0, tokens)
            assert list(answer.rows[0].top_ids) == expected.top_ids.tolist()
            assert list(answer.rows[0].top_logits) == expected.top_logits.tolist()


def _drafting(plain: NodeConfig) -> NodeConfig:
    return replace(plain, model=replace(plain.model, mtp=True))
