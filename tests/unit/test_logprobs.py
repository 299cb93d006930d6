"""Chunked log-probabilities, entropies and exact KL against a full log-softmax, values and gradients."""

import shutil

import pytest
import torch
import torch.utils._python_dispatch

from pellucid.errors import UserError
from pellucid.training.common import logprobs

TOKENS, VOCABULARY, HIDDEN, REF_HIDDEN = 23, 37, 12, 7


def token_log_probs(*arguments, **options):
    return logprobs.token_log_probs(*arguments, **options)[:2]


def token_log_probs_and_kl(hidden, weight, targets, *reference, **options):
    return logprobs.token_log_probs(hidden, weight, targets, reference, **options)



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


def reference_model():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, REF_HIDDEN, generator=generator), torch.randn(VOCABULARY, REF_HIDDEN, generator=generator)


def exact_kl(hidden, weight, ref_hidden, ref_weight, temperature):
    """Σ_v π log(π/π_ref), everything at once in float64."""
    ours, theirs = (
        (h.double() @ w.double().T / temperature).log_softmax(dim=-1) for h, w in ((hidden, weight), (ref_hidden, ref_weight))
    )
    return (ours.exp() * (ours - theirs)).sum(dim=-1)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("terms", [("kl",), ("logp", "kl"), ("logp", "entropy", "kl"), ("logp",)], ids="+".join)
def test_kl_values_and_gradients(temperature, terms):
    generator = torch.Generator().manual_seed(1)
    upstream = {name: torch.randn(TOKENS, generator=generator) for name in ("logp", "entropy", "kl")}
    ref = reference_model()

    def ours(hidden, weight, targets):
        return token_log_probs_and_kl(hidden, weight, targets, *ref, temperature=temperature, with_entropy=True)

    def dense(hidden, weight, targets):
        return *reference(hidden, weight, targets, temperature), exact_kl(hidden, weight, *ref, temperature)

    results, gradients = [], []
    for function in (ours, dense):
        hidden, weight, targets = inputs()
        out = dict(zip(("logp", "entropy", "kl"), function(hidden, weight, targets)))
        sum((out[name] * upstream[name]).sum() for name in terms).backward()
        results.append(out)
        gradients.append((hidden.grad, weight.grad))
    for name, exact in results[1].items():
        assert results[0][name].dtype == torch.float32
        torch.testing.assert_close(results[0][name].double(), exact, rtol=1e-5, atol=1e-5)
    for chunked, exact in zip(*gradients):
        assert float((chunked - exact).norm() / exact.norm()) < 5e-6  # a KL's gradient is a difference of log-probs


def test_kl_gradient_by_finite_differences():
    """The closed form of the backward pass against the float32 forward itself, in one random direction."""
    hidden, weight, targets = inputs()
    ref = reference_model()
    generator = torch.Generator().manual_seed(3)
    towards = torch.randn(hidden.shape, generator=generator)
    token_log_probs_and_kl(hidden, weight, targets, *ref)[2].sum().backward()
    with torch.no_grad():
        above, below = (
            token_log_probs_and_kl(hidden + step * towards, weight, targets, *ref)[2].double().sum() for step in (0.01, -0.01)
        )
    assert float((hidden.grad * towards).sum()) == pytest.approx(float(above - below) / 0.02, rel=1e-3)


def test_kl_to_oneself_is_zero_and_flat():
    hidden, weight, targets = inputs()
    _, entropy, kl = token_log_probs_and_kl(hidden, weight, targets, hidden, weight)
    assert kl.tolist() == [0.0] * TOKENS and not entropy.any()
    kl.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_kl_leaves_log_probs_alone_and_the_reference_without_gradient():
    hidden, weight, targets = inputs()
    ref_hidden, ref_weight = (tensor.requires_grad_() for tensor in reference_model())
    logp, entropy, kl = token_log_probs_and_kl(hidden, weight, targets, ref_hidden, ref_weight, with_entropy=True)
    plain = token_log_probs(hidden, weight, targets, with_entropy=True)
    assert torch.equal(logp, plain[0]) and torch.equal(entropy, plain[1])
    kl.sum().backward()
    assert ref_hidden.grad is None and ref_weight.grad is None


@pytest.mark.usefixtures("chunked")
def test_kl_with_a_bf16_head():
    hidden, weight, targets = (tensor.detach() for tensor in inputs())
    ref_hidden, ref_weight = reference_model()
    half = weight.bfloat16().requires_grad_()
    kl = token_log_probs_and_kl(hidden.bfloat16(), half, targets, ref_hidden.bfloat16(), ref_weight.bfloat16())[2]
    rounded = [tensor.bfloat16().float() for tensor in (hidden, weight, ref_hidden, ref_weight)]
    rounded[1].requires_grad_()
    exact = exact_kl(*rounded, 1.0)
    torch.testing.assert_close(kl.double(), exact, rtol=0.02, atol=0.02)  # logits come out of a bf16 product
    kl.sum().backward()
    exact.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    assert float((half.grad.float() - rounded[1].grad).norm() / rounded[1].grad.norm()) < 0.02


def test_kl_holds_one_chunk_of_each_model(monkeypatch):
    """No tensor made in the forward or backward pass has as many entries as [M, V], nor more rows than a chunk."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * 5)
    hidden, weight, targets = inputs()
    ref = reference_model()
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.append(result.shape if isinstance(result, torch.Tensor) else ())
            return result

    with Watch():
        sum(term.sum() for term in token_log_probs_and_kl(hidden, weight, targets, *ref, with_entropy=True)).backward()
    rows = {shape[0] for shape in made if len(shape) == 2 and shape[1] == VOCABULARY}
    assert rows - {HIDDEN, REF_HIDDEN} == {5, 3}  # a transposed head has the hidden size for rows


def test_another_vocabulary_is_refused():
    hidden, weight, targets = inputs()
    ref_hidden, ref_weight = reference_model()
    with pytest.raises(UserError, match="36 tokens and the policy 37") as caught:
        token_log_probs_and_kl(hidden, weight, targets, ref_hidden, ref_weight[:-1])
    assert caught.value.field == "actor_rollout_ref.ref"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(("dtype", "terms"), [pytest.param(torch.float32, "logp+entropy+kl", marks=pytest.mark.long), (torch.bfloat16, "logp")])
@pytest.mark.processes
def test_compiled_chunks_give_the_same_numbers(monkeypatch, dtype, terms):
    """Values and gradients within the rounding of the head's dtype, for whole chunks and a shorter last one."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * VOCABULARY * 9)
    ref = [tensor.to(dtype) for tensor in reference_model()]
    results = []
    for compiled in (False, True):
        hidden, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in inputs()[:2])
        options = {"temperature": 0.7, "with_entropy": True, "compiled": compiled}
        scores = token_log_probs_and_kl(hidden, weight, inputs()[2], *ref, **options)
        sum(score.sum() * (index + 1) for index, score in enumerate(scores[: len(terms.split("+"))])).backward()
        results.append([*(score.detach() for score in scores), hidden.grad, weight.grad])
    assert logprobs._compiled.cache_info().currsize == 2, "both chunk functions were compiled"
    # As against the dense formulas above: sums of 37 rounded terms, and a KL's gradient is a difference of log-probs.
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 0.02}[dtype]
    for plain, fused in zip(*results):
        assert fused.dtype == plain.dtype
        assert float((fused - plain).float().norm()) <= tolerance * float(plain.float().norm())


def test_compiling_pays_on_cuda_alone(monkeypatch):
    monkeypatch.setattr(logprobs.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(logprobs.importlib.util, "find_spec", lambda name: object())
    assert logprobs.compiling_pays(torch.device("cuda")) and not logprobs.compiling_pays(torch.device("cpu"))
    monkeypatch.setattr(logprobs.shutil, "which", lambda name: None)
    assert not logprobs.compiling_pays(torch.device("cuda"))
