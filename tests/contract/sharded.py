"""What each rank runs in `test_sharded_engine.py`, and the same in one process: functions of plain arguments to plain results."""

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tiny import CPU, VOCABULARY, tiny_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pellucid.config.schema.profiler import GlobalProfilerConfig, GlobalToolConfig, PrecisionDebuggerConfig
from pellucid.errors import NonFiniteError, UserError
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.precision.sentinel import Finding, Sentinel
from pellucid.rollout.transports import load_buckets
from pellucid.stages import Stage
from pellucid.training.checkpoint import load_trained_weights
from pellucid.training.common.balance import RankBalance
from pellucid.training.common.heads import LogProbHead, ValueHead
from pellucid.training.common.lora import add_lora, lora_layers, state_tensors
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import (
    enable_gradient_checkpointing,
    load_tokenizer,
    model_tensors,
    output_head,
)
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence
from pellucid.training.fsdp import FsdpEngine
from pellucid.training.protocol import TokenHead, TokenScores
from pellucid.training.sharding import Sharding, ShardingPlan

TEMPERATURE = 0.8
WHOLE_STATE = ["model", "optimizer"]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained; `plan` None is one process."""

    plan: ShardingPlan | None = None
    architecture: str = "llama"
    role: Literal["policy", "lora", "critic"] = "policy"
    exact_kl: bool = False
    """The loss has the exact KL to a frozen reference: under LoRA the policy without its adapters, else a model of its own."""
    seed: int = 0
    max_tokens: int = 60
    num_sequences: int = 8
    lr: float = 1e-2
    grad_clip: float = 1e9
    dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    optimizer_offload: bool = False
    balance_ranks: bool = True


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequences(number: int = 8) -> list[TokenSequence]:
    """Groups of three, one and four in mixed order, responses of 1 to 17 tokens, prompts of 3 to 12."""
    prompts = {0: tokens(7, 100), 1: tokens(3, 101), 2: tokens(12, 102)}
    rows = [(0, 9), (2, 4), (0, 1), (1, 17), (2, 11), (0, 6), (2, 1), (2, 12)]
    return [TokenSequence(prompts[group], tokens(length, row), group) for row, (group, length) in enumerate(rows)][:number]


def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
    """A loss in which every row has another weight: a row that lands at another's place shows."""
    results = scores.values if "values" in scores.results else scores.logp
    terms = results.square() - results
    if scores.kl is not None:
        terms = terms + 3 * scores.kl
    return (terms.sum(dim=1) * (torch.tensor(rows) + 1)).sum() / 500


def make_model(setup: Setup) -> PreTrainedModel:
    model = tiny_model(setup.architecture, seed=setup.seed)
    generator = torch.Generator().manual_seed(setup.seed + 50)
    if setup.role == "critic":
        head = torch.nn.Linear(output_head(model).in_features, 1, bias=False)
        with torch.no_grad():
            head.weight.copy_(0.3 * torch.randn(head.weight.shape, generator=generator))
        model.set_output_embeddings(head)
    if setup.role == "lora":
        add_lora(model, rank=3, alpha=6, target_modules="all-linear", seed=setup.seed)
        with torch.no_grad():  # B starts at zero: moved, so that every adapter has a gradient and an effect
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if setup.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def make_engine(setup: Setup, model: PreTrainedModel | None = None) -> FsdpEngine:
    model = make_model(setup) if model is None else model
    sharding = None if setup.plan is None else Sharding(model, setup.plan, CPU)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = ScheduledAdamW(named, Schedule(setup.lr, 0, 100), 0.01, (0.9, 0.999), setup.grad_clip, offload=setup.optimizer_offload)
    cut = MicroBatching(setup.max_tokens, None)
    return FsdpEngine(
        model,
        optimizer,
        cut,
        device=CPU,
        dtype=setup.dtype,
        sharding=sharding,
        balance_ranks=setup.balance_ranks,
    )


def make_head(setup: Setup, engine: FsdpEngine) -> TokenHead:
    if setup.role == "critic":
        return ValueHead()
    if not setup.exact_kl:
        return LogProbHead(TEMPERATURE)
    if setup.role == "lora":
        model, sharding = engine.model, engine.sharding
    else:
        model = tiny_model(setup.architecture, seed=9).requires_grad_(False)
        sharding = None if setup.plan is None else Sharding(model, setup.plan, CPU)
    reference = FsdpEngine(
        model,
        None,
        MicroBatching(None, None),
        device=CPU,
        dtype=setup.dtype,
        sharding=sharding,
        without_adapters=bool(lora_layers(model)),
    )
    return LogProbHead(TEMPERATURE, reference=reference)


def state_of(engine: FsdpEngine) -> State:
    """Return weights and moments of the whole model, on rank 0."""
    assert engine.optimizer is not None
    sharding, tensors = engine.sharding, engine._tensors() | engine.optimizer.state_tensors()
    if sharding is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    # All tensors at once: to gather each by itself takes longer than an update.
    parts: list[Any] | None = [None] * sharding.num_ranks if sharding.rank == 0 else None
    torch.distributed.gather_object({name: Sharding.local(tensor) for name, tensor in tensors.items()}, parts)
    return {} if parts is None else {name: joined(tensor, [part[name] for part in parts]) for name, tensor in tensors.items()}


def joined(tensor: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the whole of a tensor from what each rank holds of it."""
    if not isinstance(tensor, DTensor):
        return parts[0].clone()
    assert tensor.placements[-1].is_shard(0)
    return torch.cat(parts[: tensor.device_mesh.shape[-1]])  # the first copy's shards, where there are several copies


@dataclass
class Trace:
    """What some updates in a row gave."""

    results: list[torch.Tensor]
    """[B, T] of the forward pass before, of each update, and of the forward pass after."""
    kl: list[torch.Tensor]
    numbers: list[tuple[float, float, float]]
    """Loss, gradient norm and learning rate of each update."""
    state: State


def run_updates(setup: Setup, number: int = 3) -> Trace:
    engine, rows = make_engine(setup), sequences(setup.num_sequences)
    head = make_head(setup, engine)
    scores, numbers = [engine.forward(rows, head)], []
    for _ in range(number):
        result = engine.train_mini_batch(rows, head, loss)
        scores.append(result.scores)
        numbers.append((result.loss, result.grad_norm, result.lr))
    scores.append(engine.forward(rows, head))
    assert engine.version == number
    results = [one.values if "values" in one.results else one.logp for one in scores]
    return Trace(results, [one.kl for one in scores if one.kl is not None], numbers, state_of(engine))


def local_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of weights and of optimizer state that this rank holds after an update."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    assert engine.optimizer is not None
    moments = [value for name, value in engine.optimizer.state_tensors().items() if not name.endswith(".step")]
    sizes = [
        sum(Sharding.local(tensor).numel() * tensor.element_size() for tensor in tensors)
        for tensors in (engine.optimizer.parameters.values(), moments)
    ]
    return sizes[0], sizes[1]


def run_broken(setup: Setup, where: Literal["loss", "gradient"]) -> Any:
    """An update that fails on the rank that has row 3 alone, then a good one: the error, what it changed, and the good one."""
    engine = make_engine(setup)
    before = state_of(engine)

    def broken(rows: list[int], scores: TokenScores) -> torch.Tensor:
        if 3 not in rows:
            return loss(rows, scores)
        if where == "loss":
            return loss(rows, scores) * math.nan
        return (scores.logp - scores.logp.detach()).abs().sqrt().sum()  # zero, with an infinite slope

    try:
        engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), broken)
        raise AssertionError("no error")
    except NonFiniteError as error:
        caught = (error.quantity, str(error.value), error.rows)
    after = state_of(engine)
    result = engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return caught, unchanged, engine.version, (result.loss, result.grad_norm)


def rank_balance(setup: Setup) -> RankBalance | None:
    """Return how even an update's tokens were over the ranks."""
    return make_engine(setup).train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss).balance


def save_now(setup: Setup, folder: Path, contents: list[str] = WHOLE_STATE) -> State:
    """Write a checkpoint after one update and return the state that it should hold."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(), make_head(setup, engine), loss)
    folder.mkdir(exist_ok=True)
    engine.save(folder, contents)
    return state_of(engine)


def save_in_background(setup: Setup, folder: Path) -> State:
    """As `save_now`, with one more update while the files are written."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    wait = engine.start_saving(folder, WHOLE_STATE)
    state = state_of(engine)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    wait()
    return state


def save_error(setup: Setup, folder: Path, how: Literal["now", "background"]) -> tuple[str, int | None, float]:
    """Return type and number of the error that saving raises, and the loss of an update after it."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    try:
        if how == "now":
            engine.save(folder, WHOLE_STATE)
        else:
            engine.start_saving(folder, WHOLE_STATE)()
        raise AssertionError("no error")
    except OSError as error:
        result = engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
        return type(error).__name__, error.errno, result.loss


def save_untrained(setup: Setup, folder: Path) -> State:
    """Write a checkpoint before the first update, and return the state after that update."""
    engine = make_engine(setup)
    engine.save(folder, WHOLE_STATE)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    return state_of(engine)


def load_and_train(setup: Setup, folder: Path, number: int) -> tuple[int, State, State]:
    """Return version and state after loading into other weights, and the state after `number` more updates if there are any."""
    engine = make_engine(replace(setup, seed=setup.seed + 1))
    engine.load(folder, WHOLE_STATE)
    version, loaded = engine.version, state_of(engine)
    for _ in range(number):
        engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    return version, loaded, state_of(engine) if number else {}


def score_after_loading(setup: Setup, folder: Path) -> torch.Tensor | None:
    """Return the log-probs of the loaded weights, in an engine that has just scored with others."""
    engine = make_engine(replace(setup, seed=setup.seed + 1))
    engine.forward(sequences(), LogProbHead(TEMPERATURE))
    engine.load(folder, WHOLE_STATE)
    return engine.forward(sequences(), LogProbHead(TEMPERATURE)).logp


def load_error(setup: Setup, folder: Path, contents: list[str] = WHOLE_STATE) -> str:
    """Return what loading `folder` is refused with."""
    try:
        make_engine(setup).load(folder, contents)
    except UserError as error:
        return str(error)
    return "no error"


def export(setup: Setup, folder: Path) -> State:
    """Write a Hugging Face folder after an update, and return the whole weights, adapters merged in, on rank 0."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    engine.save_hf(load_tokenizer("builtin"), folder)
    engine.forward(sequences(), LogProbHead(TEMPERATURE))  # all ranks are still in step
    return {name: tensor.detach() for name, tensor in engine.merged_weights().items()}


def gather_copies(setup: Setup, folder: Path, updated: Path) -> list[State]:
    """Plain copies of the weights after loading them from `folder`, and after an update; the latter is saved to `updated`."""
    engine = make_engine(replace(setup, seed=setup.seed + 1))
    engine.load(folder, WHOLE_STATE)
    engine.forward(sequences(), LogProbHead(TEMPERATURE))  # may leave weights gathered
    copy, copies = make_model(replace(setup, seed=setup.seed + 1)), []
    for trained in (False, True):
        if trained:
            engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
        load_buckets(engine.weights(1000), model_tensors(copy), verify=True)
        copies.append({name: tensor.detach().clone() for name, tensor in state_tensors(copy).items()})
    engine.save(updated, WHOLE_STATE)
    return copies


def loaded_weights(setup: Setup, folder: Path) -> State:
    """Return the tensors of a plain model after loading the weights in `folder`, whoever wrote them."""
    model = make_model(replace(setup, seed=setup.seed + 1))
    load_trained_weights(model, folder)
    return {name: tensor.detach() for name, tensor in state_tensors(model).items()}


def run_captured(setup: Setup, folder: Path, *, level: str = "mix") -> int:
    """Take one update with a precision capture of it below `folder`, and return how many bits of the weights that changed: none."""
    plain = make_engine(setup)
    plain.train_mini_batch(sequences(setup.num_sequences), make_head(setup, plain), loss)
    rank, num_ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if setup.plan else (0, 1)
    options = PrecisionDebuggerConfig(level=level)  # pyright: ignore[reportArgumentType]
    role = RoleRequest("precision_debugger", folder, discrete=True)
    config = GlobalProfilerConfig(steps=[1], strict=True, global_tool_config=GlobalToolConfig(precision_debugger=options))
    journals = folder / ".journals"
    request = ProcessRequest(f"policy_rank_{rank}", "policy", rank, num_ranks, {"actor": role}, journals, config)
    engine, said = make_engine(setup), list[str]()
    profiler = ProcessProfiler(SpanRecorder(), request, said.append)
    profiler.models_of = lambda stage: engine.modules
    engine._probe = profiler
    profiler.begin_step(1)
    with profiler.stage(Stage.ACTOR_UPDATE, 1):
        engine.train_mini_batch(sequences(setup.num_sequences), make_head(setup, engine), loss)
    profiler.end_step(1, last=True)
    assert not said, said
    pairs = zip(plain.model.parameters(), engine.model.parameters(), strict=True)
    return sum(not torch.equal(Sharding.local(mine), Sharding.local(its)) for mine, its in pairs)


def first_nan(setup: Setup, place: Literal["weight", "token", "gradient"]) -> Finding | None:
    """What this rank's NaN sentinel finds of a NaN in one rank's shard, in row 3 or in its gradient."""
    engine, rows = make_engine(setup), [replace(row, name=f"row {index}") for index, row in enumerate(sequences())]
    assert engine.sharding is not None
    last = engine.sharding.rank == engine.sharding.num_ranks - 1
    if place == "weight":
        if last:
            with torch.no_grad():
                Sharding.local(engine.optimizer.parameters["model.layers.1.mlp.up_proj.weight"]).view(-1)[-1] = math.nan
    else:
        [mlp] = [module for name, module in engine.model.named_modules() if name.endswith("mlp") and ".0." in name]
        plain, seen = mlp.forward, {}
        engine.model.get_decoder().register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
        wanted = torch.tensor(rows[3].response_ids[:4])

        def spoiled(x: torch.Tensor) -> torch.Tensor:
            ids = seen["input_ids"][0]
            at = [start for start in range(len(ids) - 4) if torch.equal(ids[start : start + 4], wanted)]
            mask = torch.isin(torch.arange(len(ids)), torch.tensor(at))[:, None]
            if place == "token":
                return torch.where(mask, math.nan, plain(x))
            x = x.clone()
            if x.requires_grad:
                x.register_hook(lambda gradient: torch.where(mask, math.nan, gradient))
            return plain(x)

        mlp.forward = spoiled
    sentinel = engine._probe = Sentinel()
    sentinel.modules_of = lambda stage: engine.modules if stage is Stage.ACTOR_UPDATE else ()

    def update() -> bool:
        with sentinel.watch(Stage.ACTOR_UPDATE):
            engine.train_mini_batch(rows, LogProbHead(TEMPERATURE), loss)
        return True

    with contextlib.suppress(NonFiniteError):
        assert not update(), "nothing was found"
    sentinel.locate(Stage.ACTOR_UPDATE)
    with contextlib.suppress(NonFiniteError):
        assert not update(), "an update that is repeated moves no weights"
    return sentinel.take_finding()
