"""The benchmarks with many clients from end to end at toy size: every figure is there, in a record that can be read."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import long_prompt, many_clients, pipelining
from bench.crowd import Call, Part
from bench.crowd.naming import model_option, record_id
from bench.crowd.node import LoggingNode
from bench.glm_slice import slice_name
from bench.record import Record
from swarm.node.config import ModelOptions, NodeConfig


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Record]:
    """What is recorded, in place of evidence/."""
    records: list[Record] = []

    def write(record: Record) -> Path:
        records.append(record)
        return tmp_path

    monkeypatch.setattr(Record, "write", write)
    return records


def recorded(run: Callable[[list[str]], int], model: Path, options: str, written: list[Record]) -> Record:
    assert run(["--model", str(model), "--record", *shlex.split(options)]) == 0
    (record,) = written
    assert Record.model_validate_json(record.model_dump_json()) == record
    return record


def test_many_clients(llama_untied_path: Path, written: list[Record], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--clients 1,3 --hops 2 --tokens 4 --prompt-tokens 16 --rounds 1"
    record = recorded(many_clients.main, llama_untied_path, options, written)
    for clients in (1, 3):
        name = f"{clients}_clients"
        assert record.summary[f"{name}_ratio_to_same_calls_in_process"] > 0
        assert record.summary[f"{name}_processor_ratio_to_same_calls_in_process"] > 0
        assert 1 <= record.summary[f"{name}_rows_per_call"] <= clients
        assert record.summary[f"{name}_engine_call_p50_ms"] > 0
        assert record.summary[f"{name}_between_engine_calls_p50_ms"] > 0
        assert len(record.samples[f"{name}_{clients - 1}_token_seconds"]) == 4
    assert many_clients.parser().parse_args(shlex.split(record.command)[3:]).clients == (1, 3)
    assert "rows a call" in capsys.readouterr().out


def test_nodes_under_test_compute_nothing_of_their_own(llama_untied_path: Path) -> None:
    assert not LoggingNode(NodeConfig(ModelOptions(llama_untied_path))).config.measure_speed


def test_long_prompt(llama_untied_path: Path, written: list[Record], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--clients 2 --prompt-tokens 640 --chunk 32 --hops 2 --tokens 4 --rounds 1"
    record = recorded(long_prompt.main, llama_untied_path, options, written)
    assert record.summary["prompt_ratio"] > 0
    assert record.samples["client_1_loud_token_seconds"]
    assert len(record.samples["chunk_compute_seconds"]) == 20
    assert long_prompt.parser().parse_args(shlex.split(record.command)[3:]).prompt_tokens == 640
    assert "the prompt:" in capsys.readouterr().out


@pytest.mark.parametrize("links", [pytest.param("", marks=pytest.mark.slow), "--links 1"])
def test_pipelining(
    llama_untied_path: Path, written: list[Record], capsys: pytest.CaptureFixture[str], links: str
) -> None:
    options = f"{links} --prompt-tokens 64 --chunk 16 --tokens 4 --rounds 1"
    record = recorded(pipelining.main, llama_untied_path, options, written)
    assert record.summary["prefill_ratio"] > 0
    assert record.summary["two_clients_ratio"] > 0
    assert record.summary["in_process_prefill_ratio"] > 0
    assert ("--links 1" in record.command) == bool(links)
    assert "two clients:" in capsys.readouterr().out


def test_a_token_is_compared_with_the_chunk_that_it_met() -> None:
    answered, chunks = [10.0, 20.0, 40.0], [8.0, 9.0, 19.0]
    assert long_prompt.beyond_a_chunk([1.0, 15.0, 20.0, 41.0], [10.0, 9.5, 30.0, 1.0], answered, chunks) == [
        2.0,
        0.5,
        11.0,
        -18.0,
    ]


def test_records_of_layers_of_real_size_have_names_of_their_own() -> None:
    small, real = Path("SmolLM2.gguf"), Path(f"somewhere/{slice_name(2)}.gguf")
    assert (record_id("pipelining", small), model_option(small)) == ("pipelining", "")
    assert record_id("pipelining", real) == "pipelining-glm"
    assert model_option(real) == " --model glm-5.2-bench-slice-2a.gguf"


def test_a_call_is_read_as_it_was_written() -> None:
    call = Call(False, (Part("00ff", 7, 1), Part("ab", 0, 2)))
    assert Call.read(call.line()) == call
    assert call.rows == 3
