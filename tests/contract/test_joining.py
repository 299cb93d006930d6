"""What a run asks of a server before it joins it, as far as no engine is needed: answers of those that do not fit."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import UserError
from pellucid.rollout.joining import check_servers
from pellucid.rollout.sglang_processes.server import DESCRIBE
from pellucid.rollout.sglang_processes.sglang_over_http import SGLANG_SERVERS
from pellucid.rollout.transports import WeightStore
from pellucid.rollout.vllm_processes.joined_vllm import VLLM_SERVERS


class OtherServer(BaseHTTPRequestHandler):
    """Answers as engines do without what `pellucid serve` adds; a path that has no answer is not found."""

    answers: ClassVar[dict[str, tuple[int, str]]]

    def do_GET(self) -> None:
        status, text = self.answers.get(self.path, (404, '{"detail":"Not Found"}'))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


VLLM = {"/version": (200, '{"version":"0.32.0"}'), "/v1/models": (200, "{}")}
NO_METHOD = (500, "Worker failed with error ''CPUWorker' object has no attribute 'describe''")
NEEDED = '{"logprobs_mode":"processed_logprobs","policy":"priority"}'
DESCRIBED = f'{{"model":{{"vocab_size":25}},"arguments":{NEEDED},"sees":false}}'
BLIND = (200, f'{{"results":[{DESCRIBED}]}}')
SGLANG = {"/server_info": (200, '{"tp_size":1,"version":"0.5.23"}'), "/v1/models": (200, "{}")}
OF_VLLM = {"/server_info": (200, '{"vllm_config":"","system_env":{"version":"1"}}'), "/v1/models": (200, "{}")}


@pytest.mark.parametrize(
    ("kind", "answers", "words"),
    [
        (VLLM_SERVERS, {}, "no vLLM server"),
        (VLLM_SERVERS, VLLM | {"/version": (200, "the version of another")}, "no vLLM server"),
        (VLLM_SERVERS, VLLM | {"/version": (200, '{"version":"0.33.1"}')}, "runs vLLM 0.33.1, and <0.33,>=0.32 is needed"),
        (VLLM_SERVERS, VLLM | {"/v1/models": (401, '{"error":"Unauthorized"}')}, "refuses the token"),
        (VLLM_SERVERS, VLLM, "VLLM_SERVER_DEV_MODE=1"),
        (VLLM_SERVERS, VLLM | {"/collective_rpc": NO_METHOD}, "no extension that takes weights.*no attribute 'describe'"),
        (VLLM_SERVERS, VLLM | {"/collective_rpc": BLIND, "/inference/v1/generate": (403, "")}, "--enable-scale-out"),
        (VLLM_SERVERS, VLLM | {"/collective_rpc": BLIND}, "does not reach the memory of this process"),
        (SGLANG_SERVERS, VLLM, "no SGLang server"),
        (SGLANG_SERVERS, OF_VLLM, "no SGLang server"),
        (SGLANG_SERVERS, SGLANG | {"/server_info": (401, "")}, "refuses the token"),
        (SGLANG_SERVERS, SGLANG | {"/server_info": (200, '{"version":"0.4.1"}')}, "runs SGLang 0.4.1, and .* is needed"),
        (SGLANG_SERVERS, SGLANG, "was not started by `pellucid serve`, and takes no weights .404"),
        (SGLANG_SERVERS, SGLANG | {DESCRIBE: (200, DESCRIBED)}, "does not reach the memory of this process"),
    ],
)
def test_what_no_pellucid_serve_has_started_is_not_joined(kind, answers, words):
    handler = type("Answers", (OtherServer,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        section = RolloutConfig(server_addresses=[f"http://127.0.0.1:{server.server_port}"], server_token_file=None)
        with pytest.raises(UserError, match=words):
            check_servers(kind, section, {}, {"vocab_size": 25}, WeightStore())
        server.shutdown()
    with pytest.raises(UserError, match=r"nothing answers at http.*ConnectError"):
        check_servers(kind, section, {}, {}, WeightStore())
