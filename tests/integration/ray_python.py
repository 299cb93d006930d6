#!/usr/bin/env -S python3 -IS
"""Stands where Ray expects a Python: has the server of `commands.py` fork Ray's workers, and is Python for anything else.

Ray starts a worker by this program; it hands arguments, environment, folder and streams to the server, and lives as long
as the process that the server has forked.
"""

import json
import os
import socket
import sys

PYTHON, SERVER = "PELLUCID_TEST_PYTHON", "PELLUCID_TEST_SERVER"


def main() -> None:
    arguments, environment = sys.argv[1:], dict(os.environ)
    python = environment[PYTHON]
    context = next((json.loads(word.partition("=")[2]) for word in arguments if word.startswith("--serialized-runtime-env-context=")), None)
    if context is None or context["py_executable"] != python or context["command_prefix"]:
        os.execv(python, [python, *arguments])
    worker = next(index for index, word in enumerate(arguments) if word.endswith("default_worker.py"))
    words = [word for word in arguments[worker:] if not word.startswith(("--language=", "--serialized-runtime-env-context="))]
    request = {"arguments": words, "environment": environment | context["env_vars"], "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(environment[SERVER])
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        connection.recv(1)  # the end of the process closes the connection


if __name__ == "__main__":
    main()
