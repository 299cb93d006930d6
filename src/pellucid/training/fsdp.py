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

from pellucid.training.common.logprobs import token_log_probs
from pellucid.training.common.models import load_weights, model_tensors, output_head
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.packing import ModelInput, TokenSequence, pack, pad, split_micro_batches
from pellucid.training.protocol import LossFunction, NonFiniteError, Progress, TokenScores, UpdateResult

MODEL_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_NUM_STEPS = "__num_steps__"


@dataclass(slots=True)
class MicroBatching:
    """How a mini-batch is cut: by tokens or by sequences, packed or padded."""

    max_tokens: int | None
    max_sequences: int | None
    packed: bool = True


class Fsdp2Engine:
    """A causal LM with its optimizer; a frozen one (the reference) has `optimizer=None`. See `TrainingEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ScheduledAdamW | None,
        micro_batching: MicroBatching,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.optimizer, self.micro_batching, self.device, self.dtype = (
            model,
            optimizer,
            micro_batching,
            device,
            dtype,
        )
        self.version = 0

    def compute_log_probs(
        self,
        sequences: list[TokenSequence],
        *,
        temperature: float,
        with_entropy: bool = False,
        on_done: Progress | None = None,
    ) -> TokenScores:
        """See `TrainingEngine.compute_log_probs`."""
        scores = self._empty_scores(sequences)
        self.model.eval()
        with torch.no_grad():
            for rows in self._split(sequences):
                micro = [sequences[row] for row in rows]
                inputs = self._input(micro)
                self._store(scores, rows, inputs, *self._forward(inputs, temperature, with_entropy))
                if on_done:
                    on_done(len(rows))
        return scores

    def train_mini_batch(
        self,
        sequences: list[TokenSequence],
        loss: LossFunction,
        *,
        temperature: float,
        with_entropy: bool,
        on_done: Progress | None = None,
    ) -> UpdateResult:
        """See `TrainingEngine.train_mini_batch`."""
        assert self.optimizer is not None, "a frozen engine cannot train"
        scores = self._empty_scores(sequences)
        width = scores.logp.shape[1]
        self.model.train()
        self.optimizer.zero_grad()
        total_loss = 0.0
        for rows in self._split(sequences):
            micro = [sequences[row] for row in rows]
            inputs = self._input(micro)
            logp, entropy = self._forward(inputs, temperature, with_entropy)
            micro_loss = loss(rows, inputs.scatter(logp, len(rows), width), inputs.scatter(entropy, len(rows), width))
            value = float(micro_loss.detach())
            if not torch.isfinite(micro_loss):
                raise NonFiniteError("actor/pg_loss", value, rows)
            micro_loss.backward()
            total_loss += value
            self._store(scores, rows, inputs, logp.detach(), entropy.detach())
            if on_done:
                on_done(len(rows))
        grad_norm = self.optimizer.clip()
        if not math.isfinite(grad_norm):
            raise NonFiniteError("actor/grad_norm", grad_norm, list(range(len(sequences))))
        lr = self.optimizer.step()
        weight_norm = self.optimizer.weight_norm()
        if not math.isfinite(weight_norm):
            raise NonFiniteError("the norm of the updated weights", weight_norm, list(range(len(sequences))))
        self.version += 1
        return UpdateResult(scores, total_loss, grad_norm, lr)

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

    def _forward(self, inputs: ModelInput, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp [M] and entropy [M] of the micro-batch's response tokens."""
        with self.autocast():
            hidden = self.model.get_decoder()(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
            ).last_hidden_state
        predicting = hidden.flatten(0, 1)[inputs.predict_index]
        head = output_head(self.model).weight.to(self.dtype)
        return token_log_probs(predicting, head, inputs.target_ids, temperature=temperature, with_entropy=with_entropy)

    def autocast(self):
        """Return the context in which the model computes: autocast for bf16, nothing for float32."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    def _empty_scores(self, sequences: list[TokenSequence]) -> TokenScores:
        shape = (len(sequences), max((len(s.response_ids) for s in sequences), default=0))
        return TokenScores(torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device), 0)

    def _store(
        self, scores: TokenScores, rows: list[int], inputs: ModelInput, logp: torch.Tensor, entropy: torch.Tensor
    ) -> None:
        at = (torch.tensor(rows, device=self.device)[inputs.row], inputs.column)
        scores.logp[at], scores.entropy[at] = logp, entropy
        scores.num_input_tokens += inputs.num_real_tokens
