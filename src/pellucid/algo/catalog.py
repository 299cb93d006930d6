"""The algorithms by name: where the function of each one is, what it needs, and which keys of the config it reads.

Free of torch. The config's rules, the plan and the step ask an entry for its needs and compare no names, so a new
algorithm is one function and one entry here.
"""

import ast
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Need = Literal["values", "groups", "greedy_scores", "reward_components", "component_weights"]
ARGUMENTS: tuple[Need, ...] = ("values", "greedy_scores", "reward_components", "component_weights")
"""Names of what an estimator may take beside its `AdvantageInputs`; a parameter of that name asks for it."""


@dataclass(frozen=True, slots=True)
class EstimatorEntry:
    """An advantage estimator, as `algorithm.adv_estimator` names it."""

    function: str
    """`module:name`; the formula and its paper are in the function's docstring."""
    needs: frozenset[Need] = frozenset()
    """`values`: the critic's value of each token. `groups`: several samples a prompt. `greedy_scores`: the reward of
    the greedy response to each prompt. `reward_components`, `component_weights`: the parts of each reward."""
    settings: frozenset[str] = frozenset()
    """Keys of section `algorithm` that the function reads."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of what the function takes beside its `AdvantageInputs`."""
        return tuple(name for name in ARGUMENTS if name in self.needs)


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A policy loss, as `actor.policy_loss.loss_mode` names it."""

    function: str
    """`module:name`."""
    settings: frozenset[str] = frozenset()
    """Keys of section `actor_rollout_ref.actor` that the function reads."""
    select: str | None = None
    """`module:name` of the function that picks the tokens of the mini-batch which the loss treats differently."""
    sequence_mean: bool = False
    """Whether the loss is defined as a mean over sequences, so that only `seq-mean-token-mean` aggregates it."""
    sequence_weights: bool = False
    """Whether correction weights enter as their geometric mean over the sequence."""


def _estimator(name: str, *needs: Need, settings: tuple[str, ...] = ()) -> EstimatorEntry:
    return EstimatorEntry(f"pellucid.algo.advantages:{name}", frozenset(needs), frozenset(settings))


_BY_STD = ("norm_adv_by_std_in_grpo",)
ESTIMATORS: dict[str, EstimatorEntry] = {
    "gae": _estimator("gae", "values", settings=("gamma", "lam")),
    "grpo": _estimator("grpo", "groups", settings=_BY_STD),
    "grpo_passk": _estimator("grpo_passk", "groups", settings=_BY_STD),
    "rloo": _estimator("rloo", "groups"),
    "reinforce_plus_plus": _estimator("reinforce_plus_plus", settings=("gamma",)),
    "reinforce_plus_plus_baseline": _estimator("reinforce_plus_plus_baseline", "groups"),
    "remax": _estimator("remax", "greedy_scores"),
    "opo": _estimator("opo", "groups"),
    "gpg": _estimator("gpg", "groups"),
    "gdpo": _estimator(
        "gdpo", "groups", "reward_components", "component_weights", settings=(*_BY_STD, "gdpo_reward_weights")
    ),
}


def _loss(name: str, *settings: str, selects: bool = False, **flags: bool) -> LossEntry:
    module = "pellucid.algo.policy_loss"
    return LossEntry(f"{module}:{name}", frozenset(settings), f"{module}:select_{name}" if selects else None, **flags)


_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_CLIP_COV = ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
_KL_COV = ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
POLICY_LOSSES: dict[str, LossEntry] = {
    "vanilla": _loss("vanilla", *_CLIP, "clip_ratio_c"),
    "gspo": _loss("gspo", *_CLIP, sequence_mean=True),
    "sapo": _loss("sapo", "policy_loss.tau_pos", "policy_loss.tau_neg", sequence_mean=True),
    "gpg": _loss("gpg"),
    "clip_cov": _loss("clip_cov", *_CLIP, *_CLIP_COV, selects=True),
    "kl_cov": _loss("kl_cov", *_KL_COV, selects=True),
    "geo_mean": _loss("geo_mean", *_CLIP, sequence_mean=True, sequence_weights=True),
    "cispo": _loss("cispo", *_CLIP),
    "dro": _loss("dro", "policy_loss.dro_beta"),
}
REINFORCE = "gpg"
"""The loss of `algorithm.loss_type: reinforce`: −A·logp, which the weights π_θ/π_rollout multiply as elsewhere."""


def estimator_entry(name: str) -> EstimatorEntry:
    """Return the entry of a built-in estimator, or of a user's own by the names of its function's parameters."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    parameters = _parameters(name)
    return EstimatorEntry(name, frozenset(need for need in ARGUMENTS if need in parameters))


def loss_entry(name: str) -> LossEntry:
    """Return the entry of a built-in policy loss, in either spelling, or that of a user's own."""
    return POLICY_LOSSES.get(name.replace("-", "_"), LossEntry(name))


def load(path: str) -> Callable[..., Any]:
    """Return the function of a built-in algorithm, given as `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _parameters(spec: str) -> set[str]:
    """Return the names of the parameters of a user's function, read from its source without running it.

    A file that is missing or does not parse gives none: loading the function tells what is wrong before the run.
    """
    module, _, name = spec.rpartition(":")
    try:
        found = None if module.endswith(".py") else importlib.util.find_spec(module)
        source = Path(module).expanduser() if module.endswith(".py") else Path((found and found.origin) or "")
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, ImportError):
        return set()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return {argument.arg for node in functions for argument in (*node.args.args, *node.args.kwonlyargs)}
