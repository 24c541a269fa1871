from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig, KvType
from swarm.artifact.catalog import GLM52
from swarm.artifact.manifest import Manifest, load_manifest
from swarm.artifact.memory import (
    SpanMemory,
    available_memory,
    compute_bytes,
    describe,
    estimate,
    format_bytes,
    processes_bytes,
)
from tests.artifact import files

MIB = 1 << 20


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(files.write_glm(tmp_path_factory.mktemp("memory") / "glm.gguf", 6))


def test_weights_and_kv_are_exact(glm: Manifest) -> None:
    memory = estimate(glm, 1, 3, [ContextSpec(3, 1000), ContextSpec(1, 2048)], kv_type=KvType.F32)
    assert memory.weights_bytes == glm.span_bytes(1, 3)
    # llama.cpp rounds 1000 cells up to 1024
    assert memory.kv_bytes == (3 * 1024 + 2048) * glm.kv_bytes_per_token(1, 3, KvType.F32)


# what the engine reported for four layers of GLM-5.2: (is exit, tokens of the slot, rows, MiB)
GLM52_COMPUTE = [
    (False, 4096, 512, 244.1),
    (False, 65536, 512, 476.1),
    (False, 65536, 64, 59.6),
    (False, 131072, 512, 732.1),
    (False, 131072, 128, 183.1),
    (False, 1024, 128, 57.1),
    (True, 4096, 512, 326.5),
    (True, 65536, 512, 464.1),
    (True, 131072, 512, 732.1),
    (True, 1024, 128, 85.7),
]


@pytest.mark.parametrize(("is_exit", "tokens", "rows", "reported_mib"), GLM52_COMPUTE)
def test_compute_buffers_of_glm52(is_exit: bool, tokens: int, rows: int, reported_mib: float) -> None:
    estimated = compute_bytes(GLM52.manifest, ContextSpec(1, tokens), rows, rows * is_exit) / MIB
    assert reported_mib <= estimated <= 1.13 * reported_mib


@pytest.mark.parametrize(("first", "last"), [(0, 10), (10, 20), (20, 30), (0, 30)])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_the_engine_takes_what_was_estimated_for_a_dense_model(
    smollm2_path: Path, first: int, last: int, chunk_tokens: int
) -> None:
    _compare(smollm2_path, first, last, (ContextSpec(1, 4096), ContextSpec(8, 1000)), chunk_tokens)


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 6), (6, 10), (0, 10)])
def test_the_engine_takes_what_was_estimated_for_glm(glm_random_ud_path: Path, first: int, last: int) -> None:
    _compare(glm_random_ud_path, first, last, (ContextSpec(2, 4096),), 128, most=1.35)


def test_logits_of_few_rows_take_less(smollm2_path: Path) -> None:
    contexts = (ContextSpec(4, 1024),)
    few = _compare(smollm2_path, 29, 30, contexts, 512, wanted_rows=64)
    assert _compare(smollm2_path, 29, 30, contexts, 512) - few > 300 * 49152 * 4


def _compare(
    path: Path,
    first: int,
    last: int,
    contexts: tuple[ContextSpec, ...],
    chunk_tokens: int,
    wanted_rows: int | None = None,
    most: float = 1.25,
) -> int:
    """Bytes of the engine's compute buffers."""
    manifest = load_manifest(path)
    estimated = estimate(manifest, first, last, contexts, chunk_tokens=chunk_tokens, wanted_rows=wanted_rows)
    config = EngineConfig(path, first, last, contexts=contexts, chunk_tokens=chunk_tokens, wanted_rows=wanted_rows)
    with Engine.open(config) as engine:
        info = engine.info
    assert info.kv_bytes == estimated.kv_bytes
    # the engine always takes the MTP block's expert bias, a few hundred bytes, with the exit
    assert 0 <= info.weights_bytes - estimated.weights_bytes <= 1024
    assert info.output_bytes == estimated.output_bytes
    assert info.compute_bytes <= estimated.compute_bytes <= most * info.compute_bytes + MIB // 4
    return info.compute_bytes


def test_the_total_is_the_sum_that_is_printed() -> None:
    memory = SpanMemory(int(38.2 * MIB), 11 * MIB, 2 * MIB, 0, own_bytes=384 * MIB, reserve_bytes=128 * MIB)
    assert memory.total_bytes == int(38.2 * MIB) + 525 * MIB
    assert describe(memory, 6 << 30) == (
        "weights 38.2 MiB + KV 11.0 MiB + compute 2.0 MiB + node 384.0 MiB + reserve 128.0 MiB = 563.2 MiB of 6.0 GiB available"
    )


def test_the_node_itself_and_room_to_breathe_are_counted_apart(glm: Manifest) -> None:
    whole = estimate(glm, 1, 3, [ContextSpec(1, 512)], journal_bytes=7)
    engine_alone = estimate(glm, 1, 3, [ContextSpec(1, 512)], own_bytes=0, reserve_bytes=0)
    assert engine_alone.total_bytes == whole.engine_bytes
    assert whole.total_bytes == whole.engine_bytes + 7 + whole.own_bytes + whole.reserve_bytes
    assert processes_bytes(glm, 512) - processes_bytes(glm, 0) == 4 * 512 * glm.n_embd * 4
    assert processes_bytes(GLM52.manifest, 0) - processes_bytes(glm, 0) > 35 * MIB, "a vocabulary takes memory"


def test_only_the_exit_pays_for_logits(glm: Manifest) -> None:
    wide = replace(glm, n_vocab=1 << 20)
    middle, exit_ = (estimate(wide, a, b, [ContextSpec(2, 512)], chunk_tokens=64) for a, b in ((1, 3), (3, 6)))
    assert exit_.output_bytes - middle.output_bytes == 2 * (wide.n_vocab - wide.n_embd) * 4
    assert exit_.compute_bytes > 64 * wide.n_vocab * 4 > middle.compute_bytes


@given(first=st.integers(0, 5), length=st.integers(1, 6), slots=st.integers(1, 8), tokens=st.integers(1, 9000))
def test_more_of_anything_takes_no_less(glm: Manifest, first: int, length: int, slots: int, tokens: int) -> None:
    last = min(6, first + length)
    here = estimate(glm, first, last, [ContextSpec(slots, tokens)])
    larger = [
        estimate(glm, max(0, first - 1), last, [ContextSpec(slots, tokens)]),
        estimate(glm, first, min(6, last + 1), [ContextSpec(slots, tokens)]),
        estimate(glm, first, last, [ContextSpec(slots + 1, tokens)]),
        estimate(glm, first, last, [ContextSpec(slots, tokens + 1)]),
        estimate(glm, first, last, [ContextSpec(slots, tokens)], chunk_tokens=1024),
        estimate(glm, first, last, [ContextSpec(slots, tokens)], mtp=True),
        estimate(glm, first, last, [ContextSpec(slots, tokens)], journal_bytes=1),
    ]
    assert all(other.total_bytes >= here.total_bytes for other in larger)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def group(folder: Path, **entries: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in entries.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def own(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "own"
    path.write_text(line + "\n")
    return path


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory__max=300 * MIB, memory__current=100 * MIB, memory__stat="anon 5\ninactive_file 1048576")
    group(root / "a/b", memory__max="max", memory__current=MIB, memory__stat="inactive_file 0")
    assert available_memory(root, own(tmp_path, "0::/a/b")) == 201 * MIB


def test_pages_of_files_count_as_room_whether_or_not_they_were_used_lately(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    stat = "active_anon 9\ninactive_file 1048576\nactive_file 3145728\nunevictable 8388608"
    group(root / "a", memory__max=300 * MIB, memory__current=100 * MIB, memory__stat=stat)
    assert available_memory(root, own(tmp_path, "0::/a")) == 204 * MIB


def test_a_soft_limit_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory__max=300 * MIB, memory__high=50 * MIB, memory__current=20 * MIB)
    assert available_memory(root, own(tmp_path, "0::/a")) == 30 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory__max=10 * MIB, memory__current=20 * MIB)
    assert available_memory(root, own(tmp_path, "0::/a")) == 0


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(
        root / "memory/job",
        memory__limit_in_bytes=80 * MIB,
        memory__usage_in_bytes=30 * MIB,
        memory__stat="inactive_file 7\ntotal_inactive_file 2097152\ntotal_active_file 1048576",
    )
    assert available_memory(root, own(tmp_path, "4:cpu,memory:/job")) == 53 * MIB


def test_a_container_sees_its_group_at_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root, memory__max=60 * MIB, memory__current=10 * MIB)
    assert available_memory(root, own(tmp_path, "0::/docker/0123/not/mounted")) == 50 * MIB


def test_without_control_groups_the_system_counts(tmp_path: Path) -> None:
    room = available_memory(tmp_path / "none", tmp_path / "nothing")
    assert 0 < room <= psutil.virtual_memory().total


def test_a_group_that_climbs_out_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(tmp_path / "outside", memory__max=MIB, memory__current=0)
    assert available_memory(root, own(tmp_path, "0::/../outside")) > MIB
