"""Weights between Hugging Face names and the chunks of a rank, tensor by tensor, in both directions.

`read_weights` takes this rank's part of each tensor straight from safetensors files, of which no more is read;
`hf_tensors` gathers a tensor at a time from the ranks that hold it and hands it to all. Both are bit for bit.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron import core
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from pellucid.errors import UserError
from pellucid.training.common.buckets import in_buckets

parallel_state: Any = core.parallel_state  # whose groups are typed as what they never are
Kind = Literal["whole", "rows", "columns", "heads", "gate_up", "qkv"]
"""How a parameter is divided over tensor-parallel ranks: not at all, by rows, by columns, by the columns of query
heads, by the rows of its two halves, or by groups of query heads with their key and value head, which lie side by side.
Rows of the vocabulary and groups are padded with zeros where they do not come out."""

_LAYER = "model.layers.{layer}."
_NAMES: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("rows", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("rows", ("lm_head.weight",)),
    "input_layernorm.weight": ("whole", (_LAYER + "input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": ("whole", (_LAYER + "post_attention_layernorm.weight",)),
    "self_attention.q_layernorm.weight": ("whole", (_LAYER + "self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", (_LAYER + "self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(_LAYER + f"self_attn.{part}_proj.bias" for part in "qkv")),
    "self_attention.linear_proj.weight": ("heads", (_LAYER + "self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", (_LAYER + "mlp.down_proj.weight",)),
    "mlp.router.weight": ("whole", (_LAYER + "mlp.gate.weight",)),
    "mlp.experts.local_experts.linear_fc1.weight": (
        "gate_up",
        (_LAYER + "mlp.experts.{expert}.gate_proj.weight", _LAYER + "mlp.experts.{expert}.up_proj.weight"),
    ),
    "mlp.experts.local_experts.linear_fc2.weight": ("columns", (_LAYER + "mlp.experts.{expert}.down_proj.weight",)),
}
"""Megatron-core's name of a parameter, or its name within a layer → how it is divided, and the Hugging Face names of
what makes it up."""
_SCALAR = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter of a chunk, or one of a stage elsewhere, and where it comes from."""

    kind: Kind
    names: tuple[str, ...]
    expert: int | None
    """Its number on its rank, of an expert's."""

    def of_experts(self, rank: int, num_local: int) -> tuple[str, ...]:
        """Return the names on an expert-parallel rank that holds `num_local` experts."""
        if self.expert is None:
            return self.names
        return tuple(name.replace("{expert}", str(rank * num_local + self.expert)) for name in self.names)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What of a model's shape decides how its tensors are put together."""

    vocabulary: int
    head_size: int
    num_groups: int
    """Key and value heads."""
    group_heads: int
    """Query heads of each."""
    num_experts: int

    @classmethod
    def of(cls, model: PretrainedConfig) -> "Shapes":
        """Return those of a Hugging Face config."""
        fields = model.to_dict()
        heads = fields["num_attention_heads"]
        size = fields.get("head_dim") or fields["hidden_size"] // heads
        groups = fields.get("num_key_value_heads") or heads
        experts = fields.get("num_experts") or fields.get("num_local_experts") or 0
        return cls(model.vocab_size, size, groups, heads // groups, experts)


def _parts(chunk: Any, *, scalar: bool) -> Iterator[tuple[torch.nn.Parameter, _Part]]:
    """Yield the parameters of a chunk that the Hugging Face model has as well, the tied ones of the last stage too."""
    for name, parameter in chunk.named_parameters():
        if scalar and name in _SCALAR:
            yield parameter, _Part("whole", (_SCALAR[name],), None)
            continue
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        layer, expert = "", None
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            layer = str(chunk.decoder.layers[int(found[1])].layer_number - 1)
            name = found[2]
        if found := re.fullmatch(r"(mlp\.experts\.local_experts)\.(\d+)\.(.+)", name):
            name, expert = f"{found[1]}.{found[3]}", int(found[2])
        kind, names = _NAMES[name]
        yield parameter, _Part(kind, tuple(each.replace("{layer}", layer) for each in names), expert)


@torch.no_grad()
def read_weights(
    chunks: list[Any],
    source: Mapping[str, Any],
    shapes: Shapes,
    field: str,
    *,
    scalar: bool,
    missing_head: bool = False,
) -> None:
    """Fill the chunks from slices of files, by Hugging Face names.

    Args:
        chunks: of this rank.
        source: what can be sliced as a tensor is.
        shapes: of the model.
        field: the config key that names the model.
        scalar: the chunks are a value model's.
        missing_head: the source is a causal LM's, so that a value model's head stays zero.

    Raises:
        UserError: `source` lacks a tensor, or has another shape.
    """
    num_local = shapes.num_experts // parallel_state.get_expert_model_parallel_world_size()
    for chunk in chunks:
        for parameter, part in _parts(chunk, scalar=scalar):
            if missing_head and part.names[0].startswith("score."):
                continue
            expert = part.expert is not None
            rank, size = _place(expert)
            names = part.of_experts(parallel_state.get_expert_model_parallel_rank(), num_local)
            sources = [source[name] for name in names]
            wanted = _whole_shapes(part.kind, shapes, size, parameter.shape)
            for name, found, shape in zip(names, sources, wanted, strict=True):
                if tuple(found.get_shape()) != shape:
                    reason = f"'{name}' is {list(found.get_shape())} in its files, and by its config {list(shape)}."
                    raise UserError(field, reason, "Is override_config right? It cannot change what weights there are.")
            parameter.copy_(_own(part.kind, sources, shapes, rank, size, parameter.shape))


def _place(expert: bool) -> tuple[int, int]:
    """Return this rank's place among the tensor-parallel ranks, of experts or of everything else, and their number."""
    if expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _whole_shapes(kind: Kind, shapes: Shapes, size: int, shape: torch.Size) -> list[tuple[int, ...]]:
    """Return the shapes of the Hugging Face tensors that make up a parameter, of which `size` ranks have parts."""
    heads, rest = shapes.num_groups * shapes.head_size, tuple(shape[1:])
    if kind == "qkv":
        return [(heads * shapes.group_heads, *rest), (heads, *rest), (heads, *rest)]
    if kind == "gate_up":
        return [(shape[0] // 2 * size, *rest)] * 2
    whole = {"rows": (shapes.vocabulary, *rest), "heads": (shape[0], heads * shapes.group_heads)}
    return [(shape[0], shape[1] * size) if kind == "columns" else whole.get(kind, tuple(shape))]


def _own(kind: Kind, sources: list[Any], shapes: Shapes, rank: int, size: int, shape: torch.Size) -> torch.Tensor:
    """Return this rank's part of a parameter, of the shape that it has here."""
    if kind == "whole":
        return sources[0][:]
    if kind == "columns":
        return sources[0][:, rank * shape[1] : (rank + 1) * shape[1]]
    if kind == "heads":
        columns = sources[0][:, rank * shape[1] : (rank + 1) * shape[1]]
        return F.pad(columns, (0, shape[1] - columns.shape[1]))
    if kind == "gate_up":
        rows = shape[0] // 2
        return torch.cat([source[rank * rows : (rank + 1) * rows] for source in sources])
    if kind == "rows":
        return _rows(sources[0], rank * shape[0], shape[0])
    groups = shape[0] // (shapes.group_heads + 2) // shapes.head_size
    pieces = []
    for source, heads in zip(sources, (shapes.group_heads, 1, 1)):
        rows = groups * heads * shapes.head_size
        pieces.append(_rows(source, rank * rows, rows).unflatten(0, (groups, -1)))
    return torch.cat(pieces, dim=1).flatten(0, 1)


def _rows(source: Any, start: int, number: int) -> torch.Tensor:
    """Return `number` rows from `start` on, zeros where the source has no more."""
    rows = source[start : start + number]
    if len(rows) == number:
        return rows
    return torch.cat([rows, rows.new_zeros(number - rows.shape[0], *rows.shape[1:])])


@torch.no_grad()
def hf_tensors(chunks: list[Any], shapes: Shapes, *, scalar: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of the model under their Hugging Face names, whole, on every rank; each takes them all."""
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_group()
    own = [pair for chunk in chunks for pair in _parts(chunk, scalar=scalar)]
    mine = [(part, tuple(parameter.shape), parameter.dtype) for parameter, part in own]
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    seen: set[str] = set()
    for owner, listed in enumerate(everyones):
        source = dist.get_global_rank(group, owner)
        for index, (part, shape, dtype) in enumerate(listed):
            if part.names[0] in seen and part.expert is None:
                continue  # the tied head of the last stage
            seen.add(part.names[0])
            empty = torch.empty(shape, dtype=dtype, device=own[0][0].device) if owner != stage else None
            local = own[index][0].detach() if empty is None else empty
            if group.size() > 1:
                dist.broadcast(local := local.contiguous(), source, group=group)
            yield from _whole(part, local, shapes)


def _whole(part: _Part, local: torch.Tensor, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather a stage's parameter over the tensor- and expert-parallel ranks and yield its Hugging Face tensors."""
    expert = part.expert is not None
    dense, experts = parallel_state.get_tensor_model_parallel_group, parallel_state.get_expert_tensor_parallel_group
    joined = local
    if part.kind != "whole":
        joined = _joined(part.kind, _gathered(local, experts() if expert else dense()))
    copies, num_local = joined[None], 0
    if expert:
        by_expert = parallel_state.get_expert_model_parallel_group()
        copies, num_local = _gathered(joined, by_expert), shapes.num_experts // by_expert.size()
    for rank, whole in enumerate(copies):
        yield from zip(part.of_experts(rank, num_local), _pieces(part, whole, shapes), strict=True)


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return [R, ...] of a group's R ranks."""
    if group.size() == 1:
        return tensor[None]
    together = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather(list(together), tensor.contiguous(), group=group)
    return together


def _joined(kind: Kind, parts: torch.Tensor) -> torch.Tensor:
    """Return the whole parameter from the tensor-parallel ranks' parts [R, ...]; without a copy where they are rows."""
    if kind == "gate_up":
        return parts.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)
    return parts.movedim(0, 1).flatten(1, 2) if kind in ("columns", "heads") else parts.flatten(0, 1)


def _pieces(part: _Part, whole: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Return the Hugging Face tensors that make up a whole parameter."""
    if part.kind == "gate_up":
        return list(whole.chunk(2))
    if part.kind == "rows":
        return [whole[: shapes.vocabulary]]
    if part.kind == "heads":
        return [whole[:, : shapes.num_groups * shapes.group_heads * shapes.head_size]]
    if part.kind != "qkv":
        return [whole]
    size, heads = shapes.head_size, shapes.group_heads
    grouped = whole.unflatten(0, (-1, (heads + 2) * size))[: shapes.num_groups]
    return [piece.flatten(0, 1) for piece in grouped.split([heads * size, size, size], dim=1)]


class _Slices(dict[str, Any]):
    """The tensors of a folder's files by name, as slices that read only what is asked for."""

    def __init__(self, files: list[Any], folder: Path, field: str) -> None:
        names = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118, no dict
        super().__init__({name: file.get_slice(name) for name, file in names})
        self._folder, self._field = folder, field

    def __missing__(self, name: str) -> Any:
        reason = f"the weights in '{self._folder}' lack the tensor '{name}'."
        raise UserError(self._field, reason, "Download or export the whole model, as safetensors.")


@contextmanager
def open_weights(folder: Path, field: str) -> Iterator[Mapping[str, Any]]:
    """Give the tensors of a model folder by name, sliced from disk.

    Raises:
        UserError: a tensor that is asked for is not there.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        yield _Slices(files, folder, field)


def write_model_folder(
    model: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    file_bytes: int = 4 * 2**30,
) -> None:
    """Write a Hugging Face folder whose weights never are in memory all at once: files of at most `file_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = []
    total, dtype = 0, torch.float32
    for number, bucket in enumerate(in_buckets(tensors, file_bytes, digests=False)):
        state = {name: tensor.cpu().contiguous() for name, tensor in bucket.tensors.items()}
        save_file(state, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        parts.append(list(state))
        total += sum(tensor.nbytes for tensor in state.values())
        dtype = next(iter(state.values())).dtype
        del bucket, state  # or they would stay while the next ones come
    places = {}
    for number, names in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number - 1}.safetensors").rename(folder / file)
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    model = copy.deepcopy(model)
    model.dtype = dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
