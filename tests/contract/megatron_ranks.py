"""What each rank runs in `test_megatron.py`: functions of plain arguments to plain results, as in `sharded.py`."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sharded import TEMPERATURE, WHOLE_STATE, Setup, State, Trace, loss, sequences
from tiny import CPU

from pellucid.errors import NonFiniteError, UserError
from pellucid.precision.capture import NativeSession
from pellucid.precision.dump import About
from pellucid.precision.sentinel import Sentinel
from pellucid.stages import Stage, Unit
from pellucid.training.common import logprobs
from pellucid.training.common.heads import LogProbHead, ValueHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import read_config
from pellucid.training.common.optimizer import Schedule
from pellucid.training.megatron.layout import MegatronLayout, ParallelSizes
from pellucid.training.protocol import TokenScores


@dataclass(frozen=True)
class Spread:
    """A model folder, how it is trained, and over which ranks."""

    folder: Path
    setup: Setup
    sizes: ParallelSizes
    options: dict[str, Any] = field(default_factory=dict)
    """Of `load_engine`."""


def make_engine(spread: Spread, fields: dict[str, Any] | None = None, **options: Any) -> Any:
    from megatron.core import parallel_state

    from pellucid.training.megatron.megatron_engine import Training, load_engine

    if parallel_state.model_parallel_is_initialized():  # by the test before, over groups that are gone
        parallel_state.destroy_model_parallel()
    setup, layout = spread.setup, MegatronLayout(spread.sizes, CPU)
    training = Training(Schedule(setup.lr, 0, 100), 0.01, (0.9, 0.999), setup.grad_clip)
    return load_engine(
        spread.folder,
        read_config(str(spread.folder), fields, trust_remote_code=False, field="model"),
        training,
        MicroBatching(setup.max_tokens, None),
        layout,
        setup.dtype,
        field="model",
        scalar=setup.role == "critic",
        **spread.options,
        **options,
    )


def head_of(setup: Setup) -> LogProbHead | ValueHead:
    return ValueHead() if setup.role == "critic" else LogProbHead(TEMPERATURE, with_entropy=True)


def weights_of(engine: Any) -> State:
    return {name: tensor.clone() for bucket in engine.weights(1000) for name, tensor in bucket.tensors.items()}


def run_updates(spread: Spread, number: int) -> Trace:
    engine, rows, head = make_engine(spread), sequences(spread.setup.num_sequences), head_of(spread.setup)
    scores, numbers = [engine.forward(rows, head)], []
    for _ in range(number):
        result = engine.train_mini_batch(rows, head, loss)
        scores.append(result.scores)
        numbers.append((result.loss, result.grad_norm, result.lr))
    scores.append(engine.forward(rows, head))
    assert engine.version == number
    results = [values for one in scores for values in one.results.values()]
    return Trace(results, [], numbers, weights_of(engine))


def run_in_small_chunks(spread: Spread, number: int, chunk_bytes: int) -> Trace:
    """The same where a micro-batch's log-probabilities take many chunks, which all ranks must cut alike."""
    with patch.object(logprobs, "CHUNK_BYTES", chunk_bytes):
        return run_updates(spread, number)


def seeds_of_layout(kind: str) -> list[int]:
    """Return what the random state of a device that is no CPU is seeded with."""
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    seeds: list[int] = []
    with patch.object(tensor_parallel, "model_parallel_cuda_manual_seed", seeds.append):
        MegatronLayout(ParallelSizes(), torch.device(kind))
    return seeds


def load_other_config(folder: Path, fields: dict[str, Any]) -> str:
    """Return the error of loading a model whose config says something else than its files."""
    try:
        make_engine(Spread(folder, Setup(), ParallelSizes()), fields)
    except UserError as error:
        return str(error)
    return "no error"


def save_and_go_on(spread: Spread, checkpoint: Path, contents: list[str] = WHOLE_STATE) -> tuple[State, State]:
    """Write a checkpoint after one update, in the background of another; return the weights after each."""
    engine, head = make_engine(spread), head_of(spread.setup)
    engine.train_mini_batch(sequences(), head, loss)
    saved = weights_of(engine)
    wait = engine.start_saving(checkpoint, contents)
    with ThreadPoolExecutor(1) as beside:  # as runs do: while others of its collectives are under way
        waiting = beside.submit(wait)
        if torch.distributed.get_rank() % 2:
            time.sleep(0.2)
        engine.train_mini_batch(sequences(), head, loss)
        waiting.result()
    return saved, weights_of(engine)


def load_and_go_on(spread: Spread, checkpoint: Path) -> tuple[int, State, State]:
    """Load a checkpoint over other weights; return its version, its weights, and those after another update."""
    engine, head = make_engine(spread), head_of(spread.setup)
    engine.load(checkpoint, WHOLE_STATE)
    version, loaded = engine.version, weights_of(engine)
    engine.train_mini_batch(sequences(), head, loss)
    return version, loaded, weights_of(engine)


def load_error(spread: Spread, checkpoint: Path, contents: list[str]) -> str:
    try:
        make_engine(spread).load(checkpoint, contents)
    except UserError as error:
        return str(error)
    return "no error"


def exact_kl(spread: Spread, reference: Path) -> torch.Tensor:
    """Return the KL of each token from another model on the same ranks."""
    engine, other = make_engine(spread), make_reference(replace(spread, folder=reference))
    return engine.forward(sequences(), LogProbHead(TEMPERATURE, reference=other)).results["kl"]


def make_reference(spread: Spread) -> Any:
    from pellucid.training.megatron.megatron_engine import load_engine

    model = read_config(str(spread.folder), None, trust_remote_code=False, field="model")
    layout = MegatronLayout(spread.sizes, CPU)
    return load_engine(spread.folder, model, None, MicroBatching(None, None), layout, torch.float32, field="model")


def run_broken(spread: Spread) -> tuple[tuple[str, list[int]], bool, float]:
    """An update whose loss is NaN on the ranks that have row 3, then a good one: error, whether it changed a bit, loss."""
    engine = make_engine(spread)
    before = weights_of(engine)

    def broken(rows: list[int], scores: TokenScores) -> torch.Tensor:
        return loss(rows, scores) * (float("nan") if 3 in rows else 1.0)

    try:
        engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), broken)
        raise AssertionError("no error")
    except NonFiniteError as error:
        caught = error.quantity, error.rows
    after = weights_of(engine)
    result = engine.train_mini_batch(sequences(), LogProbHead(TEMPERATURE), loss)
    return caught, any(not torch.equal(before[name], after[name]) for name in before), result.loss


def export(spread: Spread, folder: Path) -> None:
    from pellucid.training.common.models import load_tokenizer

    engine = make_engine(spread)
    engine.save_hf(load_tokenizer("builtin"), folder)


def loaded_into_transformers(folder: Path, checkpoint: Path, role: str) -> State:
    """Return the weights of a transformers model of `folder`, filled from a checkpoint, by their names in files."""
    from megatron.core import parallel_state

    from pellucid.training.checkpoint import load_trained_weights
    from pellucid.training.common.models import file_tensors, load_model, model_tensors
    from pellucid.training.common.value_models import load_value_model

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    model = (load_value_model if role == "critic" else load_model)(str(folder), device=CPU)
    load_trained_weights(model, checkpoint)
    return {name: tensor.detach().clone() for name, tensor in file_tensors(model, model_tensors(model).items())}


class _Captured:
    """A probe that captures all passes, as the profiler does."""

    def __init__(self) -> None:
        self.session: NativeSession | None = None

    def unit(self, unit: Unit, spans: Any = None, **_: Any) -> Any:
        assert self.session is not None
        if spans is not None:
            self.session.begin_pass(spans, str(unit))
        return nullcontext()

    def results(self, *_: Any, **__: Any) -> None:
        pass

    loss = forward_pass = results


def captured_spans(spread: Spread) -> dict[str, set[int]]:
    """Return the numbers of the spans of which each module's call, in an update, has read or made tokens."""
    probe = _Captured()
    engine = make_engine(spread, probe=probe)
    probe.session = session = NativeSession(engine.modules, About(backend="native", level="L0", stage="", step=0, role="", started_at=0))
    with session:
        session.begin()
    engine.train_mini_batch(sequences(), head_of(spread.setup), plain_loss)
    dump = session.end()
    assert session.error is None and dump.samples is not None
    found: dict[str, set[int]] = {}
    for tensor, span in zip(dump.samples["tensor"].to_pylist(), dump.samples["span"].to_pylist()):
        found.setdefault(tensor.partition("|")[0], set()).add(span)
    return found


def plain_loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
    return -scores.logp.sum()


def located(spread: Spread, rank: int, module: str) -> tuple[str, int, str] | None:
    """Spoil a module on one rank, and let the sentinel say which it is: name, index of the pass, rank's words."""
    sentinel = Sentinel()
    engine = make_engine(spread, probe=sentinel)
    sentinel.modules_of = lambda _: engine.modules
    if torch.distributed.get_rank() == rank:
        [spoiled] = [one for chunk in engine.modules for path, one in chunk.named_modules() if path == module]
        spoiled.register_forward_hook(lambda _, args, output: (output[0] * float("nan"), *output[1:]))
    with suppress(NonFiniteError), sentinel.watch(Stage.ACTOR_UPDATE):
        engine.train_mini_batch(sequences(), head_of(spread.setup), plain_loss)
    sentinel.locate(Stage.ACTOR_UPDATE)
    with suppress(NonFiniteError), sentinel.watch(Stage.ACTOR_UPDATE):
        engine.train_mini_batch(sequences(), head_of(spread.setup), plain_loss)
    finding = sentinel.take_finding()
    return None if finding is None else (finding.place, finding.index, finding.what)
