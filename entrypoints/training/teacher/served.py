"""A frozen teacher on the hosts that make the training images: its logits are sent with the images, as records of the teacher cache."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from training.data.batches import LabelledBatch, TaughtBatch
from training.distributed.world import World
from training.servers.actor import About, AboutTeacher, Answer, PartFailed, ServerFailed
from training.servers.back_off import is_said, pause_after
from training.servers.parts import PART
from training.servers.pool import (
    LATE,
    MIN_LATE,
    QUEUED,
    NoServers,
    Servers,
    look_seconds,
    lost_seconds,
)
from training.servers.proof import OTHER_TEACHER
from training.teacher.frozen import Teacher
from training.teacher.logit_records import RecordLayout

LOOK_SECONDS = 1.0
"""Between two polls of the list of servers while none is known; and the longest single wait for an answer."""

AGAIN_SECONDS = 5.0
"""Until a server that could not open the teacher is asked again."""


class ServerTeacher:
    """A server's teacher. May be called from several threads at once.

    Args:
        teacher: on its device.
        layout: of the records that are sent.
    """

    def __init__(self, teacher: Teacher, device: torch.device, layout: RecordLayout):
        self._teacher, self._device, self._layout = teacher, device, layout
        self._about = AboutTeacher(teacher.name, teacher.parameters, teacher.digest())

    def about(self) -> AboutTeacher:
        return self._about

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self._teacher(images.to(self._device)).to(images.device)

    def taught(self, batch: LabelledBatch) -> TaughtBatch:
        """
        Raises:
            ValueError: logits are not finite, or beyond what the records hold.
        """
        return _with_records(batch, self._teacher(batch.images.to(self._device)), self._layout)


class _Asked(NamedTuple):
    """A part of a batch of images that a server was asked for."""

    part: int
    server: str
    when: float
    heard: float
    """When it was asked for, or its server last answered: a server may hold many processes' parts."""


class _Question:
    """A batch of images, in parts, until all have logits."""

    def __init__(self, images: torch.Tensor):
        self.parts = [part.cpu().numpy() for part in images.split(PART)]
        self.waiting = deque(range(len(self.parts)))
        """Parts that no server has."""
        self.asked: dict[Any, _Asked] = {}
        """By ticket."""
        self.heard = time.monotonic()
        """When a server last answered."""
        self.why = "no host has joined"
        """Why the last attempt got no answer."""
        self._found: dict[int, torch.Tensor] = {}

    def is_answered(self) -> bool:
        return len(self._found) == len(self.parts)

    def logits(self) -> torch.Tensor:
        """Logits of all images, in order."""
        return torch.cat([self._found[part] for part in range(len(self.parts))])

    def wait(self, part: int) -> None:
        """Queue a part, unless it is answered or queued already."""
        if part not in self._found and part not in self.waiting:
            self.waiting.append(part)

    def answer(self, one: _Asked, logits: torch.Tensor, now: float) -> None:
        """Take the logits of a part. Its server is alive, so its other parts are not lost."""
        self._found[one.part] = logits
        self.heard = now
        self.asked = {
            ticket: other._replace(heard=now) if other.server == one.server else other
            for ticket, other in self.asked.items()
        }
        if one.part in self.waiting:  # another server failed at it
            self.waiting.remove(one.part)

    def late(self, before: float) -> list[int]:
        """Unanswered parts that a single server has had since before that moment."""
        times = Counter(one.part for one in self.asked.values())
        return [
            one.part
            for one in self.asked.values()
            if one.when < before and times[one.part] == 1 and one.part not in self._found
        ]


class RemoteTeacher:
    """The servers' teacher, for images that a training process made itself. May be called from several threads at once.

    Args:
        about: of the teacher that servers must have.
        layout: the same as that of the servers' teachers.
        wait_seconds: how long to go without an answer before giving up.
        processes: training processes of the job.
        log: logs which server failed.
    """

    def __init__(
        self,
        servers: Servers,
        about: AboutTeacher,
        layout: RecordLayout,
        wait_seconds: float,
        processes: int,
        log: Callable[[str], None],
    ):
        self.layout = layout
        self._servers, self._about, self._wait_seconds, self._log = servers, about, wait_seconds, log
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._names: Mapping[str, int] = {}
        self._looked, self._look_seconds, self._processes = 0.0, look_seconds(processes), processes
        self._seconds: float | None = None
        """Moving average of the time from request to answer. None: no answer yet."""
        self._ties = random.Random()

    @property
    def name(self) -> str:
        return self._about.name

    @property
    def parameters(self) -> int:
        """Number of parameters of all its models."""
        return self._about.parameters

    def about(self) -> AboutTeacher:
        return self._about

    def digest(self) -> str:
        """SHA-256 of everything but the images that its logits depend on, as frozen.Teacher gives it."""
        return self._about.digest

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (batch, channels, height, width) -> logits float32 (batch, classes), on the device of the images.

        If a server fails at a part, another one is asked, or the same one later.

        Raises:
            NoServers: no server has answered for `wait_seconds`.
            ValueError: logits are not finite, or beyond what the records hold.
        """
        question = _Question(images)
        while not question.is_answered():
            now = time.monotonic()
            if now - question.heard > self._wait_seconds:
                raise NoServers(
                    f"no server has given the teacher's logits for {self._wait_seconds:.0f} s: {question.why}"
                )
            self._look(now)
            if self._seconds is not None:
                # a part far later than usual is asked of another server; the first answer counts
                for part in question.late(now - max(MIN_LATE, LATE * self._seconds)):
                    question.wait(part)
            self._ask(question)
            done = self._servers.done([*question.asked], LOOK_SECONDS)
            for ticket in done:
                self._receive(question, ticket)
            self._give_up(question, now)
            if question.waiting and not done and not question.asked:
                time.sleep(LOOK_SECONDS / 10)
        logits = question.logits()
        self.layout.encode(self.layout.pack(logits).numpy())  # checks held-out images too, before the first step
        return logits.to(images.device)

    def taught(self, batch: LabelledBatch) -> TaughtBatch:
        """
        Raises:
            NoServers, ValueError: as a call.
        """
        return _with_records(batch, self(batch.images), self.layout)

    def _look(self, now: float) -> None:
        """Refresh the list of servers, if due."""
        if now - self._looked > (self._look_seconds if self._names else LOOK_SECONDS):
            self._names, self._looked = self._servers.names() or self._names, now

    def _ask(self, question: _Question) -> None:
        """Request waiting parts while servers have room."""
        while question.waiting and (server := self._free(question.asked, question.waiting[0])) is not None:
            try:
                ticket = self._servers.teach(server, question.parts[question.waiting[0]])
            except ServerFailed as error:
                question.why = self._put_aside(server, error)
            else:
                now = time.monotonic()
                question.asked[ticket] = _Asked(question.waiting.popleft(), server, now, now)

    def _receive(self, question: _Question, ticket: Any) -> None:
        """Take a server's answer; a part that it failed at waits again."""
        one = question.asked.pop(ticket)
        try:
            logits = self._logits(ticket)
        except (PartFailed, ServerFailed) as error:
            question.why = self._put_aside(one.server, error)
            question.wait(one.part)
            return
        now = time.monotonic()
        question.answer(one, logits, now)
        took = now - one.when
        self._seconds = took if self._seconds is None else 0.8 * self._seconds + 0.2 * took
        self._failures.pop(one.server, None)

    def _give_up(self, question: _Question, now: float) -> None:
        """Give up on servers that do not answer at all."""
        for ticket, one in [*question.asked.items()]:
            if now - one.heard > self._lost_seconds:
                silent = f"no answer for {self._lost_seconds:.0f} s"
                question.why = self._put_aside(one.server, ServerFailed(silent))
                del question.asked[ticket]
                question.wait(one.part)

    @property
    def _lost_seconds(self) -> float:
        """Short enough to leave time to ask others."""
        return max(lost_seconds(1), min(lost_seconds(self._processes), self._wait_seconds / 4))

    def _free(self, asked: Mapping[Any, _Asked], part: int) -> str | None:
        """The server with the fewest parts per thread, ties broken at random; None: all are full, have this part, or have just
        failed."""
        load = Counter(one.server for one in asked.values())
        have = {one.server for one in asked.values() if one.part == part}
        now, names = time.monotonic(), self._names  # another thread may replace them
        free = [
            name
            for name, threads in names.items()
            if now >= self._until.get(name, 0.0) and load[name] < threads + QUEUED and name not in have
        ]
        return min(free, key=lambda name: (load[name] / names[name], self._ties.random()), default=None)

    def _logits(self, ticket: Any) -> torch.Tensor:
        answer = self._servers.redeem(ticket)
        assert isinstance(answer, Answer)
        if answer.digest != self._about.digest:
            raise PartFailed(OTHER_TEACHER)
        return torch.tensor(answer.logits)

    def _put_aside(self, server: str, error: Exception) -> str:
        """Pause requests to a server. Returns the reason, for messages."""
        self._failures[server] = self._failures.get(server, 0) + 1
        self._until[server] = time.monotonic() + pause_after(self._failures[server])
        why = f"{server.split('/')[1]}: {error}"
        if is_said(self._failures[server]):
            self._log(f"no teacher logits from a server on {why}")
        return why


def meet(
    servers: Servers,
    layout: RecordLayout,
    world: World,
    wait_seconds: float,
    log: Callable[[str], None],
    *,
    hosts: int,
) -> RemoteTeacher:
    """Find the servers' teacher: that of the first server to answer rank 0. A collective.

    Args:
        wait_seconds: for a first server to open the teacher; logits may take half as long, so that the run fails with the cause, and not
            with a timeout of the other processes' collective.
        hosts: number of serving hosts.

    Raises:
        ValueError: two hosts, or the only one, lack the teacher that the settings ask for.
        NoServers: no server has answered in time.
    """
    found = world.on_rank_zero(lambda: json.dumps(_first(servers, wait_seconds, log, hosts)))
    about = AboutTeacher(*json.loads(world.broadcast_bytes(None if found is None else found.encode())))
    return RemoteTeacher(servers, about, layout, wait_seconds / 2, world.size, log)


def _first(servers: Servers, wait_seconds: float, log: Callable[[str], None], hosts: int) -> AboutTeacher:
    until, asked, said = time.monotonic() + wait_seconds, dict[Any, str](), set[str]()
    why, without, again = "no host has joined", set[str](), dict[str, float]()
    while (now := time.monotonic()) < until:
        for name in servers.names() or {}:
            if name not in asked.values() and now >= again.get(name, 0.0):
                try:
                    asked[servers.about(name)] = name
                except ServerFailed as error:
                    why = f"{name.split('/')[1]}: {error}"
        for ticket in servers.done([*asked], LOOK_SECONDS):
            name = asked.pop(ticket)
            again[name], host = now + AGAIN_SECONDS, name.split("/")[1]
            try:
                found = servers.redeem(ticket)
            except PartFailed as error:
                why = f"{host}: {error}"
                if isinstance(error.__cause__, (ValueError, FileNotFoundError)):
                    without.add(host)
                if len(without) >= min(2, hosts):  # one alone may have a damaged copy
                    raise ValueError(f"the teacher on {why}") from error
            except ServerFailed as error:
                why = f"{host}: {error}"
            else:
                assert isinstance(found, About) and found.teacher is not None
                return found.teacher
            if why not in said:
                said.add(why)
                log(f"no teacher on {why}")
        time.sleep(LOOK_SECONDS / 2)
    raise NoServers(f"no server has opened the teacher for {wait_seconds:.0f} s: {why}")


def _with_records(batch: LabelledBatch, logits: torch.Tensor, layout: RecordLayout) -> TaughtBatch:
    return TaughtBatch(*batch, torch.from_numpy(layout.encode(layout.pack(logits).cpu().numpy())))
