"""The mismatch laboratory: what is sampled from, what is recorded, and that the trained weights come back untouched."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.rollout import SimulateMismatchConfig
from pellucid.rollout.native import MismatchedPolicy, NativeRolloutEngine
from pellucid.rollout.native.cache import KVCache
from pellucid.rollout.requests import SamplingParams, WeightUpdate, run_sync
from pellucid.training.common.lora import add_lora
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN_FOLDER, load_model, load_tokenizer
from pellucid.training.common.packing import TokenSequence, pack
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt, Rollout

CPU = torch.device("cpu")
TOKENIZER = load_tokenizer("builtin")
PROMPTS = [
    Prompt(f"p{i}", TOKENIZER.encode(text), text, "t") for i, text in enumerate(["12+7=", "5+88=", "40+41=", "9+9="])
]
PARAMS = SamplingParams(n=8, max_tokens=4)
STREAM = ("rollout", 3)
Weights = dict[str, torch.Tensor]


def make_actor() -> FsdpEngine:
    return FsdpEngine(
        load_model("builtin", device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32
    )


def make_native(policy, **options) -> NativeRolloutEngine:
    return NativeRolloutEngine(
        policy, TOKENIZER, [1], max_num_seqs=64, max_num_batched_tokens=8192, seed=0, **options
    )


def make_engine(actor: FsdpEngine, *, seed: int = 0, **fields) -> NativeRolloutEngine:
    policy = MismatchedPolicy(actor, SimulateMismatchConfig(**fields), seed)
    return make_native(policy, take_weights=policy.take_weights)


def sync(actor: FsdpEngine, engine: NativeRolloutEngine) -> None:
    run_sync(engine.load_weights(WeightUpdate(actor.version)))


@pytest.fixture
def actor() -> FsdpEngine:
    return make_actor()


def copy_weights(actor: FsdpEngine) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}


def set_weights(actor: FsdpEngine, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            parameter.copy_(weights[name])


def assert_equal_weights(weights: Weights, expected: Weights) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def fake_update(actor: FsdpEngine) -> None:
    """Move every weight a little, as an optimizer step does: in place, and the version counts on."""
    generator = torch.Generator().manual_seed(100 + actor.version)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    actor.version += 1


def sampled_weights(actor: FsdpEngine, engine: NativeRolloutEngine) -> Weights:
    """Return the weights that the model holds while the engine samples."""
    seen: list[Weights] = []
    hook = actor.model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(copy_weights(actor)))
    sample_rollouts(engine, PROMPTS[:1], PARAMS, stream=STREAM)
    hook.remove()
    return seen[-1]


def reference_gap(rollouts: list[Rollout], weights: Weights) -> torch.Tensor:
    """Return recorded minus reference log-probs of all tokens, the reference from plain transformers in float32."""
    plain = AutoModelForCausalLM.from_pretrained(BUILTIN_FOLDER, dtype=torch.float32).eval()
    plain.load_state_dict(weights, strict=False)
    gaps = []
    for rollout in rollouts:
        start = len(rollout.prompt.token_ids)
        with torch.no_grad():
            logits = plain(torch.tensor([rollout.prompt.token_ids + rollout.token_ids])).logits[0, start - 1 : -1]
        logp = logits.log_softmax(-1)[range(len(rollout.token_ids)), rollout.token_ids]
        gaps.append(torch.tensor(rollout.logprobs) - logp)
    return torch.cat(gaps)


def rms(tensor: torch.Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean()))


# --- off --------------------------------------------------------------------------------------------------------------


def test_off_is_the_native_engine_bit_for_bit(actor, tmp_path):
    engine = make_engine(actor)
    sync(actor, engine)
    assert sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) == sample_rollouts(
        make_native(actor), PROMPTS, PARAMS, stream=STREAM
    )
    engine.policy.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_wrapped_engine_itself_stays_exact(actor):
    native = make_native(actor)
    before = sample_rollouts(native, PROMPTS, PARAMS, stream=STREAM)
    engine = make_engine(actor, dtype="bfloat16", noise=0.1)
    assert sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) != before
    assert sample_rollouts(native, PROMPTS, PARAMS, stream=STREAM) == before


# --- dtype ------------------------------------------------------------------------------------------------------------


def test_bfloat16_samples_rounded_weights_in_bfloat16(actor, monkeypatch):
    cache_dtypes, make_cache = [], KVCache.__init__
    monkeypatch.setattr(
        KVCache, "__init__", lambda *a, dtype, **k: (cache_dtypes.append(dtype), make_cache(*a, dtype=dtype, **k))[1]
    )
    own, engine = copy_weights(actor), make_engine(actor, dtype="bfloat16")
    rounded = {name: weight.to(torch.bfloat16) for name, weight in own.items()}
    sampled = sampled_weights(actor, engine)
    assert_equal_weights(sampled, rounded)
    assert {weight.dtype for weight in sampled.values()} == {torch.bfloat16} == set(cache_dtypes)
    rollouts = sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
    to_trained = reference_gap(rollouts, own).abs()
    assert 1e-4 < float(to_trained.mean()) < 0.05
    # Rounded weights alone do not explain the gap: the activations are rounded as well.
    assert float(reference_gap(rollouts, rounded).abs().mean()) > 1e-4
    assert float(reference_gap(sample_rollouts(make_engine(actor), PROMPTS, PARAMS, stream=STREAM), own).abs().max()) < 1e-4


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_gaussian_in_units_of_each_tensors_rms(actor):
    own = copy_weights(actor)
    sampled = sampled_weights(actor, make_engine(actor, noise=0.03))
    noise = {name: (sampled[name] - own[name]).double() / (0.03 * rms(own[name])) for name in own}
    for name, draw in noise.items():
        slack = 4 / math.sqrt(draw.numel())  # four standard errors
        assert abs(float(draw.mean())) < slack, name
        assert abs(rms(draw) - 1) < slack, name
        if draw.numel() > 10_000:
            assert abs(float((draw.abs() < 1).double().mean()) - 0.6827) < slack, name
    layers = [noise[f"model.layers.{layer}.mlp.up_proj.weight"].flatten() for layer in (0, 1)]
    assert abs(float(torch.corrcoef(torch.stack(layers))[0, 1])) < 4 / math.sqrt(len(layers[0]))


def test_the_recorded_log_probs_are_the_noisy_policys(actor):
    own, engine = copy_weights(actor), make_engine(actor, noise=0.05)
    rollouts = sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
    assert float(reference_gap(rollouts, sampled_weights(actor, engine)).abs().max()) < 1e-4
    assert float(reference_gap(rollouts, own).abs().mean()) > 1e-3


def test_noise_follows_from_seed_and_version(actor):
    engine = make_engine(actor, noise=0.05)
    first = sampled_weights(actor, engine)
    sync(actor, engine)
    assert_equal_weights(sampled_weights(actor, engine), first)  # as often as the version is sampled
    assert_equal_weights(sampled_weights(actor, make_engine(actor, noise=0.05)), first)  # and in a resumed run
    other_seed = sampled_weights(actor, make_engine(actor, seed=1, noise=0.05))
    actor.version = 1
    for other in (other_seed, sampled_weights(actor, engine)):
        assert not any(torch.equal(other[name], first[name]) for name in first)


# --- stale weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale_steps", [1, 3])
def test_stale_weights_are_those_of_k_versions_ago(actor, stale_steps):
    engine = make_engine(actor, stale_steps=stale_steps)
    history: list[list[Rollout]] = []
    for version in range(stale_steps + 3):
        history.append(sample_rollouts(make_native(actor), PROMPTS, PARAMS, stream=STREAM))
        used = max(0, version - stale_steps)
        # Two calls a step, as when groups are filtered and sampling goes on, sample from the same weights.
        for _ in range(2):
            rollouts = sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
            assert rollouts == history[used]
            assert {v for rollout in rollouts for v in rollout.versions} == {used}
        fake_update(actor)
        sync(actor, engine)
    assert [r.token_ids for r in history[0]] != [r.token_ids for r in history[1]]
    assert len(engine.policy._ring) == stale_steps + 1


def test_frozen_weights_are_not_copied(actor):
    """With adapters the base never changes, so only what trains is kept."""
    trained = "model.layers.1.mlp.up_proj.weight"
    for name, parameter in actor.model.named_parameters():
        parameter.requires_grad_(name == trained)
    engine = make_engine(actor, stale_steps=1)
    before = sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
    with torch.no_grad():
        actor.model.get_parameter(trained).mul_(1.5)
    sync(actor, engine)
    assert [list(snapshot.weights) for snapshot in engine.policy._ring] == [[trained], [trained]]
    assert sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) == before


def test_adapters_are_perturbed_like_other_weights(actor):
    pytest.importorskip("peft")
    adapted = FsdpEngine(
        add_lora(actor.model, rank=4, alpha=8, target_modules="all-linear", seed=0),
        None,
        MicroBatching(None, None),
        device=CPU,
        dtype=torch.float32,
    )
    native = sample_rollouts(make_native(adapted), PROMPTS, PARAMS, stream=STREAM)
    engine = make_engine(adapted, stale_steps=1)
    assert sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) == native
    assert all(".lora_" in name for snapshot in engine.policy._ring for name in snapshot.weights)
    own = copy_weights(adapted)
    for fields in ({"dtype": "bfloat16"}, {"noise": 0.05}):
        assert sample_rollouts(make_engine(adapted, **fields), PROMPTS, PARAMS, stream=STREAM) != native
        assert_equal_weights(copy_weights(adapted), own)


def test_the_settings_compose_stale_then_noise_then_dtype(actor):
    own = copy_weights(actor)
    noisy = sampled_weights(actor, make_engine(actor, noise=0.05))
    engine = make_engine(actor, dtype="bfloat16", stale_steps=2, noise=0.05)
    for _ in range(2):
        sync(actor, engine)
        fake_update(actor)
    set_weights(actor, {name: torch.zeros_like(weight) for name, weight in own.items()})
    assert_equal_weights(
        sampled_weights(actor, engine), {name: weight.to(torch.bfloat16) for name, weight in noisy.items()}
    )
    assert {v for r in sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) for v in r.versions} == {0}


# --- the trained weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", None])
@pytest.mark.parametrize("fails", [False, True])
def test_the_trained_weights_are_untouched(actor, dtype, fails):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    engine = make_engine(actor, dtype=dtype, stale_steps=1, noise=0.1)
    sync(actor, engine)
    fake_update(actor)
    for parameter in actor.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    own, parameters = copy_weights(actor), list(actor.model.parameters())
    storage = [parameter.data_ptr() for parameter in parameters]
    if fails:
        hook = actor.model.get_decoder().layers[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
        hook.remove()
    else:
        sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
    assert_equal_weights(copy_weights(actor), own)
    assert all(now is then for now, then in zip(actor.model.parameters(), parameters, strict=True))
    assert [parameter.data_ptr() for parameter in parameters] == storage
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)
    assert not any(parameter.is_inference() for parameter in parameters)
    assert actor.version == 1


def test_gradients_are_the_same_after_sampling(actor):
    inputs, gradients = pack([TokenSequence([5, 6, 7], [8, 9], 0)], CPU), []
    for engine in (None, make_engine(actor, dtype="bfloat16"), make_engine(actor, noise=0.1)):
        if engine is not None:
            sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
        hidden = actor.model.get_decoder()(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
        ).last_hidden_state
        actor.model.zero_grad()
        hidden.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in actor.model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == len(list(actor.model.parameters()))
    for others in gradients[1:]:
        assert_equal_weights(others, gradients[0])


def test_weights_come_back_when_the_exchange_itself_fails(actor, monkeypatch):
    engine, own = make_engine(actor, noise=0.1), copy_weights(actor)
    calls = []

    def fail_late(*name):
        calls.append(name)
        if len(calls) == 5:
            raise MemoryError
        return 0

    monkeypatch.setattr("pellucid.rollout.native.laboratory.seeding.derive_seed", fail_late)
    with pytest.raises(MemoryError):
        sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM)
    assert_equal_weights(copy_weights(actor), own)


# --- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_a_resumed_run_samples_what_the_uninterrupted_one_does(actor, tmp_path, saved_after):
    fields = {"dtype": "bfloat16", "stale_steps": 2, "noise": 0.05}
    engine, expected = make_engine(actor, **fields), []
    steps = range(1, saved_after + 4)  # until nothing of the checkpoint is sampled any more
    for step in steps:
        expected.append(sample_rollouts(engine, PROMPTS, PARAMS, stream=("rollout", step)))
        fake_update(actor)
        sync(actor, engine)
        if step == saved_after:
            engine.policy.save(tmp_path)
            checkpoint = copy_weights(actor)
    resumed = make_actor()
    set_weights(resumed, checkpoint)
    resumed.version = saved_after
    engine = make_engine(resumed, **fields)
    engine.policy.load(tmp_path)
    for step in steps[saved_after:]:
        assert sample_rollouts(engine, PROMPTS, PARAMS, stream=("rollout", step)) == expected[step - 1]
        fake_update(resumed)
        sync(resumed, engine)


def test_a_checkpoint_without_stale_weights_starts_from_its_own(actor, tmp_path):
    engine = make_engine(actor, stale_steps=1)
    sync(actor, engine)
    fake_update(actor)
    engine.policy.load(tmp_path)
    assert sample_rollouts(engine, PROMPTS, PARAMS, stream=STREAM) == sample_rollouts(
        make_native(actor), PROMPTS, PARAMS, stream=STREAM
    )


def test_a_smaller_number_of_stale_steps_keeps_the_newest(actor, tmp_path):
    engine = make_engine(actor, stale_steps=3)
    for _ in range(4):
        sync(actor, engine)
        fake_update(actor)
    engine.policy.save(tmp_path)
    shorter = make_engine(actor, stale_steps=1)
    shorter.policy.load(tmp_path)
    assert [snapshot.version for snapshot in shorter.policy._ring] == [2, 3]
    plain = make_engine(actor)
    plain.policy.load(tmp_path)
    assert sample_rollouts(plain, PROMPTS, PARAMS, stream=STREAM) == sample_rollouts(
        make_native(actor), PROMPTS, PARAMS, stream=STREAM
    )
