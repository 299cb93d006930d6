"""Checks of what processes and machines need to find and talk to each other: ports, the host name, process limits."""

from __future__ import annotations

import ipaddress
import resource
import socket

from pellucid.config import RunConfig
from pellucid.config.plan import counted
from pellucid.doctor.findings import Finding
from pellucid.doctor.machine import group_limits
from pellucid.errors import UserError

_OPEN_FILES = 4096
"""Below this Ray warns of failing connections."""
_CLUSTER_THREADS, _RANK_THREADS = 200, 64
"""Threads of a one-machine cluster and of a rank: 160 and 24 were counted with two cores, before any model computes."""


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


def check_open_files() -> Finding:
    """Check how many files and connections a process may have open; Ray raises the soft limit by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    how = "ulimit -Hn, /etc/security/limits.conf, or docker run --ulimit nofile=…"
    remedy = f"Raise it to {2 * _OPEN_FILES}, Ray needs {_OPEN_FILES}: {how}" if 0 <= hard < _OPEN_FILES else ""
    return Finding.judged("open files", f"{soft}, at most {hard if hard >= 0 else 'any number'}", remedy)


def check_processes(num_ranks: int) -> Finding:
    """Check that this user and this container may have the processes and threads of `num_ranks` ranks and of Ray."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [*([] if soft == resource.RLIM_INFINITY else [soft]), *(limit for _, [limit] in group_limits("pids.max"))]
    if not limits:
        return Finding("processes", "no limit")
    needed = _CLUSTER_THREADS + num_ranks * _RANK_THREADS
    found = f"at most {min(limits)} processes and threads; {counted(num_ranks, 'rank')} and Ray start about {needed}"
    how = "Raise ulimit -u, or the container's limit (docker run --pids-limit)."
    return Finding.judged("processes", found, how if min(limits) < needed else "")
