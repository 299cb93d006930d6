"""The FSDP2 training engine: packed micro-batches, gradient accumulation, one optimizer step, and its state on disk.

With one process there is nothing to shard and the model runs as it is; sharding wraps `model` and changes nothing below.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pellucid.training.common.lora import base_weights
from pellucid.training.common.models import (
    load_weights,
    model_tensors,
    num_parameters,
    num_trainable_parameters,
    output_head,
)
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.packing import ModelInput, TokenSequence, pack, pad, split_micro_batches
from pellucid.training.protocol import (
    LossFunction,
    NonFiniteError,
    Progress,
    TokenHead,
    TokenScores,
    UpdateResult,
)

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_NUM_STEPS = "__num_steps__"


@dataclass(slots=True)
class MicroBatching:
    """How a mini-batch is cut: by tokens or by sequences, packed or padded."""

    max_tokens: int | None
    max_sequences: int | None
    packed: bool = True


class Fsdp2Engine:
    """A causal LM, or one with a scalar head, with its optimizer; a frozen one has `optimizer=None`. See `TrainingEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ScheduledAdamW | None,
        micro_batching: MicroBatching,
        *,
        device: torch.device,
        dtype: torch.dtype,
        without_adapters: bool = False,
    ) -> None:
        """Take over `model`; `without_adapters` runs it as it was before LoRA changed it (the reference policy)."""
        self.model, self.optimizer, self.micro_batching, self.device, self.dtype = (
            model,
            optimizer,
            micro_batching,
            device,
            dtype,
        )
        self._without_adapters = without_adapters
        self.version, self.flops = 0, 0.0
        self._num_parameters, self._num_trainable = num_parameters(model), num_trainable_parameters(model)

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, *, on_done: Progress | None = None
    ) -> TokenScores:
        """See `TrainingEngine.forward`."""
        results = _Results(sequences, self.device)
        self.model.eval()
        with torch.no_grad():
            for rows in self._split(sequences):
                inputs = self._input([sequences[row] for row in rows])
                results.store(rows, inputs, self._run(inputs, head))
                if on_done:
                    on_done(len(rows))
        self.flops += 2.0 * self._num_parameters * results.scores.num_input_tokens
        return results.scores

    def train_mini_batch(
        self,
        sequences: list[TokenSequence],
        head: TokenHead,
        loss: LossFunction,
        *,
        on_done: Progress | None = None,
    ) -> UpdateResult:
        """See `TrainingEngine.train_mini_batch`."""
        assert self.optimizer is not None, "a frozen engine cannot train"
        results = _Results(sequences, self.device)
        self.model.train()
        self.optimizer.zero_grad()
        total_loss = 0.0
        for rows in self._split(sequences):
            inputs = self._input([sequences[row] for row in rows])
            scores = self._run(inputs, head)
            micro_loss = loss(rows, _scatter(scores, inputs, len(rows), results.width))
            value = float(micro_loss.detach())
            if not math.isfinite(value):
                raise NonFiniteError("loss", value, rows)
            micro_loss.backward()
            total_loss += value
            results.store(rows, inputs, scores)
            if on_done:
                on_done(len(rows))
        grad_norm = self.optimizer.clip()
        if not math.isfinite(grad_norm):
            raise NonFiniteError("grad_norm", grad_norm, list(range(len(sequences))))
        lr = self.optimizer.step()
        weight_norm = self.optimizer.weight_norm()
        if not math.isfinite(weight_norm):
            raise NonFiniteError("norm of the updated weights", weight_norm, list(range(len(sequences))))
        # Forward and the gradient of activations go through every weight, the gradient of weights only to trained ones.
        self.flops += (4.0 * self._num_parameters + 2.0 * self._num_trainable) * results.scores.num_input_tokens
        self.version += 1
        return UpdateResult(results.scores, total_loss, grad_norm, lr)

    @torch.no_grad()
    def predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        """See `ReferenceModel.predicting_states`."""
        return self._predicting_states(inputs)

    def head_weight(self) -> torch.Tensor:
        """See `ReferenceModel.head_weight`."""
        return output_head(self.model).weight.detach().to(self.dtype)

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """See `TrainingEngine.save`: `model.safetensors` and `optimizer.safetensors`, bit for bit."""
        if "model" in contents:
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in model_tensors(self.model).items()},
                folder / MODEL_FILE,
            )
        if "optimizer" in contents and self.optimizer is not None:
            steps = torch.tensor([self.optimizer.num_steps, self.version])
            save_file({**self.optimizer.state_tensors(), _NUM_STEPS: steps}, folder / OPTIMIZER_FILE)

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """See `TrainingEngine.load`.

        Raises:
            UserError: the checkpoint's tensors are not this model's.
        """
        if "model" in contents:
            load_weights(self.model, folder / MODEL_FILE)
        if "optimizer" in contents and self.optimizer is not None:
            tensors = load_file(folder / OPTIMIZER_FILE)
            num_steps, self.version = tensors.pop(_NUM_STEPS).tolist()
            self.optimizer.load_state_tensors(tensors, num_steps)

    def _split(self, sequences: list[TokenSequence]) -> list[list[int]]:
        cut = self.micro_batching
        return split_micro_batches(
            sequences, max_tokens=cut.max_tokens, max_sequences=cut.max_sequences, share_prompts=cut.packed
        )

    def _input(self, micro: list[TokenSequence]) -> ModelInput:
        return (pack if self.micro_batching.packed else pad)(micro, self.device)

    def _run(self, inputs: ModelInput, head: TokenHead) -> TokenScores:
        """Return the head's [M] results for one micro-batch."""
        return head(self.model, self._predicting_states(inputs), inputs, self.dtype)

    def _predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        with self.autocast(), base_weights(self.model) if self._without_adapters else nullcontext():
            hidden = self.model.get_decoder()(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
            ).last_hidden_state
        return hidden.flatten(0, 1)[inputs.predict_index]

    def autocast(self):
        """Return the context in which the model computes: autocast for bf16, nothing for float32."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


def _scatter(scores: TokenScores, inputs: ModelInput, num_rows: int, width: int) -> TokenScores:
    """[M] results → right-padded [num_rows, width], keeping the gradient."""
    return scores.map(lambda values: inputs.scatter(values, num_rows, width))


class _Results:
    """The [B, T] results of a mini-batch, filled in micro-batch by micro-batch."""

    def __init__(self, sequences: list[TokenSequence], device: torch.device) -> None:
        self.width = max((len(s.response_ids) for s in sequences), default=0)
        self.scores, self._num_rows, self._device = TokenScores(), len(sequences), device

    def store(self, rows: list[int], inputs: ModelInput, micro: TokenScores) -> None:
        at = (torch.tensor(rows, device=self._device)[inputs.row], inputs.column)
        for name, values in micro.items():
            whole = getattr(self.scores, name)
            if whole is None:
                whole = torch.zeros(self._num_rows, self.width, device=self._device)
                setattr(self.scores, name, whole)
            whole[at] = values.detach()
        self.scores.num_input_tokens += inputs.num_real_tokens
