"""Sessions over every project in packages/ and integrations/, which are found by listing.

``nox -s parity`` is the main job: real vLLM and real Megatron-core on a CPU, equal bit for bit.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).resolve().parent
ROOMS = ("packages", "integrations")
PROJECTS = {p.parent.name: p.parent for room in ROOMS for p in sorted(ROOT.glob(f"{room}/*/pyproject.toml"))}
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
# partial credit: a random model earns next to nothing by exact match, and weights that never move prove little
PARITY_RUN = "--arm both --steps 5 --train tp=2,cp=2 --rollout tp=2,engines=2 --model tiny-qwen3 --reward partial"

# asked only when the plain index has no CPU build of this torch: an unreachable extra index costs pip minutes
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH = "torch==2.13.0+cpu"
# compiles the GPU kernels without a GPU; the release that the results in docs/results/h200 were made with
TRITON = ["triton==3.6.0; platform_system == 'Linux'", "numpy<2.4"]  # its interpreter fails on newer NumPy
# mypy's errors about types, in code that has no annotations
TYPES = (
    "arg-type", "assignment", "call-arg", "call-overload", "dict-item", "index", "list-item", "method-assign", "misc",
    "operator", "return-value", "type-var", "union-attr", "var-annotated",
)  # fmt: skip
# these come with the engine, do not import beside a CPU torch, and nothing here uses them
UNUSED_ENGINE_PARTS = ["torchvision", "torchaudio", "torchcodec"]


def with_local_dependencies(name: str) -> list[str]:
    """The project and every project of this repository it declares, dependencies first."""
    declared = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]["dependencies"]
    found: list[str] = []
    for requirement in declared:
        dependency = re.split(r"[^A-Za-z0-9_-]", requirement, maxsplit=1)[0]
        if dependency in PROJECTS:
            found += [d for d in with_local_dependencies(dependency) if d not in found]
    return [*found, name]


def install_cpu_torch(session: nox.Session) -> None:
    """The CPU build of torch: from the plain index if it is there, else from PyTorch's own."""
    try:
        session.install(CPU_TORCH, silent=True)
    except nox.command.CommandFailed:
        session.log(f"the plain index has no {CPU_TORCH}; asking PyTorch's CPU index")
        session.install(CPU_TORCH, "--extra-index-url", TORCH_CPU_INDEX)


def install_engines(session: nox.Session) -> None:
    """vLLM's CPU build, megatron-core and Ray; which versions a run had is in its manifest."""
    install_cpu_torch(session)
    session.install(CPU_TORCH, *GROUPS["engines"])
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *UNUSED_ENGINE_PARTS)


def install_projects(session: nox.Session, names: list[str]) -> None:
    session.install(CPU_TORCH, *[str(PROJECTS[name]) for name in names])


def install_everything(session: nox.Session) -> None:
    install_engines(session)
    install_projects(session, list(PROJECTS))


def run_parity(session: nox.Session, *arguments: str) -> None:
    out = ROOT / "runs" / "parity"
    if not arguments:
        shutil.rmtree(out, ignore_errors=True)
    session.run("rl-parity", "run", *(arguments or [*PARITY_RUN.split(), "--out", str(out)]))


def run_tests(session: nox.Session, *arguments: str) -> None:
    session.install(*GROUPS["test"], *GROUPS["tools"])
    session.run("python", "-m", "pytest", "-m", "not gpu", *arguments)


@nox.session
def parity(session: nox.Session) -> None:
    """Five GRPO steps on both arms; ends with 0 only if the strict arm is equal bit for bit."""
    install_everything(session)
    run_parity(session, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU, engines included; paths or pytest options may follow ``--``."""
    install_everything(session)
    run_tests(session, *(session.posargs or ["packages", "integrations", "tests"]))


@nox.session
def engines(session: nox.Session) -> None:
    """``parity`` and the tests that need the engines, of integrations and across packages, in one environment.

    Two modules at a time: most of what they do is to wait for a process that starts.
    """
    install_everything(session)
    run_parity(session)
    run_tests(session, "-n", "2", "--dist", "loadfile", "integrations", "tests", *session.posargs)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PROJECTS])
def tests_package(session: nox.Session, package: str) -> None:
    """One project alone: only what it declares is installed. An integration also gets the engines.

    A package with GPU kernels gets Triton too, which its extra ``gpu`` names: they are interpreted and compiled here.
    """
    if PROJECTS[package].parent.name == "integrations":
        install_engines(session)
    else:
        install_cpu_torch(session)
    install_projects(session, with_local_dependencies(package))
    session.install(*GROUPS["test"])
    if "gpu" in nox.project.load_toml(PROJECTS[package] / "pyproject.toml")["project"].get("optional-dependencies", {}):
        session.install(*TRITON)
    session.run("python", "-m", "pytest", "-m", "not gpu", str(PROJECTS[package]), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    session.install(*GROUPS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    install_cpu_torch(session)
    session.install(*GROUPS["typecheck"])
    install_projects(session, [n for n, p in PROJECTS.items() if p.parent.name == "packages"])
    for path in PROJECTS.values():
        session.run("mypy", str(path / "src"))
    # no CPU runs tools and tests of a GPU; at least every name in them is there
    names_only = ["--explicit-package-bases", *(f"--disable-error-code={code}" for code in TYPES)]
    tools = [x for x in (ROOT / "tools").glob("*") if x.is_file() and (x.suffix == ".py" or "." not in x.name)]
    tools += (ROOT / "tools").glob("*/*.py")
    rooms = [ROOT, *PROJECTS.values()]
    tests = [x for path in rooms for x in path.glob("tests/*.py")]
    tests = [x for x in tests if "gpu" in x.name or "mark.gpu" in x.read_text()]
    places = [ROOT / "tools", *(path / "src" for path in PROJECTS.values()), *(path / "tests" for path in rooms)]
    for found in (tools, tests):
        session.run(
            "mypy", "--scripts-are-modules", *names_only, *sorted(map(str, found)),
            env={"MYPYPATH": os.pathsep.join(map(str, places))},
        )  # fmt: skip


@nox.session
def build(session: nox.Session) -> None:
    """Wheels of all; then rl-logprob from its wheel alone must import without any engine."""
    session.install("build", "hatchling")
    out = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    for path in PROJECTS.values():
        session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(path), silent=True)
    install_cpu_torch(session)
    # files, not names: an index may hold other projects of these names
    wheels = [str(w) for n in with_local_dependencies("rl-logprob") for w in out.glob(f"{n.replace('-', '_')}-*.whl")]
    session.install(CPU_TORCH, *wheels)
    session.run("python", str(ROOT / "tools" / "check_import.py"), "rl_logprob")
