"""The Ray cluster of a run: started on this machine or joined, checked for room, and cut into pools of ranks.

`ray_placement.py` asks it for the actors of each pool; whatever is missing is said before a process starts.
"""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pellucid import devices
from pellucid.build import RoleName
from pellucid.config import RunConfig
from pellucid.errors import UserError
from pellucid.process_guard import ProcessGuard
from pellucid.threads import waiting_settings

POLICY, ROLLOUT = "policy", "rollout"
"""The pools that hold the actor and every role without a pool of its own; and separate rollout engines."""
CONNECT_S, RESERVE_S = 5.0, 30.0
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""How ranks of one machine are told to listen on no other interface."""
_SECTION = "actor_rollout_ref.rollout"
_RESOURCE = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "dashboard/agent.py", "runtime_env/agent/main.py")
"""What the command lines of Ray's agents have, once they are up and before."""
_WORDS = {"cpu": "CPU cores", "cuda": "GPUs", "npu": "NPUs"}


@dataclass(frozen=True, slots=True)
class Pool:
    """Ranks that form one process group, or the devices of separate rollout engines."""

    name: str
    roles: Sequence[RoleName]
    num_ranks: int
    ranks_per_node: int
    """Ranks that must be on one machine together."""

    @property
    def num_bundles(self) -> int:
        """Parts of the pool that each fit on one machine."""
        return self.num_ranks // self.ranks_per_node


def plan_pools(config: RunConfig, needed: Sequence[RoleName]) -> list[Pool]:
    """Return the run's pools: the policy's, one for each role with ranks of its own, and that of separate engines."""
    own, shared = config.trainer.resource_pools, list[RoleName]()
    pools = [Pool(POLICY, shared, config.num_ranks, config.trainer.n_gpus_per_node)]
    for role in needed:
        if role == "rollout" and config.has_replicas:
            if config.actor_rollout_ref.rollout.mode == "separate":
                per_machine, machines = config.rollout_machines
                pools.append(Pool(ROLLOUT, [], per_machine * machines, per_machine))
        elif role in own:
            pools.append(Pool(role, [role], own[role], 1))
        else:
            shared.append(role)
    return pools


class Cluster:
    """A connection to Ray, ended by `close`; a cluster that was started for the run ends with it."""

    def __init__(self, config: RunConfig, pools: list[Pool]) -> None:
        """Start or join a cluster, and reserve a place for every rank.

        Raises:
            UserError: no cluster answers at the address, or it has not enough machines or devices.
        """
        address = config.trainer.ray_address
        self.is_local = address is None
        self._owned = not ray.is_initialized()
        self._groups: dict[str, PlacementGroup] = {}
        self._guard: ProcessGuard | None = None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # how Ray is told not to phone home
        if address is None:
            self.device = devices.choose_device(config.trainer.device).type
            cores = len(os.sched_getaffinity(0))
            here = cores if self.device == "cpu" else devices.count(self.device)
            _check_room(self.device, pools, [(socket.gethostname(), here)])
            quick = {"prestart_worker_first_driver": False}  # a process for each core, of which ranks could use none
            local = {"_node_ip_address": "127.0.0.1", "_system_config": quick}
            self._connect(address="local", num_cpus=cores, include_dashboard=False, **local)
        else:
            _check_reachable(address)
            self._connect(address=address)
            there = ray.cluster_resources()
            best = next((kind for kind in ("cuda", "npu") if there.get(_RESOURCE[kind], 0)), "cpu")
            self.device = best if config.trainer.device == "auto" else config.trainer.device
        try:
            if not self.is_local:
                unit, alive = _RESOURCE[self.device], [node for node in ray.nodes() if node["Alive"]]
                sizes = [(node["NodeManagerHostname"], int(node["Resources"].get(unit, 0))) for node in alive]
                _check_room(self.device, pools, sizes)
            for pool in pools:
                self._groups[pool.name] = self._reserve(pool)
            if self.is_local and self._owned:
                self._guard = ProcessGuard()
                self._guard.watch(_agents())
        except BaseException:
            self.close()
            raise

    def _connect(self, **options: Any) -> None:
        if not self._owned:
            return
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray raises types of all kinds here
            raise _connection_error(error) from error

    def _reserve(self, pool: Pool) -> PlacementGroup:
        bundle = {"CPU": float(pool.ranks_per_node), _RESOURCE[self.device]: float(pool.ranks_per_node)}
        apart = pool.num_bundles > 1 and pool.ranks_per_node > 1
        group = placement_group([bundle] * pool.num_bundles, strategy="STRICT_SPREAD" if apart else "PACK")
        try:
            ray.get(group.ready(), timeout=RESERVE_S)
        except GetTimeoutError as error:
            remove_placement_group(group)
            free = ray.available_resources()
            raise UserError(
                "trainer.ray_address",
                f"the cluster is busy: {pool.num_ranks} {_WORDS[self.device]} for the {pool.name} pool were not free "
                f"within {RESERVE_S:.0f} s; free now: {free.get(_RESOURCE[self.device], 0):g} {_WORDS[self.device]} in "
                f"all, {free.get('CPU', 0):g} CPU cores.",
                "Wait for other jobs to end (`ray status` shows them), or ask for fewer ranks.",
            ) from error
        return group

    def options(self, pool: Pool, rank: int, python: str | None = None, num_devices: int = 1) -> dict[str, Any]:
        """Return the Ray options of an actor that is this rank; `python` is a command that starts it in place of Ray's
        own. With 0 devices it shares those of the ranks beside it.
        """
        environment = devices.ONE_ARENA | waiting_settings() | (_LOOPBACK if self.is_local else {})
        return {
            "num_cpus": num_devices,
            "num_gpus": num_devices if self.device == "cuda" else 0,
            "resources": {"NPU": num_devices} if self.device == "npu" and num_devices else {},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[pool.name], placement_group_bundle_index=rank // pool.ranks_per_node
            ),
            "max_restarts": 0,
            "runtime_env": {"env_vars": environment} | ({} if python is None else {"py_executable": python}),
        }

    def close(self) -> None:
        """Give the places back and leave; a cluster that was started here ends."""
        groups, self._groups = self._groups, {}
        try:
            for group in groups.values():
                remove_placement_group(group)
        finally:
            if self._owned:
                ray.shutdown()
            if self._guard is not None:
                self._guard.close()


def _connection_error(error: BaseException) -> UserError:
    """Return what Ray says, in one line; that a cluster wants a token it says far below its first one."""
    reason = str(error).strip().partition("\n")[0]
    if "AuthenticationError" in f"{error!r} {error.__cause__!r}":
        remedy = "Set RAY_AUTH_MODE=token, and copy ~/.ray/auth_token of the cluster's first machine to this one."
        return UserError("trainer.ray_address", f"{reason}: the cluster wants a token.", remedy)
    remedy = "Look at Ray's own logs, ray/session_latest/logs in the folder for temporary files, and at `ray status`."
    return UserError("trainer.placement", f"Ray does not start or join: {reason}", remedy)


def _agents() -> list[int]:
    """Return the process ids of Ray's agents on this machine, which this process' raylet has started."""
    started = ((process.pid, " ".join(process.cmdline())) for process in psutil.Process().children(recursive=True))
    return [pid for pid, command in started if any(mark in command for mark in _AGENTS)]


def _check_room(kind: str, pools: list[Pool], machines: list[tuple[str, int]]) -> None:
    """Check that the machines, each with its number of devices, are large and many enough; they may be taken."""
    sizes, found = [size for _, size in machines], ", ".join(f"{name}: {size}" for name, size in machines)
    policy, there, wanted = pools[0], sum(sizes), sum(pool.num_ranks for pool in pools)
    if wanted > there:
        beside = f"{_SECTION}.n_gpus_per_node" if ROLLOUT in [pool.name for pool in pools] else "trainer.resource_pools"
        raise UserError(
            beside if policy.num_ranks <= there else "trainer.n_gpus_per_node",
            f"{' + '.join(f'{pool.num_ranks} ({pool.name})' for pool in pools)} = {wanted} ranks need a device each, "
            f"and there are {there} {_WORDS[kind]} ({found}).",
            f"Ask for at most {there} ranks in all, or join a larger cluster (trainer.ray_address).",
        )
    for section, pool in ((_SECTION if pool.name == ROLLOUT else "trainer", pool) for pool in pools):
        num_fitting = sum(size >= pool.ranks_per_node for size in sizes)
        if num_fitting < pool.num_bundles and pool.name in (POLICY, ROLLOUT):
            raise UserError(
                f"{section}.nnodes" if num_fitting else f"{section}.n_gpus_per_node",
                f"{pool.num_bundles} machines with {pool.ranks_per_node} {_WORDS[kind]} each are needed, and "
                f"{num_fitting} of the cluster's {len(sizes)} have as many ({found}).",
                f"Add machines (`ray start --address=…` on each), or lower {section}.nnodes or n_gpus_per_node.",
            )


def _check_reachable(address: str) -> None:
    """Check that something listens at `host:port` before Ray spends a minute on finding out."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        remedy = (
            "Write host:port (Ray's own port is 6379) of a machine on which `ray start --head` runs, auto for the "
            "cluster that this machine belongs to, or null to start one here."
        )
        raise UserError("trainer.ray_address", f"no Ray cluster answers at {address} ({error}).", remedy) from error
