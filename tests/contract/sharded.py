"""What each rank runs in `test_sharded_engine.py`, and the same in one process: functions of plain arguments to plain results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from tiny import CPU, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import model_tensors
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence
from pellucid.training.fsdp import FsdpEngine, MicroBatching
from pellucid.training.protocol import TokenScores
from pellucid.training.sharding import ROOT_PREFIX, Sharding, ShardingPlan

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained; `plan` None is one process."""

    plan: ShardingPlan | None = None
    architecture: str = "llama"
    seed: int = 0
    max_tokens: int = 60
    num_sequences: int = 8
    lr: float = 1e-2
    grad_clip: float = 1e9
    dtype: torch.dtype = torch.float32


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequences(number: int) -> list[TokenSequence]:
    """Groups of three, one and four in mixed order, responses of 1 to 17 tokens, prompts of 3 to 12."""
    prompts = {0: tokens(7, 100), 1: tokens(3, 101), 2: tokens(12, 102)}
    rows = [(0, 9), (2, 4), (0, 1), (1, 17), (2, 11), (0, 6), (2, 1), (2, 12)]
    return [TokenSequence(prompts[group], tokens(length, row), group) for row, (group, length) in enumerate(rows)][:number]


def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
    """A loss in which every row has another weight: a row that lands at another's place shows."""
    assert scores.logp is not None
    return ((scores.logp.square() - scores.logp).sum(dim=1) * (torch.tensor(rows) + 1)).sum() / 500


def make_model(setup: Setup) -> PreTrainedModel:
    return tiny_model(setup.architecture, seed=setup.seed)


def make_engine(setup: Setup, model: PreTrainedModel | None = None) -> FsdpEngine:
    model = make_model(setup) if model is None else model
    sharding = None if setup.plan is None else Sharding(model, setup.plan, CPU)
    named = dict(model.named_parameters()) if sharding is None else sharding.parameters()
    named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    optimizer = ScheduledAdamW(named, Schedule(setup.lr, 0, 100), 0.01, (0.9, 0.999), setup.grad_clip)
    cut = MicroBatching(setup.max_tokens, None)
    return FsdpEngine(model, optimizer, cut, device=CPU, dtype=setup.dtype, sharding=sharding)


def updates(setup: Setup, number: int = 3) -> list[tuple[torch.Tensor, float, float, int]]:
    """(log-probs, loss, gradient norm, tokens) of some updates in a row, and the log-probs after the last."""
    engine, rows = make_engine(setup), sequences(setup.num_sequences)
    head = LogProbHead(TEMPERATURE)
    before = engine.forward(rows, head)
    results: list[Any] = [(before.logp, 0.0, 0.0, before.num_input_tokens)]
    for _ in range(number):
        result = engine.train_mini_batch(rows, head, loss)
        results.append((result.scores.logp, result.loss, result.grad_norm, result.scores.num_input_tokens))
    after = engine.forward(rows, head)
    return [*results, (after.logp, 0.0, 0.0, after.num_input_tokens)]


def trained_state(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Weights and moments of the whole model, on rank 0."""
    if engine.sharding is None:
        assert engine.optimizer is not None
        return {name: tensor.detach() for name, tensor in model_tensors(engine.model).items()} | engine.optimizer.state_tensors()
    assert engine.optimizer is not None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    root, names = engine.sharding.root, engine.sharding.tensor_names
    tensors: dict[str, Any] = get_model_state_dict(root, options=options)
    moments: Any = get_optimizer_state_dict(root, engine.optimizer.adamw, options=options).get("state", {})
    if engine.sharding.rank:
        return {}
    return {name: tensors[ROOT_PREFIX + name] for name in names} | {
        f"{name.removeprefix(ROOT_PREFIX)}.{key}": value for name, values in moments.items() for key, value in values.items()
    }


def train_and_save(setup: Setup, folder: Path, *, background: bool) -> dict[str, torch.Tensor]:
    """One update, a checkpoint, the state that it should hold, and one more update while it is written."""
    engine = make_engine(setup)
    engine.train_mini_batch(sequences(8), LogProbHead(TEMPERATURE), loss)
    if background:
        wait = engine.start_saving(folder, ["model", "optimizer"])
    else:
        engine.save(folder, ["model", "optimizer"])
    state = {name: tensor.clone() for name, tensor in trained_state(engine).items()}
    engine.train_mini_batch(sequences(8), LogProbHead(TEMPERATURE), loss)
    if background:
        wait()
    return state


def load_and_train(setup: Setup, folder: Path, number: int) -> tuple[int, dict, dict, list[tuple[float, float, float]]]:
    """Version and state after loading; the state after `number` more updates, and their (loss, norm, lr)."""
    engine = make_engine(setup)
    engine.load(folder, ["model", "optimizer"])
    version = engine.version
    loaded = {name: tensor.clone() for name, tensor in trained_state(engine).items()}
    results = [engine.train_mini_batch(sequences(8), LogProbHead(TEMPERATURE), loss) for _ in range(number)]
    trained = {name: tensor.clone() for name, tensor in trained_state(engine).items()}
    return version, loaded, trained, [(result.loss, result.grad_norm, result.lr) for result in results]


def save_now(setup: Setup, folder: Path) -> dict[str, torch.Tensor]:
    """See `train_and_save`."""
    return train_and_save(setup, folder, background=False)


def save_in_background(setup: Setup, folder: Path) -> dict[str, torch.Tensor]:
    """See `train_and_save`."""
    return train_and_save(setup, folder, background=True)
