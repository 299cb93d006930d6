"""SGLang as a server somewhere else, which `pellucid serve` has started: a run joins it by its address."""

from typing import Any, Self

from pellucid.errors import UserError
from pellucid.rollout.inference import Record
from pellucid.rollout.joining import ADDRESSES, START, ServerKind
from pellucid.rollout.server_connection import refusal
from pellucid.rollout.sglang_processes import SUPPORTED
from pellucid.rollout.sglang_processes.server import DESCRIBE, run_server
from pellucid.rollout.sglang_processes.sglang_over_http import SglangOverHttp


class JoinedSglang(SglangOverHttp):
    """A server that goes on when this run ends."""

    @classmethod
    async def join(cls, address: str, token: str | None, record: Record) -> Self:
        """Join a server, as `ServerKind` says."""
        joined = cls(address, token, record)
        await joined._server.send("POST", "/end_weight_update", json={})  # is refused where none is under way
        await joined.resume()
        return joined


def _describe(client: Any, address: str, names: list[str], handle: str) -> dict[str, Any]:
    answer = client.post(DESCRIBE, json={"names": names, "handle": handle})
    if not answer.is_success:
        reason = f"{address} was not started by `pellucid serve`, and takes no weights ({refusal(answer)})."
        raise UserError(ADDRESSES, reason, START)
    return answer.json()


SGLANG_SERVERS = ServerKind(
    engine="SGLang",
    supported=SUPPORTED,
    version_path="/server_info",
    at_least="context_length",
    num_workers="tp_size",
    needed={},
    describe=_describe,
    join=JoinedSglang.join,
    serve=run_server,
)
