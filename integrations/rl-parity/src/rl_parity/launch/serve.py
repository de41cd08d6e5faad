"""The child side of the local launcher: ``python -m rl_parity.launch.serve FD`` serves calls on an inherited socket.

When the parent is gone, even by SIGKILL, the whole process group ends itself.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rl_parity.launch.base import build


def _read(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def main(fd: int) -> None:
    connection = Connection(fd)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    target: Any = None
    broken = ""
    while True:
        method, args, kwargs = inbox.get()
        try:
            if method == "__build__":
                target, value = build(*args), None
            elif broken:
                # the first real call carries the reason, as nobody waits for the building
                connection.send((False, broken))
                continue
            else:
                value = getattr(target, method)(*args, **kwargs)
            answer = (True, value)
        except BaseException as error:
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}")
            broken = answer[1] if method == "__build__" else broken
        connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
