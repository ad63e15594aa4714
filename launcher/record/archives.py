"""Unpack jobs' .tar.gz archives: nothing escapes the target, and a damaged archive gives nothing.

It does not use tarfile's own filters, which Python 3.10 before 3.10.12 and 3.11 before 3.11.4 lack.
"""

from __future__ import annotations

import errno
import gzip
import os
import posixpath
import shutil
import tarfile
import zlib
from pathlib import Path

MAX_HEADER_BYTES = 2**20
"""Limit of a member's headers, which tarfile reads at once. Linux's longest path has 4 KiB."""

MAX_MEMBERS = 1_000_000
"""tarfile keeps about 1 KB for each."""

CHUNK = 2**20

DAMAGE = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
    LookupError,
    ArithmeticError,
    RuntimeError,
)
"""What gzip and tarfile raise for damaged or forged bytes."""

PATH_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.EPERM, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
"""Errors of a path, for which only that member is left out."""


class ArchiveError(Exception):
    """An archive is damaged, or holds more than it may."""


def unpack(archive: Path, target: Path, most_bytes: int) -> list[str]:
    """Unpack a .tar.gz, whole or not at all. It replaces what is at the target.

    Links come last, and only to files and folders of the archive. Owners and dates are not kept.

    Args:
        target: the folder that then holds the members.
        most_bytes: limit for all members together.

    Returns:
        `NAME: REASON` of each member that was left out, such as a path or a link that leads out of the target, or a device.

    Raises:
        ArchiveError: the archive is damaged, or holds more than most_bytes or MAX_MEMBERS.
        OSError: the disk is full, for example.
    """
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with gzip.open(archive) as stream:
            left_out = _extract(stream, part, most_bytes)
        if target.exists():
            shutil.rmtree(target)
        part.replace(target)
    except DAMAGE as error:
        raise _damaged(error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return left_out


def read_member(archive: Path, name: str, most_bytes: int) -> bytes | None:
    """A file of a .tar.gz that ends within its first bytes; None if there is none. What follows is not read.

    Raises:
        ArchiveError: the archive is damaged before that.
        OSError: it cannot be opened.
    """
    try:
        with gzip.open(archive) as stream, _opened(metered := _Metered(stream)) as tar:
            metered.allowed = most_bytes
            while (found := tar.next()) is not None:
                if posixpath.normpath(found.name) == name and found.isreg() and 0 <= found.size <= most_bytes:
                    content = tar.extractfile(found)
                    return content.read() if content is not None else None
    except _TooLong:
        pass
    except DAMAGE as error:
        raise _damaged(error) from error
    return None


class _TooLong(ArchiveError):
    """More was read than is allowed."""


class _Metered:
    """A stream for tarfile that stops at headers longer than allowed, before they fill the memory."""

    def __init__(self, stream: gzip.GzipFile):
        self.stream, self.count = stream, 0
        self.allow(0)

    def allow(self, content_bytes: int) -> None:
        """Allow a member's content and the next one's headers."""
        self.allowed = self.count + content_bytes + MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        if self.count > self.allowed:
            raise _TooLong(f"damaged (headers of more than {MAX_HEADER_BYTES:,} bytes)")
        return data


def _opened(metered: _Metered) -> tarfile.TarFile:
    return tarfile.open(fileobj=metered, mode="r|")  # type: ignore[call-overload, no-any-return]  # tarfile only reads


def _damaged(error: BaseException) -> ArchiveError:
    return ArchiveError(f"damaged ({str(error).strip() or type(error).__name__})")


def _extract(stream: gzip.GzipFile, folder: Path, most_bytes: int) -> list[str]:
    """Write the members into an empty folder; `NAME: REASON` of those left out."""
    left_out: list[str] = []
    links: list[tarfile.TarInfo] = []
    count = total = 0
    metered = _Metered(stream)
    with _opened(metered) as tar:
        while (member := tar.next()) is not None:
            count, total = count + 1, total + member.size
            if member.size < 0 or member.issparse():
                raise ArchiveError(f"damaged ({member.name!r} has no plain content)")
            if count > MAX_MEMBERS or total > most_bytes:
                raise ArchiveError(f"too large: more than {MAX_MEMBERS:,} members or {most_bytes / 1e6:,.0f} MB")
            metered.allow(member.size)
            if member.issym() or member.islnk():
                links.append(member)
            elif reason := _write(tar, member, folder):
                left_out.append(f"{member.name!r}: {reason}")
    rest = 0
    while data := stream.read(CHUNK):  # gzip compares checksum and length at the end
        rest += len(data)
        if rest > most_bytes:
            raise ArchiveError(f"too large: more than {most_bytes / 1e6:,.0f} MB")
    return left_out + _make_links(links, folder)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> str:
    """Write a file or make a folder, while the folder holds no link. Returns why not, or ""."""
    if reason := _unsafe(member.name):
        return reason
    place = folder / member.name
    try:
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
            return ""
        content = tar.extractfile(member) if member.isreg() else None
        if content is None:
            return "neither a file, a folder nor a link"
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb") as file:
            shutil.copyfileobj(content, file, CHUNK)
        if member.mode & 0o100:
            place.chmod(0o755)
    except OSError as error:
        return _reason(error)
    return ""


def _make_links(links: list[tarfile.TarInfo], folder: Path) -> list[str]:
    """Make links to what the folder holds; `NAME: REASON` of the others.

    Every target and every link's folder exists before the first link is made, so no path leads through a link.
    """
    left_out, sound = [], []
    for link in links:
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(link.name) if link.issym() else "", link.linkname))
        try:
            reason = _unsafe(link.name) or _unsafe(goal) or ("" if (folder / goal).exists() else "a link to nothing")
            if not reason:
                (folder / link.name).parent.mkdir(parents=True, exist_ok=True)
                sound.append((link, goal))
        except OSError as error:
            reason = _reason(error)
        if reason:
            left_out.append(f"{link.name!r}: {reason} (to {link.linkname!r})")
    for link, goal in sound:
        place = folder / link.name
        try:
            if link.issym():
                place.symlink_to(os.path.relpath(folder / goal, place.parent))
            else:
                os.link(folder / goal, place)
        except OSError as error:
            left_out.append(f"{link.name!r}: {_reason(error)}")
    return left_out


def _unsafe(path: str) -> str:
    """Why a path of an archive is not followed; "" if it stays inside."""
    if path.startswith("/") or ".." in path.split("/"):
        return "it leads out of the archive"
    return "a NUL in its name" if "\0" in path else ""


def _reason(error: OSError) -> str:
    """The error of a path in words. Raises those of the disk."""
    if error.errno not in PATH_ERRORS:
        raise error
    return str(error.strerror)
