"""LoRA adapters on their way into vLLM, which has the frozen base from the model's folder: updates bring them alone.

A worker calls `load_adapters`; `OwnVllm` adds `the_adapters` to every request.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pellucid.config.schema.model import ModelConfig
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.rollout.served_weights import TOLERANCE, Arrival, Difference
from pellucid.training.common.buckets import tensor_digest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be made ready for."""


def adapter_options(model: ModelConfig, section: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` with which vLLM takes adapters; none where they are merged."""
    room = next((largest for largest in RANKS if largest >= model.lora_rank), None)
    takes_some = section.engine_kwargs.vllm.get("enable_lora", True) and not section.server_addresses
    if section.name != "vllm" or not model.lora_rank or room is None or not takes_some:
        return {}
    own = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "load_format": "auto"}
    return own | {"use_tqdm_on_load": False, "additional_config": {"lora_alpha": model.lora_alpha}}


def the_adapters(folder: str = "already loaded", *, load_inplace: bool = False) -> Any:
    """Return vLLM's name for the policy's adapters."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, folder, load_inplace=load_inplace)


def load_adapters(worker: Any, arrival: Arrival, alpha: int) -> Difference | None:
    """Let a worker of vLLM serve the adapters that arrive; return the first that is not what was sent."""
    sent = {name.replace(".default.", "."): tensor for name, tensor in arrival.tensors()}
    layers = sorted(name.removesuffix(".lora_A.weight") for name in sent if name.endswith(".lora_A.weight"))
    rank = len(sent[f"{layers[0]}.lora_A.weight"])
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": layers}
    with tempfile.TemporaryDirectory(prefix="pellucid-adapters-") as folder:
        tensors = {f"base_model.model.{name}": tensor for name, tensor in sent.items()}
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text(json.dumps(about))
        worker.add_lora(the_adapters(folder, load_inplace=True))
    if worker.parallel_config.world_size > 1:  # layers are spread over several workers, and the digest is all
        return arrival.wrong
    return arrival.wrong or _first_difference(worker, sent, layers, alpha / rank)


def _first_difference(
    worker: Any, sent: dict[str, torch.Tensor], layers: list[str], scaling: float
) -> Difference | None:
    """Return the first adapter that is not what was sent; vLLM has B scaled."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(the_adapters().lora_int_id)
    served: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for place, module in manager.modules.items():
        parent, _, own = place.rpartition(".")
        parts = manager.packed_modules_mapping.get(own, [own])
        for part, *both in zip(parts, module.lora_a_stacked, module.lora_b_stacked):
            served[f"{parent}.{part}"] = both[0][slot, 0], both[1][slot, 0]
    for layer in layers:
        for own, scale, held in zip("AB", (1.0, scaling), served.get(layer, (None, None))):
            name = f"{layer}.lora_{own}.weight"
            if held is None:
                return name, tensor_digest(sent[name]), "no place for it"
            expected = (sent[name] * scale).to(held)
            found = held[: expected.shape[0], : expected.shape[1]]
            gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
            if not gap <= TOLERANCE[held.dtype] and expected.isfinite().all():
                return name, tensor_digest(sent[name]), f"values that differ by {gap:.2%} of the largest"
    return None
