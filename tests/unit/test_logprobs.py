"""Chunked log-probabilities and entropies against a full log-softmax, values and gradients."""

import pytest
import torch

from pellucid.training.common import logprobs
from pellucid.training.common.logprobs import token_log_probs

TOKENS, VOCABULARY, HIDDEN = 23, 37, 12


@pytest.fixture(params=[1, 5, 23, 1000], ids=lambda rows: f"{rows}-rows-a-chunk")
def chunked(request, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * request.param)


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def reference(hidden, weight, targets, temperature):
    """Everything at once, in float64."""
    full = (hidden.double() @ weight.double().T / temperature).log_softmax(dim=-1)
    return full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(dim=-1)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("terms", ["logp", "entropy", "both"])
def test_values_and_gradients(temperature, terms):
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(TOKENS, generator=generator) * (terms in (name, "both")) for name in ("logp", "entropy")]
    results, gradients = [], []
    for function in (lambda *a: token_log_probs(*a[:3], temperature=a[3], with_entropy=True), reference):
        hidden, weight, targets = inputs()
        logp, entropy = function(hidden, weight, targets, temperature)
        used = [(x * u).sum() for x, u in zip((logp, entropy), upstream) if bool(u.any())]
        sum(used).backward()
        results.append((logp, entropy))
        gradients.append((hidden.grad, weight.grad))
    for ours, exact in zip(results[0], results[1]):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(gradients[0], gradients[1]):
        assert float((ours - exact).norm() / exact.norm()) < 1e-6


def test_entropy_is_zero_unless_asked_for():
    hidden, weight, targets = inputs()
    logp, entropy = token_log_probs(hidden, weight, targets)
    assert not entropy.any()
    assert torch.equal(logp, token_log_probs(hidden, weight, targets, with_entropy=True)[0])


def test_uniform_and_certain_distributions():
    hidden, targets = torch.zeros(2, HIDDEN), torch.tensor([3, 5])
    logp, entropy = token_log_probs(hidden, torch.randn(VOCABULARY, HIDDEN), targets, with_entropy=True)
    uniform = torch.log(torch.tensor(float(VOCABULARY)))
    torch.testing.assert_close(logp, -uniform.expand(2))
    torch.testing.assert_close(entropy, uniform.expand(2))
    weight = torch.zeros(VOCABULARY, HIDDEN)
    weight[3] = 200.0
    logp, entropy = token_log_probs(torch.ones(2, HIDDEN), weight, targets, with_entropy=True)
    assert logp.tolist() == [0.0, -2400.0]
    assert entropy.tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("chunked")
def test_frozen_head_gets_no_gradient():
    hidden, weight, targets = inputs()
    logp, _ = token_log_probs(hidden, weight.detach(), targets)
    logp.sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.any())
    assert weight.grad is None


def test_bf16_head_is_summed_in_float32(monkeypatch):
    """Thousands of one-row chunks: a bf16 running sum would stop growing at 256 equal terms."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 2)
    hidden, weight = torch.ones(2000, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    logp, _ = token_log_probs(hidden, weight, torch.zeros(2000, dtype=torch.int64))
    assert logp.dtype == torch.float32
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[1000.0], [-1000.0]]), rtol=5e-3, atol=0)


def test_memory_is_one_chunk(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * 5)
    seen = []
    plain = logprobs._logits
    monkeypatch.setattr(logprobs, "_logits", lambda h, *rest: (seen.append(h.shape[0]), plain(h, *rest))[1])
    hidden, weight, targets = inputs()
    token_log_probs(hidden, weight, targets)[0].sum().backward()
    assert seen == [5, 5, 5, 5, 3] * 2
