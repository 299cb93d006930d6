"""OpenAI's API on loopback: requests are read, handed to who answers them, and the answers written.

The server runs in a thread with an event loop of its own, started with the first trajectory. Each trajectory has a
token; its requests are answered in the event loop that the trajectory lives in.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pellucid.agents.chat import FIELD, Message
from pellucid.errors import MissingExtraError, installed_version
from pellucid.types import FinishReason

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

Said = str | list[Message]
"""What is to be gone on from."""
LOOK_EVERY_S = 0.5
"""How often it is looked whether a client still waits."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("n", "best_of"), ((1,), "make a request for each answer")),
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "logit_bias", "echo", "suffix", "modalities"),
        ((False, {}, "", ["text"]), "leave it out"),
    ),
    **dict.fromkeys(("audio", "web_search_options"), ((), "leave it out")),
    "response_format": (({"type": "text"},), "leave it out, and say in the messages what form it should have"),
    "tool_choice": (("auto", "none"), "take 'auto', and say in the messages what should be called"),
    "parallel_tool_calls": ((True,), "leave it out, and answer each call"),
    "functions": (([],), "give them as 'tools'"),
}
"""What would ask for another answer than a turn of the policy, its values that do not, and what to do instead."""
_KNOWN = {
    *("messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),  # who asks, and how it is billed
    *("prediction", "prompt_cache_key", "prompt_cache_retention", *_REFUSED),
}
"""What needs no word on the console."""


class RequestError(Exception):
    """Raised for a request that cannot be answered; the program is told why."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True, slots=True)
class Ask:
    """What is read of a request."""

    said: Said
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignored: dict[str, Any] = field(default_factory=dict)
    """What changes nothing: how tokens are drawn is for the run to say, and other fields are unknown."""
    may_call: bool = True
    """Whether calls of tools are looked for in the answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a response is written from."""

    said: Message | str
    """A message where messages were asked, else a text."""
    finish_reason: FinishReason
    num_before: int
    """Tokens before the answer."""
    num_drawn: int


Trajectory = tuple[Callable[[Ask], Coroutine[Any, Any, Reply]], asyncio.AbstractEventLoop]
"""What answers, and where it is awaited."""


class OpenAIServer:
    """Answers at `url`.

    Raises:
        UserError: its packages are not installed.
    """

    def __init__(self) -> None:
        for package in ("starlette", "uvicorn"):
            if installed_version(package) is None:
                raise MissingExtraError(f"{FIELD}.name", package, "serve")
        self._trajectories: dict[str, Trajectory] = {}
        self._starting = threading.Lock()
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None
        self.url = ""
        """What clients take as base; empty before the first trajectory."""

    def admit(self, trajectory: Trajectory) -> str:
        """Return a token with which requests reach a trajectory."""
        with self._starting:
            if self._running is None:
                self._running = self._start()
        token = secrets.token_urlsafe(32)
        self._trajectories[token] = trajectory
        return token

    def dismiss(self, token: str) -> None:
        """Refuse requests with a token from now on."""
        del self._trajectories[token]

    def _start(self) -> "tuple[uvicorn.Server, threading.Thread]":
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        paths = ("/v1/chat/completions", "/v1/completions")
        app = Starlette(
            routes=[Route(path, self._respond, methods=["POST"]) for path in paths],
            exception_handlers={RequestError: _refusal, 404: _unknown},
        )
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="endpoint", daemon=True)
        thread.start()
        return server, thread

    async def _respond(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse, Response

        trajectory = self._trajectories.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if trajectory is None:
            raise RequestError("no trajectory under way has this token", "invalid_api_key", 401)
        body = _body(await request.body())
        ask = (_read_chat if request.url.path.endswith("/chat/completions") else _read_completion)(body)
        written = _written(await _reply(trajectory, ask, request), body)
        if not body.get("stream"):
            return JSONResponse(written[0])
        lines = [*map(json.dumps, written), "[DONE]"]
        return Response("".join(f"data: {line}\n\n" for line in lines), media_type="text/event-stream")

    def close(self) -> None:
        """End the server."""
        if self._running is not None:
            (server, thread), self._running = self._running, None
            server.should_exit = True
            thread.join()


def _unknown(request: "Request", error: Exception) -> "Response":
    answered = "chat/completions and completions are, and frameworks can be set to use them"
    return _refusal(request, RequestError(f"{request.url.path} is not answered: {answered}", "unknown_url", 404))


def _refusal(request: "Request", error: Exception) -> "Response":
    from starlette.responses import JSONResponse

    assert isinstance(error, RequestError)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    told = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return JSONResponse({"error": told}, status_code=error.status)


async def _reply(trajectory: Trajectory, ask: Ask, request: "Request") -> Reply:
    """Return what a request is answered; one whose client goes away is given up."""

    async def left() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(LOOK_EVERY_S)

    answer, loop = trajectory
    reply = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(ask), loop))
    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({reply, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        reply.cancel()  # nothing where it is done
    if reply.cancelled():
        raise RequestError("the trajectory has ended", "trajectory_ended", 410)
    error = reply.exception()
    if error is None or isinstance(error, RequestError):
        return reply.result()
    raise RequestError(f"{type(error).__name__}: {error}", status=500)


def plain_messages(messages: Any) -> list[Message]:
    """Return messages in the one form in which they are compared and rendered, however a client has written them.

    Raises:
        RequestError: they are none that can be rendered.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("there are no messages")
    return list(map(_plain_message, messages))


def _plain_message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message needs a role")
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise RequestError("of the parts of a message only text can be read")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError("the content of a message is a text")
    plain = {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = list(map(_plain_call, calls))
    role = "system" if role == "developer" else role
    return plain | {"role": role, "content": content.strip() if role == "assistant" else content}


def _plain_call(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"id": str(call["id"]), "type": "function", "function": {"name": name, "arguments": arguments}}
    except (TypeError, KeyError, ValueError) as error:
        raise RequestError(f"a call of a tool cannot be read ({type(error).__name__}: {error})") from error


def _body(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise RequestError("the request is no JSON object")
    for name, (harmless, instead) in _REFUSED.items():
        if body.get(name) not in (None, *harmless):
            reason = f"'{name}' cannot be {json.dumps(body[name]):.80}: answers are turns of the policy as it drew them"
            raise RequestError(f"{reason}; {instead}", "unsupported_parameter")
    return body


def _read_chat(body: dict[str, Any]) -> Ask:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or any(not isinstance(tool, dict) or "function" not in tool for tool in tools):
        raise RequestError("'tools' is a list of functions")
    return Ask(plain_messages(body.get("messages")), tools, *_common(body), body.get("tool_choice") != "none")


def _read_completion(body: dict[str, Any]) -> Ask:
    said = body.get("prompt")
    if isinstance(said, list) and len(said) == 1:
        said = said[0]
    if not isinstance(said, str) or not said:
        raise RequestError("'prompt' is one text")
    return Ask(said, [], *_common(body))


def _common(body: dict[str, Any]) -> tuple[int | None, list[str], dict[str, Any]]:
    """Return the limit of tokens, what ends the turn, and what changes nothing."""
    most, stop = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if most is not None and (type(most) is not int or most < 1):
        raise RequestError("'max_tokens' is a number of tokens, at least 1")
    if not isinstance(stop, list) or any(not isinstance(text, str) or not text for text in stop):
        raise RequestError("'stop' is a text or a list of these")
    return most, stop, {name: value for name, value in body.items() if value is not None and name not in _KNOWN}


def _written(reply: Reply, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the response, or the chunks of one that is streamed: they come together, when the turn has ended."""
    streams, reason, kind = bool(body.get("stream")), reply.finish_reason, "text_completion"
    said: dict[str, Any] = {"text": reply.said}
    parts = [said]
    if not isinstance(reply.said, str):
        message, calls = dict(reply.said), reply.said.get("tool_calls")
        if calls:
            message |= {
                "content": message["content"] or None,
                "tool_calls": list(map(_written_call, calls, range(len(calls)))),
            }
            reason = "tool_calls" if reason == "stop" else reason
        kind, said = "chat.completion.chunk" if streams else "chat.completion", {"message": message}
        parts = [{"delta": message, "finish_reason": None}, {"delta": {}}]
    choice = {"index": 0, "logprobs": None, "finish_reason": reason}
    before, drawn = reply.num_before, reply.num_drawn
    usage = {"usage": {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}}
    about = {"id": secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": str(body.get("model"))}
    if not streams:
        return [about | {"choices": [choice | said]} | usage]
    chunks = [about | {"choices": [choice | part]} for part in parts]
    options = body.get("stream_options")
    is_counted = isinstance(options, dict) and options.get("include_usage")
    return [*chunks, about | {"choices": []} | usage] if is_counted else chunks


def _written_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    return call | {"index": index, "function": function | {"arguments": json.dumps(function["arguments"])}}
