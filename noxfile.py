"""The checks of this repository; `python3 dev.py` runs the default ones.

Every session installs with the pins of constraints.txt, so that a result depends on the commit and
not on the day; the sessions for other versions replace a few of them.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint", "types", "docs"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = str(ROOT / "constraints.txt")
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
GROUPS = PYPROJECT["dependency-groups"]
BUILD_BACKEND = "hatchling"
RUNTIME_REQUIREMENTS = {"torch", "psutil", "typing-extensions"}
NEWEST = {"torch": "2.15.0"}
"""The newest of what the library needs that it is known to work with."""

OLDEST_MEGATRON = "0.16.1"
MEGATRON = {OLDEST_MEGATRON: (), "0.17.1": (), "0.19.2": ("triton==3.9.0",)}
"""Versions of Megatron-core, and what they import without declaring it."""
NVRX = "nvidia-resiliency-ext==0.4.1"
RECIPES = {
    "nemo_automodel": ("safetensors", "torchdata", "transformers"),
    "ray": ("ray[train]",),
    "torchtune": (
        *("blobfile", "datasets", "omegaconf", "safetensors", "sentencepiece", "tiktoken"),
        *("tokenizers", "torchao", "torchdata"),
    ),
}
"""Frameworks of docs/recipes.md, and what their checkpoints need."""
WITHOUT_THE_REST = {"nemo_automodel", "torchtune"}
"""Those that are installed without all that they declare: accelerator kernels, data sets."""
OLDER = {"torchtune": {"torchao": "0.14.1"}, "nemo_automodel": {"transformers": "5.18.0"}}
"""Versions of other packages with which these frameworks were tried and can be imported."""

IMPORT_CHECK = """
import sys, nostall
assert "torch" not in sys.modules, "import nostall imported torch"
assert nostall.__version__ == sys.argv[1], nostall.__version__
assert "site-packages" in nostall.__file__, nostall.__file__
nostall.FileSystemWriterAsync
"""

# Six at a time on two cores, as tests wait for other processes most of the time: with four the
# suite takes 5 to 15 % longer. Those of a file stay together, as they share what ranks have done
# for them. Files begin in the order of tests/conftest.py, not those with the most tests first: the
# longest has two.
SIDE_BY_SIDE = ("-n", "6", "--dist", "loadfile", "--no-loadscope-reorder")

# Tests that start neither ranks nor trainers: most of the stages, and the public names.
UNIT_TESTS = (
    "tests/model",
    "tests/writer",
    "tests/ranks/test_reports.py",
    "tests/memory/test_arena.py",
    "tests/storage/test_links.py",
    "tests/commit/test_collect.py",
    "tests/commit/test_commit.py",
    "tests/commit/test_hostile.py",
    "tests/plan/test_container_bytes.py",
    "tests/plan/test_layout.py",
    "tests/plan/test_global_plan.py",
    "tests/plan/test_structure.py",
    "tests/public/test_errors.py",
    "tests/public/test_options.py",
    "tests/public/test_public_names.py",
    "tests/public/test_removal.py",
    "tests/public/test_types.py",
    "tests/cli/test_prune.py",
)

VAGUE = re.compile(r'\s*r?"""(As|Of|Those|The same|What)\b')
"""The beginning of a docstring that leaves a reader to guess the noun."""

S3 = ("tests/storage/test_s3.py", "tests/manager/test_manager_in_s3.py")
AZURITE = "azurite@3.37.0"
STORES = ("tests/storage/test_msc.py", *S3)
"""Tests of object stores, with all that is tried with them."""

os.environ.update(
    PIP_DISABLE_PIP_VERSION_CHECK="1",
    PIP_NO_WARN_SCRIPT_LOCATION="1",
    PIP_ROOT_USER_ACTION="ignore",
    VIRTUALENV_NO_PERIODIC_UPDATE="1",
)


def spare_processors(session: nox.Session) -> None:
    """Keep the bytecode of tests, which many processes import, and no thread of torch's spins."""
    session.env["OMP_NUM_THREADS"] = "1"
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.env["PYTHONPYCACHEPREFIX"] = str(Path(session.create_tmp()).resolve() / "bytecode")


def install(session: nox.Session, *requirements: str, pins: str = CONSTRAINTS) -> None:
    """Install from an index, held to the pins."""
    session.install("-c", pins, *requirements)


def other_pins(session: nox.Session, instead: Mapping[str, str]) -> str:
    """A copy of constraints.txt in the session's directory with other versions of some packages."""
    lines = Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in instead]
    path = Path(session.create_tmp()).resolve() / "constraints.txt"
    others = [f"{name}=={version}" for name, version in instead.items()]
    path.write_text("\n".join([*kept, *others, ""]), encoding="utf-8")
    return str(path)


def oldest() -> dict[str, str]:
    """The lowest versions that pyproject.toml lets users have of what the library needs."""
    needed = map(Requirement, PYPROJECT["project"]["dependencies"])
    return {
        canonicalize_name(requirement.name): specifier.version
        for requirement in needed
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }


def requirements_of(*groups: str) -> tuple[str, ...]:
    """The requirements of dependency groups of pyproject.toml."""
    return nox.project.dependency_groups({"dependency-groups": GROUPS}, *groups)


def install_package(
    session: nox.Session,
    *groups: str,
    extra: str | None = None,
    with_dependencies: bool = True,
    pins: str = CONSTRAINTS,
) -> None:
    """Build nostall from this tree and install it, not as an editable: as it is shipped.

    Without build isolation: an isolated build would fetch a backend that no pin holds.

    Args:
        session: The nox session.
        *groups: Dependency groups of pyproject.toml that are installed, too.
        extra: Extras of nostall, separated by commas.
        with_dependencies: Whether what nostall needs is installed, too.
        pins: A file of constraints.
    """
    install(session, *requirements_of(*groups), BUILD_BACKEND, pins=pins)
    options = ("--no-build-isolation", *(() if with_dependencies else ("--no-deps",)))
    install(session, *options, f"{ROOT}[{extra}]" if extra else str(ROOT), pins=pins)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite against the installed package; arguments after `--` go to pytest."""
    run_tests_with(session, {})


@nox.session
def stores(session: nox.Session) -> None:
    """Run the tests of object stores with all clients and servers; arguments go to pytest."""
    install_package(session, "stores", extra="fast")
    session.run("python", "-m", "pytest", *(session.posargs or STORES))


@nox.session
def swift(session: nox.Session) -> None:
    """Run the tests of S3 against OpenStack Swift instead of moto; arguments go to pytest."""
    install_package(session, "swift", extra="fast")
    session.run("python", "-m", "pytest", "--s3=swift", *(session.posargs or STORES))


@nox.session
def seaweedfs(session: nox.Session) -> None:
    """Run the tests of S3 against SeaweedFS instead of moto; arguments go to pytest."""
    install_package(session, "seaweedfs", extra="fast")
    session.run("python", "-m", "pytest", "--s3=seaweedfs", *(session.posargs or STORES))


@nox.session
def emulators(session: nox.Session) -> None:
    """Save to emulators of Google's and Microsoft's stores; the latter only where npm is."""
    install_package(session, "emulators", extra="fast")
    modules = Path(session.create_tmp()).resolve() / "node_modules"
    if shutil.which("npm") is None:
        session.warn("npm is not installed: the tests with azurite are skipped")
    elif not (modules / "azurite").exists():
        wanted = ("--prefix", str(modules.parent), "--no-audit", "--no-fund", AZURITE)
        session.run("npm", "install", *wanted, external=True)
    session.env["PATH"] = os.pathsep.join((str(modules / ".bin"), os.environ["PATH"]))
    tests = session.posargs or ("tests/storage/test_emulators.py",)
    session.run("python", "-m", "pytest", *tests)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the test suite, and require that it reaches most lines; arguments go to pytest."""
    install_package(session, "test")
    spare_processors(session)
    # Absolute and outside the tree: tests change the current directory, and so do the processes
    # they start.
    session.env["COVERAGE_FILE"] = str(Path(session.create_tmp()).resolve() / "coverage")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs)
    session.run("coverage", "combine", "--quiet")
    # A part of the suite need not reach the floor.
    part = ("--fail-under", "0") if session.posargs else ()
    session.run("coverage", "report", *part)


@nox.session
def unit(session: nox.Session) -> None:
    """Run the fast tests, in half a minute; arguments after `--` go to pytest."""
    install_package(session, "test")
    fast = ("-n", "2", "--dist", "worksteal", "-m", "not slow")
    session.run("python", "-m", "pytest", *fast, *UNIT_TESTS, *session.posargs)


def run_tests_with(session: nox.Session, instead: Mapping[str, str]) -> None:
    """Run the test suite against the installed package, with other versions of what it needs."""
    pins = other_pins(session, instead)
    install_package(session, "test", pins=pins)
    spare_processors(session)
    session.run("python", "-m", "pytest", *SIDE_BY_SIDE, *session.posargs)


@nox.session(python="3.10")
def tests_min(session: nox.Session) -> None:
    """Run the test suite with the lowest versions that pyproject.toml allows, Python included."""
    run_tests_with(session, oldest())


@nox.session
def tests_next(session: nox.Session) -> None:
    """Run the test suite with the newest torch."""
    run_tests_with(session, NEWEST)


@nox.session(python=["3.10", "3.11", "3.12", "3.13", "3.14"])
def tests_python(session: nox.Session) -> None:
    """Run the test suite with the pinned torch on one Python, as in `nox -s tests_python-3.13`."""
    run_tests_with(session, {})


@nox.session
def torchao(session: nox.Session) -> None:
    """Run the tests that need torchao; arguments after `--` go to pytest."""
    install_package(session, "torchao")
    session.run(
        "pytest", "tests/public/test_torchao.py", "tests/save/test_values.py", *session.posargs
    )


def run_framework(session: nox.Session, name: str) -> None:
    """Run an adapter's tests with the real framework, then measure both side by side."""
    install_package(session, name, extra="fast")
    session.run("pytest", f"tests/integrations/test_{name}.py", *session.posargs)
    session.run("python", "-W", "ignore", "tests/integrations/measure.py", name)


@nox.session
def lightning(session: nox.Session) -> None:
    """Run the tests that need Lightning, and measure; arguments after `--` go to pytest."""
    run_framework(session, "lightning")


@nox.session
def accelerate(session: nox.Session) -> None:
    """Run the tests that need Accelerate and transformers, and measure; arguments go to pytest."""
    run_framework(session, "accelerate")


@nox.session
def torchtitan(session: nox.Session) -> None:
    """Run the tests that need torchtitan, and measure; arguments after `--` go to pytest."""
    install(session, "--no-deps", "torchtitan")  # its data sets and loggers are not needed
    run_framework(session, "torchtitan")


@nox.session
def torch_tests(session: nox.Session) -> None:
    """Run PyTorch's own tests of DCP, `-- .../test/distributed/checkpoint`, with ours and stock's.

    Fails if a test fails only with nostall's writer and reader. More arguments go to pytest.
    """
    if not session.posargs:
        session.error("name a folder: that of test/distributed/checkpoint in PyTorch's source")
    install_package(session, "test")
    install(session, "expecttest")  # PyTorch's tests need it
    spare_processors(session)
    session.env["PYTHONPATH"] = str(ROOT / "tests")
    tmp = Path(session.create_tmp()).resolve()
    failed = {}
    for classes in ("nostall", "stock"):
        report = tmp / f"{classes}.xml"
        # Their settings and conftest.py, not ours.
        settings = ("-c", os.devnull, "--rootdir", session.posargs[0], "-p", "no:cacheprovider")
        plugins = ("-p", "no:randomly", "-p", "support.in_place_of_stock", "--classes", classes)
        options = (*settings, *plugins, "-W", "ignore", "--tb", "short", "--show-capture", "no")
        tests = ("--junitxml", str(report), "--continue-on-collection-errors", *session.posargs)
        session.run("python", "-m", "pytest", *options, *tests, success_codes=[0, 1])
        failed[classes] = {
            f"{case.get('classname')}.{case.get('name')}"
            for case in ET.parse(report).iter("testcase")  # noqa: S314  # pytest wrote it
            if case.find("failure") is not None or case.find("error") is not None
        }
    only_ours = sorted(failed["nostall"] - failed["stock"])
    if only_ours:
        session.error("\n".join(("these fail with nostall only:", *only_ours)))
    session.log(f"all that fails, {len(failed['nostall'])} tests, fails with stock, too")


@nox.session
@nox.parametrize("framework", list(RECIPES), ids=list(RECIPES))
def recipes(session: nox.Session, framework: str) -> None:
    """Run the code of docs/recipes.md for one framework, as in `nox -s 'recipes(ray)'`."""
    pins = other_pins(session, OLDER.get(framework, {}))
    if framework in WITHOUT_THE_REST:
        install(session, "--no-deps", framework, pins=pins)
    install(session, "numpy", "pytest>=9.0", *RECIPES[framework], pins=pins)
    install_package(session, pins=pins)
    session.run("pytest", "tests/integrations/test_recipes.py", "-k", framework, *session.posargs)


@nox.session
def megatron(session: nox.Session) -> None:
    """Save with Megatron-core; arguments go to pytest, `measure` and `callers` compare the cost."""
    install_package(session, "megatron")
    for version, needed in MEGATRON.items():
        if needed:
            install(session, *needed)
        folder = Path(session.create_tmp()).resolve() / version
        # Not in the environment: the versions exclude each other, and the newer ones declare a
        # newer Python than they need.
        only = ("--only-binary=:all:", "--python-version", "3.12", "--no-deps")
        wanted = (f"megatron-core=={version}", NVRX)
        if not folder.exists():
            session.install("-q", *only, "--target", str(folder), *wanted)
        session.env["PYTHONPATH"] = str(folder)
        if session.posargs == ["callers"]:
            session.run("python", "-W", "ignore", "-m", "benchmarks", "callers")
        elif session.posargs != ["measure"]:
            session.run("pytest", "tests/integrations/test_megatron.py", *session.posargs)
        elif version != OLDEST_MEGATRON:  # its saves cannot be compared in one process
            ranks = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            program = "tests/stress/megatron_blocked.py"
            session.run("python", "-W", "ignore", "-m", *ranks, program, session.create_tmp())


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, rules, and which module may import which; nothing is imported."""
    install_package(session, "lint", with_dependencies=False)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")
    vague = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("benchmarks", "examples", "src", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if VAGUE.match(line)
    ]
    if vague:
        session.error("\n".join(("docstrings that do not say what a thing is:", *vague)))


@nox.session
def types(session: nox.Session) -> None:
    """Type-check the package and its tests; torch is there because its types are part of ours.

    pyright checks how users call the package.
    """
    install(session, *requirements_of("types"), *PYPROJECT["project"]["dependencies"])
    session.run("mypy")
    session.run("pyright")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    install_package(session, "docs")
    built = Path(session.create_tmp()).resolve()
    sphinx = ("sphinx-build", "-q", "-W", "--keep-going", "-E", "-j", "2", "-b", "html")
    session.run(*sphinx, "-d", str(built / "doctrees"), "docs", str(built / "html"))
    session.log(f"built {built / 'html' / 'index.html'}")


@nox.session
def demo(session: nox.Session) -> None:
    """Run the example against the installed package; arguments after `--` go to it."""
    install(session, "numpy")  # torch warns on import when it is missing
    install_package(session)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Kill trainers and writers at random moments, 1,000 times unless arguments say otherwise."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/soak.py", *session.posargs)


@nox.session
def soak_manager(session: nox.Session) -> None:
    """Kill trainers that use a manager, 1,000 times unless arguments say otherwise."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/manager_soak.py", *session.posargs)


@nox.session
def soak_stores(session: nox.Session) -> None:
    """Kill trainers that save to a server of S3; `-- --kills 200`."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/object_soak.py", *session.posargs)


@nox.session
def soak_tier(session: nox.Session) -> None:
    """Kill trainers that save through a local tier; `-- --kills 200`."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/tier_soak.py", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Run every cell of the fault matrix, or what arguments after `--` say."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/matrix.py", *session.posargs)


@nox.session
def mounts(session: nox.Session) -> None:
    """Save on mounted file systems with caches and faults; skipped where none can be mounted."""
    install_package(session, "mounts")
    session.run("python", "-W", "ignore", "tests/stress/mounted_saves.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Feed 1,000,000 hostile inputs to everything that reads, unless arguments say otherwise."""
    install_package(session, "test")
    session.run("python", "-W", "ignore", "tests/stress/fuzz.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks against the installed package, as in `nox -s bench -- saves --mib 64`."""
    install(session, "numpy")  # torch warns on import when it is missing
    install_package(session, extra="fast")
    session.run("python", "-m", "benchmarks", *(session.posargs or ("saves",)))


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Check and measure on an accelerator with the interpreter at hand; installs nothing."""
    session.run(sys.executable, str(ROOT / "tests" / "stress" / "gpu.py"), *session.posargs)


@nox.session
def dist(session: nox.Session) -> None:
    """Build the wheel from the sdist, install it afresh, and look at what a user gets."""
    install(session, *requirements_of("dist"))
    tmp = Path(session.create_tmp()).resolve()
    out = tmp / "dist"
    for old in out.glob("*"):
        old.unlink()
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), silent=True)
    (wheel,) = out.glob("*.whl")
    version = check_wheel(session, wheel)
    fresh = tmp / "fresh"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    python = str(fresh / "bin" / "python")
    session.run(
        *(python, "-m", "pip", "install", "-c", CONSTRAINTS, str(wheel)),
        external=True,
        silent=True,
    )
    session.run(python, "-m", "pip", "check", external=True, silent=True)
    session.chdir(tmp)
    # torch without numpy, which nostall does not need either, says so once; nothing else may be
    # said.
    warnings = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")
    session.run(python, *warnings, "-c", IMPORT_CHECK, version, external=True, log=False)
    program = str(fresh / "bin" / "nostall")
    session.run(program, "--version", external=True, log=False)
    shutil.rmtree(fresh)  # it holds a whole torch
    session.log(
        f"{wheel.name}: carries py.typed, needs only {sorted(RUNTIME_REQUIREMENTS)}, imports"
    )


def check_wheel(session: nox.Session, wheel: Path) -> str:
    """Fail the session unless the wheel is typed and needs only what it may; return its version."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
    if "nostall/py.typed" not in names:
        session.error(f"{wheel.name} lacks nostall/py.typed: type checkers would ignore its types")
    strays = sorted(n for n in names if not n.startswith(("nostall/", "nostall-")))
    if strays:
        session.error(f"{wheel.name} installs files outside the package: {strays}")
    requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
    needed = {
        canonicalize_name(r.name)
        for r in requirements
        if r.marker is None or r.marker.evaluate({"extra": ""})
    }
    if needed != RUNTIME_REQUIREMENTS:
        session.error(f"{wheel.name} needs {sorted(needed)}, not {sorted(RUNTIME_REQUIREMENTS)}")
    return str(metadata["Version"])


if __name__ == "__main__":
    sys.exit("run it with nox, or through `python3 dev.py`")
