"""The NaN sentinel names what was planted: module, sample, gradient, weight, loss input, decoding step."""

import math
import pickle
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from pellucid.agents.llm import sample_rollouts
from pellucid.errors import NonFiniteError
from pellucid.failures import Failure, _locate, _told
from pellucid.precision.sentinel import HEAD as HEAD_PLACE
from pellucid.precision.sentinel import LOSS, Finding, Flags, Sentinel
from pellucid.roles.mini_batches import update_each
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.requests import SamplingParams
from pellucid.stages import NO_PROBE, Stage
from pellucid.training.common.heads import LogProbHead, ValueHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN_FOLDER, enable_gradient_checkpointing, init_model, load_tokenizer
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence, sequences_of
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import MiniBatch, Prompt, Rollout, Samples, Score, TrainBatch

CPU = torch.device("cpu")
HEAD = LogProbHead(1.0)
POISON = 24
"""A token id that only `sequences()[3]` holds: as the third of its response."""
POISONED = "q1 sample 1 (response)"
PARAMS = SamplingParams(n=2, max_tokens=12, ignore_eos=True)


def tiny_model() -> PreTrainedModel:
    """A random two-layer Llama whose weights are large enough to matter."""
    sizes = {"vocab_size": 25, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = init_model({"model_type": "llama", "num_key_value_heads": 2, **sizes, **special}, seed=0, device=CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def sequences() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> list[int]:
        return torch.randint(2, POISON, (length,), generator=generator).tolist()

    found = []
    for group in range(3):
        prompt = draw(4)
        found += [TokenSequence(prompt, draw(5 + k), group, f"q{group} sample {k}", f"q{group}") for k in range(2)]
    found[3].response_ids[2] = POISON
    return found


class Watched:
    """An engine and the sentinel that watches it; without one where it is off."""

    def __init__(self, engine, sentinel: Sentinel | None, stage: Stage) -> None:
        self.engine, self.sentinel, self.stage = engine, sentinel, stage

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def run(self, action):
        """Return what `action` does as a stage that is watched."""
        if self.sentinel is None:
            return action()
        with self.sentinel.watch(self.stage):
            return action()

    def finding(self, action) -> Finding | None:
        """Return what repeating `action` tells of its failure."""
        assert self.sentinel is not None
        self.sentinel.locate(self.stage)
        with suppress(NonFiniteError):
            self.run(action)
        return self.sentinel.take_finding()


def engine(*, on: bool = True, dtype: torch.dtype = torch.float32) -> Watched:
    """A tiny model that needs two micro-batches for `sequences()`; the poisoned one is in the second."""
    model = tiny_model()
    optimizer = ScheduledAdamW(dict(model.named_parameters()), Schedule(1e-3, 0, 10), 0.0, (0.9, 0.999), 1.0)
    cut = MicroBatching(24, None)
    sentinel = Sentinel() if on else None
    made = FsdpEngine(model, optimizer, cut, device=CPU, dtype=dtype, probe=sentinel or NO_PROBE)
    if sentinel is not None:
        sentinel.modules_of = lambda stage: made.modules if stage is Stage.ACTOR_UPDATE else ()
    return Watched(made, sentinel, Stage.ACTOR_UPDATE)


def loss(rows, scores):
    return -scores.logp.sum()


class Action:
    """Something that a watched engine does."""

    def __init__(self, watched: Watched, call) -> None:
        self.watched, self.call = watched, call

    def __call__(self):
        return self.watched.run(self.call)


def failure(action: Action) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        action()
    return caught.value


def repeated(action: Action) -> Finding:
    """Return where an action that has failed went wrong, by a repetition."""
    finding = action.watched.finding(action.call)
    assert finding is not None
    return finding


def found(action: Action) -> Finding:
    failure(action)
    return repeated(action)


def forward(engine, head=HEAD) -> Action:
    return Action(engine, lambda: engine.forward(sequences(), head))


def update(engine, loss=loss) -> Action:
    return Action(engine, lambda: engine.train_mini_batch(sequences(), HEAD, loss))


def poison_outputs(engine, module, value: float = math.nan) -> None:
    """Let `module` return `value` for the token `POISON`, whatever it is given."""
    ids = {}
    engine.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: ids.update(now=kwargs["input_ids"]), with_kwargs=True
    )
    plain = module.forward

    def forward(x):
        return torch.where((ids["now"] == POISON)[..., None], value, plain(x))

    module.forward = forward


class BadGradient(torch.autograd.Function):
    """The identity, with a NaN in its gradient of token `at`."""

    @staticmethod
    def forward(ctx, x, at):
        ctx.at = at
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, ctx.at, 1] = math.nan
        return gradient, None


# --- forward ----------------------------------------------------------------------------------------------------------


def test_a_sound_model_gives_the_same_results_with_the_sentinel_on():
    with_it, without = engine(), engine(on=False)
    assert torch.equal(forward(with_it)().logp, forward(without)().logp)
    assert update(with_it)().grad_norm == update(without)().grad_norm
    assert all(torch.equal(a, b) for a, b in zip(with_it.model.parameters(), without.model.parameters()))
    hooks = [module for module in with_it.model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks, "flags are placed for the time of a stage"


@pytest.mark.parametrize("run", [forward, update], ids=["forward", "update"])
def test_a_bad_weight_is_named(run):
    one = engine()
    with torch.no_grad():
        one.model.model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    finding = found(run(one))
    assert (finding.place, finding.kind, finding.direction) == ("model.layers.1.mlp.up_proj", "Linear", "forward")
    assert "its parameters are wrong before it runs" in finding.cause
    assert finding.tensor == "parameters.weight: 1 NaN of 1,536 values"
    assert (finding.unit, finding.index, finding.reproduced) == ("micro-batch", 1, True)


def test_one_bad_token_is_named_by_its_sample():
    one = engine()
    poison_outputs(one, one.model.model.layers[0].mlp)
    error = failure(forward(one))
    finding = repeated(forward(one))
    assert (finding.place, finding.kind, finding.what) == ("model.layers.0.mlp", "LlamaMLP", "NaN")
    assert finding.samples == [POISONED] and finding.index == 2
    assert "the fault is in this module" in finding.cause
    error.origin = text = finding.sentence()
    assert text.removesuffix(".") in str(error)
    assert "NaN first in model.layers.0.mlp (LlamaMLP), forward, micro-batch 2, sample 'q1 sample 1 (response)'" in text


def test_a_shared_prompt_is_named_by_its_uid():
    one = engine()
    plain = one.model.model.embed_tokens.forward
    first = sequences()[0].prompt_ids[0]

    def spoil(ids):
        return plain(ids).masked_fill(((ids == first) & (torch.arange(ids.shape[1]) == 0))[..., None], math.inf)

    one.model.model.embed_tokens.forward = spoil
    finding = found(forward(one))
    assert (finding.place, finding.what) == ("model.embed_tokens", "Inf")
    assert finding.samples == ["q0 (prompt)"]


def test_what_a_module_computes_between_its_parts_is_its_own():
    one = engine()
    with torch.no_grad():
        for layer in one.model.model.layers[:1]:
            layer.self_attn.q_proj.weight.mul_(1e20)
            layer.self_attn.k_proj.weight.mul_(1e20)
    finding = found(forward(one))
    assert (finding.place, finding.kind) == ("model.layers.0.self_attn", "LlamaAttention")
    assert "what model.layers.0.self_attn.o_proj gets is not" in finding.cause


@pytest.mark.parametrize("kind", ["log-probs", "values"])
def test_the_head_is_named(kind):
    one = engine()
    if kind == "values":
        one.model.set_output_embeddings(torch.nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        one.model.lm_head.weight[0, 0] = math.nan
    finding = found(forward(one, ValueHead() if kind == "values" else HEAD))
    assert finding.place == ("lm_head" if kind == "values" else HEAD_PLACE)


def test_values_whose_sum_alone_overflows_are_no_failure():
    one = engine()
    layer = one.model.model.layers[0]
    layer.mlp.act_fn.forward = lambda x: torch.full_like(x, 1e37)
    layer.mlp.down_proj.forward = lambda x: torch.zeros(*x.shape[:2], 32)
    assert torch.isfinite(forward(one)().logp).all()
    assert math.isfinite(update(one)().grad_norm)


def test_what_cannot_be_repeated_is_said_to_be_so():
    one = engine()
    calls = []
    plain = one.model.model.layers[1].mlp.forward

    def once(x):
        calls.append(1)
        return plain(x) * (math.nan if len(calls) == 2 else 1.0)

    one.model.model.layers[1].mlp.forward = once
    finding = found(forward(one))
    assert not finding.reproduced and "not reproducible" in finding.sentence()
    assert (finding.place, finding.unit, finding.index) == ("model.layers.1.mlp", "micro-batch", 2)


@pytest.mark.parametrize(
    "step",
    ["capture.NativeSession.begin", "capture.Recorder.measure", "capture.Recorder.dump", "sentinel.first_bad"],
)
def test_a_capture_that_fails_is_said_to_have_failed(monkeypatch, step):
    one, calls = engine(), []
    plain = one.model.model.layers[0].mlp.forward
    one.model.model.layers[0].mlp.forward = lambda x: plain(BadGradient.apply(x, 5))
    assert failure(update(one)).quantity == "grad_norm"

    def full(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(f"pellucid.precision.{step}", full)
    finding = repeated(update(one))
    assert finding.cause == "the capture of the repetition failed (OutOfMemoryError: no memory left)"
    assert not finding.reproduced and len(calls) == 1, "later passes are not captured"


def test_a_repetition_that_fails_leaves_the_failure_as_it_is(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("pellucid.failures.run_again", full)
    run = SimpleNamespace(config=None, placement=SimpleNamespace(sentinel=Sentinel(), roles=None))
    assert _locate(run, Failure(Stage.ACTOR_UPDATE, 1, "loss", None, []), lambda _: None) is None


def test_filters_of_warnings_that_others_set_during_a_capture_stay():
    def loss_of_another_thread(rows, scores):
        warnings.filterwarnings("ignore", message="set meanwhile")
        return loss(rows, scores)

    with warnings.catch_warnings():
        one = engine()
        one.finding(update(one, loss_of_another_thread).call)
        assert any(pattern is not None and pattern.pattern == "set meanwhile" for _, pattern, *_ in warnings.filters)


def test_bfloat16_and_recomputed_layers():
    one = engine(dtype=torch.bfloat16)
    enable_gradient_checkpointing(one.model)
    assert math.isfinite(update(one)().grad_norm)
    poison_outputs(one, one.model.model.layers[1].mlp.down_proj)
    finding = found(update(one))
    assert finding.place == "model.layers.1.mlp.down_proj" and finding.samples == [POISONED]


# --- loss, backward, optimizer ----------------------------------------------------------------------------------------


def test_a_loss_that_overflows_is_named():
    one = engine()
    overflowing = update(one, lambda rows, scores: (scores.logp * -100).exp().sum())
    assert failure(overflowing).quantity == "loss"
    finding = repeated(overflowing)
    assert (finding.place, finding.direction, finding.what) == (LOSS, "forward", "Inf")


def test_a_gradient_of_the_loss_is_named():
    finding = found(update(engine(), lambda rows, scores: (scores.logp - scores.logp.detach()).abs().sqrt().sum()))
    assert (finding.place, finding.direction, finding.what) == (LOSS, "backward", "NaN")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gradient_in_a_module_is_named(checkpointing):
    one = engine()
    if checkpointing:
        enable_gradient_checkpointing(one.model)
    mlp = one.model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(BadGradient.apply(x, 5))
    before = [parameter.clone() for parameter in one.model.parameters()]
    assert failure(update(one)).quantity == "grad_norm"
    finding = repeated(update(one))
    assert (finding.place, finding.direction) == ("model.layers.0.mlp", "backward")
    assert "what goes into it is finite" in finding.cause
    assert finding.samples == ["q0 sample 0 (response)"], "the sixth token of the first pack"
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters()))


def test_a_gradient_that_spoils_weights_first_is_named_with_its_sample():
    one = engine()

    def spoil(module, args, output):
        output.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([5]), math.nan))

    one.model.model.layers[1].self_attn.k_proj.register_forward_hook(spoil)
    finding = found(update(one))
    assert (finding.place, finding.direction) == ("model.layers.1.self_attn.k_proj", "backward")
    assert finding.samples == ["q0 sample 0 (response)"]


def test_a_gradient_norm_that_alone_overflows_is_in_no_module():
    finding = found(update(engine(), lambda rows, scores: scores.logp.sum() * 1e36))
    assert (finding.place, finding.direction, finding.what, finding.reproduced) == ("grad_norm", "backward", "Inf", False)
    assert "overflows (a sum, a norm, a softmax)" in finding.cause


def test_a_bad_value_that_no_loss_reads_stops_the_update():
    one = engine()
    mlp = one.model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: torch.where((torch.arange(x.shape[1]) == 0)[:, None], math.inf, plain(x))
    assert torch.isfinite(engine(on=False).forward(sequences(), HEAD).logp).all(), "the first prompt token predicts nothing"
    error, finding = failure(update(one)), repeated(update(one))
    assert (error.quantity, finding.place, finding.samples) == ("the output of a module", "model.layers.1.mlp", ["q0 (prompt)"])
    assert one.version == 0 and one.optimizer.num_steps == 0


def test_weights_that_a_step_spoils_are_named():
    one = engine()
    update(one)()
    name = "model.layers.0.self_attn.q_proj.weight"
    one.optimizer.adamw.state[one.optimizer.parameters[name]]["exp_avg"][2, 3] = math.nan
    error = failure(update(one))
    finding = one.sentinel.take_finding()
    assert error.quantity == "norm of the updated weights"
    assert (finding.place, finding.direction, finding.what) == (name, "optimizer", "NaN")
    assert "1 of 1,024 values" in finding.tensor


def test_the_input_that_spoils_a_loss_is_named():
    prompt = Prompt("q0", [5, 6], "", task="t")
    rollouts = [Rollout.single_turn(prompt, k, [7, 8, 9, 10], [-1.0] * 4, [0] * 4, "length") for k in range(3)]
    samples, advantages = Samples.pad(rollouts, [Score(1.0)] * 3), torch.ones(3, 4)
    advantages[2, 1] = math.nan
    batch = TrainBatch(**vars(samples), advantages=advantages, returns=torch.ones(3, 4), loss_mask=samples.mask)
    one = engine()

    def step(part):
        chosen = batch.select(part.rows)
        one.train_mini_batch(
            sequences_of(chosen.rollouts), HEAD, lambda rows, scores: (scores.logp * chosen.advantages[rows]).sum()
        )
        return {}

    spoilt = Action(one, lambda: update_each([MiniBatch([0], 0), MiniBatch([1, 2], 1)], step, "actor"))
    error = failure(spoilt)
    assert error.quantity == "actor/loss" and error.rows == [1, 2]
    assert (error.mini_batch.rows, error.mini_batch.number) == ([1, 2], 1)
    finding = repeated(Action(one, lambda: step(error.mini_batch)))
    told = _told(finding, Failure(Stage.ACTOR_UPDATE, 3, error.quantity, error.mini_batch, batch))
    assert (told.place, told.cause, told.samples) == (LOSS, "the batch's advantages are not finite", ["q0 sample 2"])


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(BUILTIN_FOLDER))


def rollout_engine(tokenizer, *, on: bool = True) -> Watched:
    sentinel = Sentinel() if on else None
    made = NativeRolloutEngine(
        engine(on=False).engine, tokenizer, [1], max_num_seqs=4, max_num_batched_tokens=64, seed=3, probe=sentinel or NO_PROBE
    )
    if sentinel is not None:
        sentinel.modules_of = lambda stage: made.modules
    return Watched(made, sentinel, Stage.ROLLOUT_GENERATE)


PROMPTS = [Prompt(f"p{index}", [5 + index, 6, 7], "", task="t") for index in range(3)]


def sample(engine, params=PARAMS) -> Action:
    return Action(engine, lambda: sample_rollouts(engine.engine, PROMPTS, params, stream=("rollout", 1)))


def test_a_decoding_step_is_named(tokenizer):
    plain = sample(rollout_engine(tokenizer, on=False))()
    one = rollout_engine(tokenizer)
    assert [rollout.token_ids for rollout in sample(one)()] == [rollout.token_ids for rollout in plain]
    drawn = plain[1].token_ids
    seen = {token for prompt in PROMPTS for token in prompt.token_ids}
    token = next(token for token in drawn if token not in seen)
    steps = [rollout.token_ids.index(token) for rollout in plain[:4] if token in rollout.token_ids]
    embed = one.policy.model.model.embed_tokens
    embed.register_forward_hook(lambda module, args, out: torch.where((args[0] == token)[..., None], math.nan, out))
    finding = found(sample(one))
    assert (finding.place, finding.unit, finding.index) == ("model.embed_tokens", "decode step", min(steps) + 1)
    assert finding.samples and all(name.endswith("(response)") for name in finding.samples)


def test_a_prefill_is_named_though_sampling_goes_on(tokenizer):
    one = rollout_engine(tokenizer)
    mlp = one.policy.model.model.layers[1].mlp
    plain = mlp.forward

    def spoil(x):  # the first token of a prefill: no other one but its own answer reads it
        out = plain(x)
        if x.shape[1] == 6:
            out = out.clone()
            out[0, 4, 2] = math.inf
        return out

    mlp.forward = spoil
    finding = found(sample(one))
    assert (finding.place, finding.unit, finding.index) == ("model.layers.1.mlp", "prefill", 1)
    assert finding.samples == ["p1 (prompt)"]


def test_logits_that_overflow_after_the_last_module_are_said_to(tokenizer):
    one = sample(rollout_engine(tokenizer), SamplingParams(n=2, max_tokens=4, ignore_eos=True, temperature=1e-38))
    finding = found(one)
    assert (finding.place, finding.reproduced) == ("the normaliser of a next-token distribution", False)


# --- the parts --------------------------------------------------------------------------------------------------------


def test_flags_of_many_passes_are_looked_at_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr("pellucid.precision.sentinel.MAX_KEPT", 6)
    flags = Flags()
    for value in (1.0, 1.0, math.nan, *[1.0] * 20):
        flags.begin_pass("pass")
        flags.add("a", "Linear", (torch.full((1, 2), value), {"other": torch.tensor(1)}))
        assert len(flags._kept) <= 8
    first = flags.first()
    assert first is not None and (first.place, first.kind, first.index, first.what) == ("a", "Linear", 3, "NaN")


def test_no_finite_number_raises_a_flag():
    flags = Flags()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        flags.add("x", "", torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
        flags.add("x", "", torch.full((1000,), torch.finfo(dtype).min, dtype=dtype))
    assert flags.first() is None
    flags.add("x", "", torch.tensor([1.0, -math.inf], dtype=torch.float16))
    assert flags.first().what == "Inf"


def test_a_stage_that_runs_elsewhere_is_not_watched():
    sentinel = Sentinel()
    with sentinel.watch(Stage.REWARD), sentinel.watch(None):
        pass
    assert sentinel.take_finding() is None


def test_an_error_travels_between_processes():
    one = engine()
    poison_outputs(one, one.model.model.layers[0].mlp)
    error = failure(update(one))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.rows == error.rows and copy.mini_batch == error.mini_batch
    finding = repeated(update(one))
    assert pickle.loads(pickle.dumps(finding)) == finding
