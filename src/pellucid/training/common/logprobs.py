"""Log-probabilities of target tokens, entropies and exact KL from hidden states, in chunks over tokens.

The [M, V] logits of a micro-batch never exist at once: each chunk's are made, reduced and dropped, and made again in
the backward pass. What is done with one chunk is two functions, which `torch.compile` can fuse into few kernels.
"""

import importlib.util
import shutil
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pellucid.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHUNK_BYTES = 48 * 2**20
"""The logits of a chunk take at most this much: large enough for the matrix product to run at full speed."""


def compiling_pays(device: torch.device) -> bool:
    """Return whether compiled chunks are faster: on CUDA, where Triton and a C compiler are installed."""
    tools = importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
    return device.type == "cuda" and tools


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which tokens of the vocabulary this rank has the output head's rows for; the ranks of `group` have them all."""

    group: "ProcessGroup"
    start: int
    """The first token."""
    size: int
    """How many there are; further rows of the head are padding."""
    rows: int
    """Rows of the head with padding: as many on every rank, so that all cut their tokens into the same chunks."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over the group, in place."""
        torch.distributed.all_reduce(tensor, group=self.group)
        return tensor

    def log_sum_exp(self, own: torch.Tensor) -> torch.Tensor:
        """Return log Σ exp over the vocabulary from that of this rank's tokens."""
        largest = own.clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return self.sum((own - largest).exp_()).log_().add_(largest)

    def locate(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row [m] of each target in this rank's head, and whether [m] it is there at all."""
        rows = targets - self.start
        inside = (rows >= 0) & (rows < self.size)
        return rows.where(inside, 0), inside


class _ChunkedLogProbs(torch.autograd.Function):
    """log π = log softmax(h Wᵀ / temperature) at the targets, with H(π) and KL(π‖π_ref) on request.

    Logits are recomputed in the backward pass. The reference is a constant: it gets no gradient. Where the vocabulary
    is sharded, hidden states and results are whole on every rank, and so are their gradients.
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
        compiled: bool,
        shard: VocabularyShard | None,
    ) -> Any:
        num_tokens = hidden.shape[0]
        results = [torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device) for _ in range(5)]
        reduce: Any = _compiled(_reduce_chunk) if compiled else _reduce_chunk
        for rows in _chunks(num_tokens, weight.shape[0] if shard is None else shard.rows):
            chunk = hidden[rows], targets[rows], None if ref_hidden is None else ref_hidden[rows]
            for result, part in zip(results, reduce(*chunk, weight, ref_weight, temperature, with_entropy, shard)):
                if part is not None:
                    result[rows] = part
        logp, log_norm, entropy, kl, ref_log_norm = results
        ctx.save_for_backward(hidden, weight, targets, ref_hidden, ref_weight, log_norm, entropy, kl, ref_log_norm)
        ctx.temperature, ctx.compiled, ctx.shard = temperature, compiled, shard
        ctx.set_materialize_grads(False)  # None tells the backward pass that nobody needs a result's gradient
        return logp, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        hidden, weight, targets, ref_hidden, ref_weight, *reduced = ctx.saved_tensors
        grad_logp, grad_entropy, grad_kl = grad_outputs
        grad_logp = torch.zeros_like(reduced[0]) if grad_logp is None else grad_logp
        grads = grad_logp, grad_entropy, None if ref_weight is None else grad_kl
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32 over the chunks even when the head runs in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        differentiate: Any = _compiled(_differentiate_chunk) if ctx.compiled else _differentiate_chunk
        for rows in _chunks(hidden.shape[0], weight.shape[0] if ctx.shard is None else ctx.shard.rows):
            chunk = [None if each is None else each[rows] for each in (hidden, targets, ref_hidden, *reduced, *grads)]
            grad = differentiate(*chunk, weight, ref_weight, ctx.temperature, ctx.shard)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None and weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows].float())
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[rows].to(weight.dtype)
        if grad_hidden is not None and ctx.shard is not None:
            ctx.shard.sum(grad_hidden)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _reduce_chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    ref_hidden: torch.Tensor | None,
    weight: torch.Tensor,
    ref_weight: torch.Tensor | None,
    temperature: float,
    with_entropy: bool,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return logp, log Σ exp, entropy, KL and the reference's log Σ exp of m tokens, [m] each or None if not wanted."""
    logits = _logits(hidden, weight, temperature)
    log_norm = _log_sum_exp(logits, shard)
    if shard is None:
        logp = logits.gather(1, targets[:, None])[:, 0] - log_norm
    else:
        rows, inside = shard.locate(targets)
        logp = shard.sum(logits.gather(1, rows[:, None])[:, 0] * inside) - log_norm
    if not with_entropy and ref_weight is None:
        return logp, log_norm, None, None, None
    full_logp = logits.sub_(log_norm[:, None])
    probs = full_logp.exp()
    entropy = -_mean(full_logp, probs, shard) if with_entropy else None
    if ref_hidden is None or ref_weight is None:
        return logp, log_norm, entropy, None, None
    ref_logits = _logits(ref_hidden, ref_weight, temperature)
    ref_log_norm = _log_sum_exp(ref_logits, shard)
    log_ratio = full_logp.sub_(ref_logits.sub_(ref_log_norm[:, None]))
    return logp, log_norm, entropy, _mean(log_ratio, probs, shard), ref_log_norm


def _log_sum_exp(logits: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    own = torch.logsumexp(logits, dim=-1)
    return own if shard is None else shard.log_sum_exp(own)


def _mean(values: torch.Tensor, probs: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    own = torch.einsum("mv,mv->m", probs, values)
    return own if shard is None else shard.sum(own)


def _differentiate_chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    ref_hidden: torch.Tensor | None,
    log_norm: torch.Tensor,
    entropy: torch.Tensor,
    kl: torch.Tensor,
    ref_log_norm: torch.Tensor,
    grad_logp: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    grad_kl: torch.Tensor | None,
    weight: torch.Tensor,
    ref_weight: torch.Tensor | None,
    temperature: float,
    shard: VocabularyShard | None,
) -> torch.Tensor:
    """Return the gradient [m, V] of a chunk's h Wᵀ, in the head's dtype, from what `_reduce_chunk` gave for it."""
    full_logp = _logits(hidden, weight, temperature).sub_(log_norm[:, None])
    if grad_entropy is None and grad_kl is None:
        # d log p_t / d z_v = 1[v = t] − p_v
        grad = full_logp.exp_().mul_(-grad_logp[:, None])
    else:
        probs = full_logp.exp()
        grad = probs * -grad_logp[:, None]
        if grad_kl is not None and ref_hidden is not None and ref_weight is not None:
            # d KL / d z_v = p_v (log p_v − log q_v − KL)
            ref_logits = _logits(ref_hidden, ref_weight, temperature)
            log_ratio = full_logp - ref_logits.sub_(ref_log_norm[:, None])
            grad.add_(log_ratio.sub_(kl[:, None]).mul_(probs).mul_(grad_kl[:, None]))
        if grad_entropy is not None:
            # d H / d z_v = −p_v (log p_v + H)
            grad.sub_(full_logp.add_(entropy[:, None]).mul_(probs).mul_(grad_entropy[:, None]))
    if shard is not None:
        targets, inside = shard.locate(targets)
        grad_logp = grad_logp * inside
    grad.scatter_add_(1, targets[:, None], grad_logp[:, None])
    return (grad.div_(temperature) if temperature != 1 else grad).to(weight.dtype)


@cache
def _compiled(chunk_function: Any) -> Any:
    # One kernel for all sizes: the last chunk of a micro-batch is of any size.
    return torch.compile(chunk_function, dynamic=True)


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    compiled: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of `targets`, the entropies of their distributions and their KL from a reference's.

    The KL is exact, Σ_v π(v) (log π(v) − log π_ref(v)). Extra memory is a chunk of logits of each model, whatever M.

    Args:
        hidden: [M, H] final hidden states at the predicting positions.
        weight: [V, H] output head.
        targets: [M] int64 token ids.
        reference: the same two of the reference, to which no gradient flows; None asks for no KL.
        temperature: the logits of both are divided by it: the distribution that is sampled from.
        with_entropy: compute entropies.
        compiled: let `torch.compile` fuse what is done with a chunk; results differ by rounding.
        shard: which rows of the head `weight` is; None: all. The reference's are the same ones.

    Returns:
        `(logp, entropy, kl)`, all [M] float32 and in nats; zeros where not asked for.

    Raises:
        UserError: the two models' vocabularies differ in size.
    """
    ref_hidden, ref_weight = (None, None) if reference is None else (part.detach() for part in reference)
    if ref_weight is not None and weight.shape[0] != ref_weight.shape[0]:
        reason = f"the reference has {ref_weight.shape[0]} tokens and the policy {weight.shape[0]}, so they have no KL."
        raise UserError("actor_rollout_ref.ref", reason, "Use a reference with the policy's vocabulary.")
    if shard is not None:
        weight, ref_weight = weight[: shard.size], None if ref_weight is None else ref_weight[: shard.size]
    how = temperature, with_entropy, compiled, shard
    results: Any = _ChunkedLogProbs.apply(hidden, weight, targets, ref_hidden, ref_weight, *how)
    return results


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    return logits.div_(temperature) if temperature != 1 else logits


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, min(num_tokens, CHUNK_BYTES // (4 * vocabulary)))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
