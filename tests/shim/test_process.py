"""The engine in a child process, and its deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from shim import process
from shim.engine import Engine
from shim.errors import BadConfig, BadStep, BuildError, EngineDied, ModelError, StepGap, UnsupportedError
from shim.process import EngineProcess
from shim.types import SummarySpec
from tests.shim.steps import config, prompt, token_rows

RUN = (0, 6)


@pytest.fixture
async def engine(llama_untied_path: Path) -> AsyncIterator[EngineProcess]:
    async with await EngineProcess.start(config(llama_untied_path, slots=2)) as engine:
        yield engine


async def test_same_results_as_in_process(llama_untied_path: Path, engine: EngineProcess) -> None:
    tokens = prompt(40, engine.info.n_vocab)
    batch = token_rows(RUN, tokens, want=[10, 39], tiled=True)
    specs = [SummarySpec(0.8, 20, (1, 5)), SummarySpec(top=3)]
    result, ipc_seconds = await engine.step(batch, specs)
    with Engine.open(config(llama_untied_path, slots=2)) as direct:
        expected = direct.step(batch, specs)
        row = direct.row(0)
        info = direct.info
    for found, wanted in zip(result.summaries, expected.summaries, strict=True):
        np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
        np.testing.assert_array_equal(found.top_logits, wanted.top_logits)
        np.testing.assert_array_equal(found.asked, wanted.asked)
        assert found.rest_log_sum_exp == wanted.rest_log_sum_exp
    np.testing.assert_array_equal(await engine.row(0), row)
    assert await engine.position(0) == 40
    assert await engine.refresh() == info
    assert result.compute_seconds > 0
    assert 0 <= ipc_seconds < 30


async def test_hidden_states_come_back(llama_untied_path: Path) -> None:
    batch = token_rows((0, 3), prompt(300, 200))
    with Engine.open(config(llama_untied_path, 0, 3, tokens=300)) as direct:
        expected = direct.step(batch).hidden
    async with await EngineProcess.start(config(llama_untied_path, 0, 3, tokens=300)) as engine:
        result, _ = await engine.step(batch)
    np.testing.assert_array_equal(result.hidden, expected)


async def test_calls_are_answered_in_order(engine: EngineProcess) -> None:
    steps = [engine.step(token_rows(RUN, [1 + n], n, want=[0]), [SummarySpec(top=1)]) for n in range(30)]
    await asyncio.gather(*steps)
    assert await engine.position(0) == 30


async def test_a_cancelled_call_does_not_shift_replies(engine: EngineProcess) -> None:
    first = asyncio.ensure_future(engine.step(token_rows(RUN, [1, 2, 3], want=[])))
    await asyncio.sleep(0)
    first.cancel()
    await engine.truncate(1, 0)
    assert await engine.position(0) == 3
    assert first.cancelled()


async def test_errors_keep_their_class_and_the_engine_goes_on(engine: EngineProcess) -> None:
    with pytest.raises(StepGap, match="holds 0 tokens"):
        await engine.step(token_rows(RUN, [1], 7, want=[0]))
    with pytest.raises(BadStep):
        await engine.step(token_rows(RUN, [1 << 20], want=[0]))
    with pytest.raises(BadStep):
        await engine.row(0)
    await engine.step(token_rows(RUN, [1], want=[0]))
    assert not engine.died.done()


async def test_load_errors_keep_their_class(tmp_path: Path, llama_untied_path: Path, glm_random_f32_path: Path) -> None:
    with pytest.raises(ModelError, match="can't open"):
        await EngineProcess.start(config(tmp_path / "absent.gguf"))
    with pytest.raises(UnsupportedError):
        await EngineProcess.start(config(glm_random_f32_path, 3, None))
    with pytest.raises(BadConfig):
        await EngineProcess.start(config(llama_untied_path, 0, 99))
    assert psutil.Process().children() == []


async def test_progress(llama_untied_path: Path) -> None:
    seen: list[float] = []
    async with await EngineProcess.start(config(llama_untied_path), seen.append):
        assert seen == sorted(seen)
        assert seen[-1] == 1.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
async def test_death_is_reported(engine: EngineProcess, number: signal.Signals) -> None:
    os.kill(engine.pid, number)
    death = await engine.died
    assert death.exit_code == -number
    assert number.name in str(death)
    with pytest.raises(EngineDied, match=number.name):
        await engine.position(0)
    assert not psutil.pid_exists(engine.pid)


async def test_death_ends_the_calls_that_wait(engine: EngineProcess) -> None:
    calls = [asyncio.ensure_future(engine.step(token_rows(RUN, [1], want=[0]))) for _ in range(3)]
    os.kill(engine.pid, signal.SIGSTOP)
    await asyncio.sleep(0)  # the calls are sent, to a process that is stopped
    os.kill(engine.pid, signal.SIGKILL)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, EngineDied)
        assert "SIGKILL" in str(result)


async def test_last_words_are_kept(llama_untied_path: Path) -> None:
    """llama.cpp warns about a slot longer than the model was trained for; that line outlives the child."""
    async with await EngineProcess.start(config(llama_untied_path, tokens=5000)) as engine:
        os.kill(engine.pid, signal.SIGABRT)
        death = await engine.died
    assert any("n_ctx_train" in line for line in death.last_lines)
    assert str(death).endswith(death.last_lines[-1])


async def test_missing_library_is_a_build_error(llama_untied_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_SHIM_LIBRARY", "/absent/libswarm_shim.so")
    with pytest.raises(BuildError, match="SWARM_SHIM_LIBRARY"):
        await EngineProcess.start(config(llama_untied_path))


async def test_it_ignores_what_a_terminal_sends(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    os.kill(engine.pid, signal.SIGHUP)
    await engine.step(token_rows(RUN, [1], want=[0]))
    assert await engine.position(0) == 1


async def test_death_while_loading(llama_untied_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = process._spawn

    async def spawn_and_kill(connection: socket.socket) -> asyncio.subprocess.Process:
        child = await spawn(connection)
        os.kill(child.pid, signal.SIGKILL)  # long before Python is up in there
        return child

    monkeypatch.setattr(process, "_spawn", spawn_and_kill)
    with pytest.raises(EngineDied, match="SIGKILL"):
        await EngineProcess.start(config(llama_untied_path))
    assert psutil.Process().children() == []


async def test_cancelled_start_leaves_no_child(llama_untied_path: Path) -> None:
    loading = asyncio.Event()
    task = asyncio.ensure_future(EngineProcess.start(config(llama_untied_path), lambda _: loading.set()))
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert psutil.Process().children() == []


async def test_close_leaves_nothing_behind(llama_untied_path: Path) -> None:
    async def once() -> None:
        engine = await EngineProcess.start(config(llama_untied_path))
        waiting = asyncio.ensure_future(engine.step(token_rows(RUN, [1], want=[0])))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        assert not engine.died.done()
        with pytest.raises(EngineDied, match="closed"):
            await engine.position(0)
        await asyncio.gather(waiting, return_exceptions=True)

    await once()
    before = psutil.Process().num_fds()
    await once()
    assert psutil.Process().num_fds() == before
    assert psutil.Process().children() == []


async def test_a_garbled_answer_is_a_death_not_a_crash(engine: EngineProcess) -> None:
    assert engine._link is not None
    waiting = asyncio.ensure_future(engine.position(0))
    await asyncio.sleep(0)
    garbage = b"not a message, but long enough for one"
    engine._link.get_buffer(-1)[: len(garbage)] = garbage
    engine._link.buffer_updated(len(garbage))
    death = await engine.died
    assert "not the head of a message" in str(death)
    with pytest.raises(EngineDied):
        await waiting


async def test_child_dies_with_its_parent(llama_untied_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from shim.process import EngineProcess
        from shim.types import EngineConfig

        async def main():
            engine = await EngineProcess.start(EngineConfig(Path({str(llama_untied_path)!r})))
            print(engine.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    child.suspend()  # it can't notice the closed socket: the kernel has to end it
    parent.kill()
    await parent.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [child], 10)
    assert gone == [child]
