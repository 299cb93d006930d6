"""A model spread over ranks by FSDP2: sharded parameters, gradients and optimizer state.

The engine runs its passes through `Sharding.run` and adds up losses, norms and results with the methods below; nothing
else in it knows of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pellucid.training.common.rank_sums import RankSums

REPLICATE, SHARD = "replicate", "shard"
MEET_S = 300.0
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """How a model is spread over the ranks of the default process group."""

    fsdp_size: int = -1
    """Ranks that hold one copy of the model between them; -1 is all. Fewer make ranks / fsdp_size copies (HSDP)."""
    param_dtype: torch.dtype = torch.float32
    """What the layers' weights are gathered and computed in. Shards, gradients and everything outside the layers
    (embeddings, norm, head) are float32."""
    reduce_dtype: torch.dtype = torch.float32
    """What gradients are added up over the ranks in; the sums are float32 again."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights between its forward and its backward pass: less memory, one more gather."""
    param_offload: bool = False
    """Keep shards, gradients and optimizer state in CPU memory, where the optimizer then steps; nothing on a CPU."""


def join_ranks(rank: int, num_ranks: int, *, init_method: str, device: torch.device, timeout_s: float = 1800.0) -> None:
    """Make this process one of `num_ranks` that meet at `init_method` (`tcp://host:port` or `file://path`).

    They have five minutes to meet; a collective gives up after `timeout_s`.

    Collectives on CPU tensors go over gloo, those on CUDA tensors over nccl, on NPU tensors over hccl.
    """
    store, _, _ = next(dist.rendezvous(init_method, rank, num_ranks, timeout=timedelta(seconds=MEET_S)))
    dist.init_process_group(
        _BACKENDS[device.type], store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
    )


def join_alone(device: torch.device) -> None:
    """Make this process a group of one, which sharding needs too; nothing if it is in a group already."""
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)


def _make_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """Return the mesh of all ranks: [shard], or [replicate, shard] when `fsdp_size` is less than all of them."""
    ranks = dist.get_world_size()
    size = ranks if fsdp_size == -1 else fsdp_size
    assert ranks % size == 0, "the config's rules let only divisors pass"
    if size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=(REPLICATE, SHARD))


class Root(torch.nn.Module):
    """The model as one unit: whatever is computed inside its forward finds the weights outside the layers gathered.

    Those are the embeddings, the final norm and the output head, so the head's matrix is a plain tensor there, tied or
    not, and autograd carries its gradient back to the shards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` does: tensors, or a dict of them."""
        return compute()


class Sharding(RankSums):
    """A model whose tensors are spread over the ranks, and what the engine asks of the other ranks.

    Wraps `model` in place; make its optimizer afterwards, over the parameters that it then has. All methods but `local`
    are collective: every rank calls them in the same order.
    """

    def __init__(self, model: PreTrainedModel, plan: ShardingPlan, device: torch.device) -> None:
        """Shard `model` over all ranks; every rank must hold the same weights."""
        super().__init__(device)
        self.plan = plan
        self.mesh = _make_mesh(device, plan.fsdp_size)
        self.root: Any = _wrap(model, plan, self.mesh, device)
        self._background: dist.ProcessGroup | None = None
        self._running = False

    def run(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` does with the weights outside the layers gathered: tensors, or a dict of them."""
        if self._running:  # the reference of a LoRA policy, run inside the policy's own pass
            return compute()
        self._running = True
        try:
            return self.root(compute)
        finally:
            self._running = False

    def reshard(self) -> None:
        """Free the weights that passes without a backward one have left gathered."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @staticmethod
    def local(tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a sharded tensor that this rank holds, sharing its memory."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a sharded tensor whole, on the ranks' device."""
        # On the device first: shards offloaded to CPU memory would be gathered over gloo.
        return tensor.to(self.device).full_tensor() if isinstance(tensor, DTensor) else tensor  # pyright: ignore

    def background_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks for what runs beside training, whose collectives it keeps out of the way of."""
        if self._background is None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._background = group
        return self._background

    def norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        """Return the L2 norm of all shards from that of this rank's; the same number on every rank."""
        square = local_norm.to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.mesh[SHARD].get_group())
        return square.sqrt().to(local_norm.dtype)


def _wrap(model: PreTrainedModel, plan: ShardingPlan, mesh: DeviceMesh, device: torch.device) -> Any:
    root, kinds = Root(model), set(model._no_split_modules or [])
    offload = CPUOffloadPolicy() if plan.param_offload and device.type != "cpu" else OffloadPolicy()
    # Inputs are not cast: autocast decides what is computed in what, as in one process.
    policy = MixedPrecisionPolicy(plan.param_dtype, plan.reduce_dtype, cast_forward_inputs=False)
    for layer in list(model.modules()):
        if type(layer).__name__ in kinds:  # a decoder layer, the unit that is gathered at a time
            fully_shard(
                layer,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=plan.reshard_after_forward,
            )
    policy = MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype, cast_forward_inputs=False)
    # The head is used after the last layer and the backward pass begins with it, so it stays gathered in between.
    return fully_shard(root, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
