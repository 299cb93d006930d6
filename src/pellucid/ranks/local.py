"""The placement of one process: the roles are the objects themselves."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from pellucid import devices
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.build import Compute, RoleName, Roles, make_roles, torch_dtype
from pellucid.config import RunConfig
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest
from pellucid.precision.finding import Finding
from pellucid.precision.sentinel import Sentinel
from pellucid.stages import Probes, Stage


class NanSentinel(Protocol):
    """What a run asks of the NaN sentinel of its processes; `precision.sentinel.Sentinel` is the one of this
    process.
    """

    def watch(self, stage: Stage | None) -> AbstractContextManager[None]:
        """Return a context round a stage, which raises `NonFiniteError` where something in it is not finite."""
        ...

    def locate(self, stage: Stage) -> None:
        """Let the next stage, a repetition of one that failed, be searched for where it goes wrong."""
        ...

    def take_finding(self) -> Finding | None:
        """Return what is known of the failure, and watch as before from now on."""
        ...


class Placement(Protocol):
    """The roles of a run and the processes they run in."""

    roles: Roles
    num_ranks: int
    """Training processes, each with a device of its own."""
    device: str
    """Kind of device, for the run's record."""
    profile_requests: list[ProcessRequest]
    """What the processes beside this one are asked to capture."""
    sentinel: NanSentinel | None
    """Watches the stages for NaN and Inf, with `trainer.nan_sentinel`."""

    def peak_flops(self) -> float:
        """Return the peak FLOP/s of all ranks together."""
        ...

    def memory_gb(self) -> dict[str, float]:
        """Return `perf/cpu_memory_used_gb` of all processes and, off CPU, `perf/max_memory_allocated_gb` of the fullest
        device.
        """
        ...

    def in_hand(self) -> list[str]:
        """Return the samples that this process's own models work on at this moment."""
        ...

    def begin_profiled_step(self, step: int) -> None:
        """Let the processes beside this one begin with what they are to capture of a step."""
        ...

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """Let them write it, as far as they are alive; after the `last` step also what the next one would share."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class LocalPlacement(Placement):
    """One process, in which the roles are the objects themselves."""

    num_ranks = 1

    def __init__(
        self,
        config: RunConfig,
        roles: Sequence[RoleName],
        tokenizer: PreTrainedTokenizerBase,
        policy_loss: PolicyLoss,
        total_steps: int,
        profiler: ProcessProfiler,
    ) -> None:
        """Load the models of the roles into this process, whose `profiler` hears of what they do."""
        devices.keep_freed_memory()
        self._device = devices.choose_device(config.trainer.device)
        self._dtype = torch_dtype(config.actor_rollout_ref.model.dtype)
        sentinel = Sentinel() if config.trainer.nan_sentinel else None
        self.sentinel: NanSentinel | None = sentinel
        probe = profiler if sentinel is None else Probes([profiler, sentinel])
        compute = Compute(self._device, self._dtype, probe=probe)
        self.roles = make_roles(config, roles, tokenizer, policy_loss, compute, total_steps)
        profiler.models_of = self.roles.modules_of
        if sentinel is not None:
            sentinel.modules_of = self.roles.modules_of
        self.device, self.profile_requests = str(self._device), []

    @override
    def peak_flops(self) -> float:
        return devices.peak_flops(self._device, self._dtype)

    @override
    def memory_gb(self) -> dict[str, float]:
        return devices.memory_gb(self._device)

    @override
    def in_hand(self) -> list[str]:
        return self.roles.in_hand()

    @override
    def begin_profiled_step(self, step: int) -> None:
        """Do nothing: there is no process beside this one."""

    @override
    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """Do nothing: there is no process beside this one."""

    @override
    def close(self) -> None:
        """Do nothing: there is no process to end."""
