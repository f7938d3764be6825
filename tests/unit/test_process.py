"""How a process of ours ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_serve.distributed.process import children_of, is_dead, is_suspended, parent_of, usable_cores
from spmd_serve.errors import REFUSED

ALL = len(os.sched_getaffinity(0))
LEAVE = "from spmd_serve.distributed.process import leave_process; print('last words'); leave_process(3)"
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}  # so that it is the end that writes


@pytest.mark.parametrize(
    ("code", "torchrun_sees", "words"), [(0, 0, ["1.3"]), (2, 0, ["1.3.refused"]), (1, 1, []), (-1, 255, [])]
)
def test_whoever_asks_for_it_gets_word_of_the_end(
    tmp_path: Path, code: int, torchrun_sees: int, words: list[str]
) -> None:
    """torchrun would start again what returned anything but 0, which is no use after a refusal."""
    place = {"TORCHELASTIC_RESTART_COUNT": "1", "LOCAL_RANK": "3", "SPMD_SERVE_OUTCOME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LEAVE.replace("(3)", f"({code})")]
    assert subprocess.run(command, env=os.environ | place, timeout=60).returncode == torchrun_sees
    assert [path.name for path in tmp_path.iterdir()] == words
    place["SPMD_SERVE_OUTCOME_DIR"] = str(tmp_path / "gone")
    assert subprocess.run(command, env=os.environ | place, timeout=60).returncode == code % 256


def test_what_was_written_goes_out_before_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, env=BUFFERED, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "last words\n", "")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full", "2>&-"])
def test_an_output_that_cannot_be_written_does_not_change_the_exit_code(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, LEAVE]
    done = subprocess.run(command, capture_output=True, text=True, env=BUFFERED, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_nor_does_a_reader_that_has_gone() -> None:
    out, into = os.pipe()
    os.close(out)
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVE], stdout=into, stderr=subprocess.PIPE, env=BUFFERED, timeout=60
        )
    finally:
        os.close(into)
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_nor_does_an_error_that_cannot_be_told(redirection: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m spmd_serve --no-such-option {redirection}', sys.executable]
    assert subprocess.run(command, timeout=60).returncode == REFUSED


def test_no_pipe_of_ours_takes_the_place_of_a_closed_output(tmp_path: Path) -> None:
    """What a library writes there would be taken for signals, or go to another rank."""
    code = (
        "import os, sys; from spmd_serve.__main__ import main; sys.argv[1:1] = ['--help']; main(); sys.argv.pop(1)\n"
        "open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{i}') for i in range(3)))"
    )
    for closed, left in (("<&- >&- 2>&-", []), (">&-", [0, 2])):
        command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(tmp_path / "names")]
        subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, check=True, timeout=60)
        names = (tmp_path / "names").read_text().split()
        assert [i for i, name in enumerate(names) if name != os.devnull] == left


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),  # a container of its own
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, ALL),
        ("0::/", {}, ALL),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),  # the narrowest counts
        ("0::/a/b", {"c/cpu.max": "100000 100000"}, ALL),
        ("0::/../other", {"cpu.max": "100000 100000"}, 1),  # another process's view
        ("4:cpu,cpuacct:/docker/x\n0::/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu,cpuacct:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ALL),
        ("3:cpuset:/a", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, ALL),
        ("0::/", {"cpu.max": "100000"}, ALL),  # damaged
        ("0::/", {"cpu.max": f"{10**9} 100000"}, ALL),
    ],
)
def test_a_quota_of_time_is_a_limit_of_cores(tmp_path: Path, own: str, files: dict[str, str], cores: int) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert usable_cores(tmp_path / "groups", tmp_path / "none") == ALL


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "2000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_threads_without_work_soon_sleep(given: dict[str, str], spins: str) -> None:
    """As the library that torch's threads come from says itself; what the user sets stays."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run(
        [sys.executable, "-c", "import spmd_serve, torch"],
        env=plain | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in told


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_dead() -> None:
    """Clients may use up the files that a rank may open; it must not say then that the other ranks are gone."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
        try:
            assert not is_dead(child.pid)
            assert parent_of(child.pid) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert parent_of(child.pid) == os.getpid()
        assert child.pid in children_of(os.getpid())
        assert children_of(child.pid) == []
        child.kill()
        child.wait()
        assert is_dead(child.pid)


def test_a_process_that_is_suspended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_suspended(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert is_suspended(child.pid)
        child.kill()
        child.wait()
        assert not is_suspended(child.pid)


def test_a_limit_of_open_files_is_raised_or_told() -> None:
    """Python alone needs a handful; gloo and torch's store abort where a rank has none left."""
    code = (
        "import resource, sys\n"
        "from spmd_serve.distributed.process import allow_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (30, 90))\n"
        "allow_files(80)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "allow_files(100)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "(80, 90)\n"
    assert "ConfigError: only 90 files may be open here, and a rank needs about 100: raise the limit" in done.stderr


@pytest.mark.parametrize("package", ["torch", "zmq"])  # before the ranks have met, and after
def test_a_package_that_is_not_installed_is_one_line(package: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.modules['{package}'] = None\n"
        "sys.argv[1:] = ['--port', '0']\n"
        "runpy.run_module('spmd_serve', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == REFUSED
    assert done.stderr.startswith(f"spmd_serve: error: {sys.executable} has no package '{package}': ")
    assert done.stderr.count("\n") == 1


def test_a_rank_without_files_says_so() -> None:
    command = ["sh", "-c", 'ulimit -n 30; exec "$@"', "sh", sys.executable, "-m", "spmd_serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("spmd_serve: error: only 30 files may be open here") and done.stderr.count("\n") == 1
