"""What must be right of a vLLM server before a run joins it: each check says what to do, before a model is touched."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import MissingExtraError, UserError, installed_version
from pellucid.rollout.transports import Transport
from pellucid.rollout.vllm_processes import SUPPORTED

if TYPE_CHECKING:
    import httpx

CONNECT_S, LOOK_S = 5.0, 15.0
_ROLLOUT = "actor_rollout_ref.rollout"
ADDRESSES, TOKEN_FILE, TRANSPORT = (
    f"{_ROLLOUT}.{name}" for name in ("server_addresses", "server_token_file", "weight_transport")
)
START = "Start it with `pellucid serve`, in an environment like this one."
_RESTART = "Start it with the run's own recipe: `pellucid serve RECIPE`."
NEEDED = {"logprobs_mode": "processed_logprobs", "policy": "priority"}
"""What must be so on every server, under the names of vLLM's own config."""


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


def authorization(token: str | None) -> dict[str, str]:
    """Return the header that carries a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def said(error: Exception) -> str:
    """Return an error with its kind, since many have no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def refusal(answer: "httpx.Response") -> str:
    """Return what a server says where it does not do what it was asked."""
    return f"{answer.status_code}: {answer.text[:1000]}"


def shape_of(config: Any) -> dict[str, int]:
    """Return what tells models apart in a config of transformers."""
    text = config.get_text_config()
    return {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size, "num_layers": text.num_hidden_layers}


def check_servers(section: RolloutConfig, asked: dict[str, Any], shape: dict[str, int], transport: Transport) -> None:
    """Check that each server is there, was started by `pellucid serve`, and serves the run's model as it needs it.

    Args:
        section: names the servers, and the file with their token.
        asked: arguments of vLLM that they must have; of `max_model_len` at least so much.
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
    headers = authorization(read_token(section.server_token_file))
    with transport.trial() as handle:
        for address in section.server_addresses:
            # With a transport of its own it asks no proxy of the environment, nor does `JoinedVllm`.
            with httpx.Client(
                base_url=address, headers=headers, timeout=timeout, transport=httpx.HTTPTransport()
            ) as client:
                try:
                    _check_server(client, address, asked, shape, handle.to_json(), transport.place)
                except httpx.TransportError as error:
                    raise UserError(ADDRESSES, f"nothing answers at {address} ({said(error)}).", START) from None


def _check_server(
    client: "httpx.Client",
    address: str,
    asked: dict[str, Any],
    shape: dict[str, int],
    handle: str,
    place: str,
) -> None:
    version = client.get("/version")
    models = client.get("/v1/models") if version.is_success else version  # vLLM's own guard leaves the first one open
    if models.status_code in (401, 403):
        reason = f"{address} refuses the token."
        raise UserError(TOKEN_FILE, reason, "Copy the file from the machine where `pellucid serve` has written it.")
    if not version.is_success or "version" not in version.text:
        raise UserError(ADDRESSES, f"what answers at {address} is no vLLM server.", START)
    if (found := version.json()["version"]) not in SUPPORTED:
        raise UserError(ADDRESSES, f"{address} runs vLLM {found}, and {SUPPORTED} is needed.", START)
    answer = client.post("/collective_rpc", json={"method": "describe", "args": [list(asked), handle]})
    if answer.status_code == 404:
        raise UserError(ADDRESSES, f"{address} runs without VLLM_SERVER_DEV_MODE=1: no weights can be sent.", START)
    if not answer.is_success:
        raise UserError(ADDRESSES, f"{address} has no extension that takes weights ({refusal(answer)}).", START)
    if client.post("/inference/v1/generate", json={}).status_code == 403:
        raise UserError(ADDRESSES, f"{address} runs without --enable-scale-out, and takes no token ids.", START)
    found = answer.json()["results"][0]
    if found["model"] != shape:
        text = " and ".join(
            ", ".join(f"{name} {size}" for name, size in one.items()) for one in (found["model"], shape)
        )
        raise UserError(ADDRESSES, f"{address} serves another model than the run's: {text}.", _RESTART)
    for name, wanted in asked.items():
        value = found["arguments"][name]
        if int(value) < wanted if name == "max_model_len" else value not in (str(wanted), f"torch.{wanted}"):
            least = "at least " * (name == "max_model_len")
            reason = f"{address} was started with {name}: {value}, and the run asks for {least}{wanted}."
            raise UserError(ADDRESSES, reason, _RESTART)
    if not found["sees"]:
        reason = f"{address} does not reach {place}, through which it would get the weights."
        remedy = (
            f"Set {TRANSPORT}: collective and open the ports between the machines; or files, and "
            "trainer.default_local_dir to a folder that both see."
        )
        raise UserError(ADDRESSES, reason, remedy)
