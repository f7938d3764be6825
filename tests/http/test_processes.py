"""The same frontend in child processes that share the port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.fake_service import FakeService, fake_info, model_folder, start_fake
from support.server import wait_until

from spmd_serve.config import Config, ControlOptions, ServerOptions
from spmd_serve.errors import FrontendError, ModelError
from spmd_serve.frontend.link import UID_SHIFT
from spmd_serve.frontend.server import ProcessFrontend, start_frontend
from spmd_serve.types import FinishReason, ServiceState

LONG = {"prompt": "again ", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def service() -> Iterator[FakeService]:
    fake = start_fake(Config(server=ServerOptions(frontend="process:2")), step_interval=0.002)
    yield fake
    fake.close()
    assert isinstance(fake.frontend, ProcessFrontend)
    for pid in fake.frontend.pids:
        assert not Path(f"/proc/{pid}").exists()


def pids(service: FakeService) -> list[int]:
    assert isinstance(service.frontend, ProcessFrontend)
    return service.frontend.pids


async def ends_after(service: FakeService, fault: Callable[[], object], within_s: float = 20) -> list[str]:
    """How 12 streams end that are open when `fault` is called: their texts, or the names of the clients' errors."""
    async with httpx.AsyncClient(timeout=20) as client:
        posts = [client.post(f"{service.url}/v1/completions", json=LONG) for _ in range(12)]
        tasks = [asyncio.create_task(post) for post in posts]
        while service.core.busy < 12 or service.core.tokens < 24:
            await asyncio.sleep(0.01)
        fault()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), within_s)
        return [r.text if isinstance(r, httpx.Response) else type(r).__name__ for r in results]


def test_both_serve_and_their_metrics_are_summed(service: FakeService) -> None:
    """64 connections: the kernel gives some to each process; each answer is its own request's."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0, timeout=30) as client:

            async def one(i: int) -> None:
                text = ""
                async for chunk in await client.completions.create(
                    model="parrot", prompt=f"number {i}", max_tokens=99, stream=True
                ):
                    text += chunk.choices[0].text
                assert text == f"number {i}"

            await asyncio.gather(*(one(i) for i in range(64)))

    asyncio.run(run())
    assert {request.uid >> UID_SHIFT for request in service.core.seen} == {0, 1}
    assert len({request.uid for request in service.core.seen}) == 64
    for _ in range(4):  # whichever process answers
        text = httpx.get(f"{service.url}/metrics").text
        assert 'spmd_serve_requests_total{outcome="stop"} 64.0' in text
        assert "spmd_serve_time_to_first_token_seconds_count 64.0" in text
        assert f"spmd_serve_generation_tokens_total {service.core.tokens}.0" in text


def test_metrics_do_not_go_to_the_files_of_another_program(tmp_path: Path) -> None:
    code = "import sys; from spmd_serve.__main__ import main; sys.argv[1:] = ['--help']; main(); import prometheus_client as p; p.Counter('a', 'b').inc()"
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        subprocess.run([sys.executable, "-c", code], env=os.environ | {name: str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_leaves(service: FakeService) -> None:
    service.core.aborted.clear()
    with httpx.stream("POST", f"{service.url}/v1/completions", json=LONG) as response:
        pieces = response.iter_raw()
        next(pieces)
    wait_until("it is aborted", lambda: service.core.busy == 0, 1)
    assert [reason for _, reason in service.core.aborted] == [FinishReason.ABORT]


def test_nobody_else_may_have_the_port(service: FakeService) -> None:
    port = int(service.url.rpartition(":")[2])
    for kind in ("thread", "process:2"):
        with pytest.raises(FrontendError, match=f"port {port}"):
            start_frontend(Config(server=ServerOptions(port=port, frontend=kind)), fake_info())


def test_signals_to_the_group_do_not_end_the_children(service: FakeService) -> None:
    """Ctrl-C reaches all processes of the terminal; the parent decides when to drain."""
    for pid in pids(service):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    time.sleep(0.2)
    assert all(httpx.get(f"{service.url}/health").status_code == 200 for _ in range(4))


def test_a_child_that_dies_fails_the_core() -> None:
    service = start_fake(Config(server=ServerOptions(frontend="process")))
    try:
        service.core.stop()
        os.kill(pids(service)[0], signal.SIGKILL)
        with pytest.raises(FrontendError, match="frontend"):
            wait_until("the link fails", lambda: bool(service.frontend.link.drain()[0]), 3)
    finally:
        service.frontend.stop(0.1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the core ends as it should
def test_a_child_that_fails_on_an_output_ends_its_requests_with_an_error_and_itself() -> None:
    service = start_fake(Config(server=ServerOptions(frontend="process")), step_interval=0.005)
    deaths: list[str] = []
    service.frontend._on_death = deaths.append
    try:
        ends = asyncio.run(ends_after(service, lambda: service.frontend.link._outboxes[0].send(b"no message")))
        assert all(end.count('"error"') == 1 for end in ends), ends
        wait_until("the service ends", lambda: bool(deaths), 10)
        assert "process 0 ended with code 1" in deaths[0]
    finally:
        service.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the core ends as it should
def test_a_stopped_child_ends_all_requests_once() -> None:
    """Its own clients see their connections end, the other's get an error."""
    config = Config(server=ServerOptions(frontend="process:2"), control=ControlOptions(step_timeout=1.5))
    service = start_fake(config, step_interval=0.005)
    deaths: list[str] = []

    def die(reason: str) -> None:
        deaths.append(reason)
        service.frontend.link.set_state(ServiceState.FAILED, reason)

    service.frontend._on_death = die
    try:
        ends = asyncio.run(ends_after(service, lambda: os.kill(pids(service)[0], signal.SIGSTOP), within_s=6))
        (reason,) = deaths
        assert "process 0 has given no sign of life" in reason
        assert all(end == "RemoteProtocolError" or end.count(reason) == 1 for end in ends), ends
    finally:
        service.close()


@pytest.mark.parametrize("name", ["x" * 100, os.fsdecode(b"\xe4")], ids=["long", "not UTF-8"])
def test_a_folder_for_temporary_files_with_a_name_that_zeromq_cannot_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters have them; a socket's address may be 107 bytes long."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    service = start_fake(Config(server=ServerOptions(frontend="process")))
    try:
        assert service.http.get("/health").status_code == 200
    finally:
        service.close()


def test_a_child_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FrontendError, match="process 0 ended"):
        start_frontend(Config(server=ServerOptions(port=0, frontend="process")), fake_info(folder=str(tmp_path)))


def test_a_thread_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        start_frontend(Config(server=ServerOptions(port=0)), fake_info(folder=str(tmp_path)))


def test_failure_reaches_streams_in_all_processes() -> None:
    service = start_fake(Config(server=ServerOptions(frontend="process:2")), step_interval=0.005)
    try:
        ends = asyncio.run(
            ends_after(service, lambda: service.frontend.link.set_state(ServiceState.FAILED, "rank 3 is gone"))
        )
        assert all("rank 3 is gone" in text for text in ends)
    finally:
        service.close()


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    """kill -9 of rank 0 leaves no frontend and no files behind, and the port is free."""
    code = f"""
        import time
        from spmd_serve.config import Config, ServerOptions
        from spmd_serve.frontend.server import start_frontend
        from spmd_serve.types import Lengths, ModelInfo
        info = ModelInfo("m", {str(model_folder())!r}, Lengths(64, 64), 49152, (2,))
        frontend = start_frontend(Config(server=ServerOptions(port=0, frontend="process:2")), info)
        print(*frontend.pids, frontend.url, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    parent = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        *children, url = parent.stdout.readline().split()
        assert httpx.get(f"{url}/health").status_code == 503
        assert len([*tmp_path.glob("spmd_serve-*/*")]) == 3 + 4  # sockets, and files of metrics
        parent.kill()
        wait_until("the children are gone", lambda: not any(map(_alive, children)), 5)
    wait_until("the port is free", lambda: _is_free(int(url.rpartition(":")[2])), 5)
    wait_until("the files are gone", lambda: not [*tmp_path.iterdir()], 5)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
