from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.artifact.gguf_file import MAX_PAIRS, MAX_TENSORS, FileHeader, parse_header, read_file
from swarm.artifact.gguf_set import display_name, open_gguf
from swarm.errors import NotAModel
from tests.artifact import files


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_llama(tmp_path_factory.mktemp("gguf") / "small.gguf", n_layers=2)


@pytest.fixture(scope="module")
def raw(small: Path) -> bytes:
    return read_file(small).header.raw


def head(n_tensors: int, n_pairs: int, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_agrees_with_the_reference_reader(glm_random_ud_path: Path) -> None:
    mine = read_file(glm_random_ud_path)
    reader = gguf.GGUFReader(glm_random_ud_path)
    assert [(t.name, t.offset, t.bytes, t.type, t.dims) for t in mine.header.tensors] == [
        (t.name, t.data_offset, t.n_bytes, t.tensor_type.name, tuple(int(n) for n in t.shape)) for t in reader.tensors
    ]
    tokens = mine.header.metadata.array("tokenizer.ggml.tokens")
    assert tokens is not None
    assert [token.decode() for token in tokens.texts()] == reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = mine.header.metadata.array("tokenizer.ggml.token_type")
    assert kinds is not None
    assert list(kinds.scalars()) == reader.fields["tokenizer.ggml.token_type"].contents()
    for key in ("glm-dsa.rope.freq_base", "general.architecture", "glm-dsa.expert_weights_norm"):
        assert mine.header.metadata.values[key] == reader.fields[key].contents()


def test_every_truncation_of_the_header_is_refused(raw: bytes) -> None:
    for end in range(len(raw)):
        with pytest.raises(NotAModel, match=r"cut\.gguf: .*; download it again$"):
            parse_header(raw[:end], "cut.gguf")


def test_a_file_cut_anywhere_in_its_data_is_refused(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    opened = read_file(small)
    end = max(tensor.offset + tensor.bytes for tensor in opened.header.tensors)
    cut = tmp_path / "cut.gguf"
    start = opened.header.tensors[0].offset
    for size in (opened.header.header_bytes, start, (start + end) // 2, end - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(NotAModel, match=r"cut\.gguf: truncated: tensor .* ends at byte \d+ and the file has"):
            read_file(cut)
    cut.write_bytes(whole[:end])
    assert read_file(cut).header.tensors == opened.header.tensors  # padding behind the last tensor may be missing


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutations_never_do_anything_but_parse_or_refuse(raw: bytes, data: st.DataObject) -> None:
    mutated = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=9))
        mutated[at : at + len(piece)] = piece
    try:
        header = parse_header(bytes(mutated), "mutated.gguf")
    except NotAModel as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(header, FileHeader)


@given(st.binary(max_size=200))
@example(b"")
@example(b"GGUF")
@example(b"PK\x03\x04" + bytes(40))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(NotAModel):
        parse_header(data, "garbage.gguf")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_behind_a_right_start_is_parsed_or_refused(data: bytes) -> None:
    try:
        parse_header(head(2, 2) + data, "garbage.gguf")
    except NotAModel as error:
        assert str(error).endswith("download it again")


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (head(0, 0, version=1), "GGUF version 1"),
        (head(0, 0, version=4), "GGUF version 4"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (head(MAX_TENSORS + 1, 0), "claims 65537 tensors"),
        (head(0, MAX_PAIRS), "truncated"),
        (head(0, MAX_PAIRS + 1), "claims 4097 metadata keys"),
        (head(0, HUGE), "metadata keys"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, HUGE), "truncated"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, HUGE), "truncated"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "truncated"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQQQ", 9, 8, 2, HUGE - 7, 0), "truncated"),
        (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "array of type 9"),
        (head(0, 1) + text(b"k") + struct.pack("<I", 13), "has type 13"),
        (head(0, 1) + struct.pack("<Q", HUGE), "truncated"),
        (head(0, 1) + text(b"") + struct.pack("<II", 4, 1), "metadata key at byte"),
        (head(0, 2) + 2 * (text(b"k") + struct.pack("<II", 4, 1)), "key k comes twice"),
        (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 24), "general.alignment"),
        (head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "general.alignment"),
        (head(1, 0) + tensor(b"a" * 64, (32,)), "tensor name"),
        (head(1, 0) + tensor(b"a\nb", (32,)), "tensor name"),
        (head(1, 0) + tensor(b"a", (1, 1, 1, 1, 1)), "has 5 dimensions"),
        (head(1, 0) + tensor(b"a", (0, 4)), "impossible shape"),
        (head(1, 0) + tensor(b"a", (1 << 62, 4)), "impossible shape"),
        (head(1, 0) + tensor(b"a", (4,), kind=250), "unknown type 250"),
        (head(1, 0) + tensor(b"a", (33,), kind=8), "no multiple of 32"),
        (head(1, 0) + tensor(b"a", (32,), offset=32), "lies at 32, not at 0"),
        (head(2, 0) + tensor(b"a", (32,)) + tensor(b"a", (32,), offset=128), "tensor a comes twice"),
    ],
)
def test_hostile_headers_are_named(data: bytes, what: str) -> None:
    with pytest.raises(NotAModel) as caught:
        parse_header(data, "hostile.gguf")
    assert str(caught.value).startswith("hostile.gguf: ")
    assert what in str(caught.value)


@pytest.mark.parametrize("what", ["missing", "folder", "empty", "text", "pipe", "under a file"])
def test_paths_that_are_no_model(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    messages = {
        "missing": "no such model file; check the path",
        "folder": "a folder, not a model file; name the .gguf file in it",
        "empty": "empty, not a GGUF model; download it again",
        "text": "not a GGUF model (it does not start with GGUF); download it again",
        "pipe": "not a regular file; name a .gguf file",
        "under a file": "no such model file",
    }
    if what == "folder":
        path.mkdir()
    elif what in ("empty", "text"):
        path.write_text("" if what == "empty" else "<html>404</html>")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "under a file":
        (tmp_path / "file").write_text("x")
        path = tmp_path / "file" / "model.gguf"
    with pytest.raises(NotAModel) as caught:
        open_gguf(path)
    assert messages[what] in str(caught.value)
    assert path.name in str(caught.value)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_glm(tmp_path_factory.mktemp("split") / "model.gguf", split_tensors=5)


def copied(split: Path, folder: Path) -> list[Path]:
    shards = sorted(split.parent.glob("*.gguf"))
    for shard in shards:
        (folder / shard.name).write_bytes(shard.read_bytes())
    return sorted(folder.glob("*.gguf"))


def test_any_shard_opens_the_set(split: Path) -> None:
    shards = sorted(split.parent.glob("*.gguf"))
    sets = [open_gguf(shard) for shard in shards]
    assert len(shards) == 5
    for opened in sets:
        assert [file.path for file in opened.files] == shards
        assert opened.metadata.text("general.architecture") == "glm-dsa"
    assert not sets[0].files[0].header.tensors


def test_a_missing_shard_is_named(split: Path, tmp_path: Path) -> None:
    shards = copied(split, tmp_path)
    shards[2].unlink()
    with pytest.raises(NotAModel, match=r"model-00003-of-00005\.gguf: missing; the model has 5 files"):
        open_gguf(shards[0])


def test_a_truncated_shard_is_named(split: Path, tmp_path: Path) -> None:
    shards = copied(split, tmp_path)
    os.truncate(shards[3], shards[3].stat().st_size - 64)
    with pytest.raises(NotAModel, match=r"model-00004-of-00005\.gguf: truncated"):
        open_gguf(shards[0])


def test_swapped_shards_are_noticed(split: Path, tmp_path: Path) -> None:
    shards = copied(split, tmp_path)
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(NotAModel, match=r"model-00002-of-00005\.gguf: not file 2 of 5"):
        open_gguf(shards[0])


def test_a_renamed_shard_says_so(split: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "mine.gguf"
    renamed.write_bytes(split.read_bytes())
    with pytest.raises(NotAModel, match="give the files their original names back"):
        open_gguf(renamed)


def test_names_for_people() -> None:
    assert display_name(Path("/a/GLM-5.2-UD-IQ1_S-00002-of-00006.gguf")) == "GLM-5.2-UD-IQ1_S"
    assert display_name(Path("SmolLM2.Q4_1.gguf")) == "SmolLM2.Q4_1"


def test_a_header_like_glm52s_is_read_fast(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([b"token%d" % number for number in range(154_880)])
    writer.add_token_types([1] * 154_880)
    writer.add_token_merges([f"abcdefg {number}" for number in range(321_649)])
    writer.add_tensor("a", np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    begin = time.process_time()
    opened = read_file(path)
    assert time.process_time() - begin < 2
    assert opened.header.header_bytes > 9_000_000
