"""What can't be loaded says why."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from shim.engine import Engine
from shim.errors import BadConfig, LoadCancelled, ModelError, UnsupportedError
from shim.types import ContextSpec, EngineConfig, KvType
from shim.vocab import Vocab
from tests.shim.steps import config, token_rows


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't open .*absent\.gguf: No such file"):
        Engine.open(config(tmp_path / "absent.gguf"))


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"text\.gguf is not a GGUF file"):
        Engine.open(config(path))


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    with pytest.raises(ModelError, match="not a GGUF"):
        Engine.open(config(path))


@pytest.mark.parametrize("keep", [8, 100, 5000, -1000])
def test_truncated(tmp_path: Path, llama_untied_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_untied_path.read_bytes()[:keep])
    with pytest.raises(ModelError):
        Engine.open(config(path))


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "no-such-arch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="no-such-arch"):
        Engine.open(config(path))


def test_architecture_without_span_support(tmp_path: Path, llama_untied_path: Path) -> None:
    """The same file under the name of an architecture with the same tensors: whole it may run, a span is refused."""
    path = tmp_path / "renamed.gguf"
    path.write_bytes(llama_untied_path.read_bytes().replace(b"llama", b"qwen2"))
    with pytest.raises(UnsupportedError, match="cannot run a part of the layers"):
        Engine.open(config(path, 0, 3))


@pytest.mark.parametrize("first", [3, 4, 5, 7, 8, 9])
def test_illegal_start_of_glm(glm_random_f32_path: Path, first: int) -> None:
    with pytest.raises(UnsupportedError, match="top-k of a layer before it"):
        Engine.open(config(glm_random_f32_path, first, None))


@pytest.mark.parametrize(("first", "last"), [(0, 7), (6, 7), (6, None), (2, 2), (3, 2), (-1, 3)])
def test_span_out_of_range(llama_untied_path: Path, first: int, last: int | None) -> None:
    with pytest.raises(BadConfig):
        Engine.open(config(llama_untied_path, first, last))


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 0},
        {"threads": 100_000},
        {"chunk_tokens": 0},
        {"contexts": ()},
        {"contexts": (ContextSpec(0, 10),)},
        {"contexts": (ContextSpec(257, 10),)},
        {"contexts": (ContextSpec(1, 0),)},
        {"wanted_rows": 0},
        {"wanted_rows": 513},
    ],
)
def test_bad_configuration(llama_untied_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(BadConfig):
        Engine.open(replace(config(llama_untied_path), **changes))  # type: ignore[arg-type]


def test_a_file_without_the_other_layers_is_enough(tmp_path: Path, llama_untied_path: Path) -> None:
    """Layers 2-4 of a file in which everything else is a hole."""
    reader = gguf.GGUFReader(llama_untied_path)
    data = llama_untied_path.read_bytes()
    path = tmp_path / "sparse.gguf"
    start = min(tensor.data_offset for tensor in reader.tensors)
    with path.open("wb") as file:
        file.write(data[:start])
        file.truncate(len(data))
        for tensor in reader.tensors:
            if tensor.name.startswith(("blk.2.", "blk.3.", "rope_freqs")):
                file.seek(tensor.data_offset)
                file.write(data[tensor.data_offset : tensor.data_offset + tensor.n_bytes])
    batch = token_rows((0, 2), [1, 2, 3])
    with Engine.open(config(llama_untied_path)) as whole, Engine.open(config(path, 2, 4)) as part:
        hidden = whole.step(batch).hidden
        later = replace(batch, run=(2, 4), tokens=None, hidden=hidden)
        expected = whole.step(later).hidden
        np.testing.assert_array_equal(part.step(later).hidden, expected)


def test_progress_and_cancel(llama_untied_path: Path) -> None:
    seen: list[float] = []

    def note(fraction: float) -> bool:
        seen.append(fraction)
        return True

    with Engine.open(config(llama_untied_path), note):
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
    with pytest.raises(LoadCancelled):
        Engine.open(config(llama_untied_path), lambda _: False)


def test_info(smollm2_path: Path) -> None:
    settings = EngineConfig(smollm2_path, 10, 20, contexts=(ContextSpec(2, 100),), kv_type=KvType.Q8_0)
    with Engine.open(settings) as engine:
        info = engine.info
    assert (info.arch, info.n_layers, info.n_embd, info.n_vocab) == ("llama", 30, 576, 49152)
    assert (info.first, info.last, info.n_ctx_train, info.n_mtp) == (10, 20, 8192, 0)
    build, variant, kv = info.numerics_id.split("/")
    assert len(build) == 16
    assert variant
    assert kv == "q8_0"


def test_mtp_block_is_counted_and_loaded_by_the_exit_only(glm_random_f32_path: Path) -> None:
    plain = config(glm_random_f32_path, 6, None)
    with Engine.open(plain) as without, Engine.open(replace(plain, load_mtp=True)) as loaded:
        assert (without.info.n_layers, without.info.n_mtp, loaded.info.n_mtp) == (10, 0, 1)
        assert loaded.info.weights_bytes > without.info.weights_bytes
    with Engine.open(replace(config(glm_random_f32_path, 0, 6), load_mtp=True)) as entry:
        assert entry.info.n_mtp == 0


def test_vocabulary_without_tensors(tmp_path: Path, smollm2_path: Path) -> None:
    header = tmp_path / "header.gguf"
    shutil.copy(smollm2_path, header)
    start = min(tensor.data_offset for tensor in gguf.GGUFReader(smollm2_path).tensors)
    with header.open("r+b") as file:
        file.truncate(start)
        file.seek(8)
        file.write(bytes(8))  # the number of tensors
    with Vocab.load(smollm2_path) as full, Vocab.load(header) as cut:
        assert full.encode("Hello, world") == cut.encode("Hello, world")
