"""The dashboard's server: pages, figures and files over HTTP, on this machine alone and only with its token.

browser ─► _Guard (token, host) ─► a page's function of `pages.py` ─► a template of assets/view, or JSON
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import URL, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.errors import UserError
from pellucid.observe.manifest import Manifest, manifest_folder
from pellucid.observe.report.merge import merge
from pellucid.observe.report.verdict import torch_files
from pellucid.view import pages
from pellucid.view.runs import Runs

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PAGES: dict[str, Callable[[Runs, QueryParams], pages.Context]] = {
    "runs": pages.runs_page,
    "curves": pages.curves_page,
    "rollouts": pages.rollouts_page,
    "sample": pages.sample_page,
    "timeline": pages.timeline_page,
    "precision": pages.precision_page,
    "config": pages.config_page,
    "compare": pages.compare_page,
}
"""Each has a template of its name; the first is the address `/`."""
FIGURES = {"curve": pages.curve_figure, "timeline": pages.timeline_figure}
DOCUMENTS = {"report": pages.report_page, "heatmap": pages.heatmap}
"""Whole pages that commands write, too."""
ASSETS = {
    "plotly.min.js": ("plotly", "package_data/plotly.min.js", "text/javascript"),
    "view.js": ("pellucid", "assets/view/view.js", "text/javascript"),
    "view.css": ("pellucid", "assets/view/view.css", "text/css"),
}


class _Guard:
    """Lets in who has the token, in the address once and in a cookie from then on, under a name of this machine.

    The name is checked so that no page on the internet can reach the server through a name of its own.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        cookie = f"pellucid_{request.url.port}"
        response: Response | None = None
        if request.url.hostname not in [name.strip("[]") for name in LOOPBACK]:
            response = PlainTextResponse("The dashboard answers on this machine alone.", 403)
        elif secrets.compare_digest(request.query_params.get("token", "").encode(), self.token.encode()):
            response = RedirectResponse(URL(str(request.url)).remove_query_params("token"), 303)
            response.set_cookie(cookie, self.token, httponly=True, samesite="strict")
        elif not secrets.compare_digest(request.cookies.get(cookie, "").encode(), self.token.encode()):
            response = PlainTextResponse("Open the address that `pellucid view` has printed: it holds the key.", 403)
        await (response or self.app)(scope, receive, send)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def make_app(folders: Sequence[Path], token: str) -> Starlette:
    """Return the dashboard over some folders of runs."""
    runs = Runs(folders)
    psutil.cpu_percent()  # what it says later is of the time since the last call
    environment = Environment(
        loader=PackageLoader("pellucid", "assets/view"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["figure"] = _figure

    def show(template: str, query: QueryParams, context: pages.Context, status: int = 200) -> Response:
        linked = [name for name in PAGES if name != "sample"]
        about = {"page": template, "query": query, "run": query.get("run"), "pages": linked, "live": False}
        text = environment.get_template(f"{template}.html.j2").render(about | context)
        return HTMLResponse(text, status)

    def page(name: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            query = request.query_params
            if name not in ("runs", "curves") and "run" not in query and (names := list(runs.names())):
                return RedirectResponse(request.url.include_query_params(run=names[0]), 303)
            return show(name, query, PAGES[name](runs, query))

        return answer

    def figure(name: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            content = json.dumps(FIGURES[name](runs, request.query_params))
            return Response(content.replace("NaN", "null").replace("Infinity", "null"), media_type="application/json")

        return answer

    def trace(request: Request) -> Response:
        run = runs.find(request.query_params["run"])
        folder, path = manifest_folder(run.path), run.timeline / "merged.json.gz"
        merge(run.timeline, path, torch_files(Manifest.read(folder), folder), folder)
        return FileResponse(path, filename=f"{run.path.name}.json.gz", media_type="application/gzip")

    def asset(request: Request) -> Response:
        if (name := request.path_params["name"]) not in ASSETS:
            raise HTTPException(404)
        package, path, kind = ASSETS[name]
        headers = {"Cache-Control": "max-age=3600"}
        return FileResponse(str(files(package) / path), media_type=kind, headers=headers)

    def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, UserError)
        if request.url.path.startswith("/figure"):
            return Response(json.dumps({"error": str(error)}), 400, media_type="application/json")
        return show("error", request.query_params, {"error": error}, 400)

    def document(name: str) -> Callable[[Request], Response]:
        return lambda request: HTMLResponse(DOCUMENTS[name](runs, request.query_params))

    handlers: dict[Any, Any] = {UserError: failed}
    return Starlette(
        routes=[
            *(Route("/" if name == "runs" else f"/{name}", page(name)) for name in PAGES),
            *(Route(f"/figure/{name}", figure(name)) for name in FIGURES),
            *(Route(f"/{name}", document(name)) for name in DOCUMENTS),
            Route("/trace", trace),
            Route("/static/{name}", asset),
        ],
        middleware=[Middleware(_Guard, token=token)],
        exception_handlers=handlers,
    )
