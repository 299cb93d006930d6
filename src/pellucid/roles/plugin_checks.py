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
from pellucid.errors import NonFiniteError, UserError
from pellucid.plugins import what_failed

PREFIX = "plugin/"
LOSS_METRICS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/pg_covfrac")
"""What built-in losses report, and a loss built on one of them passes on."""
LOSS_FIELD, ESTIMATOR_FIELD = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"


def checked_loss(function: Callable[..., Any], spec: str) -> PolicyLossFunction:
    """Return the loss with its result checked at every call.

    Its metrics are called `plugin/…`, save for those of the built-in losses.

    Raises (when called):
        UserError: the function raises, the loss is not [B, T] or has no gradient, or a metric is not a scalar.
    """

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        per_token, metrics = _call(function, spec, LOSS_FIELD, "(loss [B, T], metrics)", inputs)
        _check_shape(per_token, inputs.logp, LOSS_FIELD, spec, "the loss")
        if inputs.logp.requires_grad and not per_token.requires_grad:
            reason = f"'{spec}' returns a loss without gradient: nothing would be learned."
            raise UserError(LOSS_FIELD, reason, "Compute it from inputs.logp, not detached.")
        named = {
            name if name in LOSS_METRICS else PREFIX + name.removeprefix(PREFIX): metrics[name] for name in metrics
        }
        for name, value in named.items():
            if torch.as_tensor(value).numel() != 1:
                raise UserError(LOSS_FIELD, f"'{spec}' returns '{name}' as {_shown(value)}.", "Return a scalar.")
        return per_token, {name: torch.as_tensor(value).detach().reshape(()) for name, value in named.items()}

    return loss


def checked_estimator(function: Callable[..., Any], spec: str) -> Estimator:
    """Return the estimator with its result checked at every call.

    Raises:
        UserError: the function has a parameter that nothing fills.

    Raises (when called):
        UserError: the function raises, or advantages or returns are not [B, T], or hold NaN or Inf inside the mask.
    """
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(estimator_entry(spec).arguments))
    except TypeError as error:  # a parameter that nothing fills
        remedy = f"After the inputs a `def` in that file may take {', '.join(ARGUMENTS)}."
        raise UserError(ESTIMATOR_FIELD, f"'{spec}' cannot be called: {error}.", remedy) from error

    def estimator(inputs: AdvantageInputs, **tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wanted, outside = "(advantages, returns), both [B, T]", ~inputs.mask
        results = _call(function, spec, ESTIMATOR_FIELD, wanted, inputs, **tensors)
        for name, value in zip(("advantages", "returns"), results):
            _check_shape(value, inputs.token_rewards, ESTIMATOR_FIELD, spec, name)
            if not value[inputs.mask].isfinite().all():
                reason = f"'{spec}' returns {name} with NaN or Inf."
                raise UserError(ESTIMATOR_FIELD, reason, "Look for a division by zero or an empty mean.")
        advantages, returns = (value.detach().masked_fill(outside, 0.0) for value in results)  # NaN × 0 is NaN
        return advantages, returns

    return estimator


def _call(function: Callable[..., Any], spec: str, field: str, wanted: str, *args: Any, **kwargs: Any) -> Any:
    """Return the pair that a user's function returns; what it raises becomes one message with its line there."""
    try:
        result = function(*args, **kwargs)
    except (UserError, NonFiniteError):
        raise
    except Exception as error:
        raise UserError(field, f"'{spec}' fails ({what_failed(error, spec)}).", "Mend the function.") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(field, f"'{spec}' returns {_shown(result)}.", f"Return {wanted}.")
    return result


def _check_shape(value: Any, like: torch.Tensor, field: str, spec: str, what: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        reason = f"'{spec}' returns {what} as {_shown(value)}; one value a token is needed, {tuple(like.shape)}."
        remedy = "Leave aggregation, masking and correction weights to the actor, and return a value for each token."
        raise UserError(field, reason, remedy)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
