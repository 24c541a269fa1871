from __future__ import annotations

from pathlib import Path

import pytest

from dht.identity import Identity
from swarm.node.identity import known_peer_id, own_identity


@pytest.mark.parametrize("named", [True, False])
def test_who_a_node_is_can_be_told_while_it_runs_and_after(tmp_path: Path, named: bool) -> None:
    given = tmp_path / "node.key" if named else None
    with own_identity(given, "a model", tmp_path) as identity:
        assert known_peer_id(given, "a model", tmp_path) == identity.peer_id
    assert known_peer_id(given, "a model", tmp_path) == identity.peer_id
    assert known_peer_id(None, "another model", tmp_path) == ""


def test_where_no_node_ever_ran_nothing_is_made(tmp_path: Path) -> None:
    assert known_peer_id(None, "model", tmp_path / "none") == ""
    (tmp_path / "broken.key").write_text("no key")
    assert known_peer_id(tmp_path / "broken.key", "model", tmp_path) == ""
    assert known_peer_id(tmp_path, "model", tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["broken.key"]


def test_a_peer_id_is_read_from_its_file(tmp_path: Path) -> None:
    with Identity.load_or_create(tmp_path / "key") as identity:
        assert Identity.peer_id_in(tmp_path / "key") == identity.peer_id
