"""slurm/serve.sbatch at its job's time limit, and cancelled. A file of its own, and so a cluster: it mostly waits for SLURM's clock."""

from __future__ import annotations

import time

import openai
from box import GONE_S, SERVER, Stream
from slurm_cluster import Cluster
from support.server import wait_until


def test_the_time_limit_drains_and_scancel_too(cluster: Cluster) -> None:
    job = cluster.submit("--nodes=2", server=SERVER, RESUBMIT="1")
    box = job.wait_ready()
    # With the two minutes that are left at most, SLURM's next look at its clock (every 30 s) finds less than 90 s + 30 s.
    job.update(TimeLimit="2")
    deadline = time.monotonic() + 60
    streams: list[Stream] = []
    while time.monotonic() < deadline and (not streams or streams[-1].error is None):
        streams.append(Stream(box, 8))
        streams[-1].start().join()
        time.sleep(1)  # the rest of the tests has use for the cores
    refused = streams.pop()
    assert isinstance(refused.error, (openai.InternalServerError, openai.APIConnectionError)), "503, or gone already"
    assert [s.finish_reason for s in streams] == ["length"] * len(streams), "what ran could finish"

    job.wait_state("PENDING", seconds=40)
    assert "before the time limit: requeueing" in job.log
    assert not job.processes()
    job.update(TimeLimit="60")
    job.update(StartTime="now+5")  # in the same second SLURM would still hold the old credential for revoked
    assert job.wait_ready(times=2)["URL"] == box["URL"], "the log is kept, and the address too"

    stream = Stream(box, 40)
    thread = stream.start()
    wait_until("the stream flows", lambda: stream.chunks > 3, 20)
    assert stream.finish_reason is None
    job.cancel()
    thread.join(30)
    assert (stream.finish_reason, stream.error) == ("length", None)
    job.wait_state("CANCELLED", seconds=30)
    wait_until("no rank is left", lambda: not job.processes(), GONE_S)
    assert job.log.count("all 1 ranks ended cleanly") >= 2
