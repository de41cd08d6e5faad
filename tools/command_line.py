"""What the tools ask of their command lines: values that mean something, files that hold what they should, GPUs."""

import argparse
import json
import math
import re
import sys
import tempfile
from pathlib import Path


def seconds(text):
    """A time over zero."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds over 0")
    return value


def count(text, least=1):
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def count_from_0(text):
    return count(text, least=0)


def pattern(text):
    """A regular expression, as text."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def name_expression(text):
    """pytest's expression on test names, as text."""
    from _pytest.mark.expression import Expression

    try:
        Expression.compile(text)
    except Exception as error:  # its class depends on pytest's version
        raise argparse.ArgumentTypeError(f"{text!r} is no expression on test names: {error}") from error
    return text


def file_to_write(text):
    """A path that a file can be written to, its folders made where they are missing; known before any work is done."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, name a file")
    near = next(p for p in (path, *path.absolute().parents) if p.exists())
    if near != path and not near.is_dir():
        raise argparse.ArgumentTypeError(f"{near} is a file, so {text} cannot be written below it")
    try:
        # permissions alone don't tell: some file systems take no new file from anyone
        if near.is_dir():
            tempfile.TemporaryFile(dir=near).close()
        else:
            near.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{near} cannot be written to ({error}); name a file elsewhere") from error
    return path


def commit(text):
    """The name of a commit, as git abbreviates it."""
    if not re.fullmatch("[0-9a-f]{7,40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no commit; give 7 to 40 hexadecimal digits")
    return text


def read_json(path, **kinds):
    """The object in a file of JSON; ``kinds`` are the types of what it must hold.

    Raises:
        SystemExit: the file is missing or holds something else; the text names it.
    """
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, RecursionError, ValueError) as error:
        sys.exit(f"{path} is no file of JSON: {error}")
    if not isinstance(found, dict):
        sys.exit(f"{path} holds a {type(found).__name__}, not the object that these tools write")
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            sys.exit(f"{path} holds no {name} ({kind.__name__}), as files of these tools do")
    return found


def need_gpus(name, least=1):
    """End here where torch sees fewer GPUs."""
    import torch

    if torch.cuda.device_count() < least:
        sys.exit(f"{name} needs {least} GPU{'s'[: least - 1]}, torch sees {torch.cuda.device_count()}")
