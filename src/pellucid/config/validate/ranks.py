"""Rules on where a run happens: ranks, machines, pools of ranks, copies of a model.

`validate` in the package calls `mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import RunConfig
from pellucid.errors import UserError


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that cannot be placed on the ranks there are."""
    trainer, ranks = config.trainer, config.num_ranks
    if trainer.placement == "local" and ranks > 1:
        key = "n_gpus_per_node" if trainer.n_gpus_per_node > 1 else "nnodes"
        yield UserError(
            f"trainer.{key}",
            f"{trainer.n_gpus_per_node} (n_gpus_per_node) × {trainer.nnodes} (nnodes) = {ranks} ranks, but placement: "
            "local keeps all in one process.",
            "Set trainer.placement: ray, or both to 1.",
        )
