"""What every server that `pellucid serve` starts has: a token, without which nothing is answered."""

import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def make_token(file: Path) -> str:
    """Return the token in a file, which is written for its owner alone where there is none."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
            new.write(f"{secrets.token_urlsafe(32)}\n")
    return file.read_text().strip()


class TokenGuard:
    """ASGI middleware that lets no request in without the token, to no route: engines' own guard some routes alone."""

    def __init__(self, app: Callable[..., Awaitable[None]], token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        brought = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(brought, self._wanted):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the token is wrong, or there is none"})
