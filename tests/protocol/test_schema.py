"""The checked-in module is what the schema generates."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from swarm.protocol import pb

ROOT = Path(__file__).parents[2]
SCHEMA = "swarm/protocol/swarm.proto"


def without_versions(module: str) -> str:
    """The generator writes its own version down, which may differ from one machine to the next."""
    module = re.sub(r"# Protobuf Python Version: .*", "", module)
    return re.sub(r"(ValidateProtobufRuntimeVersion\([^)]*?PUBLIC,)[^)]*\)", r"\1)", module)


def test_module_is_generated_from_the_schema(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="install the dev extra to regenerate the schema")
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", SCHEMA]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated = (tmp_path / "swarm/protocol/swarm_pb2.py").read_text()
    checked_in = (ROOT / "swarm/protocol/swarm_pb2.py").read_text()
    assert without_versions(generated) == without_versions(checked_in)


def all_messages() -> Iterator[Descriptor]:
    yield from pb.DESCRIPTOR.message_types_by_name.values()


def test_stubs_name_every_field() -> None:
    stubs = (ROOT / "swarm/protocol/swarm_pb2.pyi").read_text()
    for message in all_messages():
        body = stubs.split(f"\nclass {message.name}(_message.Message):")[1].split("\n@_typing.final")[0]
        for field in message.fields:
            assert f"{field.name.upper()}_FIELD_NUMBER" in body, f"{message.name}.{field.name}"
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        for value in enum.values:
            assert f"\n{value.name}: {enum.name}.ValueType  # {value.number}\n" in stubs
