"""Checks on what a user's own estimator or loss returns: a wrong shape would train, and train something else.

`build.py` wraps functions named by import path; the built-in ones are tested instead.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pellucid.algo.advantages import AdvantageInputs, Estimator
from pellucid.algo.catalog import ARGUMENTS, estimator_entry
from pellucid.algo.policy_loss import LossInputs, PolicyLossFunction
from pellucid.errors import UserError
from pellucid.plugins import user_code

PREFIX = "plugin/"
LOSS_METRICS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/pg_covfrac")
"""What built-in losses report, and a loss built on one of them passes on."""
LOSS_FIELD, ESTIMATOR_FIELD = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"


def checked_loss(function: Callable[..., Any], spec: str) -> PolicyLossFunction:
    """Return the loss with its result checked at every call.

    Raises (when called):
        UserError: the function raises, the loss is not [B, T] or has no gradient, or a metric is not a scalar tensor
            named `plugin/…`.
    """

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with user_code(spec, LOSS_FIELD):
            result = function(inputs)
        per_token, metrics = _pair(result, LOSS_FIELD, spec, "(loss [B, T], metrics)")
        _check_shape(per_token, inputs.logp, LOSS_FIELD, spec, "the loss")
        if inputs.logp.requires_grad and not per_token.requires_grad:
            raise UserError(
                LOSS_FIELD,
                f"'{spec}' returns a loss without gradient: nothing would be learned.",
                "Compute it from inputs.logp, not detached.",
            )
        for name, value in dict(metrics).items():
            if not name.startswith(PREFIX) and name not in LOSS_METRICS:
                raise UserError(LOSS_FIELD, f"'{spec}' returns the metric '{name}'.", f"Call it '{PREFIX}{name}'.")
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise UserError(LOSS_FIELD, f"'{spec}' returns '{name}' as {_shown(value)}.", "Return a scalar tensor.")
        return per_token, {name: value.detach().reshape(()) for name, value in metrics.items()}

    return loss


def checked_estimator(function: Callable[..., Any], spec: str) -> Estimator:
    """Return the estimator with its result checked at every call.

    Raises:
        UserError: the function has a parameter that nothing fills.

    Raises (when called):
        UserError: the function raises, or advantages or returns are not [B, T], or hold NaN or Inf inside the mask.
    """
    _check_parameters(function, spec)

    def estimator(inputs: AdvantageInputs, **tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with user_code(spec, ESTIMATOR_FIELD):
            result = function(inputs, **tensors)
        advantages, returns = _pair(result, ESTIMATOR_FIELD, spec, "(advantages, returns), both [B, T]")
        for name, value in (("advantages", advantages), ("returns", returns)):
            _check_shape(value, inputs.token_rewards, ESTIMATOR_FIELD, spec, name)
            if not value[inputs.mask].isfinite().all():
                raise UserError(
                    ESTIMATOR_FIELD,
                    f"'{spec}' returns {name} with NaN or Inf.",
                    "Look for a division by zero or an empty mean.",
                )
        outside = ~inputs.mask  # filled, not multiplied: NaN × 0 is NaN
        return advantages.detach().masked_fill(outside, 0.0), returns.detach().masked_fill(outside, 0.0)

    return estimator


def _check_parameters(function: Callable[..., Any], spec: str) -> None:
    filled = estimator_entry(spec).arguments
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.name not in filled and parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
        ):  # fmt: skip
            raise UserError(
                ESTIMATOR_FIELD,
                f"nothing fills the parameter `{parameter.name}` of '{spec}'.",
                f"After the inputs a `def` in that file may take {', '.join(ARGUMENTS)}.",
            )


def _pair(result: Any, field: str, spec: str, wanted: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(field, f"'{spec}' returns {_shown(result)}.", f"Return {wanted}.")
    return result


def _check_shape(value: Any, like: torch.Tensor, field: str, spec: str, what: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        raise UserError(
            field,
            f"'{spec}' returns {what} as {_shown(value)}; one value a token is needed, {tuple(like.shape)}.",
            "Leave aggregation, masking and correction weights to the actor, and return a value for each token.",
        )


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
