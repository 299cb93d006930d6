"""The mismatch laboratory: a rollout policy that differs from the trained one by a known, repeatable amount.

While the native engine decodes, the trainer's model holds older, noisier or rounded weights; the recorded log-probs
are those of the weights that sampled, as they would be from a separate inference engine.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pellucid import seeding
from pellucid.config.schema.rollout import SimulateMismatchConfig
from pellucid.rollout.native.decoder import SampledPolicy
from pellucid.rollout.requests import WeightUpdate

STALE_WEIGHTS_FILE = "stale_rollout_weights.safetensors"
_VERSIONS = "__versions__"


def changes_weights(config: SimulateMismatchConfig) -> bool:
    """Return whether sampling needs other weights than the trainer's."""
    return config.dtype is not None or config.stale_steps > 0 or config.noise > 0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The trainable weights as they were at one version of the policy."""

    version: int
    weights: dict[str, torch.Tensor]


class MismatchedPolicy:
    """The trained policy with other weights, for a native engine to sample from.

    There is one model: its parameters point at other storage while the engine decodes and at their own again after
    each step, also when it raises. Validation may go on sampling from the policy itself with an engine of its own.

    Args:
        policy: the trained policy.
        config: what to change, in the order stale, noise, dtype. `bfloat16` makes weights, activations, residual
            stream and cache bf16, as a bf16 inference engine computes; noise is Gaussian, in units of the rms of each
            weight tensor; stale weights are as they were that many updates ago, or the oldest there are.
        seed: the run's seed, from which the noise derives.
    """

    def __init__(self, policy: SampledPolicy, config: SimulateMismatchConfig, seed: int) -> None:
        self._policy, self._config, self._seed = policy, config, seed
        self.model, self.device = policy.model, policy.device
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else policy.dtype
        self._ring: deque[_Snapshot] = deque(maxlen=config.stale_steps + 1)
        """The weights of the last stale_steps + 1 updates, oldest first; empty while stale_steps is 0."""

    @property
    def version(self) -> int:
        """Version of the weights that were perturbed."""
        return self._snapshot().version

    def take_weights(self, update: WeightUpdate) -> None:
        """Keep a copy of the weights of now, while older ones are to be sampled from."""
        assert update.version == self._policy.version, "the trainer's own weights are perturbed"
        if self._config.stale_steps:
            self._keep_current()

    def _keep_current(self) -> None:
        trained = (named for named in self.model.named_parameters() if named[1].requires_grad)
        self._ring.append(_Snapshot(self._policy.version, {name: one.detach().clone() for name, one in trained}))

    def _snapshot(self) -> _Snapshot:
        if self._config.stale_steps and not self._ring:
            self._keep_current()  # nothing was synchronised yet: the weights at hand are the oldest there are
        return self._ring[0] if self._ring else _Snapshot(self._policy.version, {})

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model holds the perturbed weights of now and computes with them."""
        return _Exchanged(self.model, list(self._perturbed(self._snapshot())), self._policy.autocast())

    def _perturbed(self, snapshot: _Snapshot) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield each parameter with the weight to sample from."""
        for name, parameter in self.model.named_parameters():
            weight = snapshot.weights[name] if name in snapshot.weights else parameter.detach()
            if noise := self._config.noise:
                seed = seeding.derive_seed(self._seed, "mismatch_noise", snapshot.version, name)
                weight = _add_noise(weight, noise, seed)
            yield parameter, weight.to(torch.bfloat16) if self._config.dtype == "bfloat16" else weight

    def save(self, folder: Path) -> None:
        """Write the kept weights, if any, into `folder`, so that a resumed run samples from the same ones."""
        if self._ring:
            kept = enumerate(self._ring)
            tensors = {f"{place}.{name}": weight for place, one in kept for name, weight in one.weights.items()}
            versions = torch.tensor([snapshot.version for snapshot in self._ring])
            save_file({**tensors, _VERSIONS: versions}, folder / STALE_WEIGHTS_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; without its file (stale_steps was 0) the current weights are the oldest."""
        self._ring.clear()
        file = folder / STALE_WEIGHTS_FILE
        if not self._config.stale_steps or not file.is_file():
            return
        tensors = load_file(file, device=str(self.device))
        for place, version in enumerate(tensors.pop(_VERSIONS).tolist()):
            prefix = f"{place}."
            weights = {name.removeprefix(prefix): weight for name, weight in tensors.items() if name.startswith(prefix)}
            self._ring.append(_Snapshot(version, weights))


class _Exchanged:
    """A context, entered as often as wanted, in which parameters hold other weights and after which their own."""

    def __init__(
        self,
        model: PreTrainedModel,
        weights: list[tuple[torch.nn.Parameter, torch.Tensor]],
        inner: AbstractContextManager[object],
    ) -> None:
        self._own = [(parameter, parameter.data) for parameter in model.parameters()]
        self._weights, self._inner = weights, inner

    def __enter__(self) -> None:
        for parameter, weight in self._weights:
            parameter.data = weight
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for parameter, data in self._own:
            parameter.data = data


def _add_noise(weight: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """Return weight + noise · rms(weight) · N(0, 1); drawn on the CPU, so that every device adds the same."""
    draw = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    rms = weight.float().square().mean().sqrt()
    return weight + draw.to(weight.device, weight.dtype).mul_(noise * rms)
