"""A connection to a server that samples, which `pellucid serve` or this run has started."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pellucid.errors import RunFailedError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
SILENT_S = 30.0
"""After so long without saying how it is doing a server counts as gone."""


def authorization(token: str | None) -> dict[str, str]:
    """Return the header that carries a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def said(error: Exception) -> str:
    """Return an error with its kind, since many have no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def refusal(answer: "httpx.Response") -> str:
    """Return what a server says where it does not do what it was asked."""
    return f"{answer.status_code}: {answer.text[:1000]}"


class ServerConnection:
    """Asks a server over HTTP, and knows when it is gone.

    Another run could join the same server, or something start it anew. So the labels that it gives to tokens have this
    run's own name beside the version, and a token with another label ends the run.

    Args:
        engine: its name, for messages.
        address: `http://host:port`.
        token: what the server asks for; None where it asks for none.
        num_kept: idle connections that are kept at most; httpx looks through all of them for each request.
    """

    def __init__(self, engine: str, address: str, token: str | None, *, num_kept: int) -> None:
        import httpx

        self.name, self._run = f"the {engine} server at {address}", uuid4().hex
        self.gone = ""
        """Why it cannot be asked any more; empty while it can."""
        # A server closes a connection that was idle for 5 s, and a request may not be on its way at that moment.
        limits = httpx.Limits(max_keepalive_connections=num_kept, keepalive_expiry=2)
        self.http = httpx.AsyncClient(
            base_url=address,
            headers=authorization(token),
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # answers take their time; whether it lives, others ask
            transport=httpx.AsyncHTTPTransport(limits=limits, retries=2),  # of connecting: nothing was sent yet
        )

    def label(self, version: int) -> str:
        """Return the name of a version of this run's weights."""
        return f"{self._run}:{version}"

    def versions(self, spans: Iterable[dict[str, Any]]) -> list[int]:
        """Return the version of each token in spans of a label, which must be one of this run's."""
        versions: list[int] = []
        for span in spans:
            run, _, version = span["version"].partition(":")
            if run != self._run:
                why = "it was started anew, or another run has given it weights"
                raise RunFailedError(f"{self.name} samples from weights unknown here: {why}")
            versions += [int(version)] * (span["end"] - span["start"])
        return versions

    async def send(self, verb: str, path: str, **request: Any) -> "httpx.Response | None":
        """Return the answer, whatever it is, or None and be gone.

        All that is asked may be asked twice: a repeated request draws the same tokens, and its first copy ends with
        the connection. So a connection that breaks, which need not mean much, is made again once.
        """
        import httpx

        for is_last in (False, True):
            try:
                return await self.http.request(verb, path, **request)
            except httpx.TransportError as error:
                if is_last or isinstance(error, httpx.TimeoutException):
                    self.lose(error)
                    break
        return None

    def lose(self, error: Exception) -> None:
        """Note that the server is gone."""
        self.gone = self.gone or f"{self.name} is gone ({said(error)})"

    async def ask(self, path: str, body: dict[str, Any] | None = None, **query: str | bool | int) -> "httpx.Response":
        """Return the answer to what must be done, else the run fails."""
        answer = await self.send("POST", path, json=body, params=query)
        if answer is None:
            raise RunFailedError(self.gone)
        if answer.is_error:
            raise RunFailedError(f"{self.name} answers {path} with {refusal(answer)}")
        return answer
