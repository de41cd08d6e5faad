"""Whether a manifest agrees with itself: what was asked for stands in several of its sections."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rl_contract import ContractError, Profile
from rl_contract.contract import canonical_json, sha256_hex
from rl_parity import metrics
from rl_parity.config import CHANGEABLE, RunConfig
from rl_parity.digests import apart
from rl_parity.jsonfile import REPAIR
from vime_sync.digest import check_algorithm

# what a run's files keep of each other, as a number: in its manifest and summary, not in those of older versions
FORMAT, FORMATS = "format", (1, 2, 3)
# from which on the evidence has an entry of every sitting whose steps the run holds, also of one that was killed
TELLS_ALL = 2
# and from which on the manifest has the sha256 of what the run reads beside weights (rl_parity.inputs)
TELLS_INPUTS = 3
DIGEST = "config_sha256"
FILES = "files_sha256"
INPUTS = "inputs_sha256"
WEIGHTS = "weight_digest"
_SECTIONS = (
    *("command", DIGEST, "seeds", "sampling", "topology", "gpus", "placement", "profile", "fingerprints", "plant"),
    *("versions", "hardware", "notes", "started", "reason", WEIGHTS),
)


def config_digest(config: Mapping[str, Any]) -> str:
    """sha256 of a configuration, wherever its directory lies."""
    return sha256_hex(canonical_json({name: value for name, value in config.items() if name != "out"}))


def weight_algorithm(path: Path, manifest: Mapping[str, Any]) -> str:
    """What digest the run's weights are named by: sha256 where the manifest names none.

    Raises:
        ContractError: a digest that this version does not know.
    """
    return check_algorithm(manifest.get(WEIGHTS, "sha256"), f"{path}: {WEIGHTS}")


def topology(config: RunConfig) -> dict[str, Any]:
    return {
        "train": {"tp": config.train.tp, "cp": config.train.cp, "ranks": config.train.world_size},
        "rollout": {"tp": config.rollout.tp, "engines": config.rollout.engines, "workers": config.rollout.world_size},
        "launcher": config.launcher,
    }


def check_sections(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ContractError where a section is not there that every manifest of a ``FORMAT``, or with ``FILES``, has."""
    if FORMAT in manifest and (type(manifest[FORMAT]) is not int or manifest[FORMAT] not in FORMATS):
        raise ContractError(
            f"{path} says format {manifest[FORMAT]!r}, this version reads {', '.join(map(str, FORMATS))} and runs that "
            f"name none; read it with the version that wrote it, or {REPAIR}"
        )
    if FORMAT in manifest and FILES not in manifest:
        raise ContractError(
            f"{path} lacks {FILES}, which every run of format {manifest[FORMAT]} has from its start: it was taken out; "
            f"{REPAIR}"
        )
    _check_inputs(path, manifest)
    missing = [name for name in _SECTIONS if name not in manifest]
    if FILES in manifest and missing:
        raise ContractError(f"{path} lacks {', '.join(missing)}, which its version writes; {REPAIR}")


def _check_inputs(path: Path, manifest: Mapping[str, Any]) -> None:
    if INPUTS not in manifest:
        if manifest.get(FORMAT, 0) >= TELLS_INPUTS:
            raise ContractError(
                f"{path} lacks {INPUTS}, which every run of format {manifest[FORMAT]} has: it was taken out; {REPAIR}"
            )
        return
    told = manifest[INPUTS]
    if not isinstance(told, Mapping) or not all(isinstance(digest, str) for digest in told.values()):
        raise ContractError(f"{path}: {INPUTS} is {told!r:.80}, supported is the sha256 of each file; {REPAIR}")


def read_config(path: Path, manifest: Mapping[str, Any]) -> RunConfig:
    """The configuration in a manifest; ContractError names the fields that are unknown or of another type."""
    try:
        return RunConfig.from_dict(manifest["config"])
    except ContractError as error:
        raise ContractError(f"{path}: {error}; {REPAIR}") from error


def check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Prove that the configuration is the one that the other sections speak of; one that is not there says nothing.

    Raises:
        ContractError: a field of another type, sections that are missing, or contradict each other; all are named.
    """
    check_sections(path, manifest)
    config = read_config(path, manifest)
    weight_algorithm(path, manifest)
    problems = [*_sections(manifest, config), *_commands(manifest, config), *_fingerprints(manifest)]
    if not problems and DIGEST in manifest and manifest[DIGEST] != config_digest(manifest["config"]):
        problems.append(f"config is not the one of {DIGEST}")
    if problems:
        raise ContractError(f"{path} contradicts itself: {'; '.join(problems)}; {REPAIR}")


def _sections(manifest: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    told = {
        "seeds": {"run": config.seed},
        "sampling": json.loads(json.dumps(metrics.semantics(config).to_dict())),
        "topology": topology(config),
    }
    for section, expected in told.items():
        given = manifest.get(section, {})
        if not isinstance(given, Mapping):
            yield f"{section} is {given!r}, supported: a mapping"
            continue
        for name in expected.keys() & given.keys():
            if given[name] != expected[name]:
                yield f"{section} has {name} {given[name]!r}, config {expected[name]!r}"
    if "plant" in manifest and manifest["plant"] != config.plant:
        yield f"plant is {manifest['plant']!r}, in config {config.plant!r}"


def _commands(manifest: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Options that the first sitting's command gives otherwise or not at all, and those of the last sitting's."""
    sittings = manifest.get("sittings") or []
    first = sittings[0] if sittings and isinstance(sittings[0], Mapping) else manifest
    given = _options(first.get("command"))
    if given is not None:
        changed = CHANGEABLE if len(sittings) > 1 else ()
        defaults = _defaults(given)
        for f in fields(RunConfig):
            # where a digest proves the configuration, later versions may have other defaults
            silent = f.name not in given and (DIGEST in manifest or f.name == "device")
            wanted = given.get(f.name, getattr(defaults, f.name))
            if f.name not in (*changed, "out") and not silent and getattr(config, f.name) != wanted:
                yield f"config has {f.name} {getattr(config, f.name)!r}, command {wanted!r}"
    last = _options(manifest.get("command")) if len(sittings) > 1 else None
    for name, value in (last or {}).items():
        if name == "native_operators" and config.native_operators == "auto":
            # a later sitting may name what auto was
            continue
        if name != "out" and getattr(config, name) != value:
            yield f"config has {name} {getattr(config, name)!r}, the last command {value!r}"


def _options(command: Any) -> dict[str, Any] | None:
    from rl_parity.cli import options_of

    if not isinstance(command, list) or len(command) != 1 or not isinstance(command[0], str):
        return None
    try:
        words = shlex.split(command[0])
    except ValueError:
        return None
    # another program may have called `run` with a configuration of its own
    return options_of(words[2:]) if words[1:2] == ["run"] else None


def _defaults(given: Mapping[str, Any]) -> RunConfig:
    from rl_parity.cli import completed

    return RunConfig(**completed(given))


def _fingerprints(manifest: Mapping[str, Any]) -> Iterator[str]:
    if "profile" not in manifest or "fingerprints" not in manifest:
        return
    try:
        profile = Profile.from_dict(manifest["profile"])
    except ContractError as error:
        yield str(error)
        return
    made = {"profile": profile.fingerprint, **{name: c.fingerprint for name, c in profile.contracts.items()}}
    given = manifest["fingerprints"] if isinstance(manifest["fingerprints"], Mapping) else {}
    for name in sorted(made.keys() | given.keys()):
        if made.get(name) != given.get(name):
            theirs, ours = apart(given.get(name), made.get(name))
            yield f"fingerprints have {name} {theirs}, the profile's is {ours}"
