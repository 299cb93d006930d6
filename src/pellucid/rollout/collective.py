"""Weights over a process group of the trainer and its replicas, which need to share neither memory nor storage.

The group is theirs alone: each process may have others. The first rank sends. Every process that loads weights, one for
each device of an engine, takes a rank when it first reads a handle, and keeps it. What a bucket holds goes through the
group's store, its bytes by a broadcast. Both are as open as PyTorch's own: to whoever reaches the port.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, TCPStore

from pellucid.errors import RunFailedError
from pellucid.rollout.packed import Packed
from pellucid.training.protocol import WeightBucket

TIMEOUT = timedelta(minutes=5)
"""How long one side waits for the other: for its joining, and for each bucket."""
CONNECT_S, SETTLE_S = 5.0, 1.0
"""How long a connection may take, and a side that has failed to end by itself, so that it is known who was first."""
GroupKind = Literal["gloo", "nccl"]
_RANKS = dict[tuple[str, int], tuple[TCPStore, Any]]()
"""The rank that this process has taken, by the address of the trainer's store; of former trainers none are kept."""


@dataclass(slots=True)
class BroadcastWeights:
    """Where the weights of an update will be sent from."""

    host: str
    port: int
    """Of the store."""
    num_receivers: int
    kind: GroupKind
    update: int
    """Its number among those of the group."""
    num_bytes: int = 0

    def buckets(self, maps: dict[int, torch.Tensor] | None = None) -> Iterator[WeightBucket]:
        """Yield the buckets as they come.

        Raises:
            RunFailedError: the trainer is gone, or another replica.
        """
        index = 0
        while (bucket := self._receive(f"{self.update}/{index}")) is not None:
            yield bucket
            index += 1

    def _receive(self, key: str) -> WeightBucket | None:
        store, group = self._rank()
        try:
            message = json.loads(store.get(key))
            if "packed" in message:
                packed = Packed(**message["packed"])
                block = torch.empty(packed.num_bytes, dtype=torch.uint8, device=_device(self.kind))
                group.broadcast(block, 0).wait()
                return packed.views(block)
        except RuntimeError as error:
            _RANKS.clear()
            raise self._stopped(error) from error
        if message["failed"]:
            raise RunFailedError(f"the trainer could not send its weights: {message['failed']}")
        return None

    def _rank(self) -> tuple[TCPStore, Any]:
        """Return this process' rank, which it takes where it has none."""
        at = self.host, self.port
        if at not in _RANKS:
            _RANKS.clear()
            try:
                store = TCPStore(*at, is_master=False, timeout=TIMEOUT)
                rank = store.add("receivers", 1)
                if rank <= self.num_receivers:
                    _RANKS[at] = store, make_group(self.kind, store, rank, 1 + self.num_receivers, at)
            except RuntimeError as error:
                raise self._stopped(error) from error
            if rank > self.num_receivers:
                reason = f"more than the {self.num_receivers} workers that the run counts ask for weights"
                raise RunFailedError(f"{reason}: set tensor_model_parallel_size to the engines'")
        return _RANKS[at]

    def _stopped(self, error: RuntimeError) -> RunFailedError:
        return RunFailedError(f"no weights come from {self.host}:{self.port} any more: {_first_line(error)}")

    def is_in_reach(self) -> bool:
        """Tell whether a connection can be made from here."""
        with suppress(OSError):
            socket.create_connection((self.host, self.port), CONNECT_S).close()
            return True
        return False

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({"broadcast": asdict(self)})


class Broadcaster:
    """Broadcasts weights to the processes of all replicas.

    Args:
        host: this machine's address, as the replicas reach it.
        num_receivers: how many processes load weights.
        kind: the group's library; `nccl` needs a GPU for each process.
    """

    def __init__(self, host: str, num_receivers: int, kind: GroupKind) -> None:
        self._host, self._num_receivers = host, num_receivers
        self._kind: GroupKind = kind
        self._store: TCPStore | None = None
        self._group: Any = None
        self._num_updates = 0
        self.place = f"a port of {host}"

    def _handle(self) -> BroadcastWeights:
        if self._store is None:
            listener = socket.create_server((self._host, 0), family=_family(self._host))  # on this address alone
            port, descriptor = listener.getsockname()[1], listener.detach()
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=TIMEOUT
            )
        self._num_updates += 1
        return BroadcastWeights(self._host, self._store.port, self._num_receivers, self._kind, self._num_updates)

    @contextmanager
    def trial(self) -> Iterator[BroadcastWeights]:
        """Yield a handle with which others find out whether they are in reach."""
        yield self._handle()

    @contextmanager
    def send(self, buckets: Iterable[WeightBucket]) -> Iterator[BroadcastWeights]:
        """Broadcast weights while a `with` block runs, in which all replicas load them.

        Raises:
            Exception: what the trainer raised while it gathered them.
        """
        handle, said = self._handle(), list[str]()
        assert self._store is not None
        try:
            with beside(lambda: self._broadcast(handle, buckets, said)):
                yield handle
            for key in said:
                self._store.delete_key(key)
        except BaseException:
            self._store = self._group = None  # nobody knows how far each replica has come
            raise

    def _broadcast(self, handle: BroadcastWeights, buckets: Iterable[WeightBucket], said: list[str]) -> None:
        store, group = self._store, self._group
        assert store is not None

        def say(**message: Any) -> None:
            said.append(f"{handle.update}/{len(said)}")
            store.set(said[-1], json.dumps(message))

        try:
            for bucket in buckets:
                packed = Packed.of(bucket)
                block = torch.empty(packed.num_bytes, dtype=torch.uint8, device=_device(self._kind))
                packed.fill(block, bucket)
                say(packed=asdict(packed))
                try:
                    if group is None:
                        at = self._host, handle.port
                        group = self._group = make_group(self._kind, store, 0, 1 + self._num_receivers, at)
                    group.broadcast(block, 0).wait()
                except RuntimeError as error:
                    raise RunFailedError(f"the replicas do not take the weights: {_first_line(error)}") from error
                handle.num_bytes += packed.num_bytes
            say(failed="")
        except BaseException as error:
            say(failed=f"{type(error).__name__}: {error}")
            raise


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do work in a thread while a `with` block runs, and end the block when it is done.

    Where the block fails, the work is left alone: it may wait for those who failed. If it had failed before, by itself,
    its error is the one that is raised.
    """
    done = Future[None]()

    def note(_: object, error: BaseException | None, trace: object) -> bool:
        done.set_result(None) if error is None else done.set_exception(error)
        return True  # it is raised below

    def run() -> None:
        with ExitStack() as over:
            over.push(note)
            work()

    threading.Thread(target=run, name="weights", daemon=True).start()
    try:
        yield
    except BaseException:
        wait([done], SETTLE_S)
        error = done.exception() if done.done() else None
        if error is not None and not isinstance(error, RunFailedError):
            raise error from None
        raise
    done.result()


def make_group(kind: GroupKind, store: TCPStore, rank: int, size: int, at: tuple[str, int]) -> Any:
    """Return a process group beside those that the process may have, whose members meet in a store at an address.

    PyTorch's public functions make groups of its one default group alone, so this takes the classes below them, whose
    options have private names.
    """
    meeting = PrefixStore("group", store)
    if kind == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return ProcessGroupNCCL(meeting, rank, size, options)
    from torch.distributed import ProcessGroupGloo

    options: Any = vars(ProcessGroupGloo)["_Options"]()
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(*at))]  # or it takes the host's name
    options._timeout = TIMEOUT
    return ProcessGroupGloo(meeting, rank, size, options)


def address_towards(host: str, port: int = 9) -> str:
    """Return the address of this machine from which a host is reached."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _device(kind: GroupKind) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu")
