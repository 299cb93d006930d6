"""Where the code runs that a policy writes: a child of the process that serves the tool `python`.

On Linux it has namespaces of its own: it sees the interpreter and the system's libraries, all read-only, an empty
folder in memory, no process but its own and no network. Where the system allows none it has limits alone.
"""

import ast
import contextlib
import ctypes
import errno
import json
import linecache
import os
import resource
import socket
import sys
import traceback
from dataclasses import dataclass
from types import CodeType
from typing import Any

from pellucid.agents.call_process import BROKEN, FAILED, OUTPUT, serve

NOBODY = 65534
MANY_PROCESSES = 4096
"""Processes of the user together, where a sandbox's own cannot be counted."""
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
_SET_MOUNT_ATTRIBUTES, _READ_ONLY, _AT_RECURSIVE = 442, 0x1, 0x8000
_SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 4, 38
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_WORK = "/sandbox"
_SOURCE = "<python>"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    memory_bytes: int = 1 << 30
    """Address space of each of its processes."""
    disk_bytes: int = 64 << 20
    """Of its folder, and of a single file."""
    max_processes: int = 32
    """Processes and threads at once."""


def _system(name: str, *arguments: Any) -> None:
    """Call a function of the C library.

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    plain = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if libc[name](*plain) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _enter_user_namespace(proc: int) -> None:
    user, group = os.getuid(), os.getgid()
    _system("unshare", _NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def _enter_root(root: str, disk_bytes: int) -> None:
    """Make `root` the root folder, with what a Python program needs, read-only, and with an empty folder."""
    _system("mount", None, "/", None, _RECURSIVE | _PRIVATE, None)
    _system("mount", "tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    prefixes = {path for prefix in (sys.prefix, sys.base_prefix) for path in (prefix, os.path.realpath(prefix))}
    for path in [*_SHOWN, *sorted(prefixes), *_DEVICES]:
        target = root + path
        if os.path.lexists(target) or not os.path.lexists(path):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        _system("mount", path, target, None, _BIND | _RECURSIVE, None)
    os.mkdir(root + _WORK)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID, 0, 0, 0)
    _system("syscall", _SET_MOUNT_ATTRIBUTES, -1, root, _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    _system("mount", "tmpfs", root + _WORK, "tmpfs", _NOSUID | _NODEV, f"size={disk_bytes},nr_inodes=10000,mode=1777")
    os.chdir(root)
    _system("pivot_root", ".", ".")
    _system("umount2", ".", _DETACH)
    os.chdir(_WORK)


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _isolate(root: str, limits: Limits) -> None:
    """Fork: the child goes on in namespaces of its own, and this process ends with it.

    Raises:
        OSError: the system does not allow it.
    """
    proc, is_root = os.open("/proc", os.O_RDONLY), os.geteuid() == 0
    if not is_root:
        _enter_user_namespace(proc)
    _system("unshare", _NEWNS | _NEWIPC | _NEWPID | _NEWNET)
    if (first := os.fork()) != 0:
        os._exit(_status_of(first))
    _enter_root(root, limits.disk_bytes)
    if is_root:  # not before, as others may not see the interpreter; processes are counted in the user namespace
        _become_nobody()
        _system("prctl", _SET_DUMPABLE, 1, 0, 0, 0)
        _enter_user_namespace(proc)
    os.close(proc)
    _system("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    _system("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _status_of(child: int) -> int:
    """Wait for a child, and for what else is left to this process, and return its exit status as shells do."""
    while (ended := os.wait())[0] != child:
        pass
    status = os.waitstatus_to_exitcode(ended[1])
    return status if status >= 0 else 128 - status


def _limit(limits: Limits, max_processes: int) -> None:
    sizes = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.disk_bytes,
        resource.RLIMIT_NPROC: max_processes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for kind, size in sizes.items():
        with contextlib.suppress(ValueError, OSError):  # macOS does not know them all
            resource.setrlimit(kind, (size, size))


class _ProgramError(Exception):
    """A program raised; what it raised is printed."""


def _execute(code: str) -> None:
    """Run a program and print the value of its last line, where that is an expression that has one."""
    names = {"__name__": "__main__"}

    def compiled(tree: ast.Module | ast.Expression, mode: str) -> CodeType:
        return compile(tree, _SOURCE, mode)

    try:
        tree = ast.parse(code, _SOURCE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compiled(tree, "exec"), names)
        value = eval(compiled(ast.Expression(last.value), "eval"), names) if isinstance(last, ast.Expr) else None
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _SOURCE:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        if refused := _refused(error):
            sys.stderr.write(f"{REFUSAL}{refused}.\n")
        raise _ProgramError from error


REFUSAL = "[sandbox] It refused "
_REFUSED = {
    errno.ENETUNREACH: "the network",
    errno.EAGAIN: "more processes",
    errno.ENOMEM: "more memory",
    errno.ENOSPC: "more disk",
    errno.EFBIG: "a larger file",
    errno.EROFS: "a file outside of the working folder",
}


def _refused(error: BaseException | None) -> str:
    """Return what the sandbox refused, where an error comes of that."""
    while error is not None:
        if isinstance(error, MemoryError):
            return "more memory"
        if isinstance(error, socket.gaierror):
            return "the network"
        if "can't start new thread" in str(error):
            return "more processes"
        if isinstance(error, OSError) and error.errno in _REFUSED:
            return _REFUSED[error.errno]
        error = error.__cause__ or error.__context__
    return ""


def _run_program(code: str) -> int:
    for descriptor in (1, 2):
        os.dup2(OUTPUT, descriptor)
    os.close(OUTPUT)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, "utf-8", "backslashreplace", closefd=False) for n in (1, 2))
    os.environ.pop("PYTHONPATH")
    os.environ["HOME"] = os.environ["TMPDIR"] = folder = os.getcwd()
    sys.path[:] = [folder, *(path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)))]
    linecache.cache[_SOURCE] = len(code), None, code.splitlines(keepends=True), _SOURCE
    try:
        _execute(code)
    except _ProgramError:
        return FAILED
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _run(request: dict[str, Any], folder: str, limits: Limits) -> int:
    """Run a program in a child; this process outlives it, and nothing that it does can say that the system failed."""
    if isolated := request["isolated"]:
        try:
            _isolate(folder, limits)
        except OSError as error:
            os.write(OUTPUT, str(error.strerror).encode())
            return BROKEN
    else:
        os.mkdir(own := f"{folder}/{os.getpid()}")
        os.chdir(own)
    if (program := os.fork()) == 0:
        if os.geteuid() == 0:
            os.chown(".", NOBODY, NOBODY)
            _become_nobody()
        _limit(limits, limits.max_processes if isolated else MANY_PROCESSES)
        status = _run_program(request["code"])
        sys.stderr.flush()
        return status
    status = _status_of(program)
    return FAILED if status == BROKEN else status


def main() -> None:
    """Serve programs; the arguments are a folder and, as JSON, `Limits`."""
    folder, limits = sys.argv[1], Limits(**json.loads(sys.argv[2]))
    os.umask(0o022)
    serve(lambda request: _run(request, folder, limits), folder)
