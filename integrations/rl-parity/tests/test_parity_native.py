"""A run's native trainer goes on with the operators that it began with, or is refused by name before it starts."""

import dataclasses
import json
from importlib import metadata

import parity_workers
import pytest
from parity_rundir import write_run
from parity_sittings import edited, killed, resume, start

from rl_contract import ContractError
from rl_parity import cli, native, preflight
from rl_parity import resume as going_on
from rl_parity.config import RunConfig
from rl_parity.manifest import config_digest
from rl_parity.rundir import RunDirectory

TE = {"name": "native (TransformerEngine 2.14.1)", "operators": "te"}
LOCAL = {"name": "native (no TransformerEngine)", "operators": "local"}


def on_gpus(tmp_path, *, report=None, versions=None, **config):
    """A run with both arms as made on GPUs; ``...`` takes a setting out."""
    run = write_run(tmp_path / "run")
    manifest = run.manifest()
    manifest["config"] |= {"device": "cuda", **config}
    manifest["config"] = {name: value for name, value in manifest["config"].items() if value is not ...}
    manifest["config_sha256"] = config_digest(manifest["config"])
    manifest["versions"] = {"vllm": "0.32.0", **(versions or {})}
    run.write_manifest(manifest)
    if report:
        edited(run.root / "native" / "evidence.json", reports={"trainer-0": {"native": report}})
    return run


def operators(run, **given):
    return going_on.config_of(run, {"steps": 8, **given}).native_operators


@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ({"report": TE}, "te"),
        ({"report": LOCAL, "versions": {"transformer-engine": "2.14.1"}}, "local"),
        ({"versions": {"transformer-engine": "2.14.1"}}, "te"),
        ({"versions": {"transformer-engine": None}}, "local"),
        ({"versions": {"transformer-engine": "2.14.1"}, "placement": "shared"}, "local"),
        ({"native_operators": ...}, "local"),
        ({"native_operators": ..., "versions": {"transformer-engine": "2.14.1"}}, "local"),
        ({"native_operators": "local"}, "local"),
        ({}, "auto"),
    ],
)
def test_a_resumed_native_trainer_takes_what_really_ran(tmp_path, how, taken):
    assert operators(on_gpus(tmp_path, **how)) == taken


def test_naming_what_ran_is_accepted_and_anything_else_is_refused_by_name(tmp_path):
    run = on_gpus(tmp_path, report=LOCAL)
    assert operators(run, native_operators="local") == operators(run, native_operators="auto") == "local"
    named = r"te differs from the run's auto, which its native trainer took for local: native \(no Transf"
    with pytest.raises(ContractError, match=named):
        operators(run, native_operators="te")
    # what was installed is no proof
    unproven = on_gpus(tmp_path / "unproven", versions={"transformer-engine": "2.14.1"})
    assert operators(unproven, native_operators="local") == "local"


def test_what_ran_and_cannot_serve_any_more_is_one_error_of_the_preflight(tmp_path, monkeypatch):
    run = on_gpus(tmp_path, report=TE)
    monkeypatch.setattr(native, "_located", lambda: None)
    (found,) = native.violations(going_on.config_of(run, {"steps": 8}), native.began(run))
    assert "native trainer ran TransformerEngine (native (TransformerEngine 2.14.1))" in found
    assert "package transformer-engine is not installed; pip install" in found


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """A folder before all others on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def package(folder, text="", parts=("pytorch",)):
    for name in ("", *parts):
        (folder / "transformer_engine" / name).mkdir()
        (folder / "transformer_engine" / name / "__init__.py").write_text(text if not name else "")
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (folder / "transformer_engine").mkdir(), "no package (no __init__.py)"),
        (lambda folder: package(folder, "__version__ = '2'", parts=()), "lacks its part for PyTorch"),
        (package, "no dist-info of transformer-engine is installed"),
    ],
    ids=["folder", "no PyTorch", "no version"],
)
def test_a_transformer_engine_that_would_break_megatron_is_a_line_of_the_preflight(on_path, make, words):
    def no_distribution(name):
        raise metadata.PackageNotFoundError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.metadata, "version", no_distribution)
        make(on_path)
        (found,) = native.violations(RunConfig())
        assert words in found
        assert "Megatron-core imports it in every arm" in found
        (asked,) = native.violations(RunConfig(arm="native", device="cuda", native_operators="te"))
        assert asked.startswith("--native-operators te: ")
        assert words in asked
        assert native.version() is None
    assert any(words in v for v in preflight.check(dataclasses.replace(RunConfig(), out=str(on_path / "out"))))


def test_versions_hold_transformer_engine_without_importing_it(on_path):
    package(on_path, "__version__ = '2.14.1'\nraise OSError('imported')")
    assert native._distribution() or preflight.versions()["transformer-engine"] == "of no known version"
    info = on_path / "transformer_engine-2.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.14.1\n")
    assert preflight.versions()["transformer-engine"] == "2.14.1"
    assert list(native.violations(RunConfig())) == []


BROKEN = {
    "transformer_engine": ("__version__ = '2.14.1'\nraise OSError('libcudnn.so.9: cannot open')", "TransformerEngine"),
    "apex": ("raise RuntimeError('apex broken')", "Apex"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_installation_that_breaks_as_it_is_imported_is_a_line_of_the_preflight(on_path, broken):
    text, name = BROKEN[broken]
    (on_path / broken / "pytorch").mkdir(parents=True)
    (on_path / broken / "__init__.py").write_text(text)
    (on_path / broken / "pytorch" / "__init__.py").write_text("")
    (found,) = native.import_violations()
    assert f"megatron-core imports {name}, whose installation ({on_path}/{broken}/__init__.py) is broken: " in found
    assert text.partition("(")[2].strip("')") in found
    assert found in preflight.check(dataclasses.replace(RunConfig(), out=str(on_path / "out")))


def test_a_torchvision_that_does_not_fit_is_a_line_of_the_preflight(on_path):
    (on_path / "torchvision").mkdir()
    (on_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (found,) = [x for x in preflight.check(dataclasses.replace(RunConfig(), out=str(on_path / "out"))) if "vision" in x]
    assert "operator torchvision::nms does not exist" in found
    assert "pip uninstall torchvision torchaudio torchcodec" in found
    (on_path / "torchvision" / "__init__.py").write_text("")
    assert list(preflight._torchvision(RunConfig())) == []


def test_without_an_optional_package_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(native, "OPTIONAL", ("no_such_package",))
    monkeypatch.setattr(native.imports.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert list(native.import_violations()) == []


@pytest.mark.usefixtures("inline_workers")
def test_a_resumed_run_keeps_what_it_was_asked_for_and_says_what_ran(tmp_path, monkeypatch):
    out, taken = tmp_path / "out", []
    build = parity_workers.FakeTrainer.__init__

    def noting(self, **kwargs):
        taken.append(kwargs["native_operators"])
        build(self, **kwargs)

    monkeypatch.setattr(parity_workers.FakeTrainer, "__init__", noting)
    assert start(out, "--arm", "native", "--steps", "2", "--save-every", "1") == 0
    assert "transformer-engine" in json.loads((out / "manifest.json").read_text())["versions"]
    edited(out / "native" / "evidence.json", **{"reports__trainer-0": {"native": LOCAL}})
    killed(out)
    assert resume(out, "--steps", "3", "--native-operators", "local") == 0
    assert resume(out, "--steps", "4") == 0
    assert taken == ["auto", "local", "local"]
    run = RunDirectory(out)
    assert run.manifest()["config"]["native_operators"] == "auto"
    assert [e["sitting"] for e in (*run.evidence("native")["earlier"], run.evidence("native"))] == [0, 1, 2]
    # the last two sittings' made-up trainers say nothing about themselves
    assert native.names(run) == [LOCAL["name"], "native (not reported)"]
    assert cli.main(["report", str(out)]) == 0
    edited(out / "native" / "evidence.json", **{"reports__trainer-0": {"native": TE}})
    killed(out)
    assert resume(out, "--steps", "5") == 2
