"""Alerts: each planted trouble is told at the first step at which it can be known, and none in a healthy run."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pellucid.config.schema.alerts import AlertConfig
from pellucid.errors import UserError
from pellucid.metrics.alerts import DEFAULTS, Alert, Alerts, post
from pellucid.metrics.definitions import find

HEALTHY = {
    "reward/failed_share": 0.0, "reward/num_timeouts": 0.0, "batch/no_spread_share": 0.6, "response_length/clip_ratio": 0.1,
    "actor/entropy": 0.3, "actor/ppo_kl": 0.01, "actor/grad_norm": 0.5, "perf/throughput": 1000.0, "agent/failed_share": 0.0,
    "critic/score/mean": 0.6,
    "mismatch/rollout_is_eff_sample_size": 0.95, "mismatch/rollout_is_veto_fraction": 0.0, "mismatch/rollout_is_mean": 1.01,
    "mismatch/rollout_is_clipped_fraction": 0.1, "mismatch/num_impossible_tokens": 0.0,
    "mismatch/rollout_is_catastrophic_token_fraction": 0.0, "mismatch/rollout_rs_masked_fraction": 0.4,
}  # fmt: skip


def heard(alerts: Alerts, values: list[dict[str, float]]) -> list[tuple[int, str]]:
    return [(alert.step, alert.metric) for step, each in enumerate(values, 1) for alert in alerts.hear(step, HEALTHY | each)]


def test_every_rule_is_of_a_metric_that_there_is():
    assert {rule.metric for rule in DEFAULTS} == set(HEALTHY) and all(map(find, HEALTHY))


def test_a_healthy_run_is_quiet():
    values = [{"actor/grad_norm": 0.5 * (1 + step % 7), "perf/throughput": 1000 - 5 * step, "actor/entropy": 1 / step} for step in range(1, 100)]
    assert heard(Alerts(), values) == []


@pytest.mark.parametrize(
    ("metric", "value", "steps"),
    [
        ("reward/failed_share", 0.25, 1),
        ("reward/num_timeouts", 8.0, 2),
        ("batch/no_spread_share", 1.0, 5),
        ("response_length/clip_ratio", 1.0, 5),
        ("actor/entropy", 1e-6, 5),
        ("actor/ppo_kl", 3.0, 2),
        ("actor/grad_norm", 50.0, 1),
        ("perf/throughput", 300.0, 5),
        ("agent/failed_share", 0.5, 2),
        ("critic/score/mean", 0.1, 3),
        ("mismatch/rollout_is_eff_sample_size", 0.79, 2),
        ("mismatch/rollout_is_eff_sample_size", math.nan, 2),
        ("mismatch/rollout_is_veto_fraction", 0.06, 1),
        ("mismatch/rollout_is_mean", 0.89, 2),
        ("mismatch/rollout_is_mean", 1.11, 2),
        ("mismatch/rollout_is_clipped_fraction", 0.3, 2),
        ("mismatch/num_impossible_tokens", 1.0, 1),
        ("mismatch/rollout_is_catastrophic_token_fraction", 0.02, 1),
        ("mismatch/rollout_rs_masked_fraction", 0.96, 2),
    ],
)
def test_a_trouble_is_told_as_soon_as_it_can_be_known_and_once(metric, value, steps):
    values = [{}] * 20 + [{metric: value}] * 10
    assert heard(Alerts(), values) == [(20 + steps, metric)]
    back = [*values, {}, *[{metric: value}] * 10]
    assert len(heard(Alerts(), back)) == 2, "a trouble that comes again is told again"
    assert heard(Alerts(None), values) == []


def test_rewards_below_zero_have_no_share_of_their_median():
    assert heard(Alerts(), [{"critic/score/mean": -1.0}] * 20 + [{"critic/score/mean": -0.5}] * 9) == []


def test_a_rule_of_ones_own_takes_the_place_of_the_default():
    own = AlertConfig("actor/entropy", below=0.2, steps=2, action="stop", message="Look at it.")
    alerts = Alerts([own])
    assert alerts.hear(1, {"actor/entropy": 0.1}) == [] and alerts.hear(2, {}) == []
    [alert] = alerts.hear(3, {"actor/entropy": 0.15})
    assert str(alert) == "alert at step 3: actor/entropy is 0.15, below 0.2. Look at it." and alert.action == "stop"
    assert heard(Alerts([own]), [{"actor/entropy": 1e-9}] * 9) == [(2, "actor/entropy")]


def test_a_median_needs_steps_to_be_known():
    alerts = Alerts()
    assert heard(alerts, [{"actor/grad_norm": 1000.0}, *[{}] * 8, {"actor/grad_norm": 1000.0}]) == []
    assert heard(alerts, [{"actor/grad_norm": 1000.0}]) == [(1, "actor/grad_norm")]


@pytest.mark.parametrize(
    ("rule", "field", "reason"),
    [
        (AlertConfig("actor/entrpy", below=1), "trainer.alerts[0].metric", "actor/entropy"),
        (AlertConfig("actor/entropy"), "trainer.alerts[0]", "neither above nor below"),
        (AlertConfig("actor/entropy", below=1, action="webhook"), "trainer.alerts[0].url", "webhook"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule, field, reason):
    with pytest.raises(UserError) as caught:
        Alerts([rule])
    assert caught.value.field == field and reason in str(caught.value)


def test_an_alert_is_posted_and_one_that_does_not_arrive_is_said(capsys):
    got: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        alert = Alert(7, "actor/entropy", 0.1, "below 0.2", "", "webhook", f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        post("runs/one", alert)
        thread.join(30)
    assert got[0]["run"] == "runs/one" and got[0]["step"] == 7 and got[0]["text"].startswith("alert at step 7")
    post("runs/one", alert)
    for thread in threading.enumerate():
        if thread.name == "alert":
            thread.join(30)
    assert "did not arrive" in capsys.readouterr().out
