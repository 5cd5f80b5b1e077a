"""Directories and files of this user alone. Standard library only."""

import contextlib
import errno
import os
import stat
from typing import BinaryIO

_WALK = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
PLANTED = "%s, in a directory where any user may put things; remove it, or choose another place"


def open_directory(path: str) -> int:
    """Opens a directory by the rules of the library (OpenOwnDirectory of journal/base/directory.h); what is missing of its path is made
    with mode 0700. Where anyone may create entries, as in /tmp, a component must belong to this user or root and must be no link, since
    another user could have put it there. OSError names the component."""
    so_far = "/" if os.path.isabs(path) else "."
    at = os.open(so_far, _WALK)
    try:
        for part in filter(None, path.split("/")):
            so_far = os.path.join(so_far, part)
            following = _enter(at, part, bool(os.fstat(at).st_mode & stat.S_IWOTH), so_far)
            os.close(at)
            at = following
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def _enter(parent: int, name: str, anyone: bool, path: str) -> int:
    """One component below `parent`. `anyone`: any user may create entries there."""
    flags = _WALK | (os.O_NOFOLLOW if anyone else 0)
    try:
        try:
            found = os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            found = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if anyone and _is_link(parent, name):
            raise PermissionError(errno.EPERM, PLANTED % "is a symbolic link", path) from None
        raise type(error)(error.errno, error.strerror, path) from None
    owner = os.fstat(found).st_uid
    if anyone and owner not in (os.geteuid(), 0):
        os.close(found)
        raise PermissionError(errno.EPERM, PLANTED % "belongs to user %d, and this process runs as user %d" % (owner, os.geteuid()), path)
    return found


def _is_link(parent: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


def make_directories(path: str) -> None:
    """What is missing of the path, each with mode 0700: os.makedirs gives its mode to the last one only."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path.rstrip("/"))
    if parent:
        make_directories(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def new_file(path: str) -> BinaryIO:
    """A file that this user alone can read, open for writing, in place of whatever has that name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")
