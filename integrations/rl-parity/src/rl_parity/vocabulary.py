"""The character vocabulary of the built-in models, and reading of any checkpoint's tokenizer."""

import json
import string
from pathlib import Path
from typing import Protocol

from rl_contract import ContractError
from rl_parity.jsonfile import read_object

SPECIAL = ("<pad>", "<eos>", "<unk>")
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}
VOCABULARY: tuple[str, ...] = (*SPECIAL, *string.digits, *string.ascii_letters, *" \n+-*/=()?.,")


class Tokenizer(Protocol):
    """What the runner needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the character vocabulary."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HfTokenizer

    ids = {c: i for i, c in enumerate(VOCABULARY)}
    tokenizer = HfTokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, remedy: str) -> None:
    """Raise ContractError, which ends with ``remedy``, where the folder lacks the files of ``write_tokenizer``, or they
    are damaged or do something else.
    """
    path = folder / "tokenizer_config.json"
    if read_object(path, remedy) != _CONFIG:
        raise ContractError(f"{path} is not that of the built-in models; {remedy}")
    path = folder / "tokenizer.json"
    read_object(path, remedy)
    try:
        found = FolderTokenizer(folder)
        ids, text = list(range(len(SPECIAL), len(VOCABULARY))), "".join(VOCABULARY[len(SPECIAL) :])
        same = found.vocab_size == len(VOCABULARY) and found.encode(text) == ids and found.decode(ids) == text
    except ContractError as error:
        raise ContractError(f"{path} is not that of the built-in models ({error}); {remedy}") from error
    if not same:
        raise ContractError(f"{path} is not that of the built-in models; {remedy}")


class NoText:
    """For prompts and answers that are ids alone."""

    vocab_size = 0

    def encode(self, text: str) -> list[int]:
        raise ContractError(f"{text[:60]!r}: this run has prompts of random ids and no tokenizer; give --prompts text")

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class FolderTokenizer:
    """The tokenizer.json of a checkpoint folder.

    Raises:
        ContractError: the folder has no readable tokenizer.json, or a text can't be encoded, or holds a character that
            it maps to ``<unk>``.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as HfTokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ContractError(
                f"{folder} has no tokenizer.json; a fast tokenizer is needed, save one with `save_pretrained`"
            )
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        # the library raises bare Exceptions
        except Exception as error:
            raise ContractError(f"{path} can't be read: {error}; save the tokenizer again") from None
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self._unknown = self._tokenizer.token_to_id("<unk>")

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text).ids
        # e.g. a lone surrogate, which JSON can spell
        except Exception as error:
            raise ContractError(f"{text[:60]!r} can't be encoded: {error}; change that text") from None
        if self._unknown is not None and self._unknown in ids:
            raise ContractError(
                f"{text[:60]!r} holds a character outside the tokenizer's vocabulary; use characters it knows"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
