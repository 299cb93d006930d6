"""The FSDP training engine: packed micro-batches, gradient accumulation, one optimizer step, and its state on disk.

In one process the model runs as it is. Over several ranks (`sharding.py`) each is called with the same whole
mini-batch, runs a share of it, and returns the results of all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError
from pellucid.stages import NO_PROBE, Probe, Unit
from pellucid.training.checkpoint import StagedWriter, State, read_state, stored_shapes, write_state
from pellucid.training.common.balance import measure_balance, split_over_ranks
from pellucid.training.common.buckets import in_buckets
from pellucid.training.common.lora import base_weights, merged_tensors, state_tensors
from pellucid.training.common.models import autocast, model_tensors, output_head, save_hf_model
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.packing import ModelInput, TokenSequence, pack, packed_spans, split_micro_batches
from pellucid.training.protocol import LossFunction, Progress, TokenHead, TokenScores, UpdateResult, WeightBucket

if TYPE_CHECKING:  # a run in one process does without the second that importing it takes
    from pellucid.training.sharding import Sharding

_NUM_STEPS = "__num_steps__"


@dataclass(slots=True)
class MicroBatching:
    """How a mini-batch is cut: by tokens or by sequences."""

    max_tokens: int | None
    max_sequences: int | None


class FsdpEngine:
    """A `TrainingEngine` of a causal LM, or one with a scalar head, and its optimizer; a frozen one has None."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ScheduledAdamW | None,
        micro_batching: MicroBatching,
        *,
        device: torch.device,
        dtype: torch.dtype,
        sharding: "Sharding | None" = None,
        without_adapters: bool = False,
        balance_ranks: bool = True,
        probe: Probe = NO_PROBE,
    ) -> None:
        """Take over `model`, which `sharding` has wrapped if there is more than one rank.

        `without_adapters` runs it as it was before LoRA changed it (the reference policy). `balance_ranks` gives ranks
        about as many tokens each, not as many sequences in batch order. `probe` hears of micro- and mini-batches.
        """
        self.model, self.optimizer, self.micro_batching = model, optimizer, micro_batching
        self.device, self.dtype = device, dtype
        self.sharding, self._without_adapters = sharding, without_adapters
        self._balance_ranks, self._probe = balance_ranks, probe
        self.version, self.flops = 0, 0.0
        self._writer = StagedWriter()
        self.in_hand: list[str] = []
        self._num_parameters, self._num_trainable = model.num_parameters(), model.num_parameters(only_trainable=True)
        if optimizer is not None:
            optimizer.sharding = sharding

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model."""
        return (self.model,)

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, *, on_done: Progress | None = None
    ) -> TokenScores:
        """Compute the head's results for the responses, without gradient."""
        results = _Results(sequences, self.device)
        self.model.eval()
        with torch.no_grad():
            for rows, inputs in self._micro_batches(sequences, self._shares(sequences)):
                self.in_hand = [sequences[row].name for row in rows]
                with self._micro_batch(sequences, rows, inputs):
                    results.store(rows, inputs, self._run(inputs, head))
                if on_done and rows:
                    on_done(len(rows))
        self.in_hand = []
        if self.sharding is not None:
            self.sharding.reshard()
            results.add_up(self.sharding)
        self.flops += 2.0 * self._num_parameters * results.scores.num_input_tokens
        return results.scores

    def train_mini_batch(
        self, sequences: list[TokenSequence], head: TokenHead, loss: LossFunction, *, on_done: Progress | None = None
    ) -> UpdateResult:
        """Accumulate the gradient of the mini-batch, micro-batch by micro-batch, and apply one optimizer step."""
        with self._probe.unit(Unit.MINI_BATCH, rows=len(sequences)):
            return self._train_mini_batch(sequences, head, loss, on_done)

    def _train_mini_batch(
        self, sequences: list[TokenSequence], head: TokenHead, loss: LossFunction, on_done: Progress | None
    ) -> UpdateResult:
        assert self.optimizer is not None, "a frozen engine cannot train"
        results = _Results(sequences, self.device)
        self.model.train()
        self.optimizer.zero_grad()
        total_loss, failure = 0.0, None
        shares = self._shares(sequences)
        for rows, inputs in self._micro_batches(sequences, shares):
            self.in_hand = [sequences[row].name for row in rows]
            with self._micro_batch(sequences, rows, inputs):
                scores = self._run(inputs, head)
                if rows:
                    padded = scores.map(partial(inputs.scatter, num_rows=len(rows), width=results.width))
                    micro_loss = loss(rows, padded)
                else:  # keeps the ranks' collectives in step: every weight gets a gradient, of zero
                    micro_loss = 0.0 * torch.stack([values.sum() for values in scores.results.values()]).sum()
                self._probe.loss(micro_loss)
                value = float(micro_loss.detach())
                if rows and not math.isfinite(value):
                    failure = failure or NonFiniteError("loss", value, rows)
                if self.sharding is not None:
                    micro_loss = micro_loss * self.sharding.num_ranks  # gradients are averaged, the loss is a sum
                micro_loss.backward()
                total_loss += value if rows else 0.0
                results.store(rows, inputs, scores)
            if on_done and rows:
                on_done(len(rows))
        self.in_hand = []
        if self.sharding is not None:
            total_loss = self._agree(total_loss, failure)
            results.add_up(self.sharding)
        elif failure is not None:
            raise failure
        with self._probe.unit(Unit.OPTIMIZER_STEP):
            grad_norm = self.optimizer.clip()
            if not math.isfinite(grad_norm):
                raise NonFiniteError("grad_norm", grad_norm, list(range(len(sequences))))
            lr = self.optimizer.step()
            weight_norm = self.optimizer.weight_norm()
            if not math.isfinite(weight_norm):
                raise NonFiniteError(UPDATED_WEIGHTS, weight_norm, list(range(len(sequences))))
        # Forward and the gradient of activations go through every weight, the gradient of weights only to trained ones.
        self.flops += (4.0 * self._num_parameters + 2.0 * self._num_trainable) * results.scores.num_input_tokens
        self.version += 1
        balance = measure_balance(sequences, shares) if len(shares) > 1 else None
        return UpdateResult(results.scores, total_loss, grad_norm, lr, balance)

    def _agree(self, loss: float, failure: NonFiniteError | None) -> float:
        """Return the loss of all ranks together.

        Raises:
            NonFiniteError: on every rank, the failure of the lowest that has one.
        """
        assert self.sharding is not None
        total = float(self.sharding.sum(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        if math.isfinite(total):
            return total
        found = self.sharding.first(None if failure is None else (failure.value, failure.rows))
        assert found is not None
        raise NonFiniteError("loss", *found)

    @torch.no_grad()
    def predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        """Return the final hidden states [M, H] that predict the response tokens, without gradient."""
        return self._gathered(lambda: self._predicting_states(inputs))

    @torch.no_grad()
    def head_weight(self) -> torch.Tensor:
        """Return the output head [V, H]."""
        if self.sharding is None:
            return output_head(self.model).weight.detach().to(self.dtype)
        # A copy: the gathered weight's memory is freed when the pass is over.
        return self._gathered(lambda: output_head(self.model).weight.detach().to(self.dtype, copy=True))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return what is trained: whole tensors, or over several ranks this one's shards of them."""
        if self.sharding is not None:
            self.sharding.reshard()
        return {name: tensor.detach() for name, tensor in model_tensors(self.model).items()}

    def _state(self, contents: Sequence[str]) -> State:
        """Return the asked-for parts of the state."""
        state: State = {}
        if "model" in contents:
            state["model"] = self._tensors()
        if "optimizer" in contents and self.optimizer is not None:
            steps = torch.tensor([self.optimizer.num_steps, self.version])
            state["optimizer"] = {**self.optimizer.state_tensors(), _NUM_STEPS: steps}
        return state

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write `model.safetensors` and `optimizer.safetensors`, bit for bit; of several ranks, shards.

        Over several ranks every one calls it with the same folder, which they share.
        """
        write_state(folder, self._state(contents), over_ranks=self.sharding is not None)

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save what `save` does in the background; returns a function that waits until all of it is written."""
        group = None if self.sharding is None else self.sharding.background_group()
        write = partial(write_state, folder, over_ranks=group is not None, group=group)
        return self._writer.start(self._state(contents), write)

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights in whole tensors, adapters merged in; over several ranks on the CPU of rank 0 alone.

        Every rank calls it.
        """
        if self.sharding is None:
            return merged_tensors(self.model)
        self.sharding.reshard()
        gathered = {}
        for name, tensor in state_tensors(self.model).items():  # one at a time
            whole = self.sharding.whole(tensor)
            if self.sharding.rank == 0:
                gathered[name] = whole.detach().to("cpu", copy=True)
        return merged_tensors(self.model, gathered)

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads; over several ranks every one calls it, and rank 0 writes."""
        tensors = self.merged_weights()
        if tensors:
            save_hf_model(self.model, tokenizer, folder, tensors=tensors)

    def weights(self, bucket_bytes: int, *, digests: bool = True) -> Iterator[WeightBucket]:
        """Yield the trained weights in buckets; over several ranks every one takes all of them."""
        whole = (lambda tensor: tensor) if self.sharding is None else self.sharding.whole
        tensors = ((name, whole(tensor)) for name, tensor in self._tensors().items())
        return in_buckets(tensors, bucket_bytes, digests=digests)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`.

        Raises:
            UserError: a part is not there, or its model is another.
        """
        optimizer = self.optimizer if "optimizer" in contents else None
        state: State = {"model": self._tensors()} if "model" in contents else {}
        with nullcontext() if optimizer is None else optimizer.moments_at_hand():
            if optimizer is not None:
                steps = torch.zeros(2, dtype=torch.int64)
                names = stored_shapes(folder).get("optimizer", {}).keys() - {_NUM_STEPS}
                state["optimizer"] = {**optimizer.make_state(sorted(names)), _NUM_STEPS: steps}
            read_state(folder, state, over_ranks=self.sharding is not None)
        if optimizer is not None:
            optimizer.num_steps, self.version = state["optimizer"][_NUM_STEPS].tolist()

    def _shares(self, sequences: list[TokenSequence]) -> list[list[int]]:
        """Return the rows that each rank runs; every rank finds the same."""
        if self.sharding is None:
            return [list(range(len(sequences)))]
        return split_over_ranks(sequences, self.sharding.num_ranks, balance=self._balance_ranks)

    def _micro_batches(
        self, sequences: list[TokenSequence], shares: list[list[int]]
    ) -> Iterator[tuple[list[int], ModelInput]]:
        """Yield this rank's micro-batches and their rows: as many on every rank, the last ones of some without rows."""
        sharding, cut = self.sharding, self.micro_batching
        mine = shares[0 if sharding is None else sharding.rank]
        own = [sequences[row] for row in mine]
        parts = split_micro_batches(own, max_tokens=cut.max_tokens, max_sequences=cut.max_sequences)
        micro_batches = [[mine[index] for index in part] for part in parts]
        # Asked before the first pass, on every rank.
        missing = 0 if sharding is None else sharding.largest(len(micro_batches)) - len(micro_batches)
        for rows in micro_batches:
            yield rows, pack([sequences[row] for row in rows], self.device)
        # A token of this rank's own rows: where it makes a NaN, these rows have made one before.
        prompt = sequences[mine[0] if mine else 0].prompt_ids[:1] if sequences else [0]
        for _ in range(missing):
            yield [], pack([TokenSequence(prompt, prompt, 0)], self.device)

    def _micro_batch(
        self, sequences: list[TokenSequence], rows: list[int], inputs: ModelInput
    ) -> AbstractContextManager[object]:
        """Return the context round a micro-batch that tells the profiler what is in it."""
        spans = lambda: packed_spans([sequences[row] for row in rows]) if rows else []  # noqa: E731
        return self._probe.unit(Unit.MICRO_BATCH, spans, rows=len(rows), tokens=inputs.num_tokens)

    def _run(self, inputs: ModelInput, head: TokenHead) -> TokenScores:
        """Return the head's [M] results for one micro-batch."""

        def compute() -> dict[str, torch.Tensor]:
            results = head(self.model, self._predicting_states(inputs), inputs, self.dtype).results
            self._probe.results(**results)
            return results

        # As a dict: FSDP looks for the tensors in what a pass returns, to know when their backward pass begins.
        return TokenScores(self._gathered(compute))

    def _gathered(self, compute: Callable[[], Any]) -> Any:
        return compute() if self.sharding is None else self.sharding.run(compute)

    def _predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        with self.autocast(), base_weights(self.model) if self._without_adapters else nullcontext():
            hidden = self.model.get_decoder()(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
            ).last_hidden_state
        return hidden.flatten(0, 1)[inputs.predict_index]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes."""
        return autocast(self.device, self.dtype)


class _Results:
    """The [B, T] results of a mini-batch, filled in micro-batch by micro-batch."""

    def __init__(self, sequences: list[TokenSequence], device: torch.device) -> None:
        self.width = max((len(s.response_ids) for s in sequences), default=0)
        self.scores, self._num_rows, self._device = TokenScores({}), len(sequences), device

    def store(self, rows: list[int], inputs: ModelInput, micro: TokenScores) -> None:
        at = (torch.tensor(rows, device=self._device)[inputs.row], inputs.column) if rows else ()
        for name, values in micro.results.items():
            if name not in self.scores.results:
                self.scores.results[name] = torch.zeros(self._num_rows, self.width, device=self._device)
            whole = self.scores.results[name]
            if rows:
                whole[at] = values.detach()
        if rows:
            self.scores.num_input_tokens += inputs.num_tokens

    def add_up(self, sharding: "Sharding") -> None:
        """Add the rows that other ranks ran; each row is one rank's and zero on all others."""
        for whole in self.scores.results.values():
            sharding.sum(whole)
        num_tokens = torch.tensor(self.scores.num_input_tokens, device=self._device)
        self.scores.num_input_tokens = int(sharding.sum(num_tokens))
