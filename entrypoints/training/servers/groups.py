"""Which hosts of a job train, and which prepare images for them. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from launcher_observer.contract import contract_value

from training.runtime.environment import training_hosts

DEFAULT_PORT = 6379
"""Port where servers and trainers meet, on the first training host, unless TRAINING_SERVERS_PORT sets another: Ray's default
(https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations)."""


@dataclass(frozen=True)
class Groups:
    """The hosts of a job, by what they do."""

    host: str
    """This one."""
    training: tuple[str, ...]
    serving: tuple[str, ...]
    port: int = DEFAULT_PORT

    @property
    def serves(self) -> bool:
        """Whether this host prepares images for others."""
        return self.host in self.serving

    @property
    def is_head(self) -> bool:
        """Whether the others connect to this host."""
        return self.host == self.training[0]

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Address and port of the first training host.

        Raises:
            OSError: its name has no address (yet).
        """
        return address_of(self.training[0]), self.port


def read_groups(environ: Mapping[str, str] = os.environ) -> Groups:
    """The groups as SageMaker's contract gives them."""
    host = environ.get("SM_CURRENT_HOST", "algo-1")
    hosts = contract_value(environ, "SM_HOSTS", [host])
    training = tuple(training_hosts(environ)) or (host,)
    serving = tuple(name for name in hosts if name not in training)
    return Groups(host, training, serving, int(environ.get("TRAINING_SERVERS_PORT") or DEFAULT_PORT))


def address_of(host: str) -> str:
    """A host's IPv4 address; 127.1.0.1 for 127.0.0.1, which Ray would replace with an address that other machines can reach.

    Raises:
        OSError: its name has none.
    """
    address = socket.gethostbyname(host)
    return "127.1.0.1" if address == "127.0.0.1" else address
