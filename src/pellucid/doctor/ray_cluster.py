"""Starts or joins the Ray cluster of a recipe and takes the places of its ranks, as a run does, then leaves.

It does so in a process of its own: Ray may hang, or end the process that asks it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from pellucid.config import RunConfig
from pellucid.doctor.findings import Finding
from pellucid.errors import UserError

_ANSWER_S, _LEAVE_S = 120.0, 30.0


def check_ray(config: RunConfig | None) -> Finding:
    """Check that the run's cluster starts, or lets itself be joined, and has room for all ranks.

    Args:
        config: a checked config; None starts a cluster on this machine, whatever is to run there.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="pellucid-") as folder:
        log = Path(folder) / "log"
        process = context.Process(target=_try, args=(config, sender, log), daemon=True)
        process.start()
        sender.close()
        try:
            if receiver.poll(_ANSWER_S):
                finding = receiver.recv()
                process.join(_LEAVE_S)
                return finding
            reason = f"Ray was not ready after {_ANSWER_S:.0f} s"
        except EOFError:
            process.join()
            reason = f"Ray ended its process (status {process.exitcode})"
        finally:
            process.kill()  # Ray's own processes end with the one that started them
            process.join()
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        return _failed(": ".join([reason, *last]))


def _try(config: RunConfig | None, sender: Connection, log: Path) -> None:
    """Send one finding. Whatever Ray and its processes print goes into `log`."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from pellucid.controller.placement.cluster import Cluster, plan_pools

    run = config or RunConfig()
    try:
        cluster = Cluster(run, plan_pools(run))
    except UserError as error:
        sender.send(Finding.of_error("ray", error))
        return
    try:
        found = f"{'starts here' if cluster.is_local else 'joined'}: {_describe()}"
        sender.send(Finding("ray", found + ("" if config is None else "; every rank has a place")))
    finally:
        cluster.close()


def _describe() -> str:
    """Return what the cluster has."""
    import ray

    num_machines, there = sum(node["Alive"] for node in ray.nodes()), ray.cluster_resources()
    units = [
        f"{there[unit]:g} {word}"
        for unit, word in (("CPU", "CPU cores"), ("GPU", "GPUs"), ("NPU", "NPUs"))
        if unit in there
    ]
    return f"{num_machines} machine{'s' * (num_machines > 1)}, {', '.join(units)}"


def _failed(reason: str) -> Finding:
    remedy = "Look at Ray's own logs, ray/session_latest/logs in the folder for temporary files, and at `ray status`."
    return Finding("ray", reason, "problem", remedy)
