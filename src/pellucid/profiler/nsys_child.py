"""The first moments of a program under nsys: undoes what nsys changes for it, and becomes it.

`nsys_launch.py` runs this file as a script: `nsys_child.py UMASK OUT ERR TELL ALIVE PROGRAM …`, all but the program numbers. A shell
would not do, as some take descriptors of one digit alone.
"""

import os
import signal
import sys


def main() -> None:
    """Restore the umask and the output streams, tell the process id, and run the program in this process."""
    umask, out, err, tell, alive = (int(number) for number in sys.argv[1:6])
    program = sys.argv[6:]
    os.umask(umask)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.write(tell, b"%d\n" % os.getpid())
    for descriptor in (out, err, tell):
        os.close(descriptor)
    _end_with_the_supervisor(alive)
    os.execvp(program[0], program)


def _end_with_the_supervisor(alive: int) -> None:
    """Leave a process behind that kills the program when the supervisor, which holds the pipe's other end, is killed."""
    program = os.getpid()
    if os.fork():
        os.close(alive)
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(alive, 1):  # a byte says that the program has ended
        os.kill(program, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
