"""What every training backend must do: the same log-probs and gradients however a mini-batch is cut, and a safe state.

A backend joins by adding its constructor to `BACKENDS`.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import ARCHITECTURES, CPU, VOCABULARY, plain_copy, tiny_model
from transformers import PreTrainedModel

from pellucid.algo.policy_loss import PolicyLoss
from pellucid.config.schema.actor import ActorConfig
from pellucid.errors import NonFiniteError
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import enable_gradient_checkpointing
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence, pack, sequences_of, split_micro_batches
from pellucid.training.fsdp import FsdpEngine
from pellucid.training.protocol import TokenScores, TrainingEngine
from pellucid.types import Prompt, RewardFailure, Rollout, Samples, Score, TrainBatch

MakeEngine = Callable[..., TrainingEngine]
WHOLE = MicroBatching(None, None)
CUTS = {
    "whole": WHOLE,
    "one-by-one": MicroBatching(None, 1),
    "three": MicroBatching(None, 3),
    "tokens": MicroBatching(40, None),
}


def _fsdp2(
    model: PreTrainedModel, cut: MicroBatching, *, lr=1e-3, betas=(0.9, 0.999), grad_clip=1e9, dtype=torch.float32
) -> FsdpEngine:
    optimizer = ScheduledAdamW(dict(model.named_parameters()), Schedule(lr, 0, 100), 0.01, betas, grad_clip)
    return FsdpEngine(model, optimizer, cut, device=CPU, dtype=dtype)


BACKENDS: dict[str, MakeEngine] = {"fsdp2": _fsdp2}


@pytest.fixture(params=BACKENDS)
def make_engine(request) -> MakeEngine:
    return BACKENDS[request.param]


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_sequences() -> list[TokenSequence]:
    """Groups of three, one and four in mixed order, responses of 1 to 17 tokens, prompts of 3 to 12."""
    prompts = {0: tokens(7, 100), 1: tokens(3, 101), 2: tokens(12, 102)}
    rows = [(0, 9), (2, 4), (0, 1), (1, 17), (2, 11), (0, 6), (2, 1), (2, 12)]
    return [TokenSequence(prompts[group], tokens(length, row), group) for row, (group, length) in enumerate(rows)]


def plain_scores(plain: PreTrainedModel, sequences: list[TokenSequence], temperature: float):
    """Log-probs and entropies of each sequence alone, by plain transformers and a full float64 log-softmax."""
    width = max(len(s.response_ids) for s in sequences)
    logp, entropy = torch.zeros(len(sequences), width), torch.zeros(len(sequences), width)
    for row, s in enumerate(sequences):
        with torch.no_grad():
            logits = plain(torch.tensor([s.prompt_ids + s.response_ids])).logits[0].double() / temperature
        full = logits[len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        length = len(s.response_ids)
        logp[row, :length] = full[torch.arange(length), torch.tensor(s.response_ids)].float()
        entropy[row, :length] = -(full.exp() * full).sum(-1).float()
    return logp, entropy


def gradient(engine: TrainingEngine, folder: Path) -> torch.Tensor:
    """The last gradient as one vector: with β₁ = 0, AdamW's first moment is the gradient itself."""
    folder.mkdir(exist_ok=True)
    engine.save(folder, ["optimizer"])
    state = load_file(folder / "optimizer.safetensors")
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(".exp_avg")])


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_equal_plain_transformers(make_engine, architecture):
    model, sequences = tiny_model(architecture), some_sequences()
    expected_logp, expected_entropy = plain_scores(plain_copy(architecture, model), sequences, 0.8)
    assert expected_logp.std() > 0.5  # the model is far from uniform: a wrong mask would show
    for name, cut in CUTS.items():
        scores = make_engine(model, cut).forward(sequences, LogProbHead(0.8, with_entropy=True))
        torch.testing.assert_close(
            scores.logp, expected_logp, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
        torch.testing.assert_close(scores.entropy, expected_entropy, rtol=0, atol=1e-5)


def test_given_tokens_are_context_alone(make_engine):
    """Log-probs and entropies of the other tokens are those of a forward pass over everything; theirs are 0."""
    model, sequences = tiny_model("llama"), some_sequences()
    expected = plain_scores(plain_copy("llama", model), sequences, 0.8)
    masks = [[(row + t) % 3 != 0 for t in range(len(s.response_ids))] for row, s in enumerate(sequences)]
    masks[1] = None
    partly = [dataclasses.replace(s, sampled=mask) for s, mask in zip(sequences, masks)]
    sampled = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(mask or [True] * len(s.response_ids)) for s, mask in zip(sequences, masks)], batch_first=True
    )
    for cut in CUTS.values():
        scores = make_engine(model, cut).forward(partly, LogProbHead(0.8, with_entropy=True))
        torch.testing.assert_close(scores.logp, expected[0] * sampled, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.entropy, expected[1] * sampled, rtol=0, atol=1e-5)


def test_entropy_only_on_request(make_engine):
    scores = make_engine(tiny_model("llama"), WHOLE).forward(some_sequences(), LogProbHead(1.0))
    assert not scores.entropy.any()


def test_shared_prompts_are_processed_once(make_engine):
    model, sequences = tiny_model("llama"), some_sequences()
    responses = sum(len(s.response_ids) - 1 for s in sequences)
    packed = make_engine(model, WHOLE).forward(sequences, LogProbHead(1.0))
    alone = make_engine(model, CUTS["one-by-one"]).forward(sequences, LogProbHead(1.0))
    assert packed.num_input_tokens == responses + 7 + 3 + 12
    assert alone.num_input_tokens == responses + 3 * 7 + 3 + 4 * 12


@pytest.mark.parametrize("cut", ["whole", "tokens", "one-by-one"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_no_attention_across_sequences(make_engine, architecture, cut):
    engine, sequences = make_engine(tiny_model(architecture), CUTS[cut]), some_sequences()
    before = engine.forward(sequences, LogProbHead(1.0)).logp
    for changed in range(len(sequences)):
        others = [row for row in range(len(sequences)) if row != changed]
        other = [(token + 1) % VOCABULARY for token in sequences[changed].response_ids]
        varied = [*sequences]
        varied[changed] = dataclasses.replace(sequences[changed], response_ids=other)
        after = engine.forward(varied, LogProbHead(1.0)).logp
        torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
        assert not torch.equal(after[changed], before[changed])


def test_progress_counts_every_sequence(make_engine):
    engine, sequences, seen = make_engine(tiny_model("llama"), CUTS["tokens"]), some_sequences(), []
    engine.forward(sequences, LogProbHead(1.0), on_done=seen.append)
    assert len(seen) > 1 and sum(seen) == len(sequences)
    seen.clear()
    engine.train_mini_batch(sequences, LogProbHead(1.0), lambda rows, scores: scores.logp.sum(), on_done=seen.append)
    assert len(seen) > 1 and sum(seen) == len(sequences)


# --- gradients --------------------------------------------------------------------------------------------------------


def some_batch(engine: TrainingEngine) -> TrainBatch:
    """A batch off policy by enough that some tokens clip, with one failed sample, advantages and a reference."""
    prompts = {}
    rollouts = []
    for row, s in enumerate(some_sequences()):
        prompt = prompts.setdefault(s.group, Prompt(f"p{s.group}", s.prompt_ids, "", "t"))
        length = len(s.response_ids)
        rollouts.append(Rollout.single_turn(prompt, row, s.response_ids, [0.0] * length, [0] * length, "stop"))
    scores = [Score(0.0)] * len(rollouts)
    scores[4] = Score(None, failure=RewardFailure("timeout", ""))
    samples = Samples.pad(rollouts, scores)
    logp = engine.forward(sequences_of(rollouts), LogProbHead(0.8)).logp
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(logp.shape, generator=generator) for _ in range(3)]
    return TrainBatch(
        **vars(samples),
        old_logp=(logp + 0.3 * noise[0]) * samples.mask,
        ref_logp=(logp + 0.3 * noise[1]) * samples.mask,
        advantages=noise[2] * samples.mask,
        returns=torch.zeros_like(logp),
        loss_mask=samples.mask,
    )


def actor(engine: TrainingEngine, mode: str) -> Actor:
    config = ActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=8,
        loss_agg_mode=mode,
        entropy_coeff=0.02,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )  # pyright: ignore[reportArgumentType]
    settings = ActorSettings(PolicyLoss.named("vanilla"), temperature=0.8, max_response_length=20, seed=0)
    return Actor(engine, config, settings)


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
def test_gradient_does_not_depend_on_the_cut(make_engine, mode, tmp_path):
    """To 1e-6 of the whole gradient vector, with weights of usual size: float32 rounding alone grows with sharper ones."""
    batch = some_batch(make_engine(tiny_model("llama", scale=0.1), WHOLE))
    gradients, metrics = {}, {}
    for name, cut in CUTS.items():
        engine = make_engine(tiny_model("llama", scale=0.1), cut, lr=0.0, betas=(0.0, 0.999))
        metrics[name] = actor(engine, mode).update(batch, step=1).metrics
        gradients[name] = gradient(engine, tmp_path / name)
    assert 0.02 < metrics["whole"]["actor/pg_clipfrac"] < 0.9
    assert metrics["whole"]["actor/kl_loss"] > 0
    for name in CUTS:
        assert relative(gradients[name], gradients["whole"]) < 1e-6, name
        assert metrics[name] == {
            key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in metrics["whole"].items()
        }


def test_cuts_agree_to_rounding_in_float64():
    """The same comparison without float32's noise: cutting is exact, not merely close.

    GPT-NeoX, as the RMS norms of the others compute in float32 whatever they are given.
    """
    sequences, gradients = some_sequences(), {}
    coefficients = torch.randn(8, 17, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for name, cut in CUTS.items():
        model = tiny_model("gpt_neox").double()
        for rows in split_micro_batches(
            sequences, max_tokens=cut.max_tokens, max_sequences=cut.max_sequences
        ):
            inputs = pack([sequences[row] for row in rows], CPU)
            hidden = model.get_decoder()(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
            ).last_hidden_state
            full = model.get_output_embeddings()(hidden.flatten(0, 1)[inputs.predict_index]).log_softmax(-1)
            logp = full.gather(1, inputs.target_ids[:, None])[:, 0]
            (logp * coefficients[torch.tensor(rows)[inputs.row], inputs.column]).sum().backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    for name in CUTS:
        assert relative(gradients[name], gradients["one-by-one"]) < 1e-12, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_equals_autograd_through_plain_transformers(make_engine, architecture, tmp_path):
    model, sequences = tiny_model(architecture), some_sequences()
    plain = plain_copy(architecture, model)
    expected_loss = 0.0
    for row, s in enumerate(sequences):
        logits = plain(torch.tensor([s.prompt_ids + s.response_ids])).logits[0, len(s.prompt_ids) - 1 : -1]
        logp = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(s.response_ids)[:, None])
        loss = (row + 1) * logp.square().sum()
        loss.backward()
        expected_loss += loss.item()
    expected = dict(plain.named_parameters())
    engine = make_engine(model, CUTS["tokens"], lr=0.0, betas=(0.0, 0.999))
    result = engine.train_mini_batch(
        sequences,
        LogProbHead(0.8),
        lambda rows, scores: (scores.logp.square().sum(dim=1) * (torch.tensor(rows) + 1)).sum(),
    )
    ours = gradient(engine, tmp_path)
    theirs = torch.cat([expected[name].grad.flatten() for name in sorted(expected)])  # pyright: ignore[reportOptionalMemberAccess]
    assert relative(ours, theirs) < 3e-6
    assert result.loss == pytest.approx(expected_loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(float(theirs.norm()), rel=1e-5)


def test_gradient_checkpointing_changes_nothing(make_engine, tmp_path):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model("qwen3")
        if checkpointing:
            enable_gradient_checkpointing(model)
        engine = make_engine(model, CUTS["tokens"], lr=0.0, betas=(0.0, 0.999))
        actor(engine, "token-mean").update(some_batch(engine), step=1)
        gradients.append(gradient(engine, tmp_path / str(checkpointing)))
    assert relative(gradients[1], gradients[0]) < 1e-6


# --- the update -------------------------------------------------------------------------------------------------------


def simple_loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
    return -scores.logp.sum() / 60


def train(engine: TrainingEngine, loss=simple_loss, sequences=None):
    return engine.train_mini_batch(sequences or some_sequences(), LogProbHead(1.0), loss)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_updates_lower_the_loss_and_count_versions(make_engine):
    engine = make_engine(tiny_model("llama"), CUTS["tokens"], lr=1e-3)
    assert engine.version == 0
    results = [train(engine) for _ in range(5)]
    losses = [result.loss for result in results]
    assert losses == sorted(losses, reverse=True)
    assert engine.version == 5
    assert {result.lr for result in results} == {1e-3}


def test_scores_are_those_before_the_step(make_engine):
    engine = make_engine(tiny_model("llama"), CUTS["tokens"])
    before = engine.forward(some_sequences(), LogProbHead(1.0))
    result = train(engine)
    torch.testing.assert_close(result.scores.logp, before.logp, rtol=0, atol=1e-6)
    assert not torch.allclose(engine.forward(some_sequences(), LogProbHead(1.0)).logp, before.logp, atol=1e-4)


def test_gradient_norm_is_reported_before_clipping(make_engine, tmp_path):
    free = make_engine(tiny_model("llama"), WHOLE, lr=0.0, betas=(0.0, 0.999))
    clipped = make_engine(tiny_model("llama"), WHOLE, lr=0.0, betas=(0.0, 0.999), grad_clip=0.01)
    assert train(free).grad_norm == train(clipped).grad_norm > 0.01
    kept = gradient(clipped, tmp_path / "clipped")
    assert float(kept.norm()) == pytest.approx(0.01, rel=1e-3)
    whole = gradient(free, tmp_path / "free")
    assert relative(kept, whole * 0.01 / whole.norm()) < 1e-3


def test_nan_weight_stops_the_update(make_engine):
    model = tiny_model("llama")
    engine = make_engine(model, CUTS["one-by-one"])
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = math.nan
    bad = [row for row, s in enumerate(some_sequences()) if 3 in s.prompt_ids + s.response_ids[:-1]]
    assert 0 < len(bad) < len(some_sequences())
    before = weights(model)
    with pytest.raises(NonFiniteError) as caught:
        train(engine)
    assert caught.value.quantity == "loss" and math.isnan(caught.value.value)
    assert len(caught.value.rows) == 1 and caught.value.rows[0] in bad
    after = weights(model)
    assert all(torch.equal(before[name].nan_to_num(7.0), after[name].nan_to_num(7.0)) for name in before)
    assert engine.version == 0


def test_infinite_gradient_stops_the_update(make_engine):
    model = tiny_model("llama")
    engine, before = make_engine(model, WHOLE), weights(model)
    with pytest.raises(NonFiniteError) as caught:
        train(engine, lambda rows, scores: (scores.logp - scores.logp.detach()).abs().sqrt().sum())
    assert caught.value.quantity == "grad_norm"
    assert caught.value.rows == list(range(len(some_sequences())))
    assert same(weights(model), before)
    assert engine.version == 0


def test_a_failed_update_leaves_no_gradient_behind(make_engine):
    engines = [make_engine(model, CUTS["one-by-one"]) for model in (tiny_model("llama"), tiny_model("llama"))]
    calls = 0

    def fails_late(rows, scores):
        nonlocal calls
        calls += 1
        return scores.logp.sum() * (math.nan if calls == 5 else 1.0)

    with pytest.raises(NonFiniteError):
        train(engines[0], fails_late)
    results = [train(engine) for engine in engines]
    assert results[0].grad_norm == results[1].grad_norm


# --- the state on disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama_tied", "gpt_neox"])
def test_save_and_load_continue_bitwise(make_engine, architecture, tmp_path):
    straight = make_engine(tiny_model(architecture), CUTS["tokens"])
    train(straight)
    straight.save(tmp_path, ["model", "optimizer"])
    resumed = make_engine(tiny_model(architecture, seed=1), CUTS["tokens"])
    resumed.load(tmp_path, ["model", "optimizer"])
    assert resumed.version == 1
    assert same(weights(resumed.model), weights(straight.model))  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(2):
        ours, theirs = train(resumed), train(straight)
        assert (ours.loss, ours.grad_norm, ours.lr) == (theirs.loss, theirs.grad_norm, theirs.lr)
    assert same(weights(resumed.model), weights(straight.model))  # pyright: ignore[reportAttributeAccessIssue]


def test_parts_are_saved_as_asked(make_engine, tmp_path):
    engine = make_engine(tiny_model("llama"), WHOLE)
    train(engine)
    engine.save(tmp_path, ["model"])
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    fresh = make_engine(tiny_model("llama", seed=1), WHOLE)
    fresh.load(tmp_path, ["model"])
    assert fresh.version == 0
    assert same(weights(fresh.model), weights(engine.model))  # pyright: ignore[reportAttributeAccessIssue]


# --- number formats ---------------------------------------------------------------------------------------------------


def test_bf16_computes_close_and_keeps_float32_masters(make_engine):
    model, sequences = tiny_model("llama"), some_sequences()
    exact = make_engine(model, WHOLE).forward(sequences, LogProbHead(1.0, with_entropy=True))
    engine = make_engine(model, WHOLE, dtype=torch.bfloat16)
    rough = engine.forward(sequences, LogProbHead(1.0, with_entropy=True))
    assert rough.logp.dtype == rough.entropy.dtype == torch.float32
    gap = (rough.logp - exact.logp).abs()
    assert 0 < float(gap.mean()) < 0.02 and float(gap.max()) < 0.2
    before = weights(model)
    result = train(engine)
    assert math.isfinite(result.loss)
    after = weights(model)
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    # Steps of 1e-3 beside weights of size one: bf16 masters would round many of them away.
    moved = [(after[name] != before[name]).float().mean() for name in before if "layers" in name]
    assert float(torch.stack(moved).mean()) > 0.95
