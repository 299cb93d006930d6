"""The NaN sentinel: flags NaN and Inf from outside the engines, and locates them when the stage is run again.

It is a `Probe` beside the profiler's, and has hooks on the modules of the stage that it watches. The flags stay on the
device and are looked at where a stage ends, and in updates before each optimizer step. What is flagged raises
`NonFiniteError`; the run saves what the stage was given and runs it again under `locate`: then each pass is captured,
and the first whose capture holds NaN or Inf is kept and read.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError
from pellucid.precision.capture import LOSS_CALLS, NativeSession, class_name
from pellucid.precision.dump import About, StageDump
from pellucid.stages import PREFILL, ROLE_OF, Stage, TokenSpans, Unit

HEAD, LOSS, BATCH = "the head", "the loss", "the batch"
_MAX_SHOWN = 4
_NOT_FOUND_AGAIN = (
    "the same passes, repeated at once, gave finite numbers in every module: what is made of those overflows (a sum, a "
    "norm, a softmax), or it is not reproducible (failing hardware, or a race)"
)
OUTPUT = "the output of a module"
MAX_KEPT = 4096
"""Flags after which they are looked at, so that a long generation does not fill the memory with them."""
MAX_LAYERS = 8
"""How many decoder layers have flags in generation."""
_RUNS_AS = {Stage.VALIDATE: Stage.ROLLOUT_GENERATE}
"""The stage whose models another stage runs."""
_UNIT_NAMES = {Unit.MICRO_BATCH: "micro-batch", Unit.DECODE_STEP: "decode step"}


@dataclass(slots=True)
class Finding:
    """The first place of a pass at which a value is not finite."""

    place: str
    """A module's name in the model (`model.layers.3.mlp.down_proj`), a parameter's, or `the loss`."""
    kind: str
    """The module's class; empty for what is no module."""
    direction: str
    """`forward`, `backward` or `optimizer`."""
    what: str
    """`NaN`, `Inf` or `NaN and Inf`."""
    cause: str
    """A clause on what is and what is not in order there: why it is this place."""
    tensor: str = ""
    """Which tensor, and how many of its values, e.g. `output.0: 3 NaN of 1,536 values`."""
    samples: list[str] = field(default_factory=list)
    """Whose tokens they belong to, e.g. `<uid> sample <n> (response)`; empty where the tensor has no token axis."""
    unit: str = ""
    """What the pass is: `micro-batch`, `prefill` or `decode step`; empty outside of passes."""
    index: int = 0
    """The pass's number among those of its kind, from 1."""
    order: tuple[int, int] = (0, 0)
    """Number of the pass, and place in it: smaller is earlier, also between ranks that run the same stage."""
    reproduced: bool = True
    """False where repeating the same passes gave finite numbers, or they could not be captured."""
    stage: str = ""
    step: int = 0
    rank: int = 0
    num_ranks: int = 1

    def sentence(self) -> str:
        """Return all of it in one sentence."""
        at = [f"{self.place} ({self.kind})" if self.kind else self.place, self.direction]
        if self.stage:
            at.append(f"of {self.stage}, step {self.step}")
        if self.num_ranks > 1:
            at.append(f"rank {self.rank}")
        if self.unit:
            at.append(f"{self.unit} {self.index}")
        at += [f"sample '{sample}'" for sample in self.samples[:_MAX_SHOWN]]
        if len(self.samples) > _MAX_SHOWN:
            at.append(f"and {len(self.samples) - _MAX_SHOWN} more")
        tensor = f" At {self.tensor}." if self.tensor else ""
        return f"{self.what} {'first ' if self.reproduced else ''}in {', '.join(at)}; {self.cause}.{tensor}"


def not_found_again(place: str, kind: str, what: str, direction: str = "forward") -> Finding:
    """Return the finding of a failure that no repetition has explained."""
    return Finding(place, kind, direction, what, _NOT_FOUND_AGAIN, reproduced=False)


def first_bad(dump: StageDump) -> Finding | None:
    """Return the first NaN or Inf of a capture in execution order, or None."""
    # Every run has findings' types at hand, and few ever read a capture.
    from pellucid.precision.compare import check_stage
    from pellucid.precision.divergence import REASONS, Kind
    from pellucid.precision.matching import Place

    if (found := check_stage(Place(dump.about.step, dump.about.stage, 0, "", ""), dump).divergence) is None:
        return None
    place, kind = {"scores": HEAD, "loss": LOSS}.get(found.module, found.module), found.module_class
    if found.kind in (Kind.INPUTS, Kind.LOSS):
        place, kind = BATCH if found.kind is Kind.INPUTS else LOSS, ""
    kinds = " and ".join(name for name in ("NaN", "Inf") if name in found.what.partition(" of ")[0])
    cause = REASONS[found.kind].format(clean="finite", seen_at=found.seen_at)
    tensor, order = f"{found.path}: {found.what}", (0, found.position)
    return Finding(place, kind, found.direction, kinds, cause, tensor, found.samples, order=order)


def earliest(findings: Iterable[Finding | None]) -> Finding | None:
    """Return the earliest of the ranks' findings, and of equals the lowest rank's; reproduced ones come first."""
    found = [finding for finding in findings if finding is not None]
    return min(found, key=lambda one: (not one.reproduced, not one.index, one.order, one.rank), default=None)


class Flags:
    """The smallest and the largest number of what modules returned, kept on their device; they show any NaN and Inf."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._of: list[tuple[str, str, str, int]] = []
        """Of each flag place and class of the module, unit and number of the pass."""
        self._passes: Counter[str] = Counter()
        self._unit = ""
        self._first: Finding | None = None
        self._last: Callable[[], torch.Tensor | None] = lambda: None
        """Returns the tensor that was flagged last, while it lives."""

    def begin_pass(self, unit: str) -> None:
        """Count a pass; what follows belongs to it."""
        self._unit = unit
        self._passes[unit] += 1
        if len(self._kept) > MAX_KEPT:
            self.first()

    def add(self, place: str, kind: str, output: Any) -> None:
        """Flag the tensors of a module's result without waiting for them."""
        if isinstance(output, Mapping | tuple | list):
            for value in output.values() if isinstance(output, Mapping) else output:
                self.add(place, kind, value)
            return
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
            return
        # A module that returns what its last part did has that one's flag.
        if self._first is None and output is not self._last():
            self._last = weakref.ref(output)
            self._kept += output.detach().aminmax()
            self._of += [(place, kind, self._unit, self._passes[self._unit])] * 2

    def first(self) -> Finding | None:
        """Return the first flag that is raised, in the order in which modules returned; waits for the device."""
        values = torch.stack(self._kept).tolist() if self._kept else []
        raised = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
        if self._first is None and raised is not None:
            place, kind, unit, index = self._of[raised]
            self._first = not_found_again(place, kind, "NaN" if math.isnan(values[raised]) else "Inf")
            self._first.unit, self._first.index, self._first.order = unit, index, (index, raised)
        self._kept.clear()
        self._of.clear()
        return self._first


class Sentinel:
    """The NaN sentinel of one process; on several ranks all must call theirs alike. It is a `Probe`."""

    def __init__(self) -> None:
        self.modules_of: Callable[[Stage], tuple[nn.Module, ...]] = lambda stage: ()
        """The modules that a stage runs in this process."""
        self.dump: StageDump | None = None
        """The capture of the pass that a repetition has found to be wrong."""
        self._flags: Flags | None = None
        self._models: tuple[nn.Module, ...] = ()
        """Those of the stage that is watched."""
        self._locating: Stage | None = None
        self._session: NativeSession | None = None
        """The capture of the pass in hand, where a stage is repeated."""
        self._captures = False
        """Whether the passes that come are captured: none was wrong so far, and all captures succeeded."""
        self._passes: Counter[str] = Counter()
        self._finding: Finding | None = None

    @contextmanager
    def watch(self, stage: Stage | None) -> Iterator[None]:
        """Enclose a stage that runs in this process; between `locate` and `take_finding`, its repetition.

        Raises:
            NonFiniteError: something in it is not finite, on whichever rank; every rank raises it.
        """
        stage = self._locating or (stage and _RUNS_AS.get(stage, stage))
        models = () if stage is None else self.modules_of(stage)
        self._models = models or self._models
        if self._locating or not models:
            yield
            return
        flags, before = Flags(), self._flags

        def hook(place: str, module: nn.Module, args: Any, output: Any) -> None:
            flags.add(place, class_name(module), output)

        handles = [
            module.register_forward_hook(partial(hook, path or "the model"))
            for model in models
            for path, module in flagged_modules(model, samples=stage is Stage.ROLLOUT_GENERATE)
        ]
        self._flags = flags
        try:
            yield
        except NonFiniteError as error:
            direction = "backward" if error.quantity.endswith("grad_norm") else "forward"
            outside = not_found_again(error.quantity, "", "NaN" if math.isnan(error.value) else "Inf", direction)
            self._finding = self._finding or flags.first() or outside
            self._on_any_rank(True)
            raise
        finally:
            self._flags = before
            for handle in handles:
                handle.remove()
        self._raise_flag(flags.first())

    def locate(self, stage: Stage) -> None:
        """Let the next stage that is watched, a repetition of one that failed, be searched for where it goes wrong."""
        self._locating, self.dump, self._captures = _RUNS_AS.get(stage, stage), None, True
        self._passes.clear()

    def take_finding(self) -> Finding | None:
        """Return what this rank has found of the failure, and flag again from now on."""
        finding, self._finding, self._locating = self._finding, None, None
        if finding is not None and dist.is_initialized():
            finding.rank, finding.num_ranks = dist.get_rank(), dist.get_world_size()
        return finding

    def unit(
        self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float
    ) -> AbstractContextManager[None]:
        """Enclose a unit of work; no optimizer step begins while a flag is raised.

        Raises:
            NonFiniteError: before an optimizer step, a flag is raised on some rank; always where the stage is repeated.
        """
        if unit is Unit.OPTIMIZER_STEP:
            return self._optimizer_step()
        return nullcontext() if spans is None else self._pass(_UNIT_NAMES[unit], spans)

    def forward_pass(self, spans: TokenSpans) -> AbstractContextManager[None]:
        """Enclose a prefill."""
        return self._pass(PREFILL, spans)

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Flag a head's results, or capture them."""
        if self._session is not None:
            self._session.results({name: tensor for name, tensor in tensors.items() if tensor is not None})
        elif self._flags is not None:
            self._flags.add(HEAD, "", tensors)

    def loss(self, value: torch.Tensor) -> None:
        """Capture a loss where a stage is repeated; a failure of the loss itself the engine raises."""
        if self._session is not None:
            self._session.results({"loss": value}, LOSS_CALLS)

    @contextmanager
    def _pass(self, unit: str, spans: TokenSpans) -> Iterator[None]:
        """Enclose a pass; in a repetition it is captured, unless an earlier one was wrong or could not be."""
        self._passes[unit] += 1
        if self._flags is not None:
            self._flags.begin_pass(unit)
        if not self._locating or not self._captures:
            yield
            return
        stage, now = self._locating, time.time()
        about = About(backend="native", level="L0", stage=str(stage), step=0, role=ROLE_OF[stage], started_at=now)
        self._session = session = NativeSession(self._models, about)
        with session:  # it keeps what it raises
            session.begin()
        session.begin_pass(spans, unit)
        try:
            yield
        finally:
            self._session = None
            with session:
                dump = session.end()
                if (finding := first_bad(dump)) is not None:
                    finding.unit, finding.index = unit, self._passes[unit]
                    finding.order = self._passes.total(), finding.order[1]
                    self._finding, self.dump, self._captures = finding, dump, False
            if self._captures and (error := session.error) is not None:
                self._captures = False
                self._finding = self._finding or not_found_again("an unknown place", "", "NaN or Inf")
                self._finding.cause = f"the capture of the repetition failed ({type(error).__name__}: {error})"

    @contextmanager
    def _optimizer_step(self) -> Iterator[None]:
        """Enclose an optimizer step, and name the weights that it spoils: it cannot be repeated."""
        if self._locating:
            if self._captures:  # what is added up over passes and ranks is in none of their captures
                gradients = [(name, parameter.grad) for name, parameter in self._parameters()]
                cause = "the gradients of each pass are finite, their sum is not"
                self._finding = _first_bad_part(gradients, "backward", cause) or self._finding
            raise NonFiniteError("the repetition of an update", math.nan, [])
        if self._flags is not None:
            self._raise_flag(self._flags.first())
        try:
            yield
        except NonFiniteError as error:
            if error.quantity == UPDATED_WEIGHTS:
                cause = "the gradients of the optimizer step that made it were finite"
                self._finding = _first_bad_part(self._parameters(), "optimizer", cause)
            raise

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (named for model in self._models for named in model.named_parameters())

    def _raise_flag(self, flag: Finding | None) -> None:
        self._finding = flag or self._finding
        if self._on_any_rank(flag is not None):
            raise NonFiniteError(OUTPUT, math.inf if flag and flag.what == "Inf" else math.nan, [])

    def _on_any_rank(self, here: bool) -> bool:
        """Return whether it is so on any rank. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return here
        tensor = torch.tensor(int(here), device=next(self._models[0].parameters()).device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor)


def _first_bad_part(named: Iterable[tuple[str, Any]], direction: str, cause: str) -> Finding | None:
    """Return the first parameter, or gradient, of which this rank's part is not finite."""
    for name, tensor in named:
        own = torch.empty(0) if tensor is None else tensor.detach()
        own = own.to_local() if isinstance(own, DTensor) else own
        if num_bad := int((~own.isfinite()).sum()):
            what, counts = "NaN" if own.isnan().any() else "Inf", f"{num_bad:,} of {own.numel():,} values on this rank"
            return Finding(name, "parameter", direction, what, cause, counts)
    return None


def flagged_modules(model: Any, *, samples: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of a model that have flags: transformers' own, or a chunk of megatron-core's.

    In generation these are the decoder and a few of its layers: a decoding step is so short that a flag of each module
    would show, and NaN and Inf do not leave the stream that runs through the layers. Elsewhere what takes long to read
    and shows in the module around it has none: wide projections, and activations between them.
    """
    chosen, narrow = set[nn.Module](), 0
    if isinstance(model, PreTrainedModel):
        kinds, narrow = set(model._no_split_modules or []), model.config.get_text_config().hidden_size
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        chosen = {model.get_decoder(), *layers[:: math.ceil(len(layers) / MAX_LAYERS) or 1]}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shows = module.out_features <= narrow
        else:
            shows = bool([*module.children(), *module.parameters(recurse=False)])
        if module in chosen if samples else shows:
            yield path, module
