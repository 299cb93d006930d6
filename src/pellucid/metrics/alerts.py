"""Alerts: what people want to hear of a run before they look at its curves.

    metrics of a step ─► Alerts.hear ─► alerts that begin ─► the loop: console, run.json, checkpoint, stop, webhook

A rule names a metric, its bounds and for how many steps they must be left. Those of `DEFAULTS` hold beside the user's.
"""

import json
import math
import threading
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from pellucid.config.schema.alerts import AlertConfig
from pellucid.console import notice
from pellucid.errors import UserError, did_you_mean
from pellucid.metrics.definitions import METRICS, find

FIELD = "trainer.alerts"
REMEMBERED, NEEDED = 50, 10
"""Steps whose median relative bounds are multiples of, and how many of them there must be."""
WEBHOOK_TIMEOUT_S = 10.0
_CLOSER = (
    "bring the two policies together (give actor_rollout_ref.rollout.dtype the trainer's precision, sample with newer "
    "weights)"
)
DEFAULTS = (
    AlertConfig("reward/failed_share", above=0.05, message="Reward calls fail; pellucid rollouts RUN shows why."),
    AlertConfig("reward/num_timeouts", above=0, steps=2, message="Reward calls take longer than reward_timeout_s."),
    AlertConfig(
        "batch/no_spread_share",
        above=0.99,
        steps=5,
        message="In no group do rewards differ, so nothing is learned: the problems are too easy, too hard, or the "
        "reward cannot tell answers apart.",
    ),
    AlertConfig(
        "response_length/clip_ratio",
        above=0.95,
        steps=5,
        message="Nearly every response is cut off: raise data.max_response_length, or see whether the model ends any.",
    ),
    AlertConfig("critic/score/mean", below=0.3, of_median=True, steps=3, message="The reward is lost."),
    AlertConfig("actor/entropy", below=1e-4, steps=5, message="The policy has no choice left: its entropy is gone."),
    AlertConfig("actor/ppo_kl", above=1.0, steps=2, message="Updates move the policy far: lower the learning rate."),
    AlertConfig("actor/grad_norm", above=20, of_median=True, message="The gradient is far larger than it was."),
    AlertConfig(
        "perf/throughput", below=0.4, of_median=True, steps=5, message="Far fewer tokens a second than before."
    ),
    AlertConfig(
        "agent/failed_share", above=0.2, steps=2, message="Agents or tools fail; pellucid rollouts RUN shows why."
    ),
    AlertConfig(
        "mismatch/rollout_is_eff_sample_size",
        below=0.8,
        steps=2,
        message=f"A few samples carry the update: {_CLOSER}, or lower the variance with algorithm.rollout_is_level: "
        "token or a smaller algorithm.rollout_is_threshold.",
    ),
    AlertConfig(
        "mismatch/rollout_is_clipped_fraction",
        above=0.2,
        steps=2,
        message="Mode clip gives many tokens weight 0: widen algorithm.rollout_is_threshold and "
        "rollout_is_threshold_lower to what mismatch/rollout_is_p25 and p75 show, take algorithm.rollout_is_mode: "
        f"truncate, or {_CLOSER}.",
    ),
    AlertConfig(
        "mismatch/rollout_is_veto_fraction",
        above=0.05,
        message=f"Many sequences hold a token that the trainer finds impossible: {_CLOSER}, or lower "
        "algorithm.rollout_is_veto_threshold (null: no veto).",
    ),
    AlertConfig(
        "mismatch/rollout_is_mean",
        below=0.9,
        above=1.1,
        steps=2,
        message=f"The sampled tokens are systematically more or less likely to the trainer: {_CLOSER}, and check that "
        "both sides use the same temperature, or use algorithm.rollout_is_level: geometric or token.",
    ),
    AlertConfig(
        "mismatch/rollout_is_catastrophic_token_fraction",
        above=0.01,
        message=f"The trainer finds many sampled tokens impossible: {_CLOSER}, and compare the two sides' tokenizer "
        "and chat template.",
    ),
    AlertConfig(
        "mismatch/num_impossible_tokens",
        above=0.0,
        message="Sampled tokens have a log-probability of −inf or NaN on one side and are left out: compare the two "
        "sides' tokenizer, vocabulary size and what masks their logits.",
    ),
    AlertConfig(
        "mismatch/rollout_rs_masked_fraction",
        above=0.5,
        steps=2,
        message="algorithm.rollout_rs leaves little to train on: widen its bounds to what mismatch/rollout_is_p25 and "
        "p75 show, or first measure alone with algorithm.rollout_correction_preset: disabled.",
    ),
)


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule whose bounds have been left for as many steps as it says."""

    step: int
    metric: str
    value: float
    bound: str
    """As people read it: `above 0.05`."""
    message: str
    action: Literal["notice", "checkpoint", "stop", "webhook"]
    url: str | None = None

    def __str__(self) -> str:
        return f"alert at step {self.step}: {self.metric} is {self.value:.4g}, {self.bound}. {self.message}".rstrip()


class Alerts:
    """Looks at the metrics of one step after the other.

    Args:
        own: the user's rules, beside which `DEFAULTS` hold for metrics that they do not name; None: no rule at all.

    Raises:
        UserError: a rule names no metric, no bound, or no address for its webhook.
    """

    def __init__(self, own: Sequence[AlertConfig] | None = ()) -> None:
        for number, rule in enumerate(own or ()):
            if find(rule.metric) is None:
                reason = f"there is no metric '{rule.metric}'."
                raise UserError(f"{FIELD}[{number}].metric", reason, did_you_mean(rule.metric, METRICS))
            if rule.above is None and rule.below is None:
                raise UserError(f"{FIELD}[{number}]", "has neither above nor below.", "Set one of them.")
            if (rule.action == "webhook") != (rule.url is not None):
                reason = "goes with action: webhook, and neither without the other."
                raise UserError(f"{FIELD}[{number}].url", reason, "Set both.")
        named = {rule.metric for rule in own or ()}
        self._rules = [] if own is None else [*own, *(rule for rule in DEFAULTS if rule.metric not in named)]
        self._streaks = [0] * len(self._rules)
        """For how many steps in a row each rule's bounds have been left."""
        self._past = {rule.metric: deque[float](maxlen=REMEMBERED) for rule in self._rules}

    def hear(self, step: int, metrics: dict[str, float]) -> list[Alert]:
        """Return the alerts that begin with this step; one that goes on is not told again."""
        begun: list[Alert] = []
        for index, rule in enumerate(self._rules):
            if (value := metrics.get(rule.metric)) is None:
                continue  # not measured in this step
            bound = self._left(rule, value)
            self._streaks[index] = self._streaks[index] + 1 if bound else 0
            if self._streaks[index] == rule.steps:
                begun.append(Alert(step, rule.metric, value, bound, rule.message, rule.action, rule.url))
        for name, past in self._past.items():
            past += [metrics[name]] if not math.isnan(metrics.get(name, math.nan)) else []
        return begun

    def _left(self, rule: AlertConfig, value: float) -> str:
        """Return which bound of a rule a value is beyond; empty where none is."""
        past = self._past[rule.metric]
        if math.isnan(value):
            return "no number"
        if rule.of_median and len(past) < NEEDED:
            return ""
        unit, shown = (median(past), " times its median") if rule.of_median else (1.0, "")
        if unit <= 0:
            return ""  # a share of it says nothing
        if rule.above is not None and value > rule.above * unit:
            return f"above {rule.above:g}{shown}"
        if rule.below is not None and value < rule.below * unit:
            return f"below {rule.below:g}{shown}"
        return ""


def post(run: str, alert: Alert) -> None:
    """Send an alert as JSON to its address, in a thread; that it did not arrive is said."""
    assert alert.url is not None, "that is what it is for"
    body = json.dumps({"run": run, "text": str(alert), **asdict(alert)}).encode()
    request = urllib.request.Request(alert.url, body, {"Content-Type": "application/json"})

    def send() -> None:
        try:
            urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S).close()
        except OSError as error:
            notice(f"{FIELD}: the alert did not arrive at {alert.url} ({error}).")

    threading.Thread(target=send, name="alert").start()
