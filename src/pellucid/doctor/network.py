"""Checks of what machines need to find and talk to each other: ports, the host name, servers, Ray."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path

from pebble import ProcessPool

from pellucid.config import RunConfig
from pellucid.config.plan import counted
from pellucid.doctor.findings import Finding
from pellucid.errors import UserError

_ANSWER_S = 120.0
_LOGS = "Look at Ray's own logs, ray/session_latest/logs in the folder for temporary files, and at `ray status`."


def check_ray_port(port: int = 6379) -> Finding:
    """Look for a cluster that already runs on this machine, whose devices a second one would share unknowingly."""
    with socket.socket() as client:
        client.settimeout(1)
        if client.connect_ex(("127.0.0.1", port)) != 0:
            return Finding("ray port", f"nothing listens on {port}")
    found = f"{port} is taken: a Ray cluster may be running here"
    remedy = "Join it (trainer.ray_address: auto) or end it (`ray stop`): two clusters count the same devices twice."
    return Finding("ray port", found, "warning", remedy)


def check_host_name() -> Finding:
    """Check that this machine's name leads to an address where other machines reach it."""
    name, remedy = socket.gethostname(), ""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"no address ({error.strerror})"
        remedy = f"Add '{name}' to /etc/hosts: ranks look it up."
    else:
        if ipaddress.ip_address(address).is_loopback:
            remedy = "Other machines cannot reach it: let /etc/hosts give the network card's address, or set "
            remedy += "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
    return Finding.judged("host name", f"{name}, {address}", remedy)


def check_servers(config: RunConfig) -> Finding:
    """Check that the servers which sample for a run answer, and serve its model as it asks."""
    from pellucid.engines import check_engine

    try:
        check_engine(config)
    except UserError as error:
        return Finding.of_error("rollout servers", error)
    return Finding("rollout servers", f"{', '.join(config.actor_rollout_ref.rollout.server_addresses)} can be joined")


def check_ray(config: RunConfig | None) -> Finding:
    """Check that the run's cluster starts, or lets itself be joined, and has room for all ranks, as a run does it.

    Without a config, a cluster is started on this machine, whatever is to run there. It is done in a process of its
    own: Ray may hang, or end the process that asks it.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pellucid-") as folder, ProcessPool(1, context=spawn) as pool:
        log = Path(folder) / "log"
        answer = pool.schedule(_try, args=(config, log), timeout=_ANSWER_S)
        if (error := answer.exception()) is None:
            return answer.result()
        reason = f"Ray failed ({error})"
        if isinstance(error, TimeoutError):
            reason = f"Ray was not ready after {_ANSWER_S:.0f} s"
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        return Finding("ray", ": ".join([reason, *last]), "problem", _LOGS)


def _try(config: RunConfig | None, log: Path) -> Finding:
    """Return what was found; whatever Ray and its processes print goes into `log`."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from pellucid.build import needed_roles
    from pellucid.ranks.cluster import Cluster, plan_pools

    run = config or RunConfig()
    try:
        cluster = Cluster(run, plan_pools(run, needed_roles(run)))
    except UserError as error:
        return Finding.of_error("ray", error)
    try:
        import ray

        resources, words = ray.cluster_resources(), {"CPU": "CPU cores", "GPU": "GPUs", "NPU": "NPUs"}
        units = [f"{resources[unit]:g} {word}" for unit, word in words.items() if unit in resources]
        there = ", ".join([counted(sum(node["Alive"] for node in ray.nodes()), "machine"), *units])
        found = f"{'starts here' if cluster.is_local else 'joined'}: {there}"
        return Finding("ray", found + ("" if config is None else "; every rank has a place"))
    finally:
        cluster.close()
