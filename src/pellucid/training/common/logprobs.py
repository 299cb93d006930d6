"""Log-probabilities and entropies of target tokens from hidden states, in chunks over tokens.

The [M, V] logits of a micro-batch never exist at once: each chunk's are made, reduced and dropped, in the backward pass again.
"""

from typing import Any

import torch
import torch.nn.functional as F

# Logits of a chunk take at most this many bytes: large enough for the matrix product to run at full speed.
CHUNK_BYTES = 48 * 2**20


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h Wᵀ / temperature) at the targets, with entropies on request, recomputing logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> Any:
        num_tokens, vocabulary = hidden.shape[0], weight.shape[0]
        logp = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(logp)
        entropy = torch.zeros_like(logp)
        for rows in _chunks(num_tokens, vocabulary):
            logits = _logits(hidden[rows], weight, temperature)
            log_norm[rows] = torch.logsumexp(logits, dim=-1)
            logp[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_norm[rows]
            if with_entropy:
                logits.sub_(log_norm[rows, None])
                entropy[rows] = -torch.einsum("mv,mv->m", logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # None tells the backward pass that nobody needs the entropy's gradient
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_logp, grad_entropy = grad_outputs
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        grad_logp = torch.zeros_like(log_norm) if grad_logp is None else grad_logp
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32 over the chunks even when the head runs in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            logits = _logits(hidden[rows], weight, ctx.temperature).sub_(log_norm[rows, None])
            if grad_entropy is not None:
                probs = logits.exp()
                # d H / d z_v = −p_v (log p_v + H)
                grad = logits.add_(entropy[rows, None]).mul_(probs).mul_(-grad_entropy[rows, None])
                grad.addcmul_(probs, grad_logp[rows, None], value=-1)
            else:
                grad = logits.exp_().mul_(-grad_logp[rows, None])
            grad.scatter_add_(1, targets[rows, None], grad_logp[rows, None])
            grad = (grad.div_(ctx.temperature) if ctx.temperature != 1 else grad).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows].float())
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[rows].to(weight.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of `targets` and the entropies of their distributions.

    Args:
        hidden: [M, H] final hidden states at the predicting positions.
        weight: [V, H] output head.
        targets: [M] int64 token ids.
        temperature: the logits are divided by it: the distribution that is sampled from.
        with_entropy: compute entropies (in nats); otherwise they are zeros.

    Returns:
        `(logp, entropy)`, both [M] float32. Peak extra memory is one chunk of logits, whatever M is.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, temperature, with_entropy)  # pyright: ignore[reportReturnType]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    return logits.div_(temperature) if temperature != 1 else logits


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, min(num_tokens, CHUNK_BYTES // (4 * vocabulary)))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
