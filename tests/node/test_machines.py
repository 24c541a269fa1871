from __future__ import annotations

from pathlib import Path

import pytest

from swarm.artifact.catalog import GLM_TINY, KNOWN
from swarm.errors import UsageError
from swarm.node.cli import main
from swarm.node.machines import parse_machines

GIB = 1 << 30


def test_a_plan_is_shown_with_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "glm-5.2-ud-iq1_s", "--plan", "5x64GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["glm-5.2-ud-iq1_s, slots 4x4096:", "chain 1, largest weights/memory ratio 0.68:"]
    spans = [line.split("--layers ")[1].split(",")[0] for line in lines if "--layers" in line]
    assert spans == ["0:18", "18:34", "34:50", "50:66", "66:78"]
    assert lines[-1] == "each layer has at least 1 machine"


def test_machines_that_are_too_small_are_shown_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "glm-5.2-ud-iq1_s", "--plan", "2x64GiB,1GiB"]) == 0
    out = capsys.readouterr().out
    assert "too small together, as far as they go:" in out
    assert "(1.0 GiB): too small for any layers" in out
    assert "without a machine: layers 46:78" in out


def test_sizes_may_be_mixed() -> None:
    assert list(parse_machines("2x64GiB, 128GiB").values()) == [64 * GIB, 64 * GIB, 128 * GIB]


@pytest.mark.parametrize("text", ["", "0x64GiB", "2000x1GiB", "3xmany", "64GiB,,"])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"write for example|name 1 to"):
        parse_machines(text)


def test_a_model_of_ones_own_is_planned_by_its_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "mine.json"
    manifest.write_bytes(KNOWN[GLM_TINY].manifest.to_json())
    assert main(["--manifest", str(manifest), "--plan", "2x64GiB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mine, slots ")
    assert f"--layers 0:{KNOWN[GLM_TINY].manifest.n_layers}" in out


def test_options_that_take_memory_count(capsys: pytest.CaptureFixture[str]) -> None:
    def table(*given: str) -> str:
        assert main(["--plan", "5x64GiB", "--slots", "4x4096", *given]) == 0
        return capsys.readouterr().out

    assert len({table(), table("--chunk-tokens", "2048"), table("--journal-memory", "0")}) == 3


def test_only_models_whose_sizes_are_known_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "mine.gguf", "--plan", "64GiB"]) == 2
    assert "the sizes of mine.gguf are not known here; choose glm-5.2" in capsys.readouterr().err
