"""The checksum of a file's contents."""

from __future__ import annotations

import hashlib
from typing import IO

PIECE = 2**20
"""Bytes that are read at once."""


def sha256(opened: IO[bytes]) -> str:
    """SHA-256 of what is left to read of a file, in hexadecimal digits; `hashlib.file_digest` needs Python 3.11."""
    found = hashlib.sha256()
    while piece := opened.read(PIECE):
        found.update(piece)
    return found.hexdigest()
