"""The FSDP training engine: packed micro-batches, gradient accumulation, one optimizer step, and its state on disk.

In one process the model runs as it is. Over several ranks (`sharding.py`) each is called with the same whole
mini-batch, runs a share of it, and returns the results of all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError
from pellucid.stages import NO_PROBE, Probe, Unit
from pellucid.training.checkpoint import StagedWriter, State, read_state, stored_shapes, write_state
from pellucid.training.common.balance import measure_balance
from pellucid.training.common.buckets import in_buckets
from pellucid.training.common.lora import base_weights, merged_tensors, state_tensors
from pellucid.training.common.mini_batch import MicroBatch, MicroBatching, MiniBatch
from pellucid.training.common.models import autocast, file_tensors, model_tensors, output_head, save_hf_model
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.packing import ModelInput, TokenSequence
from pellucid.training.protocol import (
    LossFunction,
    OutputLayer,
    Progress,
    TokenHead,
    TokenScores,
    UpdateResult,
    WeightBucket,
)

if TYPE_CHECKING:  # a run in one process does without the second that importing it takes
    from pellucid.training.sharding import Sharding

_NUM_STEPS = "__num_steps__"


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
        whole = self._mini_batch(sequences, head)
        self.model.eval()
        with torch.no_grad():
            for micro in self._micro_batches(whole):
                with micro.unit(self._probe):
                    whole.store(micro, self._run(micro.inputs, head))
                if on_done and micro.rows:
                    on_done(len(micro.rows))
        self.in_hand = []
        if self.sharding is not None:
            self.sharding.reshard()
            whole.add_up(self.sharding.sum)
        self.flops += 2.0 * self._num_parameters * whole.scores.num_input_tokens
        return whole.scores

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
        whole = self._mini_batch(sequences, head)
        self.model.train()
        self.optimizer.zero_grad()
        total_loss, failure = 0.0, None
        for micro in self._micro_batches(whole):
            with micro.unit(self._probe):
                scores = self._run(micro.inputs, head)
                micro_loss = micro.share_of_loss(scores, loss, whole.width)
                self._probe.loss(micro_loss)
                value = float(micro_loss.detach())
                if micro.rows and not math.isfinite(value):
                    failure = failure or NonFiniteError("loss", value, micro.rows)
                if self.sharding is not None:
                    micro_loss = micro_loss * self.sharding.num_ranks  # gradients are averaged, the loss is a sum
                micro_loss.backward()
                total_loss += value if micro.rows else 0.0
                whole.store(micro, scores)
            if on_done and micro.rows:
                on_done(len(micro.rows))
        self.in_hand = []
        if self.sharding is not None:
            total_loss = self.sharding.loss_of_all(total_loss, failure)
            whole.add_up(self.sharding.sum)
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
        self.flops += (4.0 * self._num_parameters + 2.0 * self._num_trainable) * whole.scores.num_input_tokens
        self.version += 1
        balance = measure_balance(sequences, whole.shares) if len(whole.shares) > 1 else None
        return UpdateResult(whole.scores, total_loss, grad_norm, lr, balance)

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

    def weights(self, bucket_bytes: int, *, digests: bool = True, merged: bool = False) -> Iterator[WeightBucket]:
        """Yield the trained weights in buckets; over several ranks every one takes all of them."""
        if merged:
            return in_buckets(self.merged_weights().items(), bucket_bytes, digests=digests)
        whole = (lambda tensor: tensor) if self.sharding is None else self.sharding.whole
        tensors = ((name, whole(tensor)) for name, tensor in self._tensors().items())
        return in_buckets(file_tensors(self.model, tensors), bucket_bytes, digests=digests)

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

    def _mini_batch(self, sequences: list[TokenSequence], head: TokenHead) -> MiniBatch:
        over = {} if self.sharding is None else {"rank": self.sharding.rank, "num_ranks": self.sharding.num_ranks}
        return MiniBatch(sequences, head, self.micro_batching, self.device, balance=self._balance_ranks, **over)

    def _micro_batches(self, whole: MiniBatch) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches: as many on every rank."""
        for micro in whole.micro_batches(int if self.sharding is None else self.sharding.largest):
            self.in_hand = [sequence.name for sequence in micro.sequences]
            yield micro

    def _run(self, inputs: ModelInput, head: TokenHead) -> TokenScores:
        """Return the head's [M] results for one micro-batch."""

        def compute() -> dict[str, torch.Tensor]:
            layer = OutputLayer(output_head(self.model))
            results = head(layer, self._predicting_states(inputs), inputs, self.dtype).results
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
