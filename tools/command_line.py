"""What the tools ask of their command lines: values that mean something, files that hold what they should, GPUs."""

import argparse
import json
import math
import re
import sys


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


def read_json(path, **kinds):
    """The object in a file of JSON; ``kinds`` are the types of what it must hold.

    Raises:
        SystemExit: the file is missing or holds something else; the text names it.
    """
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
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
