"""AdamW, gradient clipping and the learning-rate schedule.

The rate is a function of the number of optimizer steps done, so a resumed run needs no scheduler state.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from pellucid.training.sharding import Sharding


@dataclass(slots=True)
class Schedule:
    """Linear warm-up to `lr`, then constant, linear or cosine decay to `min_lr_ratio * lr` at `total_steps`."""

    lr: float
    warmup_steps: int
    total_steps: int
    kind: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 0.0

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the optimizer step after `step` finished ones."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        decay = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)


@dataclass(slots=True)
class ScheduledAdamW:
    """AdamW (arXiv 1711.05101) over a model's trainable parameters, with clipping and a schedule."""

    parameters: dict[str, torch.nn.Parameter]
    schedule: Schedule
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    num_steps: int = 0
    """Optimizer steps done."""
    sharding: "Sharding | None" = None
    """Set where the parameters are this rank's shards."""
    offload: bool = False
    """Keep the moments in CPU memory between steps; for parameters that are there themselves it changes nothing."""
    adamw: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        # Betas as Python floats and a fused kernel: one pass over parameters, gradients and moments.
        self.adamw = torch.optim.AdamW(
            self.parameters.values(), lr=self.schedule.lr, betas=self.betas, weight_decay=self.weight_decay, fused=True
        )

    def clip(self) -> float:
        """Scale gradients to the global norm `grad_clip` and return the norm before; one not finite scales nothing."""
        grads = self._local(parameter.grad for parameter in self.parameters.values())
        norm = self._norm(grads)
        if torch.isfinite(norm) and norm > self.grad_clip:
            # As torch.nn.utils.clip_grads_with_norm_, which takes no shards.
            factor = float(torch.clamp(self.grad_clip / (norm + 1e-6), max=1.0))
            torch._foreach_mul_(grads, factor)
        return float(norm)

    def step(self) -> float:
        """Apply one update, drop the gradients and return the learning rate used."""
        lr = self.schedule.lr_at(self.num_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        with self.moments_at_hand():
            self.adamw.step()
        self.zero_grad()
        self.num_steps += 1
        return lr

    @contextmanager
    def moments_at_hand(self) -> Iterator[None]:
        """Have the moments on the parameters' device inside the block, and with `offload` in CPU memory after it."""
        if not self.offload:
            yield
            return
        self._move_moments(None)
        try:
            yield
        finally:
            self._move_moments("cpu")

    def _move_moments(self, device: str | None) -> None:
        for parameter, state in self.adamw.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(device or parameter.device)

    def weight_norm(self) -> float:
        """Return the L2 norm of the weights: one pass over them, which shows whether any is NaN or Inf."""
        with torch.no_grad():
            return float(self._norm(self._local(self.parameters.values())))

    def _local(self, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return what this rank holds of `tensors`."""
        there = [tensor for tensor in tensors if tensor is not None]
        return there if self.sharding is None else [self.sharding.local(tensor) for tensor in there]

    def _norm(self, local: list[torch.Tensor]) -> torch.Tensor:
        norm = torch.nn.utils.get_total_norm(local)
        return norm if self.sharding is None else self.sharding.norm(norm)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return `<parameter>.exp_avg`, `.exp_avg_sq` and `.step` for every parameter that has been updated."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }

    def make_state(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Replace the state by zeros under those of `names`, as `state_tensors` has them, that are the model's."""
        self.adamw.state.clear()
        for full_name in names:
            name, _, key = full_name.rpartition(".")
            if (parameter := self.parameters.get(name)) is not None:
                zeros = torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter)
                self.adamw.state[parameter][key] = zeros
        return self.state_tensors()
