"""Log-probabilities of target tokens, entropies and exact KL from hidden states, in chunks over tokens.

The [M, V] logits of a micro-batch never exist at once: each chunk's are made, reduced and dropped, in the backward pass again.
"""

from typing import Any

import torch
import torch.nn.functional as F

from pellucid.errors import UserError

# Logits of a chunk take at most this many bytes: large enough for the matrix product to run at full speed.
CHUNK_BYTES = 48 * 2**20


class _ChunkedLogProbs(torch.autograd.Function):
    """log π = log softmax(h Wᵀ / temperature) at the targets, with H(π) and KL(π‖π_ref) on request.

    Logits are recomputed in the backward pass. The reference is a constant: it gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        ref_hidden: torch.Tensor | None,
        ref_weight: torch.Tensor | None,
        temperature: float,
        with_entropy: bool,
    ) -> Any:
        num_tokens, vocabulary = hidden.shape[0], weight.shape[0]
        logp = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        log_norm, ref_log_norm = torch.empty_like(logp), torch.empty_like(logp)
        entropy, kl = torch.zeros_like(logp), torch.zeros_like(logp)
        for rows in _chunks(num_tokens, vocabulary):
            logits = _logits(hidden[rows], weight, temperature)
            log_norm[rows] = torch.logsumexp(logits, dim=-1)
            logp[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_norm[rows]
            if not with_entropy and ref_weight is None:
                continue
            full_logp = logits.sub_(log_norm[rows, None])
            probs = full_logp.exp()
            if with_entropy:
                entropy[rows] = -torch.einsum("mv,mv->m", probs, full_logp)
            if ref_hidden is not None and ref_weight is not None:
                ref_logits = _logits(ref_hidden[rows], ref_weight, temperature)
                ref_log_norm[rows] = torch.logsumexp(ref_logits, dim=-1)
                log_ratio = full_logp.sub_(ref_logits.sub_(ref_log_norm[rows, None]))
                kl[rows] = torch.einsum("mv,mv->m", probs, log_ratio)
        ctx.save_for_backward(hidden, weight, targets, ref_hidden, ref_weight, log_norm, ref_log_norm, entropy, kl)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # None tells the backward pass that nobody needs a result's gradient
        return logp, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_logp, grad_entropy, grad_kl = grad_outputs
        hidden, weight, targets, ref_hidden, ref_weight, log_norm, ref_log_norm, entropy, kl = ctx.saved_tensors
        grad_logp = torch.zeros_like(log_norm) if grad_logp is None else grad_logp
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32 over the chunks even when the head runs in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            full_logp = _logits(hidden[rows], weight, ctx.temperature).sub_(log_norm[rows, None])
            if grad_entropy is None and (grad_kl is None or ref_weight is None):
                # d log p_t / d z_v = 1[v = t] − p_v
                grad = full_logp.exp_().mul_(-grad_logp[rows, None])
            else:
                probs = full_logp.exp()
                grad = probs * -grad_logp[rows, None]
                if grad_kl is not None and ref_weight is not None:
                    # d KL / d z_v = p_v (log p_v − log q_v − KL)
                    ref_logits = _logits(ref_hidden[rows], ref_weight, ctx.temperature)
                    log_ratio = full_logp - ref_logits.sub_(ref_log_norm[rows, None])
                    grad.add_(log_ratio.sub_(kl[rows, None]).mul_(probs).mul_(grad_kl[rows, None]))
                if grad_entropy is not None:
                    # d H / d z_v = −p_v (log p_v + H)
                    grad.sub_(full_logp.add_(entropy[rows, None]).mul_(probs).mul_(grad_entropy[rows, None]))
            grad.scatter_add_(1, targets[rows, None], grad_logp[rows, None])
            grad = (grad.div_(ctx.temperature) if ctx.temperature != 1 else grad).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows].float())
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[rows].to(weight.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


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
    results: Any = _ChunkedLogProbs.apply(hidden, weight, targets, None, None, temperature, with_entropy)
    logp, entropy, _ = results
    return logp, entropy


def token_log_probs_and_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ref_hidden: torch.Tensor,
    ref_weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `token_log_probs` does, and the exact KL(π‖π_ref) = Σ_v π(v) (log π(v) − log π_ref(v)) in nats.

    Args:
        hidden: [M, H] final hidden states at the predicting positions.
        weight: [V, H] output head.
        targets: [M] int64 token ids.
        ref_hidden: [M, H_ref] final hidden states of the reference at the same positions; no gradient flows to it.
        ref_weight: [V, H_ref] output head of the reference; no gradient flows to it.
        temperature: the logits of both are divided by it.
        with_entropy: compute entropies (in nats); otherwise they are zeros.

    Returns:
        `(logp, entropy, kl)`, all [M] float32. Peak extra memory is one chunk of logits of each model, whatever M is.

    Raises:
        UserError: the two models' vocabularies differ in size.
    """
    if weight.shape[0] != ref_weight.shape[0]:
        raise UserError(
            "actor_rollout_ref.ref",
            f"the reference has {ref_weight.shape[0]} tokens and the policy {weight.shape[0]}, so no KL between them exists.",
            "Use a reference with the policy's vocabulary.",
        )
    results: Any = _ChunkedLogProbs.apply(
        hidden, weight, targets, ref_hidden.detach(), ref_weight.detach(), temperature, with_entropy
    )
    return results


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    return logits.div_(temperature) if temperature != 1 else logits


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, min(num_tokens, CHUNK_BYTES // (4 * vocabulary)))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
