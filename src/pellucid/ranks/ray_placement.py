"""The Ray placement: pools of ranks, each a process group, and proxies of the roles that live on them."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from pellucid import devices
from pellucid.build import RoleName, Roles
from pellucid.config import RunConfig
from pellucid.console import console
from pellucid.engines import host_towards_servers, join_servers, longest_request, weight_transport
from pellucid.files.rundir import RunDir
from pellucid.observe.captures import rank_request
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.recording import RecordedRanks, start_unrecorded_children
from pellucid.observe.request import ProcessRequest
from pellucid.precision.sentinel import Sentinel
from pellucid.ranks.cluster import POLICY, ROLLOUT, Cluster, Pool, plan_pools
from pellucid.ranks.group import Answer, Member, RemoteRole, RemoteRolloutEngine, RemoteSentinel, WorkerGroup
from pellucid.ranks.replica import REQUESTS_AT_ONCE, RemoteReplica, ReplicaHost, ReplicaSpec
from pellucid.ranks.wire import SharedMemory
from pellucid.ranks.worker import RankSpec, RankWorker
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import RolloutEngine, WeightUpdate, run_sync
from pellucid.rollout.transports import Transport, WeightHandle


class RayPlacement:
    """Pools of ranks that Ray starts, and proxies of the roles that live on them."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        roles: Sequence[RoleName],
        total_steps: int,
        heartbeat: Callable[[], None],
        profiler: ProcessProfiler,
    ) -> None:
        """Start the processes of all ranks and let them load their models.

        Raises:
            UserError: there is no room for so many ranks, or a model does not fit its role.
            RankFailedError: a process died while it started.
        """
        self._config, self._run_dir, self._total_steps = config, run_dir, total_steps
        pools = plan_pools(config, roles)
        self._profiler = profiler
        self._groups: dict[str, WorkerGroup] = {}
        self.profile_requests: list[ProcessRequest] = []
        with contextlib.ExitStack() as opened:
            self._meeting = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="pellucid-")))
            start_unrecorded_children()
            self._cluster = Cluster(config, pools)
            opened.callback(self._cluster.close)
            self._recorded = RecordedRanks(config, run_dir.path, self._cluster.device)
            # Ray's end would end nsys, too, in the middle of its files.
            opened.callback(self._recorded.finish)
            memory = SharedMemory(ray)
            for pool in pools:
                if pool.roles:
                    self._groups[pool.name] = self._start(pool, memory, heartbeat)
                    opened.callback(self._groups[pool.name].close)
            joined = bool(config.actor_rollout_ref.rollout.server_addresses)
            hosts = self._start_hosts(pools, memory, heartbeat) if config.has_replicas and not joined else None
            if hosts is not None:
                opened.callback(hosts.close)
            # All pools start at once; only then is each waited for.
            for name, group in self._groups.items():
                self._meet(name, group)
            ranks_on = Counter(machine for group in self._groups.values() for machine in group.machines)
            if hosts is not None:
                hosts.locate()
                if config.actor_rollout_ref.rollout.mode == "separate":
                    ranks_on.update(hosts.machines)
            for group in self._groups.values():
                group.ask("make_roles", lambda rank: rank.make_roles(dict(ranks_on)))
                group.align_clocks()
            group_of: dict[RoleName, WorkerGroup] = {
                role: self._groups[pool.name] for pool in pools for role in pool.roles
            }
            proxies: dict[str, Any] = {role: RemoteRole(role, group) for role, group in group_of.items()}
            if joined:
                proxies["rollout"] = self._join_servers(proxies["actor"], opened)
            elif hosts is not None:
                proxies["rollout"] = self._make_replicas(hosts, dict(ranks_on), proxies["actor"])
            else:
                proxies["rollout"] = RemoteRolloutEngine(group_of["rollout"])
            self._opened = opened.pop_all()
        self.roles = Roles(**proxies)
        sentinel = RemoteSentinel(group_of) if config.trainer.nan_sentinel else None
        self.sentinel: Sentinel | RemoteSentinel | None = sentinel
        self.num_ranks = sum(pool.num_ranks for pool in pools)
        self.device = f"{self._cluster.device}, {self.num_ranks} ranks"

    def _start(self, pool: Pool, memory: SharedMemory, heartbeat: Callable[[], None]) -> WorkerGroup:
        """Start the pool's processes; each writes into a log of its own."""
        config = self._config
        threads = {"beside": 1, "control": 1, "saving": 1}
        as_actor: Any = ray.remote(concurrency_groups=threads)  # pyright: ignore[reportCallIssue]
        worker = as_actor(RankWorker)
        members = []
        for rank in range(pool.num_ranks):
            profile = rank_request(
                config,
                self._run_dir.path,
                pool=pool.name,
                roles=pool.roles,
                rank=rank,
                num_ranks=pool.num_ranks,
                device=self._cluster.device,
            )
            if profile is not None:
                self.profile_requests.append(profile)
            spec = RankSpec(
                label=f"{pool.name}_rank_{rank}",
                run_dir=self._run_dir.path.absolute(),
                config=config,
                device=self._cluster.device,
                pool=pool,
                rank=rank,
                total_steps=self._total_steps,
                profile=profile,
            )
            python = self._recorded.python(spec.label, profile)
            actor = worker.options(**self._cluster.options(pool, rank, python)).remote(spec)
            members.append(Member(spec.name, actor, spec.log))
        console.print(
            f"starting {pool.num_ranks} rank{'s' * (pool.num_ranks > 1)} for {', '.join(pool.roles)} "
            f"(logs: {self._run_dir.path / 'logs'})",
            markup=False,
        )
        return WorkerGroup(members, memory, config.trainer.stall_timeout_s, heartbeat, lambda: self._profiler.at)

    def _start_hosts(self, pools: list[Pool], memory: SharedMemory, heartbeat: Callable[[], None]) -> WorkerGroup:
        """Start the processes of the replicas, on devices of their own or on those of the policy's ranks."""
        config, size = self._config, self._config.actor_rollout_ref.rollout.tensor_model_parallel_size
        separate = config.actor_rollout_ref.rollout.mode == "separate"
        [pool] = [pool for pool in pools if pool.name == (ROLLOUT if separate else POLICY)]
        members, host = [], ray.remote(ReplicaHost)
        for index in range(config.num_replicas):
            label, run_dir = f"rollout_replica_{index}", self._run_dir.path.absolute()
            spec = ReplicaSpec(label=label, run_dir=run_dir, config=config, device=self._cluster.device, index=index)
            options = self._cluster.options(pool, index * size, num_devices=size if separate else 0)
            actor: Any = host.options(max_concurrency=REQUESTS_AT_ONCE, **options)
            members.append(Member(spec.name, actor.remote(spec), spec.log))
        return WorkerGroup(members, memory, config.trainer.stall_timeout_s, heartbeat, lambda: self._profiler.at)

    def _make_replicas(self, hosts: WorkerGroup, processes_on: dict[str, int], actor: RemoteRole) -> ReplicaSet:
        """Let the hosts make their engines, and return these with the actor's weights of this moment."""
        policy = self._groups[POLICY]
        colocated = self._config.actor_rollout_ref.rollout.mode == "colocated"
        shared = [name for place in policy.places for name in place.device_ids] if colocated else []

        def make(host: Any) -> None:
            host.make(processes_on, shared)

        hosts.ask("make", make)
        hosts.align_clocks()
        here = set(hosts.machines) == {policy.machines[0]}
        host = "127.0.0.1" if here else policy.places[0].address
        make_transport = weight_transport(self._config, shares_memory=here, host=host)
        return self._replicas({m.name: RemoteReplica(hosts, m) for m in hosts.members}, make_transport, actor)

    def _join_servers(self, actor: RemoteRole, opened: contextlib.ExitStack) -> ReplicaSet:
        """Return the servers, which the policy's first rank sends weights to, with the actor's of this moment."""
        config = self._config
        [host, *_] = self._groups[POLICY].ask("find servers", lambda _: host_towards_servers(config))
        make_transport = weight_transport(config, shares_memory=config.weight_transport == "shared_memory", host=host)
        engines = join_servers(config)
        for engine in engines.values():
            opened.callback(engine.close)
        return self._replicas(engines, make_transport, actor)

    def _replicas(
        self, engines: dict[str, RolloutEngine], make_transport: Callable[[], Transport], actor: RemoteRole
    ) -> ReplicaSet:
        """Return engines as one that gets its weights from the policy's ranks, with those of this moment."""
        section, policy = self._config.actor_rollout_ref.rollout, self._groups[POLICY]

        @contextlib.contextmanager
        def send(digests: bool) -> Iterator[WeightHandle]:
            handle: WeightHandle = actor.send_weights(make_transport, digests)
            were_loaded = False
            try:
                yield handle
                were_loaded = True
            finally:
                if policy.answers:
                    handle.num_bytes = policy.ask("forget_weights", lambda rank: rank.forget_weights(were_loaded))[0]

        replicas = ReplicaSet(engines, send, section.verify_weights, longest_request(section))
        run_sync(replicas.load_weights(WeightUpdate(0)))
        return replicas

    def _meet(self, name: str, group: WorkerGroup) -> None:
        """Let the pool's ranks meet: over a file where all are on this machine, else on a free port of the first's."""
        group.locate()
        if set(group.machines) == {ray.get_runtime_context().get_node_id()}:
            point = f"file://{self._meeting / name}"
        else:
            point = f"tcp://{group.places[0].address}:{group.places[0].port}"
        group.ask("join", lambda rank: rank.join(point))

    def peak_flops(self) -> float:
        """Return the peak FLOP/s of all ranks together."""
        return sum(self._ask_all("peak_flops", lambda rank: devices.peak_flops(rank.device, rank.dtype)))

    def memory_gb(self) -> dict[str, float]:
        """Return the memory of all processes together, and of the fullest device."""
        answers = self._ask_all("memory_gb", lambda rank: devices.memory_gb(rank.device))
        names = answers[0].keys()
        largest = {name: max(answer[name] for answer in answers) for name in names}
        return largest | {"perf/cpu_memory_used_gb": sum(answer["perf/cpu_memory_used_gb"] for answer in answers)}

    def _ask_all(self, what: str, work: Callable[[RankWorker], Answer]) -> list[Answer]:
        return [answer for group in self._groups.values() for answer in group.ask(what, work)]

    def begin_profiled_step(self, step: int) -> None:
        """Let the ranks begin with what they are to capture of a step."""
        for group in self._profiled_groups():
            group.captures = True
            group.ask("begin_profiled_step", lambda rank: rank.profiler.begin_step(step))

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """Let them write it, as far as they are alive."""
        for group in self._profiled_groups():
            if group.answers:
                group.ask("end_profiled_step", lambda rank: rank.profiler.end_step(step, last=last))
                group.captures = not last

    def _profiled_groups(self) -> list[WorkerGroup]:
        captured = {request.group for request in self.profile_requests}
        return [group for name, group in self._groups.items() if name in captured]

    def close(self) -> None:
        """End all ranks, and the cluster where it was started here."""
        self._opened.close()
