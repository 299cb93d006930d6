"""The Megatron training engine: packed micro-batches through megatron-core's pipeline schedule, and its optimizer.

Every rank is called with the same whole mini-batch, runs its part of a share of it, and returns the results of all.
Heads and losses are those of the other engines: they run where the last stage's output comes out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError, UserError
from pellucid.stages import NO_PROBE, Probe, Unit
from pellucid.training.common.balance import measure_balance
from pellucid.training.common.buckets import in_buckets
from pellucid.training.common.logprobs import VocabularyShard
from pellucid.training.common.mini_batch import MicroBatch, MicroBatching, MiniBatch
from pellucid.training.common.models import file_tensors, model_tensors, output_head
from pellucid.training.common.optimizer import Schedule
from pellucid.training.common.packing import ModelInput, TokenSequence
from pellucid.training.megatron.architectures import check_architecture
from pellucid.training.megatron.conversion import Shapes, hf_tensors, open_weights, read_weights, write_model_folder
from pellucid.training.megatron.cpu_adapter import megatron_calls
from pellucid.training.megatron.layout import MegatronLayout, ParallelSizes
from pellucid.training.megatron.model_chunks import Pack, chunk_config, make_chunks
from pellucid.training.megatron.sharded_state import (
    chunk_state,
    load_optimizer_state,
    optimizer_state,
    read,
    start_writing,
)
from pellucid.training.protocol import (
    LossFunction,
    OutputLayer,
    Progress,
    TokenHead,
    TokenScores,
    UpdateResult,
    WeightBucket,
)
from pellucid.training.sharding import join_alone


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained."""

    schedule: Schedule
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    offload: bool = False
    """Keep the optimizer's state in CPU memory between its steps."""


class MegatronEngine:
    """A `TrainingEngine` of chunks that megatron-core runs; a frozen one has no `training`."""

    def __init__(
        self,
        chunks: list[Any],
        model: PretrainedConfig,
        config: TransformerConfig,
        training: Training | None,
        micro_batching: MicroBatching,
        layout: MegatronLayout,
        *,
        num_parameters: int,
        scalar: bool = False,
        offload: bool = False,
        balance_ranks: bool = True,
        probe: Probe = NO_PROBE,
    ) -> None:
        """Take over this rank's `chunks`, filled with the weights of a model with the Hugging Face config `model`.

        `num_parameters` are those of the whole model. `scalar`: it is a value model. `offload` keeps weights and
        gradients in CPU memory between passes. `balance_ranks` gives data-parallel ranks about as many tokens each.
        """
        self.layout, self.device, self.dtype = layout, layout.device, config.params_dtype
        self.micro_batching, self._scalar, self._hf_config = micro_batching, scalar, model
        self._balance_ranks, self._probe, self._training, self._config = balance_ranks, probe, training, config
        self._shapes = Shapes.of(model)
        self.version, self.num_steps, self.flops = 0, 0, 0.0
        self.in_hand: list[str] = []
        self._chunks = chunks
        self._optimizer: Any = None
        self._run_chunks: list[Any] = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
        if training is not None:
            self._prepare_training(training)
        self._offload = offload and self.device.type != "cpu"
        self._num_parameters = num_parameters
        self._leave_device()

    def _prepare_training(self, training: Training) -> None:
        with megatron_calls(self.device):
            buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            self._run_chunks = [
                DistributedDataParallel(self._config, buffers, chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(self._run_chunks)
            ]
            options = OptimizerConfig(
                optimizer="adam",
                lr=training.schedule.lr,
                weight_decay=training.weight_decay,
                adam_beta1=training.betas[0],
                adam_beta2=training.betas[1],
                clip_grad=training.grad_clip,
                params_dtype=self.dtype,
                bf16=self._config.bf16,
                use_distributed_optimizer=True,
            )
            # No overrides: every parameter decays, as under the other strategies.
            self._optimizer = get_megatron_optimizer(options, self._run_chunks, config_overrides={})
        self._config.finalize_model_grads_func = _finalize_gradients
        for part in self._optimizer.chained_optimizers:
            _make_moments(part.optimizer)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model chunks that this rank has."""
        return tuple(self._chunks)

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, *, on_done: Progress | None = None
    ) -> TokenScores:
        """Compute the head's results for the responses, without gradient."""
        whole = self._mini_batch(sequences, head)
        with torch.no_grad(), self._on_device():
            self._run_schedule(whole, head, None, on_done)
        whole.add_up(self.layout.sum)
        self.flops += 2.0 * self._num_parameters * whole.scores.num_input_tokens
        return whole.scores

    def train_mini_batch(
        self, sequences: list[TokenSequence], head: TokenHead, loss: LossFunction, *, on_done: Progress | None = None
    ) -> UpdateResult:
        """Accumulate the gradient of the mini-batch over the pipeline's micro-batches, and apply one optimizer step."""
        with self._on_device(gradients=True), self._probe.unit(Unit.MINI_BATCH, rows=len(sequences)):
            return self._train_mini_batch(sequences, head, loss, on_done)

    def _train_mini_batch(
        self, sequences: list[TokenSequence], head: TokenHead, loss: LossFunction, on_done: Progress | None
    ) -> UpdateResult:
        assert self._optimizer is not None and self._training is not None, "a frozen engine cannot train"
        whole = self._mini_batch(sequences, head)
        for chunk in self._run_chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        total, failure = self._run_schedule(whole, head, loss, on_done)
        total = self.layout.loss_of_all(total, failure)
        whole.add_up(self.layout.sum)
        with self._gradients_shown(), self._probe.unit(Unit.OPTIMIZER_STEP), megatron_calls(self.device):
            self._move_optimizer(self.device)
            self._optimizer.prepare_grads()
            grad_norm = float(self._optimizer.get_grad_norm())
            if not math.isfinite(grad_norm):
                raise NonFiniteError("grad_norm", grad_norm, list(range(len(sequences))))
            lr = self._training.schedule.lr_at(self.num_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.zero_grad()  # float32 copies of gradients, which would stay with the float32 weights
            self._move_optimizer(torch.device("cpu"))
            self.num_steps += 1
            weight_norm = self._weight_norm()
            if not math.isfinite(weight_norm):
                raise NonFiniteError(UPDATED_WEIGHTS, weight_norm, list(range(len(sequences))))
        self.flops += 6.0 * self._num_parameters * whole.scores.num_input_tokens
        self.version += 1
        balance = measure_balance(sequences, whole.shares) if len(whole.shares) > 1 else None
        return UpdateResult(whole.scores, total, grad_norm, lr, balance)

    @contextmanager
    def _on_device(self, *, gradients: bool = False) -> Iterator[None]:
        """Bring weights, and room for `gradients`, to the device while something runs."""
        for chunk in self._run_chunks if self._offload else ():
            if self._optimizer is None:
                chunk.to(self.device)
            else:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.reload_from_cpu(move_grads=gradients)
        try:
            yield
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        for chunk in self._run_chunks if self._offload else ():
            if self._optimizer is None:
                chunk.to("cpu")
            else:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.offload_to_cpu()

    def _move_optimizer(self, device: torch.device) -> None:
        """Move the optimizer's moments, and the float32 weights that it has beside bfloat16 ones."""
        assert self._training is not None
        if not self._training.offload or self.device.type == "cpu":
            return
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups if self._config.bf16 else ():
                for parameter in group["params"]:
                    parameter.data = parameter.data.to(device)
            for state in part.optimizer.state.values():
                state |= {name: value.to(device) for name, value in state.items() if name != "step"}

    def _mini_batch(self, sequences: list[TokenSequence], head: TokenHead) -> MiniBatch:
        over = {"rank": self.layout.data_rank, "num_ranks": self.layout.num_data_ranks}
        return MiniBatch(sequences, head, self.micro_batching, self.device, balance=self._balance_ranks, **over)

    def _run_schedule(
        self, whole: MiniBatch, head: TokenHead, loss: LossFunction | None, on_done: Progress | None
    ) -> tuple[float, NonFiniteError | None]:
        """Run all micro-batches of this rank, with their backward passes where there is a `loss`.

        Returns:
            The loss, 0.0 on ranks that do not count, and the first failure that this rank saw.
        """
        layout = self.layout
        micro_batches = [self._padded(micro) for micro in whole.micro_batches(layout.num_micro_batches)]
        num_tokens = max(micro.inputs.input_ids.shape[1] for micro in micro_batches)
        if layout.sizes.pipeline > 1:  # the stages' tensors have one shape, which they then need not tell each other
            micro_batches = [replace(micro, inputs=micro.inputs.padded(num_tokens)) for micro in micro_batches]
        losses, failures = [0.0], []

        def finish(micro: MicroBatch, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            """Turn the last stage's states [1, n, H] into the micro-batch's loss."""
            scores = self._apply(head, micro.inputs, states)
            whole.store(micro, scores, counts=layout.counts)
            value = torch.zeros((), device=self.device)
            if loss is not None:
                value = micro.share_of_loss(scores, loss, whole.width)
                self._probe.loss(value)
                number = float(value.detach())
                if micro.rows and not math.isfinite(number):
                    failures.append(NonFiniteError("loss", number, micro.rows))
                if micro.rows and layout.counts:
                    losses.append(number)
            if on_done and micro.rows and layout.counts:
                on_done(len(micro.rows))
            return value, torch.zeros((), dtype=torch.int, device=self.device), {}

        # A unit lasts to the next chunk's pass: of a pipeline's last stage it has all of a micro-batch, of others the
        # backward pass of an earlier one.
        unit = ExitStack()

        def forward_step(batches: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            unit.close()
            micro = next(batches)
            self.in_hand = [sequence.name for sequence in micro.sequences]
            unit.enter_context(micro.unit(self._probe))
            return self._pass(chunk, micro.inputs), lambda states: finish(micro, states)

        for chunk in self._run_chunks:
            chunk.train(loss is not None)
        several = len(self._run_chunks) > 1
        batches = [iter(micro_batches) for _ in self._run_chunks]
        with unit, megatron_calls(self.device):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches if several else batches[0],
                model=self._run_chunks if several else self._run_chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=num_tokens,
                micro_batch_size=1,
                forward_only=loss is None,
            )
        self.in_hand = []
        return math.fsum(losses), failures[0] if failures else None

    def _padded(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch whose tokens can be divided between context- and tensor-parallel ranks."""
        num_tokens, multiple = micro.inputs.input_ids.shape[1], self.layout.pack_multiple
        return replace(micro, inputs=micro.inputs.padded(-(-num_tokens // multiple) * multiple))

    def _own_tokens(self, inputs: ModelInput) -> slice:
        """Return which of a pack's tokens this context-parallel rank has."""
        size = inputs.input_ids.shape[1] // self.layout.sizes.context
        return slice(self.layout.context_rank * size, (self.layout.context_rank + 1) * size)

    def _pass(self, chunk: Any, inputs: ModelInput) -> torch.Tensor:
        """Run a chunk on this rank's part of a pack."""
        own = self._own_tokens(inputs)
        pack = Pack(inputs, own)
        return chunk(inputs.input_ids[:, own], inputs.position_ids[:, own], None, packed_seq_params=pack)

    def _apply(self, head: TokenHead, inputs: ModelInput, states: torch.Tensor) -> TokenScores:
        """Return the head's [M] results from the last stage's states [1, n, H] of this rank's tokens."""
        layer = self._output_layer()
        if self.layout.sizes.context == 1:
            results = head(layer, states[0, inputs.predict_index], inputs, self.dtype).results
        else:
            results = self._over_context(head, layer, inputs, states)
        self._probe.results(**results)
        return TokenScores(results)

    def _over_context(
        self, head: TokenHead, layer: OutputLayer, inputs: ModelInput, states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Apply the head to the tokens that this context-parallel rank predicts, and join all ranks' results."""
        own = self._own_tokens(inputs)
        chosen = ((inputs.predict_index >= own.start) & (inputs.predict_index < own.stop)).nonzero()[:, 0]
        some = ModelInput(
            inputs.input_ids,
            inputs.position_ids,
            inputs.layout,
            inputs.predict_index[chosen] - own.start,
            inputs.target_ids[chosen],
            inputs.row[chosen],
            inputs.column[chosen],
            inputs.num_tokens,
        )
        results = head(layer, states[0, some.predict_index], some, self.dtype).results
        group = self.layout.state.get_context_parallel_group()
        total = inputs.target_ids.shape[0]
        return {
            name: _SumForward.apply(values.new_zeros(total).index_put((chosen,), values), group)
            for name, values in results.items()
        }

    def _output_layer(self) -> OutputLayer:
        chunk = self._chunks[-1]
        if self._scalar:
            return OutputLayer(_Scalar(chunk.output_layer))
        shared = chunk.share_embeddings_and_output_weights and chunk.pre_process
        module = chunk.embedding.word_embeddings if shared else chunk.output_layer
        if self.layout.sizes.tensor == 1:
            return OutputLayer(module)
        rows = module.weight.shape[0]
        start = self.layout.tensor_rank * rows
        size = min(rows, self._shapes.vocabulary - start)
        group = self.layout.state.get_tensor_model_parallel_group()
        return OutputLayer(module, VocabularyShard(group, start, size, rows))

    @contextmanager
    def _gradients_shown(self) -> Iterator[None]:
        """Show observers the gradients where they look for them, if that takes no copy: in float32, and where there is
        one data rank; else each has a part of the sum.
        """
        whole = self.layout.num_ranks == self.layout.sizes.tensor * self.layout.sizes.pipeline and not self._config.bf16
        shown = [each for chunk in self._chunks for each in chunk.parameters()] if whole else []
        for parameter in shown:
            parameter.grad = parameter.main_grad  # pyright: ignore
        try:
            yield
        finally:
            for parameter in shown:
                parameter.grad = None

    @torch.no_grad()
    def _weight_norm(self) -> float:
        """Return a number over all ranks' weights that is finite where they are."""
        norms = torch._foreach_norm([parameter.detach() for chunk in self._chunks for parameter in chunk.parameters()])
        total = torch.stack([norm.float() for norm in norms]).square().sum()
        return float(self.layout.sum(total))

    @torch.no_grad()
    def predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        """Return the final hidden states [M, H] that predict the response tokens, without gradient; without a pipeline
        and context ranks, which the config's rules see to.
        """
        with self._on_device(), megatron_calls(self.device):
            return self._pass(self._run_chunks[0], inputs)[0, inputs.predict_index]

    @torch.no_grad()
    def head_weight(self) -> torch.Tensor:
        """Return the output head [V, H], or this rank's rows of it where the vocabulary is sharded."""
        return self._output_layer().module.weight.detach()  # pyright: ignore

    def _state(self, contents: Sequence[str], *, loading: bool) -> dict[str, Any]:
        """Return the asked-for parts as megatron-core's sharded state; to load a part it is made anew."""
        chunks = [chunk_state(chunk) for chunk in self._chunks]
        model = {(index, name): entry for index, chunk in enumerate(chunks) for name, entry in chunk.items()}
        state: dict[str, Any] = {}
        if names := self._optimizer_parts(contents):
            state["optimizer"] = optimizer_state(self._optimizer, model, names, empty=loading)
            state["steps"] = [self.num_steps, self.version]
        if "model" in contents:
            state["chunks"] = {str(index): chunk for index, chunk in enumerate(chunks)}
        return state

    def _optimizer_parts(self, contents: Sequence[str]) -> tuple[str, ...]:
        """Return the names of what the optimizer holds that belongs to the asked-for parts."""
        if self._optimizer is None:
            return ()
        masters = ("param",) if "model" in contents and self._config.bf16 else ()
        return masters + (("exp_avg", "exp_avg_sq") if "optimizer" in contents else ())

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the asked-for parts; every rank calls it with the same folder, which they share."""
        self.start_saving(folder, contents)()

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save in the background; returns a function, for every rank to call, that waits until all of it is written."""
        with self._on_device():
            with megatron_calls(self.device):
                state = self._state(contents, loading=False)
            return start_writing(state, folder, self.layout)

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads, file by file; every rank calls it, and rank 0 writes."""
        tensors = self._hf_tensors()
        if self.layout.rank == 0:
            write_model_folder(self._hf_config, tokenizer, folder, tensors)
        else:
            for _ in tensors:
                pass

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from what any layout wrote.

        Raises:
            UserError: a part is not there, or its model is another.
        """
        with self._on_device(), megatron_calls(self.device):
            state = read(self._state(contents, loading=True), folder)
            if "model" in contents:
                for index, chunk in enumerate(self._chunks):
                    chunk.load_state_dict(state["chunks"][str(index)])
                if self._optimizer is not None:
                    self._optimizer.reload_model_params()
            if names := self._optimizer_parts(contents):
                num_steps, version = state["steps"]
                load_optimizer_state(self._optimizer, state["optimizer"], names, num_steps)
                if "optimizer" in contents:
                    self.num_steps, self.version = num_steps, version

    def weights(self, bucket_bytes: int, *, digests: bool = True, merged: bool = False) -> Iterator[WeightBucket]:
        """Yield the trained weights under their Hugging Face names, gathered tensor by tensor; every rank takes all.

        There are no adapters that could be `merged`.
        """
        return in_buckets(self._hf_tensors(), bucket_bytes, digests=digests)

    def _hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._on_device():
            yield from hf_tensors(self._chunks, self._shapes, scalar=self._scalar)


def load_engine(
    folder: Path,
    model: PretrainedConfig,
    training: Training | None,
    micro_batching: MicroBatching,
    layout: MegatronLayout,
    dtype: torch.dtype,
    *,
    field: str,
    scalar: bool = False,
    recompute: bool = False,
    sequence_parallel: bool = True,
    overrides: dict[str, Any] | None = None,
    **options: Any,
) -> MegatronEngine:
    """Return the engine of a model folder, of whose weights each rank reads its part alone.

    Args:
        folder: with `config.json` and safetensors files.
        model: its config.
        training: None for a frozen model.
        micro_batching: how mini-batches are cut.
        layout: of the ranks.
        dtype: what weights and activations are in; optimizer state and its copy of the weights are float32.
        field: the config key that names the model, for errors.
        scalar: make a value model of it: of a classifier with its head, of a causal LM with a head of zeros.
        recompute: drop the activations within layers, and compute them again in the backward pass.
        sequence_parallel: divide tokens between tensor-parallel ranks outside of attention and MLP.
        overrides: of the fields of megatron-core's `TransformerConfig`.
        options: as `MegatronEngine` takes them.

    Raises:
        UserError: the model is of an architecture that the chunks do not compute, or lacks weights.
    """
    check_architecture(model, field)
    with open_weights(folder, field) as source, megatron_calls(layout.device):
        both = [source[name] for name in ("lm_head.weight", "model.embed_tokens.weight") if name in source]
        if model.tie_word_embeddings and not scalar and len(both) == 2 and not torch.equal(both[0][:], both[1][:]):
            reason = "its config ties the output layer to the embedding, and its files have another output layer."
            raise UserError(field, reason, "Set tie_word_embeddings: false in the model's config.json.")
        given = {"sequence_parallel": sequence_parallel and layout.sizes.tensor > 1} | (overrides or {})
        config = chunk_config(model, layout, dtype, recompute=recompute, overrides=given)
        classifier = "score.weight" in source
        chunks = make_chunks(model, config, layout, scalar=scalar, scalar_bias="score.bias" in source)
        read_weights(chunks, source, Shapes.of(model), field, scalar=scalar, missing_head=not classifier)
        sizes = {name: math.prod(tensor.get_shape()) for name, tensor in source.items()}
    if scalar and not classifier:
        sizes["lm_head.weight"] = model.hidden_size
    return MegatronEngine(
        chunks,
        model,
        config,
        training,
        micro_batching,
        layout,
        num_parameters=sum(sizes.values()),
        scalar=scalar,
        **options,
    )


@torch.no_grad()
def load_into(model: PreTrainedModel, folder: Path) -> None:
    """Fill a transformers model with the weights of a checkpoint that any layout wrote; this process is no rank.

    Raises:
        UserError: the checkpoint is of another model, or of another strategy.
    """
    cpu = torch.device("cpu")
    join_alone(cpu)
    layout, head = MegatronLayout(ParallelSizes(), cpu), output_head(model)
    scalar = head.out_features == 1
    with megatron_calls(cpu):
        config = chunk_config(model.config, layout, torch.float32, recompute=False, overrides={})
        [chunk] = make_chunks(model.config, config, layout, scalar=scalar, scalar_bias=head.bias is not None)
        state = read({"chunks": {"0": chunk_state(chunk)}}, folder)
        chunk.load_state_dict(state["chunks"]["0"])
    own = dict(file_tensors(model, model_tensors(model).items()))
    own |= {f"score.{name}": parameter for name, parameter in head.named_parameters() if scalar}
    for name, tensor in hf_tensors([chunk], Shapes.of(model.config), scalar=scalar):
        own[name].copy_(tensor)


def _finalize_gradients(chunks: list[Any], num_tokens: Any = None, **how: Any) -> None:
    """Add gradients up over the ranks; they are shares of the whole mini-batch's, so that nothing is divided."""
    finalize_model_grads(chunks, None, **how)


def _make_moments(adamw: torch.optim.Optimizer) -> None:
    """Give an optimizer the state that its first step would: the distributed one stores and loads no other."""
    counts = {"step": torch.tensor(0.0)} if isinstance(adamw, torch.optim.AdamW) else {}  # others count by group
    for group in adamw.param_groups:
        if not counts:
            group.setdefault("step", 0)
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adamw.state[parameter] = {name: count.clone() for name, count in counts.items()} | moments


class _Scalar(torch.nn.Module):
    """The output layer of a value model, as a head calls it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden, self.weight.float(), bias)


class _SumForward(torch.autograd.Function):
    """Adds up over ranks that all go on to compute the same loss: each one's gradient is that of its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
