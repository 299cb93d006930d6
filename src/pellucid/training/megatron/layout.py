"""Which rank does what under Megatron: the sizes of the parallel dimensions, their process groups, and sums over ranks.

Made once a process, from `actor.megatron.*`; megatron-core keeps the groups, which all roles of the process share.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from pellucid.training.common.rank_sums import RankSums
from pellucid.training.megatron.cpu_adapter import megatron_calls


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Over how many ranks each dimension is spread; what is left of the world is data parallel."""

    tensor: int = 1
    """Ranks between which the matrices of each layer are divided."""
    pipeline: int = 1
    """Stages of consecutive layers."""
    virtual_pipeline: int | None = None
    """Model chunks a stage holds, where they are interleaved."""
    context: int = 1
    """Ranks between which the tokens of a pack are divided."""
    expert: int = 1
    """Ranks between which the experts of a layer are divided, taken from the data- and context-parallel ones."""
    expert_tensor: int | None = None
    """Ranks between which the matrices of an expert are divided; None: as many as `tensor`."""


class MegatronLayout(RankSums):
    """The place of this rank, and what it asks of other ranks. All methods but properties are collective."""

    def __init__(self, sizes: ParallelSizes, device: torch.device) -> None:
        """Join the process groups of `sizes`, over the default process group that this process has joined."""
        super().__init__(device)
        self.sizes = sizes
        if not parallel_state.model_parallel_is_initialized():
            with megatron_calls(device):
                parallel_state.initialize_model_parallel(
                    sizes.tensor,
                    sizes.pipeline,
                    sizes.virtual_pipeline,
                    context_parallel_size=sizes.context,
                    expert_model_parallel_size=sizes.expert,
                    expert_tensor_parallel_size=sizes.expert_tensor,
                )
                if device.type != "cpu":  # there is no dropout, but sequence parallel layers ask for the random state
                    tensor_parallel.model_parallel_cuda_manual_seed(0)
        self.state: Any = parallel_state
        self.tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.context_rank = parallel_state.get_context_parallel_rank()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.num_data_ranks = parallel_state.get_data_parallel_world_size()

    @cached_property
    def background(self) -> dist.ProcessGroup:
        """A group of all ranks for what runs beside training, whose collectives it keeps out of the way of."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.stage == self.sizes.pipeline - 1

    @property
    def counts(self) -> bool:
        """Whether results and losses of this rank are counted: one rank for each part of the data does."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def pack_multiple(self) -> int:
        """What the number of tokens in a pack must be a multiple of."""
        return self.sizes.context * self.sizes.tensor

    def num_micro_batches(self, own: int) -> int:
        """Return how many micro-batches every rank runs: the most that one has, as the schedule can divide them."""
        group = self.sizes.pipeline if self.sizes.virtual_pipeline else 1
        return -(-self.largest(max(own, 1)) // group) * group
