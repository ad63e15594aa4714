"""A private /opt/ml for a host on this machine: a mount namespace in which /opt/ml is the host's folder.

    python opt_ml.py FOLDER COMMAND …     run a command there; if the kernel forbids it, without
    python opt_ml.py --check FOLDER       print why it is not possible; nothing if it is

Nothing outside the namespace changes, and it ends with its last process. Root needs only a mount namespace; other users also need a
user namespace around it, in which they keep their ids. https://man7.org/linux/man-pages/man7/user_namespaces.7.html

The file runs by its path and imports nothing else of this kit.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

OPT, OPT_ML = "/opt", "/opt/ml"
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 4096, 16384, 1 << 19  # linux/mount.h
LIBC = ctypes.CDLL(None, use_errno=True)

REASONS = {
    errno.EPERM: "the kernel does not allow it (user namespaces are switched off, or AppArmor or a container forbids them)",
    errno.EACCES: "a security policy does not allow it",
    errno.ENOSPC: "the limit of namespaces is reached, see /proc/sys/user",
    errno.EUSERS: "the limit of nested namespaces is reached",
}
"""What the kernel's errors mean here: ENOSPC, for example, is not a full disk. https://man7.org/linux/man-pages/man2/unshare.2.html"""


def command(folder: Path, shim: list[str]) -> list[str]:
    """The command that runs a host's shim with the host's folder as /opt/ml."""
    return [sys.executable, "-I", "-S", __file__, str(folder), *shim]


def why_not(folder: Path) -> str:
    """Why /opt/ml cannot be a folder below this one; "" if it can. Tried in a separate process, which leaves nothing behind."""
    check = [sys.executable, "-I", "-S", __file__, "--check", str(folder)]
    checked = subprocess.run(check, capture_output=True, text=True)
    return (checked.stdout + checked.stderr).strip()


def tried(folder: str) -> str:
    """Why `enter` fails, as tried in a child process; "" if it works."""
    if sys.platform != "linux":
        return "only Linux has mount namespaces"
    for place in (folder, sys.prefix, sys.base_prefix, *map(str, Path(folder).glob("input/data/*"))):
        if Path(place).resolve().is_relative_to(OPT_ML):
            return f"{place} would be hidden"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            enter(folder)
        except OSError as error:
            os.write(writing, REASONS.get(error.errno or 0, str(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        why = answer.read().decode()
    os.waitpid(child, 0)
    return why


def enter(folder: str) -> None:
    """Move this process into a mount namespace of its own, in which /opt/ml is `folder`. Raises OSError."""
    user, group, here = os.geteuid(), os.getegid(), os.getcwd()
    try:
        _unshare(CLONE_NEWNS)
    except PermissionError:
        _unshare(CLONE_NEWUSER | CLONE_NEWNS)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as setting:
                setting.write(text)
    _mount("none", "/", flags=MS_REC | MS_SLAVE)  # later mounts are not visible outside
    if not os.path.isdir(OPT_ML):
        _cover_opt()
    _mount(folder, OPT_ML, flags=MS_BIND | MS_REC)
    os.chdir(here)  # by its path, which may lead through /opt


def _cover_opt() -> None:
    """Mount a file system in memory over /opt, with all of /opt's contents in place, and an empty ml."""
    held = [
        (
            entry.path,
            os.readlink(entry.path) if entry.is_symlink() else "",
            os.open(entry.path, os.O_PATH | os.O_NOFOLLOW),
        )
        for entry in os.scandir(OPT)
    ]
    folders = {path for path, _, _ in held if os.path.isdir(path)}
    _mount("tmpfs", OPT, kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data="mode=755")
    for path, link, handle in held:
        if link:
            os.symlink(link, path)
            continue
        if path in folders:
            os.mkdir(path)
        else:
            Path(path).touch()
        _mount(f"/proc/self/fd/{handle}", path, flags=MS_BIND | MS_REC)
    for _, _, handle in held:
        os.close(handle)
    os.mkdir(OPT_ML)


def _unshare(flags: int) -> None:
    if LIBC.unshare(flags):
        raise _error("unshare")


def _mount(source: str, target: str, *, kind: str = "none", flags: int, data: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    if LIBC.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data)):
        raise _error(f"mount {target}")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    folder, *shim = sys.argv[1:]
    if folder == "--check":
        print(tried(shim[0]))
        return
    why = tried(folder)
    if why:
        print(f"launcher: a script that names /opt/ml does not find this host's folder: {why}", flush=True)
    else:
        enter(folder)
    os.execv(shim[0], shim)


if __name__ == "__main__":
    main()
