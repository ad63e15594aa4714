"""Batches made by servers: which server makes which part, in what order they come, and what happens if a server fails.

The order, the draws and what is in flight are kept by the training process. A part is requested again, from another server, if its
server failed or takes far longer than usual; the first answer counts, and all answers are identical.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from training.data.batches import SampleKey
from training.servers.actor import About, Answer, Opened, Part, PartFailed, ServerFailed, Teacher, made
from training.servers.back_off import is_said, pause_after
from training.servers.parts import PART, PendingBatch, PendingPart
from training.servers.proof import Proof

QUEUED = 2
"""Parts that wait at a server besides those in its threads, so that it never waits for the next."""

MIN_BATCHES = 2
"""Batches in flight, at least."""

MAX_BYTES = 2**30
"""Of batches in flight, though MIN_BATCHES are always allowed."""

LATE, MIN_LATE = 5.0, 2.0
"""A part is late after this multiple of what parts take, and at least this many seconds."""

LOST_SECONDS = 60.0
"""A server that has not answered for this long is put aside, with its requests; longer if many processes ask it."""

FEW_ASKERS, MAX_ASKERS = 8, 64
"""Processes up to which that is long enough, and how many count at most: each has six parts at a server of four threads, so one of 64
waits for 95 turns, and one of 8 for 11, of 5 s each."""

LOOK_SECONDS = 5.0
"""Between a training process's polls of the list of servers; a fifth of it while there are none."""

LOOKS = 50.0
"""Such polls per second that the head answers in all: with more processes than that allows, each polls less often."""

IN_A_ROW = 3
"""Consecutive parts that a server could not make and this process then could, after which the server is put aside: a single one may be an
episode."""


class Servers(Protocol):
    """The servers that can be asked."""

    def names(self) -> Mapping[str, int] | None: ...
    def about(self, server: str) -> Any: ...
    def ask(self, server: str, draws: Sequence[SampleKey]) -> Any: ...
    def teach(self, server: str, images: np.ndarray) -> Any: ...
    def done(self, tickets: Sequence[Any], seconds: float) -> list[Any]: ...
    def redeem(self, ticket: Any) -> Part | About | Answer: ...


class NoServers(ConnectionError):
    """No server is left, and the settings do not let the run go on without one."""


@dataclass
class Counts:
    """What happened since the run began."""

    images: int = 0
    """Received from servers."""
    alone: int = 0
    """Made here, because no server was left or one failed at them."""
    megabytes: float = 0.0
    server_seconds: float = 0.0
    """Of one thread of a server, for these images."""
    teacher_seconds: float = 0.0
    """Of these, the teacher's."""
    waited_seconds: float = 0.0
    """From requesting a part to having it, over all parts."""
    receiving_seconds: float = 0.0
    """CPU time of this process's thread that asks and receives."""
    failures: int = 0
    late: int = 0
    """Parts requested twice because the first answer did not come."""


class _Request(NamedTuple):
    part: PendingPart
    asked: float
    """When."""


@dataclass(eq=False)
class _Server:
    name: str
    threads: int
    state: Literal["new", "proving", "live", "refused"] = "new"
    asked: dict[Any, _Request] = field(default_factory=dict)
    """By ticket."""
    proof: Any = None
    """Ticket for its description, then for images that it has to make as this process does. None: neither is pending."""
    proof_draws: list[SampleKey] = field(default_factory=list)
    heard: float = 0.0
    """When it last answered, or was first asked."""
    failed: int = 0
    """Times in a row that it was put aside."""
    unmade: int = 0
    """Parts in a row that it could not make and this process could, since it was last put aside."""
    until: float = 0.0
    """It is not asked before this time."""
    seconds: float | None = None
    """Moving average from request to answer. None: it has not answered yet."""

    def has_room(self, now: float) -> bool:
        return self.state == "live" and now >= self.until and len(self.asked) < self.threads + QUEUED


class Pool:
    """A training process's requests to servers, in the thread of one Stream at a time.

    Args:
        servers: those that can be asked.
        opened: this process's own images, to compare with and to go on alone.
        go_on: whether this process makes the images itself while there is no server.
        patience: seconds that parts wait without any server before it does, or fails.
        first_patience: the same before there has been any server, if `go_on` is false.
        threads: of this process, for making images.
        device: gets the batches.
        processes: training processes of the job.
        log: logs what happens to servers.
        teacher: asks servers for the teacher's logits of images that this process makes itself; a server with another teacher is refused.
            None: servers have none.
    """

    def __init__(
        self,
        servers: Servers,
        opened: Opened,
        *,
        go_on: bool,
        patience: float,
        first_patience: float,
        threads: int,
        device: torch.device,
        processes: int,
        log: Callable[[str], None],
        teacher: Teacher | None = None,
    ):
        self.threads, self.device, self.counts = threads, device, Counts()
        self.waiting: deque[PendingPart] = deque()
        """Parts that nobody makes yet."""
        self._unmade: dict[PendingPart, list[tuple[_Server, PartFailed]]] = {}
        """Parts that this process makes because servers could not: which ones, and why."""
        self._ask, self._opened, self._go_on, self._log = servers, opened, go_on, log
        self._patience, self._first_patience, self._teacher = patience, first_patience, teacher
        self._servers: dict[str, _Server] = {}
        self._proof = Proof(opened, teacher)
        self._looked, self._look_seconds, self._processes = 0.0, look_seconds(processes), processes
        self._without: float | None = None
        """Since when parts wait and nobody can be asked."""
        self._alone = self._met = False
        self._batch_images, self._image_bytes = PART, 0.0

    @property
    def live(self) -> list[_Server]:
        """Servers that have proven themselves."""
        return [one for one in [*self._servers.values()] if one.state == "live"]  # another thread adds some

    def is_asking(self) -> bool:
        """Whether an answer is on its way."""
        return any(one.asked or one.proof is not None for one in self._servers.values())

    def window(self) -> int:
        """Batches in flight at most: enough for every server, in bounded memory."""
        slots = sum(one.threads + QUEUED for one in self.live)
        wanted = 1 + -(-slots * PART // self._batch_images)
        room = int(MAX_BYTES / (self._image_bytes * self._batch_images)) if self._image_bytes else MIN_BATCHES
        return max(MIN_BATCHES, min(wanted, room))

    def ask_for(self, batch: PendingBatch) -> None:
        """Queue a batch after those before it."""
        self._batch_images = sum(len(part.draws) for part in batch.parts)
        self.waiting.extend(batch.parts)

    def look(self) -> None:
        """Find new servers, and drop those that are gone."""
        now = time.monotonic()
        if now - self._looked >= self._look_seconds / (1 if self.live else 5):
            self._looked = now
            self._learn(self._ask.names())
        for server in self._servers.values():
            if server.state == "new" and now >= server.until:
                self._prove(server)

    def assign(self) -> None:
        """Request waiting parts from the servers that answer soonest."""
        now = time.monotonic()
        free = [one for one in self.live if one.has_room(now)]
        while self.waiting and free:
            part = self.waiting.popleft()
            if part.there:
                continue
            server = min(free, key=lambda one: (len(one.asked) + 1) / one.threads * (one.seconds or 0.0))
            if not self._request(server, part):
                self.waiting.appendleft(part)
            free = [one for one in free if one.has_room(now)]

    def receive(self, seconds: float) -> list[PendingPart]:
        """Take what servers have made, waiting at most `seconds`; parts that a server lost wait again. Returns parts one could not make."""
        requests = {ticket: server for server in self._servers.values() for ticket in server.asked}
        proofs = {server.proof: server for server in self._servers.values() if server.proof is not None}
        unmade: list[PendingPart] = []
        for ticket in self._ask.done([*requests, *proofs], seconds):
            if ticket in proofs:
                self._compare(proofs[ticket])
                continue
            server = requests[ticket]
            if ticket not in server.asked:
                continue
            part, asked = server.asked[ticket]
            try:
                found = self._ask.redeem(ticket)
                assert isinstance(found, Part)
            except PartFailed as error:
                del server.asked[ticket]
                part.at.discard(server.name)
                if not part.there:
                    unmade.append(part)
                    self._unmade.setdefault(part, []).append((server, error))
                continue
            except ServerFailed as error:
                self._fail(server, error)
                continue
            del server.asked[ticket]
            now = time.monotonic()
            if not part.there:
                part.batch.receive(part, found)
                self._count(part, found, now - asked)
            server.seconds = now - asked if server.seconds is None else 0.8 * server.seconds + 0.2 * (now - asked)
            server.heard, server.failed, server.unmade = now, 0, 0
        return unmade

    def hurry(self) -> None:
        """Request late parts from another server, and put aside servers that do not answer at all."""
        now, lost = time.monotonic(), lost_seconds(self._processes)
        for server in self._servers.values():
            if (server.asked or server.proof is not None) and now - server.heard > lost:
                self._fail(server, ServerFailed(f"no answer for {lost:.0f} s"))
            late = LOST_SECONDS if server.seconds is None else max(MIN_LATE, LATE * server.seconds)
            for part, asked in [*server.asked.values()]:
                if part.there or len(part.at) > 1 or now - asked < late:
                    continue
                others = [one for one in self.live if one.has_room(now) and one.name not in part.at]
                if others and self._request(min(others, key=lambda one: len(one.asked)), part):
                    self.counts.late += 1

    def is_without_servers(self) -> bool:
        """Whether parts have waited too long without any server that can be asked, so that this process makes them.

        Raises:
            NoServers: they have, and `go_on` is false.
        """
        now = time.monotonic()
        if any(one.asked or now >= one.until for one in self.live):
            self._without, self._alone = None, False
            return False
        if self._alone:
            return True
        if not self.waiting:
            self._without = None
            return False
        self._without = now if self._without is None else self._without
        patience = self._patience if self._met or self._go_on else self._first_patience
        if now - self._without < patience:
            return False
        names = ", ".join(sorted({name.split("/")[1] for name in self._servers})) or "no host has joined"
        why = f"no server has made an image for {patience:.0f} s ({names})"
        if not self._go_on:
            raise NoServers(f"{why}, and without_servers is fail")
        self._log(f"{why}: this process makes images itself until a server is back")
        self._alone = True
        return True

    def make_here(self, draws: list[SampleKey]) -> Part:
        """Make a part of a batch in this process, in any thread."""
        return made(self._opened, draws, self._teacher)

    def made_here(self, part: PendingPart, found: Part) -> None:
        """Take a part made by this process. Servers that failed at it are charged only if it replaced no image; broken ones always fail."""
        could_not = self._unmade.pop(part, [])
        if could_not and _is_as_drawn(part, found):
            for server, error in could_not:
                self._charge(server, error)
        if not part.there:
            part.batch.receive(part, found)
            self.counts.alone += len(part.draws)

    def forget(self) -> None:
        """End an iteration, without waiting for pending requests."""
        self.waiting.clear()
        self._unmade.clear()
        for server in self._servers.values():
            server.asked.clear()

    def _learn(self, names: Mapping[str, int] | None) -> None:
        if names is None:
            return
        for name in [name for name, one in self._servers.items() if name not in names and not one.asked]:
            del self._servers[name]
        for name, threads in names.items():
            if name not in self._servers:
                self._servers[name] = _Server(name, threads)

    def _request(self, server: _Server, part: PendingPart) -> bool:
        try:
            ticket = self._ask.ask(server.name, part.draws)
        except ServerFailed as error:
            self._fail(server, error)
            return False
        now = time.monotonic()
        if not server.asked:
            server.heard = now
        part.at.add(server.name)
        server.asked[ticket] = _Request(part, now)
        return True

    def _count(self, part: PendingPart, found: Part, seconds: float) -> None:
        counts, size = self.counts, sum(one.nbytes for one in found.fields)
        counts.images += len(part.draws)
        counts.megabytes += size / 1e6
        counts.server_seconds += found.seconds
        counts.teacher_seconds += found.teacher_seconds
        counts.waited_seconds += seconds
        self._image_bytes = size / len(part.draws)

    def _fail(self, server: _Server, error: Exception) -> None:
        """Drop a server until it proves itself anew, and put its parts back at the front."""
        self._put_aside(server, error)
        server.state = "new"
        for part, _ in reversed([*server.asked.values()]):
            part.at.discard(server.name)
            if not part.there and not part.at:
                self.waiting.appendleft(part)
        server.asked.clear()
        server.proof = None

    def _charge(self, server: _Server, error: PartFailed) -> None:
        """Count a part that a server should have made; from IN_A_ROW on, put it aside."""
        server.unmade += 1
        if server.unmade >= IN_A_ROW:
            self._put_aside(server, error)

    def _put_aside(self, server: _Server, error: Exception) -> None:
        """Pause requests to a server."""
        server.unmade = 0  # afterwards, one part again says little
        if time.monotonic() < server.until:
            return  # for the same cause
        self.counts.failures += 1
        server.failed += 1
        pause = pause_after(server.failed)
        server.until = time.monotonic() + pause
        if is_said(server.failed):
            self._log(f"server {_place(server)} failed: {error}; retrying in {pause:.0f} s")

    def _prove(self, server: _Server) -> None:
        """Ask a server what it serves."""
        try:
            server.proof = self._ask.about(server.name)
        except ServerFailed as error:
            self._fail(server, error)
            return
        server.state, server.heard = "proving", time.monotonic()

    def _compare(self, server: _Server) -> None:
        """Accept a server if it serves the same images and makes them identically; else refuse it for good."""
        ticket, server.proof = server.proof, None
        try:
            found = self._ask.redeem(ticket)
            assert not isinstance(found, Answer), "a proof asks for no logits"
            server.heard = time.monotonic()
            if isinstance(found, About):
                wrong = self._proof.other_images(found)
                if wrong is None:  # only now: pixels of other images would say nothing
                    server.proof_draws = self._proof.draws()
                    server.proof = self._ask.ask(server.name, server.proof_draws)
                    return
            else:
                wrong = self._proof.other_pixels(server.proof_draws, found)
        except (PartFailed, ServerFailed) as error:
            self._fail(server, error)
            return
        if wrong is not None:
            server.state = "refused"
            self._log(f"server {_place(server)} is not used: {wrong}")
            return
        server.state, self._met = "live", True
        if server.failed:
            self._log(f"server {_place(server)} is back")


def lost_seconds(processes: int) -> float:
    """Seconds without an answer until a server that `processes` of a job ask counts as gone. A killed one is known at once."""
    return LOST_SECONDS * max(1.0, min(processes, MAX_ASKERS) / FEW_ASKERS)


def look_seconds(processes: int) -> float:
    """Seconds between two polls of each of a job's training processes."""
    return max(LOOK_SECONDS, processes / LOOKS)


def _is_as_drawn(part: PendingPart, found: Part) -> bool:
    """Whether a part holds exactly the images that were drawn, with none in place of a broken one."""
    indices: list[int] = found.fields[found.batch._fields.index("indices")].tolist()
    return indices == [index for _, index in part.draws]


def _place(server: _Server) -> str:
    _, host, number, *_ = server.name.split("/")
    return f"{number} on {host}"
