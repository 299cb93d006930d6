"""`pellucid view [RUN…]`: the local dashboard, in the browser of this machine."""

from __future__ import annotations

import importlib
import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from pellucid.console import console
from pellucid.errors import MissingExtraError, UserError


def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders with runs; `outputs` when left out.", metavar="[RUN…]")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 6060,
    browser: Annotated[bool, typer.Option("--open", help="Open the browser, too.")] = False,
) -> None:
    """Show runs in the browser, while they train and afterwards: curves, rollouts, timeline, precision, config.

    [bold]pellucid view outputs/pellucid/demo[/bold]

    Only this machine is answered, and only with the key in the printed address; nothing is loaded from elsewhere. From
    another machine: [bold]ssh -L 6060:127.0.0.1:6060 THIS_MACHINE[/bold], then the same address.
    """
    folders = runs or [Path("outputs")]
    for folder in folders:
        if not folder.is_dir():
            reason = f"the folder '{folder}' does not exist."
            raise UserError("RUN", reason, "Give the folder of a run, or one with runs, e.g. outputs.")
    for package in ("plotly", "starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtraError("pellucid view", package, "view") from error
    import uvicorn

    from pellucid.view.app import make_app
    from pellucid.view.runs import Runs

    if not Runs(folders).names():
        where = ", ".join(map(str, folders))
        raise UserError("RUN", f"there is no run in {where}.", "Train one first: pellucid train recipes/demo.yaml")
    token = secrets.token_urlsafe(16)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            reason = f"{port} cannot be listened at: {error.strerror}."
            raise UserError("--port", reason, "Name another, or 0 for a free one.") from error
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/?token={token}"
        console.print(f"The dashboard is at {address}\nCtrl-C ends it.", markup=False, soft_wrap=True)
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(make_app(folders, token), log_level="warning", access_log=False)
        uvicorn.Server(config).run([listener])
