from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import BadIdentity, IdentityInUse
from dht.identity import Identity
from dht.peer_id import decode_base58, encode_base58, is_peer_id, peer_id_of, public_key_of

# The Ed25519 test vector of https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
SPEC_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC_KEY = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def test_the_key_of_the_specification(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SPEC_PRIVATE_KEY)
    with Identity.load_or_create(path) as identity:
        assert identity.private_key_protobuf == SPEC_PRIVATE_KEY
        assert public_key_of(identity.peer_id) == SPEC_PUBLIC_KEY
        assert identity.peer_id.startswith("12D3KooW")


def test_a_new_identity_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity"
    with Identity.load_or_create(path) as first:
        peer_id = first.peer_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with Identity.load_or_create(path) as second:
        assert second.peer_id == peer_id
    assert sorted(file.name for file in path.parent.iterdir()) == ["identity", "identity.lock"]


def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path).close()
    path.chmod(0o644)
    Identity.load_or_create(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_processes_cannot_share_an_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    code = "import sys; from dht import Identity; me = Identity.load_or_create(sys.argv[1]); print(me.peer_id); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        peer_id = holder.stdout.readline().strip()
        with pytest.raises(IdentityInUse, match=f"{path} is used by process {holder.pid};"):
            Identity.load_or_create(path)
        holder.kill()  # the kernel gives the lock back
    with Identity.load_or_create(path) as identity:
        assert identity.peer_id == peer_id


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a key",
        SPEC_PRIVATE_KEY[:-1],
        SPEC_PRIVATE_KEY + b"\0",
        SPEC_PRIVATE_KEY[:-1] + b"\0",  # public half of another key
        b"\x08\x00" + SPEC_PRIVATE_KEY[2:],  # RSA
    ],
)
def test_a_file_that_is_no_identity(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    path.chmod(0o644)
    for _ in range(2):  # the failure gave the lock back
        with pytest.raises(BadIdentity, match="holds no Ed25519 identity; move it away"):
            Identity.load_or_create(path)
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o644, "a file named by mistake stays as it is"


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadIdentity, match="choose another path"):
        Identity.load_or_create(tmp_path / "file" / "identity")


def test_only_the_owner_of_an_id_signs_for_it() -> None:
    one, other = Identity.ephemeral(), Identity.ephemeral()
    signature = one.sign(b"text")
    assert Identity.verify(one.peer_id, b"text", signature)
    assert not Identity.verify(other.peer_id, b"text", signature)
    assert not Identity.verify(one.peer_id, b"texT", signature)
    assert not Identity.verify("Qm" + "1" * 44, b"text", signature)


@given(st.binary(max_size=64))
def test_base58_round_trip(data: bytes) -> None:
    assert decode_base58(encode_base58(data)) == data


@given(st.binary(min_size=32, max_size=32))
def test_the_id_holds_the_key(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    assert public_key_of(peer_id) == public_key
    assert is_peer_id(peer_id)


@given(st.text(max_size=70))
def test_other_texts_are_no_ids(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        public_key_of(text)
