"""What is computed from the final hidden states of response tokens: log-probabilities of a policy, values of a critic.

The roles choose a head; the training engine calls it once a micro-batch and scatters its [M] results back to [B, T].
"""

from dataclasses import dataclass

import torch

from pellucid.training.common.logprobs import token_log_probs
from pellucid.training.common.packing import ModelInput
from pellucid.training.protocol import OutputLayer, TokenScores, TrainingEngine


@dataclass(frozen=True, slots=True)
class LogProbHead:
    """Log-probabilities of the response tokens, with entropies and the exact KL to a reference on request."""

    temperature: float
    """The logits are divided by it: the distribution that is sampled from."""
    with_entropy: bool = False
    compiled: bool = False
    """Let `torch.compile` fuse the work on a chunk of logits; `compiling_pays` says on which device it is faster."""
    reference: TrainingEngine | None = None
    """Compute Σ_v π(v)(log π(v) − log π_ref(v)) against this model, run on the same micro-batch."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it computes."""
        return ("logp", "entropy") if self.reference is None else ("logp", "entropy", "kl")

    def __call__(self, layer: OutputLayer, hidden: torch.Tensor, inputs: ModelInput, dtype: torch.dtype) -> TokenScores:
        """Return [M] results for the hidden states [M, H] that predict the micro-batch's M response tokens."""
        weight: torch.Tensor = layer.module.weight.to(dtype)  # pyright: ignore
        model_of_kl = self.reference
        reference = None if model_of_kl is None else (model_of_kl.predicting_states(inputs), model_of_kl.head_weight())
        logp, entropy, kl = token_log_probs(
            hidden,
            weight,
            inputs.target_ids,
            reference,
            temperature=self.temperature,
            with_entropy=self.with_entropy,
            compiled=self.compiled,
            shard=layer.shard,
        )
        return TokenScores({"logp": logp, "entropy": entropy} | ({} if reference is None else {"kl": kl}))


@dataclass(frozen=True, slots=True)
class ValueHead:
    """The scalar that a model with a [1, H] output head gives to the state before each response token."""

    names = ("values",)

    def __call__(self, layer: OutputLayer, hidden: torch.Tensor, inputs: ModelInput, dtype: torch.dtype) -> TokenScores:
        """Return [M] results for the hidden states [M, H] that predict the micro-batch's M response tokens."""
        # In float32 whatever the model computes in: a value is regressed to, and bf16 has three digits.
        return TokenScores({"values": layer.module(hidden.float())[:, 0]})
