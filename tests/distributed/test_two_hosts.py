"""Two hosts whose own names are loopback, and the cable between them."""

from __future__ import annotations

import time
from pathlib import Path

from support.ports import free_port
from support.two_hosts import HOSTS, TwoHosts
from torchrun_job import Job

CONTROL_TIMEOUT_S = 4


def test_a_cut_link_ends_both_sides(hosts: TwoHosts, tmp_path: Path) -> None:
    address = hosts.address("hA")
    options = ("--host", address, "--no-api-key", "--step-timeout", "30")
    timeouts = ("--control-timeout", f"{CONTROL_TIMEOUT_S}", "--heartbeat-interval", "0.5")
    head = ("--nnodes=2", "--rdzv-backend=static", "--master-addr=hA", f"--master-port={free_port()}")
    jobs = [
        Job(
            tmp_path,
            *options,
            *timeouts,
            ranks=1,
            torchrun=(*head, f"--node-rank={rank}"),
            prefix=hosts.on(host),
            host=address,
            port=8000,
        )
        for rank, host in enumerate(HOSTS)
    ]
    try:
        jobs[0].await_ready()
        assert jobs[0].complete().status_code == 200
        stream = jobs[0].stream().await_chunks()
        began = time.monotonic()
        hosts.cut("hB")
        assert stream.await_end(CONTROL_TIMEOUT_S + 5) == "error", stream.detail
        for job in jobs:
            assert job.await_end(CONTROL_TIMEOUT_S + 12) != 0
        jobs[0].note("cut link between two hosts, --control-timeout 4", time.monotonic() - began)
        assert "rank 1 (hB) is lost" in jobs[0].log
        assert "rank 0 (hA) is lost" in jobs[1].log
    finally:
        for job in jobs:
            print(job.log)
            job.close()
