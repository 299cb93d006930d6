"""The rollout engine SGLang, always a server: `sglang_over_http.py` starts one in processes of its own, or joins one,
and speaks to it for `inference.py`; `server.py` and `scheduler_hooks.py` run in it.
"""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from pellucid.config.schema.model import ModelConfig
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import MissingExtraError, UserError, installed_version, nearest
from pellucid.training.common.models import model_folder

SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
"""Versions that the contract tests ran with."""
SPARE_TOKENS = 6
"""Tokens of `context_length` that SGLang keeps for itself: it refuses prompts that leave less."""
_NAME, _OPTIONS = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.engine_kwargs.sglang"


def check_sglang(options: dict[str, Any]) -> None:
    """Check that SGLang is installed in a version that is known to work, and takes the arguments in `options`.

    Raises:
        MissingExtraError: it is not installed.
        UserError: it is of another version, or has no such argument.
    """
    installed = installed_version("sglang")
    if installed is None:
        raise MissingExtraError(_NAME, "sglang", "sglang")
    if installed not in SUPPORTED:
        reason = f"is sglang, of which version {installed} is installed and {SUPPORTED} is needed."
        raise UserError(_NAME, reason, f"pip install 'sglang{SUPPORTED}'")
    if given := {name for name, value in options.items() if value is not None}:
        known = _arguments()
        for name in given - set(known):
            match, listed = nearest(name, known), "`python -m sglang.launch_server --help` lists what there is."
            remedy = f"Did you mean '{match}'?" if match else listed
            raise UserError(f"{_OPTIONS}.{name}", f"is no argument of SGLang {installed}.", remedy)


def _arguments() -> list[str]:
    """Return the fields of SGLang's `ServerArgs`, read from its source: importing it changes transformers."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "srt" / "arg_groups" / "field_order.py"
    for statement in ast.parse(source.read_text()).body:
        if isinstance(statement, ast.Assign):
            return list(ast.literal_eval(statement.value))
    raise AssertionError(f"{source} lists no arguments")


def sglang_options(model: ModelConfig, section: RolloutConfig, device: str, longest: int) -> dict[str, Any]:
    """Return the fields of SGLang's `ServerArgs` that two sections of a config stand for.

    `device` is a kind, e.g. "cuda"; `longest` is the most tokens of a request and its answer.
    """
    own: dict[str, Any] = {
        "model_path": model_folder(model.path),
        "tokenizer_path": model_folder(model.tokenizer_path or model.path),
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(model.override_config),
        "device": device,
        "dtype": section.dtype,
        "context_length": longest + SPARE_TOKENS,
        "max_running_requests": section.max_num_seqs,
        "max_prefill_tokens": section.max_num_batched_tokens,
        "chunked_prefill_size": section.max_num_batched_tokens if section.enable_chunked_prefill else -1,
        "tp_size": section.tensor_model_parallel_size,
        "disable_cuda_graph": section.enforce_eager or device == "cpu",
        "disable_radix_cache": not section.enable_prefix_caching,
    }
    if device != "cpu":
        own["mem_fraction_static"] = section.gpu_memory_utilization
    return own | {name: value for name, value in section.engine_kwargs.sglang.items() if value is not None}
