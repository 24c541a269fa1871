"""The page that Prometheus reads, of real nodes: what it says is what was done, and each speaks for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from dht.record import NodeState
from swarm.errors import NetworkError
from swarm.node.config import HostPort, NodeConfig
from swarm.node.metrics_page import MetricsPage
from swarm.node.node import SwarmNode
from swarm.protocol import CONTROL_STREAM, pb
from tests.node.harness import client_peer, config, hang_up, hear, say, session, slots_empty, until

FREE_PORT = HostPort("127.0.0.1", 0)
Samples = dict[str, float]


def with_metrics(made: NodeConfig) -> NodeConfig:
    return replace(made, metrics=FREE_PORT)


async def page(url: str, accept: str = "") -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as http, http.get(url, headers={"Accept": accept}) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def scrape(node: SwarmNode) -> Samples:
    """By name and labels, without the prefix."""
    status, _, text = await page(node.metrics_url)
    assert status == 200
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name.removeprefix('glm_swarm_')}{{{labels}}}" if labels else sample.name[10:]] = (
                sample.value
            )
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(
    llama_untied_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[SwarmNode, SwarmNode]]:
    folder = tmp_path_factory.mktemp("metrics")
    async with (
        SwarmNode(with_metrics(config(llama_untied_path, "0:3", folder))) as entry,
        SwarmNode(with_metrics(config(llama_untied_path, "3:6", folder, entry.addresses))) as last,
    ):
        yield entry, last


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_was_done_is_counted(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    entry, last = nodes
    before = [await scrape(node) for node in nodes]
    async with client_peer(*nodes) as peer, session(peer, *nodes, keep_journal=True) as client:
        await client.compute(0, range(16))
        for position in (16, 17, 18):
            await client.compute(position, [position])
        await client.compute(16, [16, 17, 18], replay=False, kind=pb.DECODE)
        held = [await scrape(node) for node in nodes]
    await until(lambda: entry.counts() == last.counts() and not entry.counts().sessions)
    after = [await scrape(node) for node in nodes]
    grown = [{name: now[name] - was[name] for name in was} for was, now in zip(before, held, strict=True)]
    for change in grown:
        assert change["tokens_total{kind=prefill}"] == 16
        assert change["tokens_total{kind=decode}"] == 6
        assert change["tokens_total{kind=replay}"] == 0
        assert change["engine_call_rows_count"] == change["engine_call_sessions_sum"] == 5
        assert change["engine_call_rows_sum"] == 22
        assert change["engine_call_rows_bucket{le=1.0}"] == 3
        assert change["engine_call_rows_bucket{le=+Inf}"] == 5
        assert change["engine_compute_seconds_count"] == change["engine_ipc_seconds_count"] == 5
        assert change["step_queue_seconds_count"] == 5
        assert change["step_serialise_seconds_count{direction=decode}"] == 5
        assert change["step_serialise_seconds_count{direction=encode}"] == 5
        assert 0 < change["engine_compute_seconds_sum"] < 60
        assert change["sessions_opened_total"] == change["sessions"] == change["client_peers"] == 1
        assert change["kv_tokens{slot_tokens=64}"] == 19
        assert change["free_slots{slot_tokens=64}"] == -1
    assert grown[0]["journal_bytes{where=memory}"] == 19 * 4 * entry.manifest.n_embd
    assert grown[1]["journal_bytes{where=memory}"] == 0, "an exit has nobody to feed"
    assert grown[0]["sent_bytes_total{stream=data}"] > 22 * 4 * entry.manifest.n_embd
    assert grown[0]["sent_bytes_total{stream=control}"] < grown[1]["sent_bytes_total{stream=control}"]
    for was, now in zip(before, after, strict=True):
        for gauge in ("sessions", "kv_tokens{slot_tokens=64}", "free_slots{slot_tokens=64}", "waiting_tokens"):
            assert now[gauge] == was[gauge]
    assert after[0]["journal_bytes{where=memory}"] == 0


async def test_what_one_sends_the_other_receives(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    entry, last = nodes
    sent = [node.shared.tally.streams["glm-swarm/1/data"].sent_bytes for node in nodes]
    received = [node.shared.tally.streams["glm-swarm/1/data"].received_bytes for node in nodes]
    async with client_peer(*nodes) as peer, session(peer, *nodes) as client:
        await client.compute(0, range(16))
    await until(lambda: entry.service.open_streams == last.service.open_streams == 0)
    pushed = entry.shared.tally.streams["glm-swarm/1/data"].sent_bytes - sent[0]
    arrived = last.shared.tally.streams["glm-swarm/1/data"].received_bytes - received[1]
    assert 16 * 4 * entry.manifest.n_embd < arrived < pushed, "the entry has answered its own predecessor, too"


async def test_what_it_is_and_what_it_can_hold(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    for node, (first, last_layer) in zip(nodes, ((0, 2), (3, 5)), strict=True):
        found = await scrape(node)
        info = next(name for name in found if name.startswith("node_info{"))
        for label in (
            f"artifact={node.manifest.artifact_id}",
            f"peer_id={node.peer_id}",
            f"numerics={node.shared.host.info.numerics_id}",
            f"first_layer={first}",
            f"last_layer={last_layer}",
        ):
            assert label in info
        assert {state: found[f"node_state{{state={state.value}}}"] for state in NodeState} == {
            state: float(state is NodeState.ONLINE) for state in NodeState
        }
        assert found["kv_capacity_tokens{slot_tokens=64}"] == 4 * 64
        assert found["kv_capacity_tokens{slot_tokens=128}"] == 128
        assert found["slots{slot_tokens=64}"] == 4


async def test_failures_are_there_before_they_happen(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    node = nodes[1]
    before = await scrape(node)
    async with client_peer(*nodes) as peer, session(peer, *nodes) as client:
        stranger = await say(peer, node, CONTROL_STREAM)
        asked = client.opening(1)
        asked.artifact_id = "0" * 64
        await stranger.send(asked)
        assert isinstance(await hear(stranger), pb.Error)
        assert client.data is not None
        await client.data.send_step(client.step(9, [1]))  # a gap, which the entry finds
        while not isinstance(said := await hear(client.control[0]), pb.Error):
            pass
        assert said.code == pb.GAP
    after, entry = await scrape(node), await scrape(nodes[0])
    assert after["refusals_total{code=wrong_artifact}"] == before["refusals_total{code=wrong_artifact}"] + 1
    assert entry["failed_steps_total{code=gap}"] == 1
    assert entry["failed_steps_total{code=engine_lost}"] == 0
    await hang_up()
    for one in nodes:
        await until(lambda one=one: slots_empty(one))


async def test_names_follow_the_conventions(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    _, kind, text = await page(nodes[0].metrics_url)
    assert kind.startswith("text/plain")
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("glm_swarm_")]
    assert len(families) > 25
    for family in families:
        assert family.documentation.endswith(".")
        assert f"{family.name}_total" in text or family.type != "counter"
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_rows", "_sessions"))
    _, kind, text = await page(nodes[0].metrics_url, "application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_other_pages_are_not_there(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    assert (await page(nodes[0].metrics_url.replace("/metrics", "/")))[0] == 404


async def test_before_there_are_numbers_it_says_so() -> None:
    async with MetricsPage(FREE_PORT) as empty:
        status, _, text = await page(empty.url)
    assert (status, text) == (503, "the node is not set up yet; try again\n")


async def test_a_taken_address_is_told_before_anything_is_loaded(
    nodes: tuple[SwarmNode, SwarmNode], tmp_path: Path
) -> None:
    port = int(nodes[0].metrics_url.partition("127.0.0.1:")[2].partition("/")[0])
    absent = replace(config(tmp_path / "absent.gguf", "0:3", tmp_path), metrics=HostPort("127.0.0.1", port))
    with pytest.raises(
        NetworkError, match=rf"at 127.0.0.1:{port} \(address already in use\); choose another --metrics"
    ):
        async with SwarmNode(absent):
            pass


async def test_an_unknown_host_is_told(nodes: tuple[SwarmNode, SwarmNode]) -> None:
    with pytest.raises(NetworkError, match=r"metrics can't be served at nowhere.invalid:0 \(.+\); choose another"):
        async with MetricsPage(HostPort("nowhere.invalid", 0)):
            pass
