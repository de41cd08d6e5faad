"""Prompts, answers and rewards.

A data set is JSON lines ``{"prompt": str, "answer": str}``; files in the style of GSM8K (``question``/``answer`` with
the result after ``####``) work as they are. Two generated sets ship: ``arithmetic`` and ``easy``. ``random:LENGTH`` is
random token ids, for models without a language.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_contract import ContractError
from rl_parity.config import RunConfig, is_count
from rl_parity.vocabulary import FolderTokenizer, NoText, Tokenizer

BUILT_IN = ("arithmetic", "easy")
RANDOM = "random:"
_RANDOM_COUNT = 256
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Example:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """An example with its token ids; ``index`` is its place in the data set."""

    index: int
    ids: tuple[int, ...]
    text: str
    answer: str


def arithmetic(seed: int = 0, count: int = 256) -> list[Example]:
    """Sums, differences and products of small numbers, as one-line questions of different lengths."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        op = rng.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
        form = rng.choice(("{a} {op} {b} =", "What is {a} {op} {b}? ", "Compute {a}{op}{b}. Answer = "))
        out.append(Example(form.format(a=a, op=op, b=b), str(value)))
    return out


def easy() -> list[Example]:
    """Ten prompts ``d=`` with the one-digit answer ``d``: seldom said by a random policy, and learnt as copying."""
    return [Example(f"{d}=", str(d)) for d in range(10)]


def random_lengths(source: str) -> tuple[int, int] | None:
    """Shortest and longest prompt of ``random:LENGTH`` or ``random:SHORTEST-LONGEST``; None for any other source.

    Raises:
        ContractError: it begins with ``random:`` and is neither.
    """
    if not source.startswith(RANDOM):
        return None
    low, dash, high = source.removeprefix(RANDOM).partition("-")
    high = high if dash else low
    if not (is_count(low) and is_count(high) and 0 < int(low) <= int(high)):
        raise ContractError(f"--prompts {source}: give a length in tokens, e.g. random:512, or a range, random:16-512")
    return int(low), int(high)


def random_prompts(source: str, *, vocab_size: int, max_prompt: int, seed: int) -> list[Prompt]:
    """256 prompts of uniformly random ids and lengths; they have no text and no answer.

    Raises:
        ContractError: the longest does not fit.
    """
    lengths = random_lengths(source)
    assert lengths is not None
    if lengths[1] > max_prompt:
        raise ContractError(
            f"--prompts {source}: the context leaves {max_prompt} tokens for a prompt; give shorter ones, lower "
            "--max-new-tokens or raise --max-model-len"
        )
    rng = random.Random(f"{seed}:{source}")
    return [
        Prompt(index, tuple(rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))), "", "")
        for index in range(_RANDOM_COUNT)
    ]


def read_examples(source: str) -> list[Example]:
    """The named built-in set, or the lines of a JSONL file.

    Raises:
        ContractError: no such file, an empty set, or lines that are not examples (all of them are listed by number).
    """
    if source == "arithmetic":
        return arithmetic()
    if source == "easy":
        return easy()
    path = Path(source)
    if not path.is_file():
        raise ContractError(f"prompts {source!r}: no such file; give a JSONL file or one of {BUILT_IN}")
    examples, problems = [], []
    try:
        # some editors begin a file with a byte order mark
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"{source} cannot be read ({error}); save it as UTF-8") from error
    # only a newline ends a line: U+2028 and its like may stand in a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(_example(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ContractError(f'{source}: {shown}; every line must be {{"prompt": "...", "answer": "..."}}')
    if not examples:
        raise ContractError(f'{source} holds no examples; give at least one line {{"prompt": "...", "answer": "..."}}')
    return examples


def _example(row: object) -> Example:
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}, not an object")
    prompt, answer = row.get("prompt", row.get("question")), row.get("answer")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("no text under 'prompt'")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("no text under 'answer'")
    return Example(prompt, answer)


def encode(examples: Sequence[Example], tokenizer: Tokenizer, *, vocab_size: int, max_prompt: int) -> list[Prompt]:
    """Token ids of every example.

    Args:
        vocab_size: the model's; ids at or beyond it have no row.
        max_prompt: longest prompt, in tokens, that leaves room for the completion.

    Raises:
        ContractError: no room for any prompt, or prompts that are too long, empty, not encodable or out of range; all
            of them are listed.
    """
    if max_prompt < 1:
        raise ContractError("the context has no room for a prompt; lower --max-new-tokens or raise --max-model-len")
    prompts, problems = [], []
    for index, example in enumerate(examples):
        try:
            ids = tokenizer.encode(example.prompt)
        except ContractError as error:
            problems.append(f"example {index + 1}: {error}")
            continue
        if not ids:
            problems.append(f"example {index + 1}: the prompt has no tokens")
        elif max(ids) >= vocab_size or min(ids) < 0:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            problems.append(f"example {index + 1}: token id {bad} is outside the model's vocabulary of {vocab_size}")
        elif len(ids) > max_prompt:
            problems.append(
                f"example {index + 1}: {len(ids)} tokens, the context leaves {max_prompt}; "
                "shorten the prompt or lower --max-new-tokens"
            )
        else:
            prompts.append(Prompt(index, tuple(ids), example.prompt, example.answer))
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ContractError(f"prompts: {shown}")
    return prompts


def batch_for_step(prompts: Sequence[Prompt], *, step: int, batch: int, seed: int) -> list[Prompt]:
    """The prompts of one step: seeded shuffles of the whole set, one after the other, cut into batches."""
    out = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, offset = divmod(position, len(prompts))
        order = list(range(len(prompts)))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        out.append(prompts[order[offset]])
    return out


def sampling_seed(seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """A request's seed, a function of these four alone, so that engine count and batch mates leave the tokens alone.

    ``prompt_index`` is the prompt's place in the step, since a small data set may put one prompt twice into a step.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{prompt_index}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def final_answer(text: str) -> str:
    """What follows the last ``####``, else the last number, else the stripped text."""
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    else:
        numbers = _NUMBER.findall(text)
        text = numbers[-1] if numbers else text
    return text.strip().replace(",", "").rstrip(".")


def reward_exact(completion: str, answer: str) -> float:
    """1.0 when the final answers are the same text, else 0.0."""
    return 1.0 if final_answer(completion) == final_answer(answer) else 0.0


def reward_partial(completion: str, answer: str) -> float:
    """1.0 for the exact answer, else 0.2 for any number plus up to 0.3 for its leading characters that are right."""
    given, wanted = final_answer(completion), final_answer(answer)
    if given == wanted:
        return 1.0
    if not _NUMBER.fullmatch(given):
        return 0.0
    same = 0
    for x, y in zip(given, wanted):
        if x != y:
            break
        same += 1
    return 0.2 + 0.3 * same / max(len(given), len(wanted))


def reward_even(tokens: Sequence[int]) -> float:
    """The share of sampled ids that are even: no text needed, seldom the same twice, and learnable."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


REWARDS = {"exact": reward_exact, "partial": reward_partial}


def reward_repeat(tokens: Sequence[int]) -> float:
    """The share of sampled ids that the completion has already: a policy learns it by preferring fewer ids."""
    return 1.0 - len(set(tokens)) / max(1, len(tokens)) if len(tokens) else 0.0


TOKEN_REWARDS = {"even": reward_even, "repeat": reward_repeat}


def load_prompts(
    config: RunConfig, model: Path, model_config: dict[str, Any], longest: int
) -> tuple[FolderTokenizer | NoText, list[Prompt]]:
    """The checkpoint's tokenizer and the encoded data set; random ids need no tokenizer.

    Raises:
        ContractError: see ``read_examples``, ``encode`` and ``random_prompts``.
    """
    if longest <= config.max_new_tokens:
        raise ContractError(f"--max-new-tokens {config.max_new_tokens}: the context is {longest}; lower it")
    room = {"vocab_size": int(model_config["vocab_size"]), "max_prompt": longest - config.max_new_tokens}
    if random_lengths(config.prompts) is not None:
        return NoText(), random_prompts(config.prompts, seed=config.seed, **room)
    tokenizer = FolderTokenizer(model)
    return tokenizer, encode(read_examples(config.prompts), tokenizer, **room)
