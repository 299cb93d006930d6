"""Captures of a small model computed in numpy, with faults planted where a test wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pellucid.precision.dump import About, Entry, Pass, StageDump, TensorStats, write_dump
from pellucid.stages import TokenSpan

Array = np.ndarray
HIDDEN, VOCABULARY, LAYERS = 32, 50, 3
Fault = Callable[[Array, int], Array]
"""(values, number of the pass) → values."""


def bf16(values: Array, number: int = 0) -> Array:
    """Round to bfloat16, to nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def scaled(factor: float = 1.01, of_pass: int | None = None) -> Fault:
    return lambda values, number: values * np.float32(factor) if of_pass in (None, number) else values


def stats_of(values: Array, *, dtype: str | None = None, requires_grad: bool = False, native: bool = True) -> TensorStats:
    wide = values.astype(np.float64)
    is_nan, name = np.isnan(wide).any(), dtype or {"f": "torch.float32", "i": "torch.int64"}[values.dtype.kind]
    with np.errstate(invalid="ignore"):
        figures = [np.nan] * 4 if is_nan else [wide.min(), wide.max(), wide.mean(), np.sqrt((wide**2).sum())]
    counts: dict[str, Any] = {}
    if native:
        small = (np.abs(wide) > 0) & (np.abs(wide) < np.finfo(np.float32).tiny)
        counts = {
            "num_nan": int(np.isnan(wide).sum()), "num_inf": int(np.isinf(wide).sum()), "num_zero": int((wide == 0).sum()),
            "num_subnormal": int(small.sum()), "checksum": hashlib.sha256(values.tobytes()).hexdigest()[:16],
        }  # fmt: skip
    return TensorStats(name, values.shape, *map(float, figures), requires_grad=requires_grad, **counts)


@dataclass
class Model:
    """Embedding, three layers of norm, attention and mlp, and a norm; `faults` act on what a name says:

    `<module>:made` (the weight that the optimizer makes) and `<module>:clipped` (the gradient that it gets) get the number of the step;
    `<module>`: its output; `<module>:input`; `<module>:weight`; `<module>:grad` (what it sends back); `<module>:weight_grad`; `loss`
    (the gradient that the loss sends back).
    """

    seed: int = 0
    faults: dict[str, Fault] = field(default_factory=dict)
    low: set[str] = field(default_factory=set)
    """Modules that compute in bf16; `all`: every one."""
    noise: float = 0.0
    """Relative error that every output gets, as another order of additions makes."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shape = {"embed": (VOCABULARY, HIDDEN)} | {
            f"layers.{layer}.{part}": (HIDDEN, HIDDEN) for layer in range(LAYERS) for part in ("attn", "mlp")
        }
        self.weights = {name: random.normal(size=size).astype(np.float32) / np.float32(6) for name, size in shape.items()}
        self._noise = np.random.default_rng(1 + self.seed)

    def at(self, name: str, values: Array, number: int) -> Array:
        return self.faults[name](values, number).astype(values.dtype) if name in self.faults else values

    def out(self, name: str, values: Array, number: int) -> Array:
        if self.noise:
            values = values * (1 + self.noise * self._noise.normal(size=values.shape)).astype(np.float32)
        if name in self.low or "all" in self.low:
            values = bf16(values)
        return self.at(name, values, number)

    def dtype(self, name: str) -> str:
        return "torch.bfloat16" if name in self.low or "all" in self.low else "torch.float32"


class Recorder:
    """Makes entries and sums over samples while the model runs."""

    def __init__(self, *, native: bool = True, children_first: bool = True) -> None:
        self.entries: list[Entry] = []
        self.native, self.children_first = native, children_first
        self._sums: list[tuple[str, int, list[tuple[float, float, int]]]] = []
        self.passes: list[Pass] = []

    def call(self, name: str, parent: str | None, groups: dict[str, Any]) -> None:
        self.entries.append(Entry(name, parent, groups))

    def tensor(self, name: str, path: str, values: Array, dtype: str | None = None) -> TensorStats:
        number = len(self.passes) - 1
        spans = self.passes[number].spans
        if self.native and spans:
            parts = [values[0, span.start : span.start + span.length].astype(np.float64) for span in spans]
            sums = [(float(part.sum()), float((part**2).sum()), int((~np.isfinite(part)).sum())) for part in parts]
            self._sums.append((f"{name}|{path}", number, sums))
        return stats_of(values, dtype=dtype, native=self.native)

    def samples(self) -> pa.Table | None:
        if not self.native:
            return None
        first = np.cumsum([0, *(len(one.spans) for one in self.passes)])
        rows = [(name, first[number] + at, *sums) for name, number, spans in self._sums for at, sums in enumerate(spans)]
        names, *numbers = zip(*rows) if rows else [()] * 5
        columns = dict(zip(("span", "sum", "square_sum", "num_bad"), numbers))
        return pa.table({"tensor": pa.array(names, pa.string()).dictionary_encode(), **columns})


def run_pass(model: Model, recorder: Recorder, ids: Array, one: Pass, *, backward: bool = False) -> Array:
    """One pass; attention looks at the token alone, so that packed and one by one agree. Returns the last hidden states."""
    recorder.passes.append(one)
    one.first_entry = len(recorder.entries)
    number = len(recorder.passes) - 1
    root = f"Module.model.TinyModel.forward.{number}"
    placeholder = Entry(root, None, {})
    if not recorder.children_first:
        recorder.entries.append(placeholder)

    def module(name: str, kind: str, parent: str, given: Array, compute: Callable[[Array, Array | None], Array]) -> Array:
        entry = f"Module.model.{name}.{kind}.forward.{number}"
        given = model.at(f"{name}:input", given, number)
        weight = model.weights.get(name)
        if weight is not None:
            weight = model.at(f"{name}:weight", weight, number)
        result = model.out(name, compute(given, weight), number)
        groups: dict[str, Any] = {
            "input_args": [recorder.tensor(entry, "input_args.0", given)],
            "input_kwargs": {},
            "output": [recorder.tensor(entry, "output.0", result, model.dtype(name))],
            "parameters": {},
        }
        if weight is not None:
            groups["parameters"]["weight"] = stats_of(weight, requires_grad=True, native=recorder.native)
        recorder.call(entry, parent, groups)
        return result

    def norm(values: Array, _: object) -> Array:
        with np.errstate(invalid="ignore"):
            return values / np.sqrt((values**2).mean(-1, keepdims=True) + np.float32(1e-6))

    hidden = module("embed", "Embedding", root, ids, lambda given, weight: weight[given])  # pyright: ignore[reportOptionalSubscript]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        parent = f"Module.model.{name}.TinyLayer.forward.{number}"
        given, at = hidden, len(recorder.entries)
        inner = module(f"{name}.norm", "Norm", parent, hidden, norm)
        inner = model.at(f"{name}:between", inner, number)
        hidden = hidden + module(f"{name}.attn", "Attention", parent, inner, lambda given, weight: given @ weight)
        hidden = hidden + module(f"{name}.mlp", "Mlp", parent, hidden, lambda given, weight: np.tanh(given @ weight))
        hidden = model.at(name, hidden, number)
        groups = {
            "input_args": [recorder.tensor(parent, "input_args.0", given)], "input_kwargs": {},
            "output": [recorder.tensor(parent, "output.0", hidden)], "parameters": {},
        }  # fmt: skip
        place = len(recorder.entries) if recorder.children_first else at
        recorder.entries.insert(place, Entry(parent, root, groups))
    hidden = module("norm", "Norm", root, hidden, norm)
    placeholder.groups = {
        "input_args": [], "input_kwargs": {"input_ids": recorder.tensor(root, "input_kwargs.input_ids", ids)},
        "output": {"last_hidden_state": recorder.tensor(root, "output.last_hidden_state", hidden)}, "parameters": {},
    }  # fmt: skip
    if recorder.children_first:
        recorder.entries.append(placeholder)
    if backward:
        run_backward(model, recorder, hidden, number)
    return hidden


def run_backward(model: Model, recorder: Recorder, hidden: Array, number: int) -> None:
    """A chain of modules backwards, recorded as msprobe does: gradients of parameters first, parents missing in part."""
    gradient = model.at("loss", hidden * np.float32(0.01), number)
    for layer in reversed(range(LAYERS)):
        parent = f"Module.model.layers.{layer}.TinyLayer.backward.{number}"
        came_in = gradient
        for part, kind in (("mlp", "Mlp"), ("attn", "Attention")):
            name = f"layers.{layer}.{part}"
            prefix = f"Module.model.{name}.{kind}"
            incoming = model.at(f"{name}:incoming", gradient, number)
            outgoing = model.at(f"{name}:grad", incoming @ model.weights[name].T, number)
            of_weight = model.at(f"{name}:weight_grad", incoming[0].T @ incoming[0], number)
            recorder.call(f"{prefix}.parameters_grad.{number}", None, {"weight": [stats_of(of_weight, native=recorder.native)]})
            recorder.call(
                f"{prefix}.backward.{number}", parent if part == "mlp" else None,
                {"input": [recorder.tensor(f"{prefix}.backward.{number}", "input.0", incoming)],
                 "output": [recorder.tensor(f"{prefix}.backward.{number}", "output.0", outgoing)]},
            )  # fmt: skip
            gradient = incoming + outgoing
        recorder.call(parent, None, {"input": [recorder.tensor(parent, "input.0", came_in)],
                                     "output": [recorder.tensor(parent, "output.0", gradient)]})  # fmt: skip


def run_optimizer(model: Model, recorder: Recorder, step: int) -> None:
    """What the optimizer gets and makes of each weight; the weights of the passes stay as they are."""
    for name in model.weights:
        kind = {"attn": "Attention", "mlp": "Mlp"}.get(name.rpartition(".")[2], "Embedding")
        gradient = model.at(f"{name}:clipped", model.weights[name] * np.float32(0.01), step)
        made = model.at(f"{name}:made", model.weights[name] * np.float32(1 + 0.001 * step), step)
        if model.noise:
            made = made * (1 + model.noise * model._noise.normal(size=made.shape)).astype(np.float32)
        groups = {"input": [{"weight": stats_of(gradient)}], "output": [{"weight": stats_of(made)}]}
        recorder.call(f"Module.model.{name}.{kind}.optimizer.{step}", None, groups)


@dataclass(frozen=True)
class Sequence:
    """A sample: its prompt is shared by all samples of one uid."""

    uid: str
    sample: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.uid} sample {self.sample}"


def make_batch(num_prompts: int = 2, samples: int = 2, seed: int = 3) -> list[Sequence]:
    random = np.random.default_rng(seed)
    batch = []
    for prompt in range(num_prompts):
        ids = tuple(random.integers(0, VOCABULARY, 4 + prompt).tolist())
        batch += [
            Sequence(f"p{prompt}", sample, ids, tuple(random.integers(0, VOCABULARY, 5 + sample).tolist()))
            for sample in range(samples)
        ]
    return batch


def packed(sequences: list[Sequence]) -> tuple[Array, Pass]:
    """Token ids [1, N] of a micro-batch, each prompt once, and whose they are."""
    ids: list[int] = []
    spans: list[TokenSpan] = []
    for sequence in sequences:
        if sequence.uid not in {span.sample for span in spans}:
            spans.append(TokenSpan(sequence.uid, "prompt", len(ids), len(sequence.prompt), 0))
            ids += sequence.prompt
        fed = sequence.response[:-1]
        spans.append(TokenSpan(sequence.name, "response", len(ids), len(fed), len(sequence.prompt)))
        ids += fed
    return np.array([ids]), Pass("micro_batch", spans)


def training_dump(
    model: Model, micro_batches: list[list[Sequence]], *, stage: str = "actor_update", step: int = 1, rank: int = 0, num_ranks: int = 1,
    mini_batches: tuple[int, ...] = (), **options: bool,
) -> StageDump:  # fmt: skip
    recorder = Recorder(**options)
    starts = mini_batches or (0,)
    for number, sequences in enumerate(micro_batches):
        ids, one = packed(sequences)
        run_pass(model, recorder, ids, one, backward=stage == "actor_update")
        if stage == "actor_update" and recorder.native and number + 1 in (*starts[1:], len(micro_batches)):
            run_optimizer(model, recorder, sum(start <= number for start in starts) - 1)
    return _dump(recorder, stage, step, rank, num_ranks, mini_batches)


def rollout_dump(model: Model, batch: list[Sequence], *, step: int = 1, rank: int = 0) -> StageDump:
    """One prefill of all prompts, then decode steps of all rows that are not done."""
    recorder = Recorder()
    prompts = list({sequence.uid: sequence.prompt for sequence in batch}.items())
    starts = np.cumsum([0, *(len(prompt) for _, prompt in prompts)]).tolist()
    spans = [TokenSpan(uid, "prompt", at, len(prompt), 0) for (uid, prompt), at in zip(prompts, starts)]
    run_pass(model, recorder, np.array([[token for _, prompt in prompts for token in prompt]]), Pass("prefill", spans))
    for position in range(max(len(sequence.response) for sequence in batch) - 1):
        rows = [sequence for sequence in batch if position < len(sequence.response) - 1]
        spans = [TokenSpan(row.name, "response", at, 1, len(row.prompt) + position) for at, row in enumerate(rows)]
        run_pass(model, recorder, np.array([[row.response[position] for row in rows]]), Pass("decode_step", spans))
    return _dump(recorder, "rollout_generate", step, rank, 1, ())


def _dump(recorder: Recorder, stage: str, step: int, rank: int, num_ranks: int, mini_batches: tuple[int, ...]) -> StageDump:
    about = About(
        backend="native" if recorder.native else "msprobe", level="L0", stage=stage, step=step, role="actor", rank=rank, num_ranks=num_ranks,
        device="cpu", dtype="float32", model="tiny", passes=recorder.passes if recorder.native else [], mini_batches=list(mini_batches),
    )  # fmt: skip
    return StageDump(about, recorder.entries, recorder.samples())


def save(root: Path, dump: StageDump, replica: int | None = None) -> Path:
    """Write a capture where a run has it."""
    about = dump.about
    base = root if replica is None else root / f"rollout_replica{replica}"
    folder = base / f"step_{about.step}" / about.stage / f"step{about.call}" / f"rank{about.rank}"
    write_dump(folder, dump)
    return folder
