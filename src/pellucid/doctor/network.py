"""Checks of what machines need to find and talk to each other: ports, the host name, servers."""

from __future__ import annotations

import ipaddress
import socket

from pellucid.config import RunConfig
from pellucid.doctor.findings import Finding
from pellucid.errors import UserError


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
