"""Where the roles run: in the controller's process (`local`), or on ranks that Ray starts (`ray`).

`place_roles` turns a config into roles with the same methods either way, so the loop is the same code for both.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pellucid.algo.policy_loss import PolicyLoss
from pellucid.build import RoleName
from pellucid.config import RunConfig
from pellucid.files.rundir import RunDir
from pellucid.observe.process import ProcessProfiler
from pellucid.ranks.placement import LocalPlacement, Placement

__all__ = ["LocalPlacement", "Placement", "place_roles"]


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
        # Ray's servers listen on all interfaces: only who has this run's own token may talk to them. Read at Ray's
        # import.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # ranks are the work, not something beside it
    elif (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `ray start` does where there is a token
    from pellucid.ranks.ray_placement import RayPlacement

    return RayPlacement(config, run_dir, roles, total_steps, heartbeat, profiler)
