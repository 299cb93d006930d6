"""The mismatch laboratory: a rollout policy that differs from the trained one by a known, repeatable amount.

Wraps the native engine and, for the time of one `generate`, exchanges the trainer's weights for older, noisier or coarser
ones; the recorded log-probs are those of the weights that sampled, as they would be from a separate inference engine.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pellucid import seeding
from pellucid.errors import UserError
from pellucid.profiler.tools.base import Tool
from pellucid.rollout.native.engine import NativeRolloutEngine
from pellucid.rollout.protocol import Progress, SamplingParams
from pellucid.training.common.models import output_head
from pellucid.types import Prompt, Rollout

STALE_WEIGHTS_FILE = "stale_rollout_weights.safetensors"
_VERSIONS = "__versions__"


@dataclass(frozen=True, slots=True)
class MismatchSettings:
    """How the sampling policy differs from the trained one; applied in the order stale, noise, dtype."""

    dtype: Literal["bfloat16", "int8"] | None = None
    """`bfloat16`: weights, activations, residual stream and KV cache in bf16, as a bf16 inference engine computes.
    `int8`: the weights of the linear layers rounded to 8 bits an output channel, activations as in training. None: neither."""
    stale_steps: int = 0
    """Sample from the weights as they were this many `sync_weights` ago, or the oldest there are."""
    noise: float = 0.0
    """σ of the Gaussian noise added to each weight tensor W, in units of rms(W)."""

    @property
    def changes_weights(self) -> bool:
        """Whether sampling needs other weights than the trainer's."""
        return self.dtype is not None or self.stale_steps > 0 or self.noise > 0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The trainable weights as they were at one version of the policy."""

    version: int
    weights: dict[str, torch.Tensor]


class MismatchedEngine:
    """The native engine sampling from perturbed weights. See `RolloutEngine`.

    There is one model: its parameters point at other storage during `generate` and at their own again after it, also when
    it raises. With every setting off this is the native engine, bit for bit and at its cost.

    Args:
        native: the engine that samples; left as it is, so validation may go on using it.
        settings: what to change.
        seed: the run's seed, from which the noise derives.

    Raises:
        UserError: int8 is asked for and the model has no linear layers.
    """

    def __init__(self, native: NativeRolloutEngine, settings: MismatchSettings, seed: int) -> None:
        self._settings, self._seed, self._actor = settings, seed, native.policy
        if settings.dtype == "int8" and not _linear_weights(native.policy.model):
            raise UserError(
                "actor_rollout_ref.rollout.simulate_mismatch.dtype",
                f"{type(native.policy.model).__name__} has no linear layers whose weights int8 could round.",
                "Use bfloat16, or noise.",
            )
        self._native = copy.copy(native)
        if settings.dtype == "bfloat16":
            self._native.dtype = torch.bfloat16
        self._ring: deque[_Snapshot] = deque(maxlen=settings.stale_steps + 1)
        """The weights of the last stale_steps + 1 synchronisations, oldest first; empty while stale_steps is 0."""

    def capture_tool(self, tool: Tool) -> Tool:
        """See `RolloutEngine.capture_tool`."""
        return self._native.capture_tool(tool)

    def sync_weights(self) -> None:
        """See `RolloutEngine.sync_weights`; keeps a copy of the weights while older ones are to be sampled from."""
        self._native.sync_weights()
        if self._settings.stale_steps:
            weights = {
                name: parameter.detach().clone()
                for name, parameter in self._actor.model.named_parameters()
                if parameter.requires_grad
            }
            self._ring.append(_Snapshot(self._actor.version, weights))

    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        stream: tuple[str | int, ...],
        on_done: Progress | None = None,
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`; `Rollout.versions` is the version whose weights were perturbed."""
        if not self._settings.changes_weights:
            return self._native.generate(prompts, params, stream=stream, on_done=on_done)
        if self._settings.stale_steps and not self._ring:
            self.sync_weights()  # nothing was synchronised yet: the weights at hand are the oldest there are
        snapshot = self._ring[0] if self._ring else _Snapshot(self._actor.version, {})
        with _exchanged(self._actor.model, self._perturbed(snapshot)):
            rollouts = self._native.generate(prompts, params, stream=stream, on_done=on_done)
        for rollout in rollouts:
            rollout.versions = [snapshot.version] * len(rollout.token_ids)
        return rollouts

    def _perturbed(self, snapshot: _Snapshot) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with the weight to sample from."""
        model, settings = self._actor.model, self._settings
        quantised = _linear_weights(model) if settings.dtype == "int8" else set()
        for name, parameter in model.named_parameters():
            weight = snapshot.weights[name] if name in snapshot.weights else parameter.detach()
            if settings.noise:
                weight = _add_noise(
                    weight, settings.noise, seeding.derive_seed(self._seed, "mismatch_noise", snapshot.version, name)
                )
            if settings.dtype == "bfloat16":
                weight = weight.to(torch.bfloat16)
            elif name in quantised:
                weight = _fake_int8(weight)
            yield parameter, weight

    def save(self, folder: Path) -> None:
        """Write the kept weights into `folder`, so that a resumed run samples from the same ones; nothing if none are kept."""
        if self._ring:
            tensors = {
                f"{place}.{name}": weight
                for place, snapshot in enumerate(self._ring)
                for name, weight in snapshot.weights.items()
            }
            versions = torch.tensor([snapshot.version for snapshot in self._ring])
            save_file({**tensors, _VERSIONS: versions}, folder / STALE_WEIGHTS_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; a checkpoint without it (stale_steps was 0) leaves the current weights the oldest."""
        self._ring.clear()
        file = folder / STALE_WEIGHTS_FILE
        if not self._settings.stale_steps or not file.is_file():
            return
        tensors = load_file(file, device=str(self._actor.device))
        for place, version in enumerate(tensors.pop(_VERSIONS).tolist()):
            prefix = f"{place}."
            weights = {name.removeprefix(prefix): weight for name, weight in tensors.items() if name.startswith(prefix)}
            self._ring.append(_Snapshot(version, weights))


@contextmanager
def _exchanged(
    model: PreTrainedModel, replacements: Iterator[tuple[torch.nn.Parameter, torch.Tensor]]
) -> Iterator[None]:
    """Let the parameters of `model` hold the given weights inside the block, and their own storage again after it."""
    own = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, weight in replacements:
            parameter.data = weight
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


def _linear_weights(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers' weights, without the output head, which int8 engines keep in full."""
    head = output_head(model).weight
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {name for name in linears if model.get_parameter(name) is not head}


def _add_noise(weight: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """Return weight + noise · rms(weight) · N(0, 1); drawn on the CPU, so that every device adds the same."""
    draw = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    rms = weight.float().square().mean().sqrt()
    return weight + draw.to(weight.device, weight.dtype).mul_(noise * rms)


def _fake_int8(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [out, in] as symmetric 8-bit quantisation with one scale an output channel represents it."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round_() * scale
