"""Variants that are measured in turns, each in a process of its own: what one leaves in its process, no other finds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

from tests.gpu import isolation
from tests.gpu.bench import Bench
from tests.gpu.outcomes import NotChecked

ROUNDS = 3
"""In each of which all take turns."""

Found = TypeVar("Found")


def in_turns(
    bench: Bench, variants: Mapping[str, Callable[[Bench], Callable[[], Found]]], rounds: int = ROUNDS
) -> dict[str, list[Found]]:
    """What each variant measures in each round. This process must not have started CUDA.

    Args:
        variants: each gets a bench with a folder of its own, and returns what measures it once. They begin one after another, and only one
            of them measures at a time.

    Raises:
        NotChecked: a variant cannot run here.
        RuntimeError: a variant failed; the message ends with its log.
    """
    pipes, pids = dict[str, Connection](), dict[str, int]()
    logs = {name: bench.folder / f"{name}.log" for name in variants}
    found: dict[str, list[Found]] = {name: [] for name in variants}

    def answer(name: str) -> Found:
        try:
            return pipes[name].recv()
        except EOFError:
            code = isolation.wait(pids[name], 10)
            raise RuntimeError(f"{name} ended with {code}; its log ends:\n{isolation.tail(logs[name])}") from None

    for name, begin in variants.items():
        own = replace(bench, folder=bench.folder / name)
        own.folder.mkdir()
        pipes[name], theirs = multiprocessing.Pipe()
        pids[name] = isolation.start(partial(_serve, begin, own, theirs), logs[name], own_group=False)
        theirs.close()
        if (why_not := answer(name)) is not None:
            raise NotChecked(str(why_not))
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            found[name].append(answer(name))
    for name, pipe in pipes.items():
        pipe.send(False)
        isolation.wait(pids[name], 10)
    return found


def _serve(begin: Callable[[Bench], Callable[[], object]], bench: Bench, pipe: Connection) -> None:
    """Say that it can begin, or why not; then measure until the parent wants no more."""
    try:
        measure = begin(bench)
    except NotChecked as why:
        pipe.send(str(why))
        return
    pipe.send(None)
    while pipe.recv():
        pipe.send(measure())
