"""The launch scripts' decisions, with stand-ins for what is slow: no environment is made and no model is loaded here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import kubernetes_validate
import pytest
import yaml
from support.ports import free_port
from support.server import wait_until

import spmd_serve

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [*LAUNCH.glob("*.sh"), ROOT / "slurm" / "serve.sbatch", ROOT / ".ci" / "run"]
WITH_HELP = [
    path for path in [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.py"), ROOT / "slurm/serve.sbatch"] if path.stem != "ranks"
]


def bash(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run bash code in the shell options of the scripts, with their functions."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV", "TORCH")}
    code = f"set -euo pipefail; . {LAUNCH}/venv.sh; . {LAUNCH}/ranks.sh\n{code}"
    return subprocess.run(["bash", "-c", code], env={**env, **environ}, capture_output=True, text=True, timeout=60)


# ---- the scripts themselves ---------------------------------------------------------------------------------------


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed (apt-get install shellcheck)"
)
def test_shellcheck() -> None:
    command = ["shellcheck", "-x", "-P", "SCRIPTDIR", "-P", str(ROOT), *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", WITH_HELP, ids=lambda path: path.name)
def test_each_script_has_help(script: Path, tmp_path: Path) -> None:
    command = [sys.executable] if script.suffix == ".py" else ["bash"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHON"} | {"VENV": str(tmp_path / "none")}
    done = subprocess.run([*command, str(script), "--help"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert re.match(r"usage: .*" + re.escape(script.name), done.stdout, re.IGNORECASE)
    assert list(tmp_path.iterdir()) == [], "asking for help installs nothing"


def test_wrong_use_is_one_line() -> None:
    for script, arguments, says in [
        ("serve.sh", [], "NPROC is 'two'; it must be the number of ranks"),
        ("multinode.sh", ["--nnodes", "2"], "--head is missing"),
        ("multinode.sh", ["--model", "x"], "unknown option '--model'"),
        ("multinode.sh", ["--head"], "--head needs a value"),
        (
            "multinode.sh",
            [*["--head", "h", "--nnodes", "1", "--node-rank", "0", "--max-restarts", "x"]],
            "--max-restarts is 'x'; it must be",
        ),
        (
            "multinode.sh",
            [*["--head", "h", "--nnodes", "1", "--node-rank", "0", "--wait", "x"]],
            "--wait is 'x'; it must be a number",
        ),
        ("multinode.sh", ["--preset", "token-ring"], "there is no "),
    ]:
        env = {**os.environ, "NPROC": "two", "PYTHON": sys.executable}
        done = subprocess.run([LAUNCH / script, *arguments], env=env, capture_output=True, text=True, timeout=30)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert says in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PYTHON", "/no/such/python", "there is no interpreter PYTHON=/no/such/python"),
        ("PYTHON", "/bin/false", "/bin/false cannot start"),
        ("PYTHONHASHSEED", "x", f"{sys.executable} cannot start: correct the variables that it complains of"),
        ("TMPDIR", "/no/such/folder", "no folder can be made in /no/such/folder; set TMPDIR"),
        ("MAX_RESTARTS", "x", "MAX_RESTARTS is 'x'; it must be a number"),
    ],
)
def test_a_wrong_variable_ends_the_start(name: str, value: str, says: str) -> None:
    env = {**os.environ, "PYTHON": sys.executable, name: value}
    done = subprocess.run(
        [LAUNCH / "serve.sh", "--help-is-not-asked"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"[launch] error: {says}")


def test_a_base_python_that_cannot_start_is_told(tmp_path: Path) -> None:
    done = bash("ensure_python", PYTHON="", VENV=str(tmp_path / "venv"), PYTHONHASHSEED="x")
    assert done.returncode == 1
    assert "PYTHONHASHSEED must be" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("[launch] error: python3 cannot start")


def test_too_few_open_files_end_the_start(tmp_path: Path) -> None:
    done = bash("ulimit -n 40; run_ranks 2", PYTHON=fake_torchrun(tmp_path, ""), TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("[launch] error: only 40 files may be open here")
    done = bash("ulimit -Sn 40; run_ranks 2", PYTHON=fake_torchrun(tmp_path, ""), TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


# ---- which torch ----------------------------------------------------------------------------------------------------


def fake_wheel(folder: Path, version: str) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )


def choose_torch(tmp_path: Path, torch: str, functions: str = "") -> subprocess.CompletedProcess[str]:
    """What pip would be asked to install; `tmp_path`/pypi stands for pip's own sources, /index for PyTorch's CPU index."""
    (tmp_path / "index" / "torch").mkdir(parents=True, exist_ok=True)
    return bash(
        f'{functions}\nchoose_torch; printf "%s " "${{torch_arguments[@]}}"',
        TORCH=torch,
        VENV=sys.prefix,
        CPU_INDEX=f"file://{tmp_path}/index",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=f"file://{tmp_path}/nothing",
        PIP_FIND_LINKS=str(tmp_path / "pypi"),
        PIP_EXTRA_INDEX_URL="",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's torch has no CUDA")
def test_a_machine_without_a_gpu_gets_a_cpu_build_or_nothing(tmp_path: Path) -> None:
    for version in ("2.7.0+cpu", "2.13.0", "2.14.0"):
        fake_wheel(tmp_path / "pypi", version)
    refused = choose_torch(tmp_path, "cpu")
    assert refused.returncode == 1
    assert "found no CPU build of torch" in refused.stderr
    assert "TORCH='torch>=2.8'" in refused.stderr
    assert refused.stdout == ""

    fake_wheel(tmp_path / "index" / "torch", "2.12.0+cpu")
    page = '<a href="torch-2.12.0+cpu-py3-none-any.whl">torch-2.12.0+cpu-py3-none-any.whl</a>'
    (tmp_path / "index" / "torch" / "index.html").write_text(page)
    from_index = choose_torch(tmp_path, "cpu")
    assert from_index.stdout.split() == ["torch==2.12.0+cpu", "--extra-index-url", f"file://{tmp_path}/index"]

    fake_wheel(tmp_path / "pypi", "2.13.0+cpu")
    assert choose_torch(tmp_path, "cpu").stdout.split() == ["torch==2.13.0+cpu"], "pip's own sources come first"


def test_a_gpu_gets_the_build_that_its_driver_runs(tmp_path: Path) -> None:
    new = choose_torch(tmp_path, "cuda", "cuda_major() { echo 13; }")
    assert new.stdout.split() == ["torch>=2.8"]
    old = choose_torch(tmp_path, "cuda", "cuda_major() { echo 12; }")
    assert old.stdout.split()[:2] == ["torch>=2.8", "--index-url"]
    assert "cu126" in old.stdout
    assert choose_torch(tmp_path, "torch==2.11.0").stdout.split() == ["torch==2.11.0"]


@pytest.mark.parametrize(
    ("made_with", "extras", "torch", "asks_for", "is_current"),
    [
        ("cpu", "", "auto", "", True),
        ("cpu", "test", "auto", "test", True),
        ("cpu", "", "auto", "test", False),
        ("cpu", "cuda test", "auto", "", True),
        ("cuda", "cuda", "cpu", "", True),  # made on a GPU node, used on a login node
        ("cpu", "", "cuda", "", False),
        ("torch==2.11.0", "", "auto", "", True),  # asked for once: stays
        ("torch==2.11.0", "", "torch==2.12.0", "", False),
    ],
)
def test_the_environment_is_made_again_only_when_it_must(
    tmp_path: Path, made_with: str, extras: str, torch: str, asks_for: str, is_current: bool
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with (ROOT / "pyproject.toml").open() as file:
        checksum = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True).stdout.strip()
    (tmp_path / ".made-from").write_text(f"{checksum} {ROOT}\n{made_with}\n{extras}\n")
    code = "has_nvidia_gpu() { false; }; install_everything() { echo installs; }; ensure_python %s; echo $PYTHON"
    began = time.monotonic()
    done = bash(code % asks_for, VENV=str(tmp_path), TORCH=torch)
    took = time.monotonic() - began
    expected = [] if is_current else ["installs"]
    assert done.stdout.split() == [*expected, str(tmp_path / "bin" / "python")], done.stderr
    assert took < 1, "a second start is immediate"
    if is_current:  # ... until what it was made from changes
        for other in (f"1 2 {ROOT}", f"{checksum} /another/checkout"):
            (tmp_path / ".made-from").write_text(f"{other}\n{made_with}\n{extras}\n")
            assert "installs" in bash(code % asks_for, VENV=str(tmp_path), TORCH=torch).stdout


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("1", 1), ("GPU-8c-1,GPU-9d-2", 2), ("0,-1,2", 1), ("0,1,2,3,4", 3)]
)
def test_gpus_that_are_hidden_get_no_rank(visible: str, count: int) -> None:
    there = "compgen() { printf '/dev/nvidia%s\\n' 0 1 2; }; unset CUDA_VISIBLE_DEVICES; gpu_count"
    done = bash(f"{there}; CUDA_VISIBLE_DEVICES={visible}; gpu_count")
    assert done.stdout.split() == ["3", str(count)], done.stderr


def test_an_environment_whose_making_was_broken_off_is_made_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    code = "install_torch() { $VENV/bin/python -m pip --version; exit 7; }; torch_of() { :; }; install_everything sum"
    done = bash(code, VENV=str(tmp_path), TORCH="cpu")
    assert (done.returncode, done.stdout[:4]) == (7, "pip "), done.stderr
    again = bash(code, VENV=str(tmp_path), TORCH="cpu")
    assert "making" not in again.stderr


def test_venv_sh_prints_the_interpreter_alone(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho what pip says\n")
    python.chmod(0o755)
    environ = os.environ | {"VENV": str(tmp_path), "TORCH": "cpu"}
    environ.pop("PYTHON", None)
    done = subprocess.run([LAUNCH / "venv.sh"], env=environ, capture_output=True, text=True)
    assert done.stdout == f"{python}\n", done.stderr
    assert done.stderr.count("what pip says") >= 2


def test_cdpath_does_not_lead_to_another_checkout(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for elsewhere in (".", str(tmp_path)):
        command = ["bash", "-c", ". launch/venv.sh; echo $ROOT"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CDPATH": elsewhere}, capture_output=True, text=True)
        assert done.stdout == f"{ROOT}\n"


@pytest.mark.parametrize("script", [path for path in WITH_HELP if path.suffix == ".sh"], ids=lambda path: path.name)
def test_a_link_to_a_script_is_as_good(script: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(script)
    env = {**os.environ, "VENV": str(tmp_path / "none"), "PYTHON": str(tmp_path / "none")}
    done = subprocess.run([tmp_path / "linked", "--help"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_checkout_of_a_link_is_that_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(LAUNCH / "venv.sh")
    assert bash(f'. {tmp_path}/linked; echo "$ROOT"').stdout == f"{ROOT}\n"


def test_standard_files_may_be_closed(tmp_path: Path) -> None:
    """As some supervisors start a program."""
    code = f"{LAUNCH}/venv.sh <&- 2>&-; {LAUNCH}/venv.sh <&- >&-"
    done = subprocess.run(["bash", "-ec", code], env={**os.environ, "PYTHON": sys.executable}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == f"{sys.executable}\n"


def test_a_reader_of_the_help_may_leave() -> None:
    done = bash(f"{LAUNCH}/serve.sh --help | true", PYTHON=sys.executable)
    assert done.stderr == ""


def test_the_folder_that_a_script_is_called_from_has_no_modules(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('this is the user's')")
    (tmp_path / "spmd_serve").mkdir()  # as above a checkout
    code = f"cd {tmp_path}; ensure_python; $PYTHON -c 'import random, spmd_serve; print(spmd_serve.__version__)'"
    done = bash(code, PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, f"{spmd_serve.__version__}\n"), done.stderr


# ---- exit code and signals --------------------------------------------------------------------------------------------


def fake_torchrun(tmp_path: Path, body: str) -> str:
    """A "python" that stands for torchrun; `body` sees `outcome`, the folder that ranks report to."""
    path = tmp_path / "python"
    head = "import json, os, pathlib, signal, subprocess, sys, time\noutcome = pathlib.Path(os.environ['SPMD_SERVE_OUTCOME_DIR'])\n"
    path.write_text(f"#!{sys.executable}\n{head}{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("error", "reports", "code", "returns"),
    [
        ("SignalException: Process 7 got signal: 15", ["0.0", "0.1"], 1, 0),
        ("SignalException: Process 7 got signal: 15", ["0.0"], 1, 1),  # rank 1 did not end cleanly
        ("SignalException: Process 7 got signal: 15", [], 1, 1),
        ("SignalException: Process 7 got signal: 15", ["0.0", "0.1", "1.0"], 1, 1),  # the last attempt counts
        ("SignalException: Process 7 got signal: 15", ["0.0", "1.0", "1.1"], 1, 0),
        ("ChildFailedError: ", ["0.0", "0.1"], 1, 1),  # a failure stays one, whatever the ranks reported
        ("", ["0.0", "0.1"], 3, 3),
        ("", [], 0, 0),
        ("", ["0.0.refused", "0.1.refused"], 0, 2),
        ("", ["9.0", "9.1", "10.0.refused", "10.1.refused"], 0, 2),
        ("", ["0.0.refused", "1.0", "1.1"], 0, 0),  # one rank failed otherwise, and the restart helped
        ("ChildFailedError: ", ["0.0.refused"], 1, 1),
    ],
)
def test_the_exit_code_is_torchruns_but_for_a_clean_drain_and_a_refusal(
    tmp_path: Path, error: str, reports: list[str], code: int, returns: int
) -> None:
    record = json.dumps({"message": {"message": error}})
    body = f"[(outcome / name).touch() for name in {reports}]\n"
    if error:
        body += f"pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text({record!r})\n"
    folder = tmp_path / "o'odd [1-3] *ä"  # no pattern, and one word
    folder.mkdir()
    done = bash("run_ranks 2 || exit $?", PYTHON=fake_torchrun(tmp_path, f"{body}sys.exit({code})"), TMPDIR=str(folder))
    assert done.returncode == returns, done.stderr
    assert list(folder.iterdir()) == [], "nothing is left behind"


def test_serve_sh_is_for_one_machine_whatever_torchruns_variables_say() -> None:
    env = {**os.environ, "PYTHON": sys.executable, "NPROC": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
    command = [LAUNCH / "serve.sh", "--max-num-seqs", "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--max-num-seqs is 0" in done.stderr, "torchrun did not wait for another machine"


def test_torchruns_own_folder_goes_too_unless_logs_are_asked_for(tmp_path: Path) -> None:
    body = "import tempfile; pathlib.Path(tempfile.mkdtemp(dir=os.environ.get('PET_LOG_DIR') or None, prefix='torchelastic_'))"
    body = f"os.makedirs(os.environ.get('PET_LOG_DIR', outcome), exist_ok=True); {body}"
    python, folder = fake_torchrun(tmp_path, body), tmp_path / "temporary"
    folder.mkdir()
    for asked, left in (({}, 0), ({"PET_REDIRECTS": "3"}, 1), ({"PET_LOG_DIR": f"{folder}/logs"}, 2)):
        done = bash("run_ranks 2 || exit $?", PYTHON=python, TMPDIR=str(folder), **asked)
        assert done.returncode == 0, done.stderr
        assert len(list(folder.iterdir())) == left, asked


def test_a_signal_before_torchrun_takes_any_is_a_stop_as_well(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"set -euo pipefail; . {LAUNCH}/venv.sh; . {LAUNCH}/ranks.sh; run_ranks 2 || exit $?"
    python = fake_torchrun(tmp_path, f"pathlib.Path({str(started)!r}).touch(); time.sleep(60)")
    env = {**os.environ, "PYTHON": python, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(["bash", "-c", code], env=env, start_new_session=True) as process:
        wait_until("torchrun", started.exists, 20, 0.05)
        process.terminate()
        assert process.wait(20) == 0


def test_a_reader_of_the_log_may_leave(tmp_path: Path) -> None:
    record = json.dumps({"message": {"message": "SignalException: Process 7 got signal: 15"}})
    body = f"""
time.sleep(0.5)
pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text({record!r})
(outcome / "0.0").touch()
sys.exit(1)"""
    code = "{ run_ranks 1 2>&1 || echo $? >&3; echo ended >&3; } 3>&2 | true"
    done = bash(code, PYTHON=fake_torchrun(tmp_path, body), TMPDIR=str(tmp_path))
    assert done.stderr == "ended\n"
    assert [path.name for path in tmp_path.iterdir()] == ["python"], "nothing is left behind"


@pytest.mark.skipif(
    shutil.which("pkill") is None, reason="without pkill (procps) torchrun is signalled instead of the ranks"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("pause", [0, 1], ids=["", "torchrun ends before the script goes on"])
def test_a_signal_reaches_the_ranks_and_not_torchrun(tmp_path: Path, number: int, pause: int) -> None:
    rank = (
        "import os, signal, sys, time; signal.signal(15, lambda *a: sys.exit(0)); os.write(1, b'up\\n'); time.sleep(60)"
    )
    body = f"""
signal.signal(signal.SIGTERM, lambda *a: os._exit(9))
ranks = [subprocess.Popen([sys.executable, "-c", {rank!r}]) for _ in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))"""
    code = f"set -euo pipefail; . {LAUNCH}/venv.sh; . {LAUNCH}/ranks.sh; "
    code += f'pkill() {{ command pkill "$@"; sleep {pause}; }}; run_ranks 2'
    env = {**os.environ, "PYTHON": fake_torchrun(tmp_path, body), "TMPDIR": str(tmp_path)}
    # A shell cannot trap what was ignored when it began, as nohup and background jobs leave it.
    command = ["env", "--default-signal=HUP,INT", "bash", "-c", code]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert [process.stdout.readline() for _ in range(2)] == [b"up\n", b"up\n"]
        process.send_signal(number)
        assert process.wait(20) == 0


def test_torchrun_ends_as_the_signal_comes(tmp_path: Path) -> None:
    """As where SLURM signals all processes of a step. In a few of a hundred such moments bash loses the exit code."""
    body = "signal.signal(15, lambda *a: os._exit(0))\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    code = f"set -euo pipefail; . {LAUNCH}/venv.sh; . {LAUNCH}/ranks.sh; run_ranks 1"
    env = {**os.environ, "PYTHON": fake_torchrun(tmp_path, body), "TMPDIR": str(tmp_path)}
    for turn in range(40):
        process = subprocess.Popen(["bash", "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        with process:
            os.kill(int(process.stdout.readline()), signal.SIGTERM)
            until = time.perf_counter() + turn / 10_000
            while time.perf_counter() < until:
                pass
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM), turn  # the latter: it was about to end


def test_torchrun_dies_with_the_script(tmp_path: Path) -> None:
    body = "signal.signal(15, lambda *a: (print('ended', flush=True), os._exit(0)))\nprint('up', flush=True)\ntime.sleep(60)"
    code = f"set -euo pipefail; . {LAUNCH}/venv.sh; . {LAUNCH}/ranks.sh; run_ranks 1"
    env = {**os.environ, "PYTHON": fake_torchrun(tmp_path, body), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(["bash", "-c", code], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"up\n"
        process.kill()
        process.wait()
        assert process.stdout.readline() == b"ended\n"


# ---- several hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", LAUNCH / "preflight.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_nodes(*nodes: dict[str, object], port: int | None = None) -> list[tuple[int, str]]:
    """Run the check for several nodes at once; (exit code, last line of stderr) of each."""
    port = port or free_port()
    processes = []
    for node in nodes:
        options = {"head": "127.0.0.1", "port": port, "wait": 20, **node}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, str(LAUNCH / "preflight.py"), *words]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for process in processes:
        out, err = process.communicate(timeout=30)
        assert out == ("127.0.0.1\n" if process.returncode == 0 else "")
        found.append((process.returncode, err.splitlines()[-1]))
    return found


def test_nodes_that_fit_together_start() -> None:
    found = check_nodes(*({"nnodes": 3, "node_rank": rank} for rank in (2, 0, 1)))
    assert [code for code, _ in found] == [0, 0, 0]


def test_different_node_counts_are_told_on_every_node() -> None:
    found = check_nodes({"nnodes": 2, "node_rank": 0}, {"nnodes": 3, "node_rank": 1})
    assert [code for code, _ in found] == [1, 1]
    host = socket.gethostname()
    for _, line in found:
        assert f"{host} (127.0.0.1) was started with --nnodes 3, the head with --nnodes 2" in line


def test_a_taken_port_is_told() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        ((code, line),) = check_nodes({"nnodes": 2, "node_rank": 0}, port=port)
    assert code == 1
    assert f"port {port} of 127.0.0.1 cannot be used (Address already in use): choose another one with --port" in line


def test_a_head_that_is_another_host_is_told() -> None:
    ((code, line),) = check_nodes({"nnodes": 2, "node_rank": 0, "head": "192.0.2.77"})
    assert code == 1
    assert "node rank 0 must run on the head, but 192.0.2.77 is 192.0.2.77, which is no address of this host" in line


def test_a_missing_node_is_named_at_the_deadline() -> None:
    ((code, line),) = check_nodes({"nnodes": 3, "node_rank": 0, "wait": 0.5})
    assert code == 1
    assert "gave up after 0 s waiting for node rank 1, 2 of 3: start launch/multinode.sh there" in line


def test_a_missing_head_is_named_at_the_deadline() -> None:
    ((code, line),) = check_nodes({"nnodes": 2, "node_rank": 1, "wait": 0.5})
    assert code == 1
    assert "Connection refused" in line
    assert "'127.0.0.1' is this node's own loopback" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_node_that_is_stopped_while_it_waits_for_the_others(number: int) -> None:
    port = free_port()
    place = ["--head", "127.0.0.1", "--port", str(port), "--nnodes", "2", "--node-rank", "0", "--wait", "30"]
    command = ["env", "--default-signal=HUP,INT", str(LAUNCH / "multinode.sh"), *place]

    def hello() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen(command, env={**os.environ, "PYTHON": sys.executable}, start_new_session=True) as process:
        wait_until("listening", hello, 20, 0.05)
        process.send_signal(number)
        assert process.wait(10) == (-9 if number == signal.SIGKILL else 0)
    wait_until("the port is let go of", lambda: not hello(), 10, 0.05)


def test_an_unknown_interface_is_told() -> None:
    ((code, line),) = check_nodes({"nnodes": 1, "node_rank": 0, "interface": "ib7"})
    assert code == 1
    assert "interface 'ib7' is not on this node, which has lo" in line


def test_a_name_that_does_not_resolve(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NAME_SECONDS", 0.1)
    with pytest.raises(preflight.PreflightError, match=r"the name 'no-such-head\.invalid' to resolve: add it to DNS"):
        preflight.resolve("no-such-head.invalid", 600)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_a_head_may_have_ipv6_alone(preflight: ModuleType) -> None:
    address = preflight.resolve("::1", 600)
    with preflight.listen("::1", address, free_port()) as listener:
        socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()


def test_another_program_on_the_heads_port(preflight: ModuleType) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(10)
        port = other.getsockname()[1]
        command = [sys.executable, str(LAUNCH / "preflight.py"), "--head=127.0.0.1", f"--port={port}"]
        node = subprocess.Popen([*command, "--nnodes=2", "--node-rank=1"], stderr=subprocess.PIPE, text=True)
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            _, err = node.communicate(timeout=10)
    assert node.returncode == 1
    assert f"port {port} of 127.0.0.1 is used by something else" in err


def test_ports_follow_from_the_job_and_move_on_when_taken() -> None:
    def ports(seed: int) -> list[int]:
        command = [sys.executable, str(LAUNCH / "free_ports.py"), "--seed", str(seed)]
        return [
            int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]

    first = ports(4321)
    assert first == ports(4321)
    with socket.socket() as other:
        other.bind(("", first[1]))
        moved = ports(4321)
    assert not set(first) & set(moved)
    assert all(1024 < port < 32768 for port in first + moved), "below the ports of outgoing connections"


# ---- files for other launchers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(LAUNCH.glob("presets/*.env")), ids=lambda path: path.stem)
def test_presets_give_a_reason_and_leave_what_is_set(preset: Path) -> None:
    names = []
    above = ""
    for line in preset.read_text().splitlines():
        assignment = re.match(r"([A-Z_0-9]+)=\$\{\1:-[^}]+\}$", line)
        assert assignment or line == "" or line.startswith("# "), line
        if assignment:
            assert above, f"no reason above {line}"
            names.append(assignment[1])
        above = line
    done = bash(f'. {preset}; echo "{" ".join("$" + name for name in names)}"', **{names[0]: "mine"})
    assert done.stdout.split()[0] == "mine"
    assert len(done.stdout.split()) == len(names)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "spmd-serve.service"
    unit.write_text((LAUNCH / "spmd-serve.service").read_text().replace("/opt/spmd_serve", str(ROOT)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_accepts_the_manifest() -> None:
    job, service = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(service, version, strict=True)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert isinstance(job["spec"]["nprocPerNode"], str), "the operator wants a string"
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        template = replica["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, version, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        assert template["spec"]["terminationGracePeriodSeconds"] > 30
        assert (ROOT / container["command"][0]).exists()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["http"]) == container["args"][container["args"].index("--port") + 1]
        assert "pytorchjob-port" in ports
    assert service["spec"]["selector"]["training.kubeflow.org/job-name"] == job["metadata"]["name"]


def test_what_the_dockerfile_copies_exists() -> None:
    text = (LAUNCH / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert copies
    for source in " ".join(copies).split():
        assert (ROOT / source).exists(), source
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    assert os.access(ROOT / entry[0], os.X_OK)
