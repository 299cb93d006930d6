"""Loading, checking and saving of Hugging Face models and their tokenizers.

A model is named by a folder, a hub id, or `builtin` (the one shipped in the package). Weights are float32 masters; a
run in bf16 computes under autocast, so that small updates are never rounded away.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from pellucid.errors import UserError
from pellucid.training.common.attention import NAME, register_attention, unsupported
from pellucid.training.common.lora import adapter_rank, adapter_tensors, has_lora, merged_tensors
from pellucid.training.common.packing import TokenSequence, pack

BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).parents[2] / "assets" / "builtin"
POLICY = "actor_rollout_ref.model.path"
"""The config key that errors name unless the caller loads another model than the policy."""

# What our attention and head compute differs from the architecture when one of these is set in its config.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")

CLASSIFIER_HEADS = ("score", "classifier")
"""What transformers calls the output layer of sequence and token classifiers."""


def model_folder(path: str, field: str = POLICY) -> str:
    """Return what transformers should load for `path`: the shipped folder for `builtin`, else `path` itself.

    Raises:
        UserError: the path looks like a folder and is none, or has no config or no weights.
    """
    if path == BUILTIN:
        return str(BUILTIN_FOLDER)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            reason = f"the folder '{folder}' has no config.json, so it is not a Hugging Face model."
            remedy = "A checkpoint of a run becomes a model folder with: pellucid export RUN --out FOLDER"
            raise UserError(field, reason, remedy)
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            reason = f"the folder '{folder}' has a config but no weights (*.safetensors)."
            raise UserError(field, reason, "Download or export the whole model.")
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir():
        remedy = "Give a model folder, a hub id 'owner/name', or 'builtin'."
        if path.count("/") == 1 and folder.parent != Path():
            remedy += f" The hub is not asked, because there is a folder '{folder.parent}' here."
        raise UserError(field, f"the folder '{folder}' does not exist.", remedy)
    return path


def load_model(
    path: str,
    *,
    device: torch.device,
    override_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    field: str = POLICY,
) -> PreTrainedModel:
    """Return the causal LM in float32 on `device`, with Pellucid's attention and without dropout.

    `field` is the config key that names the model; errors name it.

    Raises:
        UserError: the model cannot be found or read, or its architecture computes something the packed path does not.
    """
    config = read_config(path, override_config, trust_remote_code=trust_remote_code, field=field)
    model, loading = read_model(path, config, AutoModelForCausalLM, trust_remote_code=trust_remote_code, field=field)
    check_complete(path, loading, field)
    check_head(model, field)
    return prepare_model(model, device, gradient_checkpointing=gradient_checkpointing, field=field)


def init_model(config_fields: dict[str, Any], *, seed: int, device: torch.device) -> PreTrainedModel:
    """Return a randomly initialised causal LM of the given transformers config (`model_type` and its fields)."""
    register_attention()
    fields = dict(config_fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    check_head(model, POLICY)
    return prepare_model(model, device, gradient_checkpointing=False, field=POLICY)


def read_config(
    path: str, override_config: dict[str, Any] | None, *, trust_remote_code: bool, field: str
) -> PretrainedConfig:
    """Return the transformers config of a model folder, hub id or `builtin`, with some of its fields replaced.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = model_folder(path, field)
    with _loading(path, field):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **(override_config or {}))


def read_model(
    path: str, config: PretrainedConfig, auto_class: Any, *, trust_remote_code: bool, field: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model of one of transformers' auto classes as its file has it, and transformers' loading info.

    Raises:
        UserError: it cannot be read, or its attention cannot be replaced.
    """
    register_attention()
    with _loading(path, field):
        return auto_class.from_pretrained(
            model_folder(path, field),
            config=config,
            dtype=torch.float32,
            attn_implementation=NAME,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


def check_complete(path: str, loading: dict[str, Any], field: str) -> None:
    """Refuse weights that lack tensors, which transformers would draw at random.

    Raises:
        UserError: tensors are missing or have another shape than the config says.
    """
    absent = sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])})
    if absent:
        reason = f"the weights of '{path}' lack {len(absent)} tensors of its config, or have them in another shape"
        remedy = "Download or export the whole model, with the config that belongs to its weights."
        raise UserError(field, f"{reason}; the first is '{absent[0]}'.", remedy)


def prepare_model(
    model: PreTrainedModel, device: torch.device, *, gradient_checkpointing: bool, field: str
) -> PreTrainedModel:
    """Check that the packed path computes what `model` does, drop its dropout and move it to `device`.

    Raises:
        UserError: the architecture computes something else, or weights are not finite.
    """
    set_fields = [name for name in _UNSUPPORTED if model.config.to_dict().get(name) not in (None, 1, 1.0)]
    if set_fields:
        raise unsupported(model, f"sets {', '.join(set_fields)}, which the packed path does not compute", field)
    if any(vars(module).get("is_causal") is False for module in model.modules()):
        raise unsupported(model, "attends in both directions, which the packed path does not compute", field)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the policy that is trained must be the policy that sampled
    broken = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if broken:
        reason = f"{len(broken)} of the model's tensors hold NaN or Inf, the first is '{broken[0]}'."
        raise UserError(field, reason, "Download or export the model anew, or take an earlier checkpoint.")
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.to(device)  # pyright: ignore[reportArgumentType]
    _check_packing(model, device, field)
    return model


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Let `model` recompute its layers' activations in the backward pass, also where only adapters are trained."""
    # Not the re-entrant kind: it drops the gradient of layers whose input needs none, as with a frozen embedding.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # transformers before it renamed the method
        model.gradient_checkpointing_enable({"use_reentrant": False})


def check_head(model: PreTrainedModel, field: str) -> None:
    """Refuse a causal LM whose output head is more than a matrix.

    Raises:
        UserError: naming `field`.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise unsupported(model, "has an output head that is not a plain matrix, which chunked log-probs need", field)


@torch.no_grad()
def _check_packing(model: PreTrainedModel, device: torch.device, field: str) -> None:
    """Refuse a model whose tokens see another sequence of the pack: recurrent layers, or attention of its own.

    The last sequence of a pack must come out as it does alone.
    """
    first, last = TokenSequence([0, 1, 2], [], 0), TokenSequence([2, 1], [], 1)
    training = model.training
    decoder = model.eval().get_decoder()
    try:
        together, alone = (
            decoder(
                input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, layout=inputs.layout
            ).last_hidden_state[0, -2:]
            for inputs in (pack([first, last], device), pack([last], device))
        )
    except UserError as error:  # the attention does not know which config key named the model
        raise UserError(field, error.reason, error.remedy) from error
    model.train(training)
    gap = (together - alone).abs().max()
    if gap > 1e-3 * alone.abs().max():
        raise unsupported(model, "mixes the sequences of a pack, which packed training needs kept apart", field)


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, field: str = "actor_rollout_ref.model.tokenizer_path"
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder, hub id or `builtin`; errors name the config key `field`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = str(BUILTIN_FOLDER) if path == BUILTIN else path
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        remedy = f"Set {field.rpartition('.')[2]} to a folder that holds tokenizer.json."
        raise UserError(field, f"no tokenizer can be loaded from '{path}': {_first_line(error)}", remedy) from error


def save_hf_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder that plain `transformers` loads with identical logits (up to `dtype`); adapters are merged in.

    `tensors` are the weights where `model` holds only shards of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Tied tensors once: as separate copies in another dtype they would be written twice.
    whole = merged_tensors(model) if tensors is None else tensors
    state = {name: value.detach().to("cpu", dtype) for name, value in whole.items()}
    stored_dtype = model.config.dtype
    model.config.dtype = dtype
    try:
        with _quiet():
            model.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)
    finally:
        model.config.dtype = stored_dtype


def output_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the layer from final hidden states to logits, or to the score of a value or reward model."""
    head = model.get_output_embeddings()
    if head is None:
        head = next((module for name, module in model.named_children() if name in CLASSIFIER_HEADS), None)
    assert isinstance(head, torch.nn.Linear)
    return head


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip_special: bool = False) -> str:
    """Return the text of token ids, spaces untouched."""
    text = tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TokenPieces:
    """What token ids look like on their own, for the rollout dump; each id of the vocabulary is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """Return one string a token."""
        for token in set(ids) - self._known.keys():
            self._known[token] = decode(self._tokenizer, [token])
        return [self._known[token] for token in ids]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return the context in which a model computes in `dtype`: autocast for bf16, nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def model_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that make up the trained state, tied ones once: parameters and persistent buffers.

    With LoRA only the adapters: the base is the frozen model folder.
    """
    return adapter_tensors(model) if has_lora(model) else merged_tensors(model)


def file_tensors(
    model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names that model files and rollout engines have, as views: experts one by one.

    transformers keeps all experts of a layer in two tensors, `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].
    """
    apart = model.config.model_type in ("qwen2_moe", "qwen3_moe")
    for name, tensor in tensors:
        layer, inside, kind = name.rpartition(".experts.")
        if not inside or not apart:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2)) if kind == "gate_up_proj" else ((kind, expert),)
            for part, weight in parts:
                yield f"{layer}.experts.{number}.{part}.weight", weight


def check_same_tensors(stored: dict[str, torch.Size], own: dict[str, torch.Size], checkpoint: Path) -> None:
    """Raise UserError when a checkpoint's tensors have other names or shapes than the model's `own`."""
    stored_rank, own_rank = adapter_rank(stored), adapter_rank(own)
    if stored_rank != own_rank:
        reason = f"the checkpoint '{checkpoint}' is of a run with lora_rank {stored_rank}, and this one has {own_rank}."
        remedy = f"Set actor_rollout_ref.model.lora_rank={stored_rank}, or trainer.resume_mode=disable."
        raise UserError("trainer.resume_mode", reason, remedy)
    wrong = [name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name)]
    if wrong:
        reason = f"the checkpoint '{checkpoint}' is of another model: '{sorted(wrong)[0]}' does not match."
        keys = f"model.path{' and target_modules' if own_rank else ''}"
        remedy = f"Set {keys} as in the run that wrote it, or trainer.resume_mode=disable."
        raise UserError("trainer.resume_mode", reason, remedy)


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response: the generation config's and the tokenizer's."""
    stored = generation.eos_token_id if generation is not None else None
    ids: list[Any] = stored if isinstance(stored, list) else [stored]
    return sorted({int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None})


def response_ends(path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> list[int]:
    """Return every id that ends a response of the model at `path`, without loading its weights."""
    folder = model_folder(path)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # it has none
        config = read_config(path, None, trust_remote_code=trust_remote_code, field=POLICY)
        generation = GenerationConfig.from_model_config(config)
    return eos_token_ids(generation, tokenizer)


@contextmanager
def _loading(path: str, field: str) -> Iterator[None]:
    """Read quietly, and say what is wrong with `path` in the user's terms."""
    try:
        with _quiet():
            yield
    except KeyError as error:
        if error.args != (NAME,):
            raise
        reason = f"'{path}' is of an architecture whose attention transformers does not let one replace."
        raise UserError(field, reason, "Use another one (Llama, Qwen, Mistral, SmolLM, GPT-NeoX, …).") from error
    except (OSError, ValueError) as error:
        reason = f"'{path}' cannot be loaded as a language model: {_first_line(error)}"
        remedy = "Is it a complete Hugging Face model folder or a hub id this machine can reach?"
        raise UserError(field, reason, remedy) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice while loading or saving."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
