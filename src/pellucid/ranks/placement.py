"""What a run asks of its roles and the processes they run in, and the placement of one process.

`place_roles` turns a config into roles with the same methods wherever they run, so the loop is the same code for both.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from pellucid import devices
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.build import RoleName, Roles, make_roles
from pellucid.config import RunConfig
from pellucid.engine_maker import Compute
from pellucid.files.rundir import RunDir
from pellucid.loading import torch_dtype
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest
from pellucid.precision.sentinel import Sentinel
from pellucid.stages import Probes

if TYPE_CHECKING:  # imports ray
    from pellucid.ranks.group import RemoteSentinel


class Placement(Protocol):
    """The roles of a run and the processes they run in."""

    roles: Roles
    num_ranks: int
    """Training processes, each with a device of its own."""
    device: str
    """Kind of device, for the run's record."""
    profile_requests: list[ProcessRequest]
    """What the processes beside this one are asked to capture."""
    sentinel: "Sentinel | RemoteSentinel | None"
    """Watches the stages for NaN and Inf, with `trainer.nan_sentinel`."""

    def peak_flops(self) -> float:
        """Return the peak FLOP/s of all ranks together."""
        ...

    def memory_gb(self) -> dict[str, float]:
        """Return `perf/cpu_memory_used_gb` of all and, off CPU, the fullest device's `perf/max_memory_allocated_gb`."""
        ...

    def begin_profiled_step(self, step: int) -> None:
        """Let the processes beside this one begin with what they are to capture of a step."""

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        """Let them write it, as far as they are alive; after the `last` step also what the next one would share."""

    def close(self) -> None:
        """End the processes beside this one."""


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
        self.sentinel = Sentinel() if config.trainer.nan_sentinel else None
        probe = profiler if self.sentinel is None else Probes([profiler, self.sentinel])
        compute = Compute(self._device, self._dtype, probe=probe)
        self.roles = make_roles(config, roles, tokenizer, policy_loss, compute, total_steps)
        profiler.models_of = self.roles.modules_of
        if self.sentinel is not None:
            self.sentinel.modules_of = self.roles.modules_of
        self.device, self.profile_requests = str(self._device), []

    @override
    def peak_flops(self) -> float:
        return devices.peak_flops(self._device, self._dtype)

    @override
    def memory_gb(self) -> dict[str, float]:
        return devices.memory_gb(self._device)

    @override
    def close(self) -> None:
        if self.roles.rollout is not None:
            self.roles.rollout.close()


def place_roles(
    config: RunConfig,
    run_dir: RunDir,
    roles: Sequence[RoleName],
    tokenizer: PreTrainedTokenizerBase,
    policy_loss: PolicyLoss,
    total_steps: int,
    heartbeat: Callable[[], None],
    profiler: ProcessProfiler,
) -> Placement:
    """Return the roles, their models loaded; `close` ends the processes they run in.

    Raises:
        UserError: a model does not fit its role, or there is no place for so many ranks.
    """
    if config.trainer.placement == "local":
        return LocalPlacement(config, roles, tokenizer, policy_loss, total_steps, profiler)
    if config.trainer.ray_address is None:
        # Ray's servers listen on all interfaces: who talks to them needs this run's token. Read at Ray's import.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # ranks are the work, not something beside it
    elif (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `ray start` does where there is a token
    from pellucid.ranks.ray_placement import RayPlacement

    return RayPlacement(config, run_dir, roles, total_steps, heartbeat, profiler)
