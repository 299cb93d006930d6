"""What must be right of a server before a run joins it: each check says what to do, before a model is touched."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import MissingExtraError, UserError, installed_version
from pellucid.rollout.inference import Inference, Record
from pellucid.rollout.server_connection import CONNECT_S, authorization, said
from pellucid.rollout.transports import Transport

if TYPE_CHECKING:
    import httpx

LOOK_S = 15.0
_ROLLOUT = "actor_rollout_ref.rollout"
ADDRESSES, TOKEN_FILE, TRANSPORT = (
    f"{_ROLLOUT}.{name}" for name in ("server_addresses", "server_token_file", "weight_transport")
)
START = "Start it with `pellucid serve`, in an environment like this one."
_RESTART = "Start it with the run's own recipe: `pellucid serve RECIPE`."


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What is known of the servers of one engine."""

    engine: str
    """Its name."""
    supported: SpecifierSet
    version_path: str
    """Where a server tells its version."""
    at_least: str
    """The engine's argument of which a server may have more than a run asks for."""
    num_workers: str
    """Its argument that says how many processes load weights."""
    needed: dict[str, str]
    """What must be so on every server."""
    describe: "Callable[[httpx.Client, str, list[str], str], dict[str, Any]]"
    """From a client, its address, names of arguments and a `WeightHandle` in JSON to what the server has: `arguments`
    by these names, `model` as `shape_of` returns it, and whether it `sees` the weights. Raises UserError."""
    join: Callable[[str, str | None, Record], Coroutine[Any, Any, Inference]]
    """Joins the server at an address, which asks for a token, and which the run before may have left paused or on the
    way to other weights; the third is told of its numbers."""
    serve: Callable[..., None]
    """Serves a model with the engine's arguments, at `host` and `port`, until a signal ends it. Each request must bring
    `token`; the weights are what the run that joins sends."""


def read_token(file: str | None) -> str | None:
    """Return the token that a file has; None where no file is named.

    Raises:
        UserError: there is no such file.
    """
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text().strip()
    except OSError as error:
        remedy = "`pellucid serve` writes it: copy it from the server's machine. null is for servers that ask for none."
        raise UserError(TOKEN_FILE, f"'{file}' cannot be read ({error.strerror}).", remedy) from None


def shape_of(config: Any) -> dict[str, int]:
    """Return what tells models apart in a config of transformers."""
    text = config.get_text_config()
    return {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size, "num_layers": text.num_hidden_layers}


def check_servers(
    kind: ServerKind, section: RolloutConfig, asked: dict[str, Any], shape: dict[str, int], transport: Transport
) -> None:
    """Check that each server is there, was started by `pellucid serve`, and serves the run's model as it needs it.

    Args:
        kind: of the servers.
        section: names the servers, and the file with their token.
        asked: arguments that they must have beside those that all need; of `kind.at_least` at least so much.
        shape: of the model.
        transport: by which weights go.

    Raises:
        MissingExtraError: httpx is not installed.
        UserError: a server is not as it must be.
    """
    if installed_version("httpx") is None:
        raise MissingExtraError(ADDRESSES, "httpx", "serve")
    import httpx

    timeout = httpx.Timeout(LOOK_S, connect=CONNECT_S)
    headers, asked = authorization(read_token(section.server_token_file)), kind.needed | asked
    with transport.trial() as handle:
        for address in section.server_addresses:
            # With a transport of its own it asks no proxy of the environment, nor does `ServerConnection`.
            http = httpx.HTTPTransport()
            with httpx.Client(base_url=address, headers=headers, timeout=timeout, transport=http) as client:
                try:
                    sees = _check_server(kind, client, address, asked, shape, handle.to_json())
                except httpx.TransportError as error:
                    raise UserError(ADDRESSES, f"nothing answers at {address} ({said(error)}).", START) from None
            if not sees:
                reason = f"{address} does not reach {transport.place}, through which it would get the weights."
                remedy = (
                    f"Set {TRANSPORT}: collective and open the ports between the machines; or files, and "
                    "trainer.default_local_dir to a folder that both see."
                )
                raise UserError(ADDRESSES, reason, remedy)


def _check_server(
    kind: ServerKind, client: "httpx.Client", address: str, asked: dict[str, Any], shape: dict[str, int], handle: str
) -> bool:
    """Check all but whether weights reach it, and return that."""
    version = client.get(kind.version_path)
    models = client.get("/v1/models") if version.is_success else version  # vLLM's own guard leaves the first one open
    if models.status_code in (401, 403):
        reason = f"{address} refuses the token."
        raise UserError(TOKEN_FILE, reason, "Copy the file from the machine where `pellucid serve` has written it.")
    if not version.is_success or '"version":' not in version.text or "version" not in (told := version.json()):
        raise UserError(ADDRESSES, f"what answers at {address} is no {kind.engine} server.", START)
    if told["version"] not in kind.supported:
        reason = f"{address} runs {kind.engine} {told['version']}, and {kind.supported} is needed."
        raise UserError(ADDRESSES, reason, START)
    found = kind.describe(client, address, list(asked), handle)
    if found["model"] != shape:
        shapes = (", ".join(f"{name} {size}" for name, size in one.items()) for one in (found["model"], shape))
        reason = f"{address} serves another model than the run's: {' and '.join(shapes)}."
        raise UserError(ADDRESSES, reason, _RESTART)
    for name, wanted in asked.items():
        value = found["arguments"][name]
        if int(value) < wanted if name == kind.at_least else value not in (str(wanted), f"torch.{wanted}"):
            least = "at least " * (name == kind.at_least)
            reason = f"{address} was started with {name}: {value}, and the run asks for {least}{wanted}."
            raise UserError(ADDRESSES, reason, _RESTART)
    return found["sees"]
