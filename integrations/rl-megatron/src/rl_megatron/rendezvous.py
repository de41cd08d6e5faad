"""The URL by which ranks meet: what is wrong with it is said at once, where torch.distributed would wait for it."""

import os
import socket
import sys
from urllib.parse import ParseResult, urlparse

_FORMS = "supported: a URL of torch.distributed, tcp://host:port with a port of 1 to 65535, file:///path or env://"


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
    if url.scheme == "file" and not url.path:
        return "it has no path"
    if url.scheme == "tcp":
        if not url.hostname:
            return "it has no host"
        # ``port`` raises what is wrong with one that is no number
        if url.port is None:
            return "it has no port"
        return _port_problem(url.port)
    return None


def _port_problem(port: int) -> str | None:
    return None if 1 <= port <= 65535 else f"port {port} can't be"


def _schemes() -> tuple[str, ...]:
    """Those that torch brings, and what a caller has registered."""
    module = sys.modules.get("torch.distributed.rendezvous")
    return tuple(getattr(module, "_rendezvous_handlers", ("tcp", "env", "file")))


def place_problem(name: str, value: str, world_size: int) -> str | None:
    """Why ranks can't meet at a sound URL: looked at right before they do.

    A file is opened, and made if it isn't there, as torch does next. A host name that is not known here is a problem of
    a world of one alone: it may come up with the rank that has it.
    """
    url = urlparse(value)
    problem = None
    if url.scheme == "file":
        try:
            os.close(os.open(url.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except (OSError, ValueError) as error:
            problem = f"{error}; give a file in a folder that is there and can be written to, the same for every rank"
    elif url.scheme == "env":
        problem = _environment_problem()
    elif url.scheme == "tcp" and world_size == 1:
        try:
            socket.getaddrinfo(url.hostname, url.port)
        except (OSError, ValueError) as error:
            problem = f"host {url.hostname!r:.80} is not known ({error}); give rank 0's, localhost for a world of one"
    return problem and f"{name}={value!r:.200}: {problem}"


def _environment_problem() -> str | None:
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
    if missing:
        return f"{' and '.join(missing)} not set; set the host and port of rank 0, or give tcp://host:port"
    port = os.environ["MASTER_PORT"]
    problem = _port_problem(int(port)) if port.isdecimal() and port.isascii() else f"{port!r:.80} is no port"
    return problem and f"MASTER_PORT: {problem}; set one of 1 to 65535"
