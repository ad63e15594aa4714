"""Batches made by servers: who makes which part, in which order they come, and what happens where a server fails.

The order, the draws and what is on its way are the training process's own. A part is asked for again, of another server, where its
server failed or takes far longer than usual; the first answer counts, and all answers are alike.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from training.data.batches import SampleKey
from training.runtime import accelerator
from training.servers.actor import About, Opened, Part, PartFailed, ServerFailed, made

PART = 16
"""Images that are asked for at once. Even, since mixing pairs neighbours, which are then decoded once."""

QUEUED = 2
"""Parts that wait at a server beside those in its threads, so that it never waits for the next."""

LEAST_BATCHES = 2
"""Batches on their way, at least."""

MOST_BYTES = 2**30
"""Of batches on their way, but for LEAST_BATCHES."""

LATE, LEAST_LATE = 5.0, 2.0
"""A part is late after so many times what parts take, and at least so many seconds."""

LOST_SECONDS = 60.0
"""A server that has not answered for so long is put aside, with what it was asked for."""

BACK_OFF, LONGEST_BACK_OFF = 1.0, 60.0
"""Seconds until a failed server is asked again; twice as long after each further failure."""

LOOK_SECONDS = 5.0
"""Between two looks at which servers there are; a fifth of it while there are none."""

PROOF = 3
"""Images that a server makes first, and this process too: a server counts only where both are equal, byte for byte."""

_TURN = 0.05


class Servers(Protocol):
    """Those that can be asked."""

    def names(self) -> Mapping[str, int] | None: ...
    def about(self, server: str) -> Any: ...
    def ask(self, server: str, draws: Sequence[SampleKey]) -> Any: ...
    def done(self, tickets: Sequence[Any], seconds: float) -> list[Any]: ...
    def redeem(self, ticket: Any) -> Part | About: ...


class NoServers(ConnectionError):
    """No server is left, and the settings do not let the run go on without."""


@dataclass
class Counts:
    """What happened since the run began."""

    images: int = 0
    """Received from servers."""
    alone: int = 0
    """Made here, with no server left or where one failed at them."""
    megabytes: float = 0.0
    server_seconds: float = 0.0
    """Of one thread of a server, for these images."""
    waited_seconds: float = 0.0
    """From asking for a part to having it, over all parts."""
    receiving_seconds: float = 0.0
    """CPU time of this process's thread that asks and receives."""
    failures: int = 0
    late: int = 0
    """Parts that were asked for twice because the first answer did not come."""


@dataclass(eq=False)
class _Server:
    name: str
    threads: int
    state: Literal["new", "proving", "live", "refused"] = "new"
    asked: dict[Any, _Part] = field(default_factory=dict)
    proof: list[Any] = field(default_factory=list)
    heard: float = 0.0
    """When it last answered, or was first asked."""
    failed: int = 0
    """In a row."""
    until: float = 0.0
    """It is not asked before."""
    seconds: float = 0.1
    """From asking to an answer, of late."""


@dataclass(eq=False)
class _Part:
    batch: _Batch
    first: int
    draws: list[SampleKey]
    asked: float = 0.0
    at: set[str] = field(default_factory=set)
    there: bool = False


class _Batch:
    """One batch in the making."""

    def __init__(self, draws: list[SampleKey], device: torch.device):
        self.parts = [_Part(self, first, draws[first : first + PART]) for first in range(0, len(draws), PART)]
        self.count, self._device = len(draws), device
        self.missing = len(self.parts)
        self.fields: list[torch.Tensor] = []
        self._kind: Any = None

    def receive(self, part: _Part, made: Part) -> None:
        """Put a part into its place."""
        if not self.fields:
            self._kind = made.batch
            self.fields = [
                torch.empty(
                    (self.count, *one.shape[1:]),
                    dtype=torch.from_numpy(np.empty(0, one.dtype)).dtype,
                    pin_memory=accelerator.is_gpu(self._device),
                )
                for one in made.fields
            ]
        for target, source in zip(self.fields, made.fields):
            np.copyto(target.numpy()[part.first : part.first + len(source)], source)
        part.there = True
        self.missing -= 1

    def whole(self) -> Any:
        """The batch, when no part is missing."""
        return self._kind._make(self.fields)


class Pool:
    """What one training process asks of servers.

    Args:
        servers: those that can be asked.
        opened: the images as this process has them, to compare with and to go on alone.
        go_on: whether this process makes the images itself while there is no server.
        patience: seconds without any server until it does, or fails.
        threads: of this process, for that.
        device: that gets the batches.
        say: logs what happens to servers.
    """

    def __init__(
        self,
        servers: Servers,
        opened: Opened,
        *,
        go_on: bool,
        patience: float,
        threads: int,
        device: torch.device,
        say: Callable[[str], None],
    ):
        self._ask, self._opened, self._go_on, self._patience = servers, opened, go_on, patience
        self._threads, self._device, self._say = threads, device, say
        self._servers: dict[str, _Server] = {}
        self._looked, self._served = 0.0, time.monotonic()
        self._alone = False
        self.waiting: deque[_Part] = deque()
        """Parts that nobody makes yet."""
        self.counts = Counts()

    def batches(self, draws: Iterator[list[SampleKey]]) -> Iterator[Any]:
        """The batches, NamedTuples of tensors, in the order of the draws.

        Raises:
            NoServers: none is left, and the run is not to go on alone.
        """
        stream = _Stream(self, draws)
        try:
            yield from stream
        finally:
            stream.close()

    @property
    def is_asking(self) -> bool:
        """Whether any server has an answer to give."""
        return any(one.asked or one.proof for one in self._servers.values())

    @property
    def live(self) -> list[_Server]:
        return [one for one in self._servers.values() if one.state == "live"]

    def window(self, batch_size: int, bytes_a_batch: int | None) -> int:
        """Batches on their way at most: enough for every server, in bounded memory."""
        slots = sum(one.threads + QUEUED for one in self.live)
        wanted = 1 + -(-slots * PART // batch_size)
        room = MOST_BYTES // bytes_a_batch if bytes_a_batch else LEAST_BATCHES
        return max(LEAST_BATCHES, min(wanted, room))

    # What follows runs in the thread of the stream.

    def look(self) -> None:
        """Meet new servers, and let go of those that are gone."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS / (1 if self.live else 5):
            return
        self._looked = now
        names = self._ask.names()
        if names is not None:
            for name in [name for name, one in self._servers.items() if name not in names and not one.asked]:
                del self._servers[name]
            for name, threads in names.items():
                if name not in self._servers:
                    self._servers[name] = _Server(name, threads)
        for server in self._servers.values():
            if server.state == "new" and now >= server.until:
                self._prove(server)

    def assign(self) -> None:
        """Ask for what waits, of those servers that answer soonest."""
        now = time.monotonic()
        free = [one for one in self.live if now >= one.until and len(one.asked) < one.threads + QUEUED]
        while self.waiting and free:
            part = self.waiting.popleft()
            if part.there:
                continue
            server = min(free, key=lambda one: (len(one.asked) + 1) / one.threads * one.seconds)
            if not self._asked(server, part):
                self.waiting.appendleft(part)
            if len(server.asked) >= server.threads + QUEUED or server.until > now:
                free.remove(server)

    def receive(self, seconds: float) -> list[_Part]:
        """Take what servers have made, and wait no longer for it; what a server lost waits again. Returns parts that one could not make."""
        tickets = {ticket: (server, part) for server in self._servers.values() for ticket, part in server.asked.items()}
        proofs = {ticket: server for server in self._servers.values() for ticket in server.proof}
        impossible = []
        for ticket in self._ask.done([*tickets, *proofs], seconds):
            if ticket in proofs:
                if ticket in proofs[ticket].proof:  # its server may have failed at the one before
                    self._compare(proofs[ticket], ticket)
                continue
            server, part = tickets[ticket]
            if ticket not in server.asked:
                continue
            del server.asked[ticket]
            try:
                found = self._ask.redeem(ticket)
                assert isinstance(found, Part)
                if not part.there:
                    part.batch.receive(part, found)
                    self._count(part, found)
            except PartFailed as error:
                self._put_aside(server, error)
                impossible.append(part)
                continue
            except ServerFailed as error:
                server.asked[ticket] = part
                self._fail(server, error)
                continue
            now = time.monotonic()
            server.seconds += 0.2 * (now - part.asked - server.seconds)
            server.heard, server.failed = now, 0
            self._served, self._alone = now, False
        return impossible

    def hurry(self) -> None:
        """Ask another server for what is late, and put aside those that do not answer at all."""
        now = time.monotonic()
        for server in self._servers.values():
            if server.proof and now - server.heard > LOST_SECONDS:
                self._fail(server, ServerFailed(f"no answer for {LOST_SECONDS:.0f} s"))
            for part in [*server.asked.values()]:
                if part.there:
                    continue
                age = now - part.asked
                if len(part.at) == 1 and age > max(LEAST_LATE, LATE * server.seconds):
                    others = [one for one in self.live if one.name not in part.at and now >= one.until]
                    if others and self._asked(min(others, key=lambda one: len(one.asked)), part):
                        self.counts.late += 1
                if now - server.heard > LOST_SECONDS and age > LOST_SECONDS:
                    self._fail(server, ServerFailed(f"no answer for {LOST_SECONDS:.0f} s"))
                    break

    def must_go_on_alone(self) -> bool:
        """Whether there has been no server for too long.

        Raises:
            NoServers: and the run is not to go on.
        """
        if self._alone:
            return True
        if time.monotonic() - self._served < self._patience:
            return False
        names = ", ".join(sorted({name.split("/")[1] for name in self._servers})) or "no host has joined"
        why = f"no server has made an image for {self._patience:.0f} s ({names})"
        if not self._go_on:
            raise NoServers(f"{why}, and without_servers is fail")
        self._say(f"{why}: this process makes them itself until one is back")
        self._alone = True
        return True

    def is_alone(self) -> bool:
        return self._alone

    def make_here(self, draws: list[SampleKey]) -> Part:
        """A part of a batch, by this process."""
        return made(self._opened, draws)

    def made_here(self, part: _Part, found: Part) -> None:
        """Take a part that this process made."""
        if not part.there:
            part.batch.receive(part, found)
            self.counts.alone += len(part.draws)

    @property
    def own_threads(self) -> int:
        return self._threads

    @property
    def device(self) -> torch.device:
        return self._device

    def _asked(self, server: _Server, part: _Part) -> bool:
        try:
            ticket = self._ask.ask(server.name, part.draws)
        except ServerFailed as error:
            self._fail(server, error)
            return False
        now = time.monotonic()
        if not server.asked:
            server.heard = now
        part.asked = now
        part.at.add(server.name)
        server.asked[ticket] = part
        return True

    def _count(self, part: _Part, found: Part) -> None:
        counts = self.counts
        counts.images += len(part.draws)
        counts.megabytes += sum(one.nbytes for one in found.fields) / 1e6
        counts.server_seconds += found.seconds
        counts.waited_seconds += time.monotonic() - part.asked

    def _fail(self, server: _Server, error: Exception) -> None:
        """Let a server go until it proves itself anew, and put what it was asked for back in front."""
        self._put_aside(server, error)
        server.state = "new"
        for part in reversed([*server.asked.values()]):
            part.at.discard(server.name)
            if not part.there and not part.at:
                self.waiting.appendleft(part)
        server.asked.clear()
        server.proof.clear()

    def _put_aside(self, server: _Server, error: Exception) -> None:
        """Ask a server nothing for a while."""
        self.counts.failures += 1
        server.failed += 1
        pause = min(LONGEST_BACK_OFF, BACK_OFF * 2 ** (server.failed - 1))
        server.until = time.monotonic() + pause
        if server.failed in (1, 4):
            self._say(
                f"server {_place(server)} failed: {error}; its part is made elsewhere, and it is asked again in {pause:.0f} s"
            )

    def forget(self) -> None:
        """An iteration is over: what is still asked for is not waited for."""
        self.waiting.clear()
        for server in self._servers.values():
            server.asked.clear()

    def _prove(self, server: _Server) -> None:
        """Ask a server for what it serves and for a few images."""
        draws = self._proof_draws(server)
        try:
            server.proof = [self._ask.about(server.name), self._ask.ask(server.name, draws)]
        except ServerFailed as error:
            self._fail(server, error)
            return
        server.state, server.heard = "proving", time.monotonic()

    def _proof_draws(self, server: _Server) -> list[SampleKey]:
        rng, count = random.Random(server.name), len(self._opened.images)
        return [(1, rng.randrange(count)) for _ in range(PROOF)]

    def _compare(self, server: _Server, ticket: Any) -> None:
        """Take a server where it serves the same images and makes them alike; refuse it for good where it does not."""
        server.proof.remove(ticket)
        try:
            found = self._ask.redeem(ticket)
        except (PartFailed, ServerFailed) as error:
            self._fail(server, error)
            return
        server.heard = time.monotonic()
        wrong = None
        if isinstance(found, About):
            count, listing = len(self._opened.images), self._opened.images.listing()
            if found.images != count:
                wrong = f"it has {found.images:,} training images, this process {count:,}"
            elif found.listing != listing:
                wrong = "it has other training images, or has them in another order"
        else:
            own = self.make_here(self._proof_draws(server))
            if not _equal(own, found):
                wrong = "it makes other pixels of the same images: its libraries or its processor round otherwise"
        if wrong is not None:
            server.state = "refused"
            server.proof.clear()
            self._say(f"server {_place(server)} is not asked: {wrong}")
        elif not server.proof and server.state == "proving":
            server.state = "live"
            self._served = time.monotonic()
            if server.failed:
                self._say(f"server {_place(server)} is back")


class _Stream:
    """Batches of one iteration, made ahead by a thread that asks and receives."""

    def __init__(self, pool: Pool, draws: Iterator[list[SampleKey]]):
        self._pool, self._draws = pool, draws
        self._batches: deque[_Batch] = deque()
        self._here: dict[Future[Part], _Part] = {}
        self._drawn = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._own = ThreadPoolExecutor(pool.own_threads, thread_name_prefix="data worker")
        self._thread = threading.Thread(target=self._run, name="server pool", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._next_is_there() or self._is_over())
                if self._error is not None:
                    raise self._error
                if not self._batches:
                    return
                batch = self._batches.popleft()
                self._changed.notify_all()
            yield batch.whole()

    def close(self) -> None:
        """End the thread; what servers still make is dropped when it comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._own.shutdown(wait=True, cancel_futures=True)

    def _next_is_there(self) -> bool:
        return bool(self._batches) and self._batches[0].missing == 0

    def _is_over(self) -> bool:
        return self._drawn and not self._batches

    def _run(self) -> None:
        try:
            while not self._closed and not self._is_over():
                started = time.thread_time()
                self._turn()
                self._pool.counts.receiving_seconds += time.thread_time() - started
        except BaseException as error:  # raised where the batches are taken
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._pool.forget()

    def _turn(self) -> None:
        pool = self._pool
        pool.look()
        self._refill()
        pool.assign()
        impossible = pool.receive(0 if self._here else _TURN)
        pool.hurry()
        for part in impossible:  # a broken image fails here too, with its own error; a server's trouble does not
            self._make_here(part)
        if pool.waiting and (not pool.live and pool.must_go_on_alone()):
            while pool.waiting and len(self._here) < 2 * pool.own_threads:
                self._make_here(pool.waiting.popleft())
        for future in wait([*self._here], timeout=_TURN, return_when=FIRST_COMPLETED).done if self._here else ():
            part = self._here.pop(future)
            pool.made_here(part, future.result())
        with self._changed:
            if self._next_is_there():
                self._changed.notify_all()
            rests = all(batch.missing == 0 for batch in self._batches) or not (self._here or pool.is_asking)
            if not self._closed and rests:
                self._changed.wait(_TURN)

    def _make_here(self, part: _Part) -> None:
        if not part.there:
            self._here[self._own.submit(self._pool.make_here, part.draws)] = part

    def _refill(self) -> None:
        with self._changed:
            first = self._batches[0] if self._batches else None
            size = first.count if first else PART
            weight = sum(one.nbytes for one in first.fields) if first and first.fields else None
            while not self._drawn and len(self._batches) < self._pool.window(size, weight):
                draws = next(self._draws, None)
                if draws is None:
                    self._drawn = True
                    self._changed.notify_all()
                    return
                batch = _Batch(draws, self._pool.device)
                self._batches.append(batch)
                self._pool.waiting.extend(batch.parts)


def _equal(one: Part, other: Part) -> bool:
    return len(one.fields) == len(other.fields) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one.fields, other.fields)
    )


def _place(server: _Server) -> str:
    _, host, number, *_ = server.name.split("/")
    return f"{number} on {host}"
