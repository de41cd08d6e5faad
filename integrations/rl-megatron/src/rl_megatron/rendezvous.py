"""The URL by which ranks meet: what is wrong with it is said at once, where torch.distributed would wait for it."""

import os
import socket
import stat
import sys
import tempfile
from pathlib import Path
from urllib.parse import ParseResult, urlparse

import torch.distributed as dist

_PORTS = "1 to 65535, or 0, any that is free, for a world of one"
_FORMS = f"supported: a URL of torch.distributed, tcp://host:port with a port of {_PORTS}, file:///path or env://"


def url_problem(name: str, value: object) -> str | None:
    """What is wrong with a URL of torch.distributed, whatever this machine has; None where nothing is."""
    if not isinstance(value, str) or not value.partition("://")[1]:
        return f"{name}={value!r:.80}, {_FORMS}"
    try:
        problem = _form_problem(urlparse(value))
    except ValueError as error:
        problem = str(error)
    return problem and f"{name}={value!r:.200}: {problem}; {_FORMS}"


def _form_problem(url: ParseResult) -> str | None:
    if url.scheme not in _schemes():
        return f"torch.distributed knows no {url.scheme!r:.80}, only {', '.join(_schemes())}"
    pairs = [pair.split("=") for pair in url.query.split("&") if pair]
    if any(len(pair) == 1 or pair[0] in ("rank", "world_size") for pair in pairs):
        return f"?{url.query:.80} is no query of options, or says rank or world size, which this package adds"
    # torch leaves out what it takes for a host
    if url.scheme == "file" and url.netloc not in ("", "localhost"):
        return f"{url.netloc!r:.80} is a host and no part of the path, which begins at the third slash"
    if url.scheme == "file" and not url.path:
        return "it has no path"
    if url.scheme == "tcp":
        if not url.hostname:
            return "it has no host"
        # ``port`` raises what is wrong with one that is no number
        if url.port is None:
            return "it has no port"
    return None


def _port_problem(port: int, world_size: int) -> str | None:
    if port == 0 and world_size > 1:
        return f"port 0 is another one for each of {world_size} ranks"
    return None if port <= 65535 else f"port {port} can't be"


def fresh(value: str) -> str:
    """What else the URL by which a world was not joined must be, to be said in a list of it."""
    return ", of a file that no earlier run has left" if urlparse(value).scheme == "file" else ""


def _schemes() -> tuple[str, ...]:
    """Those that torch brings, and what a caller has registered."""
    module = sys.modules.get("torch.distributed.rendezvous")
    return tuple(getattr(module, "_rendezvous_handlers", ("tcp", "env", "file")))


def place_problem(name: str, value: str, world_size: int) -> str | None:
    """Why ranks can't meet at a sound URL: looked at right before they do.

    A file is opened, and made if it isn't there, as torch does next; one that begins as no store of torch's does is
    none, for there torch would wait without end. A host name that is not known here is a problem of a world of one
    alone: it may come up with the rank that has it.
    """
    url = urlparse(value)
    problem = None
    if url.scheme == "file":
        try:
            problem = _file_problem(url.path)
        except (OSError, ValueError) as error:
            problem = f"{error}; give a file in a folder that is there and can be written to, the same for every rank"
    elif url.scheme == "env":
        problem = _environment_problem(world_size)
    elif url.scheme == "tcp" and (found := _port_problem(url.port or 0, world_size)):
        problem = f"{found}; give one of 1 to 65535, the same for every rank"
    elif url.scheme == "tcp" and world_size == 1:
        try:
            socket.getaddrinfo(url.hostname, url.port)
        except (OSError, ValueError) as error:
            problem = f"host {url.hostname!r:.80} is not known ({error}); give rank 0's, localhost for a world of one"
    return problem and f"{name}={value!r:.200}: {problem}"


def _file_problem(path: str) -> str | None:
    """Why no ranks can meet in a file that can be opened; OSError or ValueError for one that can't."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return "it is no regular file; give one, or a path where nothing is yet"
        begin = _begin_of_stores()
        # a peer may be writing its first entry
        if begin.startswith(os.pread(handle, len(begin), 0)):
            return None
    finally:
        os.close(handle)
    return "the file holds something else than ranks that meet; give a path where nothing is yet"


def _begin_of_stores() -> bytes:
    """What this torch writes first to every file in which ranks meet; nothing where that can't be seen."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "store"
            # referred to, since the last one to leave a store removes its file
            store = dist.FileStore(str(file), 1)
            begin = file.read_bytes()
            del store
            return begin
    except (OSError, RuntimeError):
        return b""


def _environment_problem(world_size: int) -> str | None:
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
    if missing:
        return f"{' and '.join(missing)} not set; set the host and port of rank 0, or give tcp://host:port"
    port = os.environ["MASTER_PORT"]
    number = int(port) if port.isdecimal() and port.isascii() and len(port) < 10 else None
    problem = f"{port!r:.80} is no port" if number is None else _port_problem(number, world_size)
    return problem and f"MASTER_PORT: {problem}; set one of {_PORTS}"
