"""Copied state stands for the computation whatever the layers keep: MLA with indexers, or many dense layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shim.types import ContextSpec, KvType
from swarm.node.node import SwarmNode
from tests.models import GLM_TOP_K
from tests.node.copying import bits, decode, prefill, understudy
from tests.node.harness import client_peer, config, session

MORE = [3, 141, 59, 26]
CONTEXT = 256


@pytest.mark.parametrize(
    ("fixture", "cut", "end", "kv_type"),
    [
        ("glm_random_ud_path", 2, 10, KvType.F16),
        pytest.param("glm_random_ud_path", 6, 10, KvType.Q8_0, marks=pytest.mark.slow),
        pytest.param("smollm2_path", 11, 30, KvType.F16, marks=pytest.mark.slow),
    ],
)
async def test_an_understudy_of_either_hop(
    fixture: str, cut: int, end: int, kv_type: KvType, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = request.getfixturevalue(fixture)

    def node(layers: str, *peers: str) -> SwarmNode:
        made = config(path, layers, tmp_path, peers)
        return SwarmNode(replace(made, model=replace(made.model, contexts=(ContextSpec(2, CONTEXT),), kv_type=kv_type)))

    prompt = [7 * index % 250 for index in range(2 * GLM_TOP_K + 9)]
    async with (
        node(f"0:{cut}") as entry,
        node(f"{cut}:{end}", *entry.addresses) as last,
        node(f"0:{end}", *entry.addresses) as wide,
        client_peer(entry, last, wide) as client,
    ):
        async with session(client, entry, last, context_tokens=CONTEXT) as mine:
            expected = bits([await prefill(mine, prompt), *await decode(mine, len(prompt), MORE)])
        for of in (0, 1):
            async with session(client, entry, last, keep_journal=True, context_tokens=CONTEXT) as mine:
                answers = [await prefill(mine, prompt), *await decode(mine, len(prompt), MORE[:2])]
                second = await understudy(mine, wide, of)
                held = len(prompt) + 2
                await second.copy(held)
                assert (await second.copied(held, done=True)).position == held
                await second.takes_over(held)
                assert bits(answers + await decode(mine, held, MORE[2:])) == expected
