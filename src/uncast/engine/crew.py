"""The processes of one server: rank 0 leads, the others do each forward step with it, and no one outlives the rest.

    rank 0    engine, scheduler, tokenizer, HTTP        sends every step to the others before it runs it
    rank r    a runner on its part of the model         runs what it is told, in that order

Each follower holds one connection to rank 0 over the loopback interface. It carries the steps, and its end tells of a death:
the kernel closes it whatever a process dies of, so every rank ends with a sentence at once, whatever it is waiting for. A rank
that hangs without dying is found by the timeout of the collectives, and in a CUDA graph, where no collective has one, by the
age of the last step.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from uncast.engine.pace import Done, Pace
from uncast.models.parallel import Parallel, ParallelError, form_group

COLLECTIVE_TIMEOUT_S = 120.0
_CLOSE_S, _NOTICE_S = 10.0, 1.0
_HOST = "127.0.0.1"


class Step(msgspec.Struct, tag=True, frozen=True):
    """One forward step: the rows of a batch, see `uncast.engine.runner`."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    tables: list[list[int]]
    kv_lens: list[int]
    ends: list[int]
    wanted: list[int]


class Capture(msgspec.Struct, tag=True, frozen=True):
    """Static decode steps are prepared, see `ModelRunner.capture`."""

    max_requests: int
    graphs: bool | None
    buckets: list[int]


class Launch(msgspec.Struct, tag=True, frozen=True):
    """One static decode step, see `uncast.engine.static_step.Staged`."""

    rows: list[list[int]]
    places: list[int]
    values: list[int]
    requests: int
    topk: int


class TakePages(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 has written these pages (from host memory) and sends their bytes to everyone."""

    pages: list[int]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The sender's model is loaded; from rank 0: everyone's is."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 has finished; from a follower: so has it."""


Message = Step | Capture | Launch | TakePages | Ready | Stop
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder().encode


class Crew:
    """This process among its peers.

    Attributes:
        parallel: the group, for the model.
        at_end: called by `leave_crew` before the group is taken down.
    """

    def __init__(self, parallel: Parallel, device: torch.device, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        """Connects every follower to rank 0; all ranks have to call it at about the same time.

        Args:
            timeout_s: rank 0 waits no longer for the others to connect.

        Raises:
            ParallelError: a rank did not connect.
        """
        self.parallel, self.timeout_s = parallel, timeout_s
        self.at_end = list[Callable[[], None]]()
        parallel.on_failure = self._collective_failed
        self._peers: dict[int, Connection] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._pace = Pace(timeout_s, self.abandon, f"rank {parallel.rank} of {parallel.world}")
        self._send_lock, self._last_words = threading.Lock(), threading.Lock()
        if self.leads:
            self._listen(device)
        else:
            self._connect(device)
        for rank, peer in self._peers.items():
            threading.Thread(target=self._watch, args=(rank, peer), name=f"uncast-rank-{rank}", daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.parallel.rank == 0

    def wait_ready(self) -> None:
        """Returns on every rank once every rank has called it, however long some take."""
        if self.leads:
            for _ in self._peers:
                self.receive()
            self.tell(Ready())
        else:
            self.tell(Ready())
            self.receive()

    def tell(self, message: Message) -> None:
        """Sends to every peer of this rank: from rank 0 to all, from a follower to rank 0."""
        encoded = _encode(message)
        with self._send_lock:
            for rank, peer in self._peers.items():
                try:
                    peer.send_bytes(encoded)
                except OSError:
                    self.abandon(self._ended(rank))

    def pace(self, event: Done) -> None:
        """Notes that a step has been launched behind which the device reaches `event`; if it does not do so within `timeout_s`,
        and no later step is noted meanwhile, this process ends."""
        self._pace.note(event)

    def receive(self) -> Message:
        """The next message to this rank; waits for it."""
        return self._inbox.get()[1]

    def close(self) -> None:
        """Ends the crew in order, every rank for itself: rank 0 tells the others to stop and waits until they have."""
        self._closing.set()
        self._pace.close()
        if self.leads:
            self.tell(Stop())
            for _ in self._peers:
                try:
                    self._inbox.get(timeout=_CLOSE_S)
                except queue.Empty:
                    _print("a process has not stopped in time")
                    break
        else:
            self.tell(Stop())

    def abandon(self, sentence: str) -> NoReturn:
        """Ends this process at once: its peers cannot go on either."""
        with self._last_words:
            _print(sentence)
            os._exit(1)

    def _collective_failed(self, sentence: str) -> NoReturn:
        """Leaves the last word to `_watch`, which knows who has died, if anyone has."""
        time.sleep(_NOTICE_S)
        self.abandon(sentence)

    def _listen(self, device: torch.device) -> None:
        key, deadline = secrets.token_bytes(32), time.monotonic() + self.timeout_s
        with socket.create_server((_HOST, 0), backlog=self.parallel.world) as server:
            address = torch.tensor([server.getsockname()[1], *key], dtype=torch.int64, device=device)
            self.parallel.from_first(address)
            while len(self._peers) < self.parallel.world - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    sock, _ = server.accept()
                except TimeoutError:
                    missing = self.parallel.world - 1 - len(self._peers)
                    raise ParallelError(
                        f"{missing} of {self.parallel.world} processes have not reached rank 0"
                    ) from None
                sock.settimeout(None)
                self._admit(Connection(sock.detach()), key)

    def _admit(self, peer: Connection, key: bytes) -> None:
        """Takes in a follower; a stranger, who does not know the key, is sent away."""
        try:
            deliver_challenge(peer, key)
            answer_challenge(peer, key)
            self._peers[int.from_bytes(peer.recv_bytes(), "little")] = peer
        except (AuthenticationError, EOFError, OSError):
            peer.close()

    def _connect(self, device: torch.device) -> None:
        address = torch.zeros(33, dtype=torch.int64, device=device)
        self.parallel.from_first(address)
        port, *key = address.tolist()
        try:
            leader = Client((_HOST, port), authkey=bytes(key))
            leader.send_bytes(self.parallel.rank.to_bytes(8, "little"))
        except (OSError, EOFError, AuthenticationError) as error:
            raise ParallelError(f"rank {self.parallel.rank} cannot reach rank 0 on this machine: {error}") from None
        self._peers[0] = leader

    def _watch(self, rank: int, peer: Connection) -> None:
        """Reads a peer's messages; its end without a Stop is this process's."""
        while True:
            try:
                message = _decode(peer.recv_bytes())
            except (OSError, EOFError):
                if not self._closing.is_set():
                    self.abandon(self._ended(rank))
                return
            self._inbox.put((rank, message))
            if isinstance(message, Stop):
                return

    def _ended(self, rank: int) -> str:
        here, world = self.parallel.rank, self.parallel.world
        return f"rank {here} of {world} ends, because rank {rank} has ended and none can go on alone"


def _print(sentence: str) -> None:
    print(f"uncast: {sentence}", file=sys.stderr, flush=True)


def join_crew(timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Crew | None:
    """This process's crew as `torchrun` started it; None if it runs alone.

    Raises:
        ParallelError: the processes are on several machines, more than there are GPUs, or cannot find each other.
    """
    rank, world, here = (_variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is None or world < 2 or rank is None:
        return None
    if here is not None and here != world:
        raise ParallelError(
            f"{world} processes run on more than one machine: uncast serves from one; use its SGLang or vLLM plug-in beyond"
        )
    local = _variable("LOCAL_RANK")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        gpus, number = torch.cuda.device_count(), rank if local is None else local
        if world > gpus:
            raise ParallelError(f"{world} processes were started and there are {gpus} GPUs: start one for each at most")
        torch.cuda.set_device(number)
        device = torch.device("cuda", number)
    form_group("nccl" if device.type == "cuda" else "gloo", rank, world, timeout_s)
    return Crew(Parallel(rank, world), device, timeout_s)


def leave_crew(crew: Crew) -> None:
    """Ends what `join_crew` began; no collective may follow."""
    crew.close()
    for end in crew.at_end:
        end()
    dist.destroy_process_group()


def _variable(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None
