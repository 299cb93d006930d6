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
from pellucid.config.plan import counted
from pellucid.doctor.findings import Finding
from pellucid.errors import UserError

_ANSWER_S, _LEAVE_S = 120.0, 30.0
_LOGS = "Look at Ray's own logs, ray/session_latest/logs in the folder for temporary files, and at `ray status`."


def check_ray(config: RunConfig | None) -> Finding:
    """Check that the run's cluster starts, or lets itself be joined, and has room for all ranks.

    Without a config, a cluster is started on this machine, whatever is to run there.
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
        return Finding("ray", ": ".join([reason, *last]), "problem", _LOGS)


def _try(config: RunConfig | None, sender: Connection, log: Path) -> None:
    """Send one finding; whatever Ray and its processes print goes into `log`."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from pellucid.build import needed_roles
    from pellucid.ranks.cluster import Cluster, plan_pools

    run = config or RunConfig()
    try:
        cluster = Cluster(run, plan_pools(run, needed_roles(run)))
    except UserError as error:
        sender.send(Finding.of_error("ray", error))
        return
    try:
        found = f"{'starts here' if cluster.is_local else 'joined'}: {_describe_cluster()}"
        sender.send(Finding("ray", found + ("" if config is None else "; every rank has a place")))
    finally:
        cluster.close()


def _describe_cluster() -> str:
    import ray

    resources, words = ray.cluster_resources(), {"CPU": "CPU cores", "GPU": "GPUs", "NPU": "NPUs"}
    units = [f"{resources[unit]:g} {word}" for unit, word in words.items() if unit in resources]
    return ", ".join([counted(sum(node["Alive"] for node in ray.nodes()), "machine"), *units])
