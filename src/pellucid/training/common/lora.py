"""Low-rank adapters (LoRA, arXiv 2106.09685) on a model's linear layers, by peft.

`add_lora` wraps the layers in place: W x becomes W x + (alpha / rank) B A x with W frozen. Checkpoints hold the
adapters alone, exports and packed rollouts the merged weights. peft is imported only to add adapters.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from pellucid.errors import MissingExtraError, UserError, nearest

ALL_LINEAR = "all-linear"
_ADAPTER = "default"
_LORA_A, _LORA_B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"


def add_lora(
    model: PreTrainedModel, *, rank: int, alpha: float, target_modules: str | list[str], seed: int
) -> PreTrainedModel:
    """Freeze `model` and give its linear layers trainable float32 adapters, in place.

    B starts at zero, so the policy is unchanged until the adapters move. The global random stream is left alone.

    Args:
        model: a model as loaded; the same object is returned.
        rank: rows of A [rank, in] and columns of B [out, rank].
        alpha: the adapters' output is scaled by alpha / rank.
        target_modules: `all-linear` (all but the output head), or names of linear layers, e.g. `layers.0.mlp.up_proj`.
        seed: draws A.

    Raises:
        MissingExtraError: peft is not installed.
        UserError: a name is no linear layer of this model.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    names = _target_names(model, target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    return model


def require_peft() -> None:
    """Check that adapters can be added, without importing anything.

    Raises:
        MissingExtraError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("actor_rollout_ref.model.lora_rank", "peft", "lora")


def has_lora(model: torch.nn.Module) -> bool:
    """Return whether `model` carries adapters."""
    return bool(lora_layers(model))


def lora_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers that carry an adapter (peft's wrappers, around a `base_layer`)."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextmanager
def base_weights(model: torch.nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the block: the model computes as it was before training, the reference policy."""
    layers = lora_layers(model)
    try:
        for layer in layers:
            # peft's enable_adapters would also freeze the adapters, and a sharded one, frozen once, is never trained.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def merged_weight(layer: Any) -> torch.Tensor:
    """Return W + (alpha / rank) B A [out, in] of an adapted layer."""
    return layer.base_layer.weight + layer.get_delta_weight(_ADAPTER)


@torch.no_grad()
def merged_tensors(model: torch.nn.Module, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers under their Hugging Face names, tied ones once, with adapters merged in.

    Without adapters these are the model's own tensors, not copies. `tensors` are the whole ones of a sharded model.
    """
    tensors = state_tensors(model) if tensors is None else tensors
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for layer in [name.removesuffix(_LORA_A) for name in tensors if name.endswith(_LORA_A)]:
        scaling = lora_layers(model)[0].scaling[_ADAPTER]  # every layer has the same rank and alpha
        delta = (tensors[layer + _LORA_B] @ tensors[layer + _LORA_A]) * scaling
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + delta
    return merged


def state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's own parameters, adapters among them, and persistent buffers, tied ones once."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors A and B of every adapter: what a checkpoint stores, the base being the model folder."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def adapter_rank(shapes: dict[str, torch.Size]) -> int:
    """Return the rank of stored adapters, or 0 when there are none among the tensors."""
    return next((shape[0] for name, shape in shapes.items() if ".lora_A." in name), 0)


def _target_names(model: PreTrainedModel, wanted: str | list[str]) -> list[str]:
    """Return the full names of the linear layers that `wanted` means."""
    field = "actor_rollout_ref.model.target_modules"
    head = model.get_output_embeddings()
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and module is not head]
    if not linears:
        reason = f"{type(model).__name__} has no linear layers that adapters could go on."
        raise UserError(field, reason, "Use another architecture, or train all weights (lora_rank=0).")
    if wanted == ALL_LINEAR:
        return linears
    names = [wanted] if isinstance(wanted, str) else wanted
    endings = sorted({name.rpartition(".")[2] for name in linears})
    for name in names:
        if not any(f".{linear}".endswith(f".{name}") for linear in linears):
            match = nearest(name, [ALL_LINEAR, *endings])
            reason = f"'{name}' is not a linear layer of {type(model).__name__}, which has {', '.join(endings)}."
            remedy = f"Did you mean '{match}'?" if match else f"Name some of these, or {ALL_LINEAR}."
            raise UserError(field, reason, remedy)
    return [linear for linear in linears if any(f".{linear}".endswith(f".{name}") for name in names)]
