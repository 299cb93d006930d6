"""Rules on sampling: how many responses, from which distribution, of what length.

`validate` in the package calls `mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.algo.catalog import estimator_entry
from pellucid.config.schema import RunConfig
from pellucid.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting under which sampling makes no sense."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    yield from _groups(config)
    for section, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if not sampling.do_sample and sampling.n > 1:
            reason = f"{sampling.n} samples with do_sample: false are {sampling.n} times the same text."
            yield UserError(f"{section}.n", reason, f"Set {section}.do_sample: true, or n: 1.")
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        reason = "0 divides the logits by zero while do_sample is true."
        remedy = f"Set it above 0, or {ROLLOUT}.val_kwargs.do_sample: false for greedy decoding."
        yield UserError(f"{ROLLOUT}.val_kwargs.temperature", reason, remedy)
    if rollout.temperature == 0:
        yield UserError(
            f"{ROLLOUT}.temperature",
            "0 divides the logits by zero: training's log-probabilities are of the temperature-scaled distribution, "
            "however responses are sampled.",
            "Set it above 0; for greedy decoding, temperature: 1.0 and do_sample: false.",
        )
    if rollout.dtype != model.dtype:
        yield UserError(
            f"{ROLLOUT}.dtype",
            f"is {rollout.dtype} while actor_rollout_ref.model.dtype is {model.dtype}; the native engine "
            "runs on the actor's own weights.",
            f"Remove it, or set both alike. To study a gap in precision, set {ROLLOUT}.simulate_mismatch.dtype.",
        )
    for ours, data_key, theirs in (
        (rollout.prompt_length, "max_prompt_length", config.data.max_prompt_length),
        (rollout.response_length, "max_response_length", config.data.max_response_length),
    ):
        if ours != theirs:
            name = data_key.removeprefix("max_")
            reason = f"is {ours} while data.{data_key} is {theirs}."
            yield UserError(f"{ROLLOUT}.{name}", reason, f"Remove it; it follows data.{data_key}.")


def _groups(config: RunConfig) -> Iterator[UserError]:
    """Yield what goes wrong when each prompt has a single response, or always the same one."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    if config.trainer.val_only:
        return
    needs = estimator_entry(algorithm.adv_estimator).needs
    if "greedy_scores" in needs and not rollout.do_sample:
        yield UserError(
            f"{ROLLOUT}.do_sample",
            f"{algorithm.adv_estimator} compares each sample with the greedy response, and here both are "
            "the same: every advantage is 0.",
            "Set it to true.",
        )
    if rollout.n > 1:
        return
    if "groups" in needs:
        outcome = "" if algorithm.adv_estimator == "rloo" else ": every advantage is 0"
        yield UserError(
            f"{ROLLOUT}.n",
            f"{algorithm.adv_estimator} compares the samples of one prompt, and a group of 1 has nothing to compare"
            f"{outcome}.",
            "Set it to 2 or more, e.g. 8; or take an estimator without groups, such as "
            "algorithm.adv_estimator: reinforce_plus_plus.",
        )
    elif algorithm.filter_groups.enable:
        reason = "algorithm.filter_groups drops groups without a spread, and a group of 1 never has one."
        yield UserError(f"{ROLLOUT}.n", reason, "Set it to 2 or more, or algorithm.filter_groups.enable: false.")
