"""The placement of one process: the roles are the objects themselves."""

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from pellucid import devices
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.config import RunConfig
from pellucid.controller.make_roles import Compute, Roles, make_roles, needed_roles, torch_dtype
from pellucid.profiler.process import ProcessProfiler
from pellucid.profiler.request import ProcessRequest


class Placement(Protocol):
    """The roles of a run and the processes they run in."""

    roles: Roles
    num_ranks: int
    """Training processes, each with a device of its own."""
    device: str
    """Kind of device, for the run's record."""
    profile_requests: list[ProcessRequest]
    """What the processes beside this one are asked to capture."""

    def peak_flops(self) -> float:
        """Return the peak FLOP/s of all ranks together."""
        ...

    def memory_gb(self) -> dict[str, float]:
        """Return `perf/cpu_memory_used_gb` of all processes and, off CPU, `perf/max_memory_allocated_gb` of the fullest device."""
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


class LocalPlacement:
    """See `Placement`."""

    num_ranks = 1

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        policy_loss: PolicyLoss,
        total_steps: int,
        profiler: ProcessProfiler,
    ) -> None:
        """Load the models of all roles into this process, whose `profiler` hears of what they do."""
        devices.keep_freed_memory()
        self._device = devices.choose_device(config.trainer.device)
        self._dtype = torch_dtype(config.actor_rollout_ref.model.dtype)
        compute = Compute(self._device, self._dtype, probe=profiler, nan_sentinel=config.trainer.nan_sentinel)
        self.roles = make_roles(config, needed_roles(config), tokenizer, policy_loss, compute, total_steps)
        profiler.models_of = self.roles.modules_of
        if self.roles.rollout is not None:
            profiler.adapt = self.roles.rollout.capture_tool
        self.device, self.profile_requests = str(self._device), []

    def peak_flops(self) -> float:
        """See `Placement`."""
        return devices.peak_flops(self._device, self._dtype)

    def memory_gb(self) -> dict[str, float]:
        """See `Placement`."""
        return devices.memory_gb(self._device)

    def in_hand(self) -> list[str]:
        """See `Placement`."""
        return self.roles.in_hand()

    def begin_profiled_step(self, step: int) -> None:
        """See `Placement`."""

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """See `Placement`."""

    def close(self) -> None:
        """See `Placement`."""
