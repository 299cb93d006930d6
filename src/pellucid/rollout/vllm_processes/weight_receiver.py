"""What Pellucid adds to vLLM's worker processes, through vLLM's own extension point (`worker_extension_cls`).

`InferenceRolloutEngine` calls it by `collective_rpc`; weights come from the trainer through a transport.
"""

import importlib
from dataclasses import fields
from typing import Any

import torch

from pellucid.rollout.joining import shape_of
from pellucid.rollout.served_weights import Arrival, Difference
from pellucid.rollout.transports import parse_handle
from pellucid.rollout.vllm_processes.adapters import load_adapters


class WeightReceiver:
    """Methods that vLLM mixes into its worker."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    cache_config: Any
    parallel_config: Any
    scheduler_config: Any
    profiler: Any

    def describe(self, names: list[str], handle: str) -> dict[str, Any]:
        """Tell a run that joins this server its arguments in `names`, its model, and whether weights reach it."""
        parts = self.model_config, self.cache_config, self.parallel_config, self.scheduler_config
        had = {field.name: str(getattr(part, field.name)) for part in reversed(parts) for field in fields(part)}
        model = shape_of(self.model_config.hf_config)
        arguments = {name: had.get(name) for name in names}
        return {"arguments": arguments, "model": model, "sees": parse_handle(handle).is_in_reach()}

    def take_weights(self, handle: str, verify: bool) -> Difference | None:
        """Load the weights of a `WeightHandle` in JSON; return the first that is not what was sent."""
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        arrival = Arrival(handle, verify)
        if self.vllm_config.lora_config is not None:
            return load_adapters(self, arrival, self.vllm_config.additional_config["lora_alpha"])
        self.model_runner.reload_weights(weights_iterator=arrival.tensors())
        self.pack_head(model)
        return arrival.difference(
            model,
            model.packed_modules_mapping,
            config.dtype,
            tied=config.hf_text_config.tie_word_embeddings,
            whole=self.parallel_config.world_size == 1,
        )

    def look_inside(self, function: str, *arguments: Any) -> Any:
        """Call a function of `module:name` with this worker: what looks into the model comes from outside."""
        module, _, name = function.partition(":")
        return vars(importlib.import_module(module))[name](self, *arguments)

    def print_no_tables(self) -> None:
        """Let the profiler that has begun write its trace alone: on a CPU it prints a table of operators, too."""
        self.profiler.dump_cpu_time_total = False

    def pack_head(self, model: Any) -> None:
        """Pack the output head anew: a tied one shares the embeddings, and on a CPU keeps a packed copy of the old."""
        head = dict(model.named_children()).get("lm_head")
        if head is not None and isinstance(head.weight, torch.Tensor):
            head.quant_method.process_weights_after_loading(head)
