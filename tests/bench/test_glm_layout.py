"""The layout twin: the artifact's sizes, headers and offsets, and never its name or id."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import glm_layout
from bench.glm_layout import Layout, of_layers, pinned_layout, plan, write_twin
from bench.glm_metadata import GlmShape
from bench.glm_tensors import class_a_type, trunk_tensors
from bench.glm_twin_load import check_finite, decode
from bench.page_cache import dropped, resident_bytes
from shim.engine import Engine
from shim.types import ContextSpec, EngineConfig
from shim.vocab import Vocab
from swarm.artifact.catalog import GLM52, pinned_of
from swarm.artifact.facts import ModelFacts, read_facts
from swarm.artifact.gguf_set import open_gguf
from swarm.errors import UsageError


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without digests: 200 GiB of zeros take a minute to hash."""
    return write_twin(tmp_path_factory.mktemp("twin"), pinned_layout(), GlmShape())[0]


def test_headers_sizes_and_offsets_are_the_artifacts(twin: Path) -> None:
    opened, pinned = open_gguf(twin), GLM52.manifest
    assert [file.size_bytes for file in opened.files] == [file.size_bytes for file in pinned.files]
    assert [file.header.header_bytes for file in opened.files] == [file.header_bytes for file in pinned.files]
    placed = [
        (number, t.name, t.offset, t.bytes, t.type, t.dims)
        for number, file in enumerate(opened.files)
        for t in file.header.tensors
    ]
    assert placed == [(t.file, t.name, t.offset, t.bytes, t.type, t.dims) for t in pinned.tensors]
    assert len(placed) == 1809
    assert sum(file.path.stat().st_blocks for file in opened.files) * 512 < 16 << 20


def test_metadata_says_the_same_about_the_model(twin: Path) -> None:
    opened, pinned = open_gguf(twin), GLM52.manifest
    facts = read_facts(opened.metadata, {t.name: t for file in opened.files for t in file.header.tensors})
    assert facts == ModelFacts(**{name: getattr(pinned, name) for name in facts.__dataclass_fields__})


def test_it_never_claims_to_be_the_artifact(twin: Path) -> None:
    first = open_gguf(twin).files[0]
    assert "LAYOUT-TWIN" in twin.name
    assert "not the model" in first.header.metadata.text("general.name")
    header = hashlib.sha256(twin.read_bytes()).hexdigest()
    assert replace(GLM52.manifest, header_sha256=header).artifact_id != GLM52.artifact_id
    assert pinned_of(first, 6) is None


def test_vocabulary(twin: Path) -> None:
    known = {"<|endoftext|>": 154_820, "[gMASK]": 154_822, "<|user|>": 154_827, "<|observation|>": 154_829}
    with Vocab.load(twin) as vocab:
        assert {text: vocab.encode(text) for text in known} == {text: [token] for text, token in known.items()}
        tokens = vocab.encode("Hello, wörld")
        assert b"".join(vocab.piece(token) for token in tokens).decode() == "Hello, wörld"


def test_generated_tensors_are_the_artifacts() -> None:
    generated = dict(trunk_tensors(GlmShape()))
    trunk = [t for t in GLM52.manifest.tensors if not t.name.startswith("blk.78.")]
    assert [(t.name, t.dims) for t in trunk] == list(generated.items())
    layer = [t for t in trunk if t.name.startswith("blk.10.")]
    assert [t.type for t in layer] == [class_a_type(t.name) for t in layer]
    assert sum(t.bytes for t in layer) == 2_668_793_856


def test_a_span_takes_its_own_bytes_of_memory_only(twin: Path) -> None:
    """Layers 0 and 1 with the embedding: 1.15 of 202 GiB."""
    manifest = GLM52.manifest
    files = [twin.with_name(file.path.name) for file in open_gguf(twin).files]
    own = manifest.span_bytes(0, 2)
    with dropped(files):
        config = EngineConfig(twin, 0, 2, contexts=(ContextSpec(1, 256),), chunk_tokens=1)
        with Engine.open(config) as engine:
            assert engine.info.weights_bytes == own
            check_finite(decode(engine, 0), "holes")
        assert resident_bytes(files) == pytest.approx(own, rel=0.05)


def test_noise_goes_where_it_was_asked_for() -> None:
    tensors = GLM52.manifest.tensors
    names = {t.name.split(".")[1] for t in of_layers(tensors, [(10, 12), (20, 21)])}
    assert names == {"10", "11", "20"}
    assert {t.name for t in of_layers(tensors, [(0, 1)]) if "blk" not in t.name} == {"token_embd.weight"}
    assert len([t for t in of_layers(tensors, [(77, 79)]) if "blk" not in t.name]) == 3


def test_a_layout_that_does_not_come_out_is_refused() -> None:
    layout = pinned_layout()
    with pytest.raises(UsageError, match="don't fit a header of 1000"):
        plan(Layout(layout.sizes, (1000, *layout.header_bytes[1:]), layout.tensors), GlmShape())


@pytest.mark.parametrize("text", ["10:80", "14:10", "x", "auto"])
def test_bad_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert glm_layout.main([str(tmp_path / "twin"), "--noise", text]) == 2
    assert "write for example" in capsys.readouterr().err
    assert not (tmp_path / "twin").exists()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "twin"
    assert glm_layout.main([str(folder), "--no-digests"]) == 0
    first = Path(capsys.readouterr().out.strip())
    assert len(list(folder.iterdir())) == 6
    assert open_gguf(first).files[5].size_bytes == 19_171_063_136
    assert glm_layout.main([str(folder), "--no-digests"]) == 2
    assert "already there; delete" in capsys.readouterr().err
