"""The wheel, the editable install and a checkout that is not installed all hold the whole suite."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("spec", "reference", "fixtures", "conformance", "adapters")

pytestmark = pytest.mark.xdist_group("packaging")


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a command that has to succeed, without what pytest's own process adds to the import path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree in which every folder of the wheel has run once: it holds bytecode."""
    copy = tmp_path_factory.mktemp("checkout") / "src"
    leftovers = shutil.ignore_patterns(".git", ".tox", "*venv", ".*_cache", ".hypothesis", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=leftovers)
    for folder in FOLDERS:
        cache = copy / folder / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / "junk.cpython-311.pyc").write_bytes(b"")
    return copy


@pytest.fixture(scope="module", params=["from the tree", "through the sdist"])
def wheel(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    which = ["--wheel"] if request.param == "from the tree" else []
    run([sys.executable, "-m", "build", "--no-isolation", *which, "--outdir", out, checkout], out)
    (built,) = out.glob("*.whl")
    return built


def environment(folder: Path) -> Path:
    """A clean environment that sees the packages of this one, behind its own: returns its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run([python, "-c", code], folder).strip())
    # A path, not a site directory: the goldenppo that this environment may have as editable stays out.
    (own / "packages-of-the-test-run.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def install(python: Path, *what: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed", "--quiet", "--no-index", "--no-deps"]
    run([*pip, *what], python.parent)


def shipped(folder: Path) -> set[str]:
    """The files of a folder that are not bytecode, relative to it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder).as_posix() for path in files}


def test_wheel_holds_the_folders_and_nothing_else(wheel: Path, checkout: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"goldenppo", "goldenppo-0.1.0.dist-info"}
    inside = {name.removeprefix("goldenppo/") for name in names if name.startswith("goldenppo/")}
    expected = {f"{folder}/{name}" for folder in FOLDERS for name in shipped(checkout / folder)}
    assert inside == expected | shipped(checkout / "goldenppo")
    assert {"spec/ops.yaml", "py.typed", "conformance/cli.py"} <= inside
    assert any(name.startswith("fixtures/ops/") for name in inside)


def test_installed_wheel_checks_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    install(python, wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run([python, "-c", "import goldenppo.reference as r; print(r.__file__)"], elsewhere)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    assert "gae" in run([python, "-m", "goldenppo", "list", "ops"], elsewhere)
    assert "conforms" in run([python.parent / "goldenppo", "check", "reference", "--op", "ratio"], elsewhere)
    assert list(elsewhere.iterdir()) == []


def test_editable_install_sees_the_checkout(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    # The build backend lies in the environment of the test run, which the new one sees.
    install(python, "--no-build-isolation", "--editable", checkout)
    (checkout / "reference" / "made_later.py").write_text("here = True\n", encoding="utf-8")
    run([python, "-c", "from goldenppo.reference.made_later import here"], tmp_path)
    (checkout / "reference" / "made_later.py").unlink()
    assert "gae" in run([python.parent / "goldenppo", "list", "ops"], tmp_path)


def test_checkout_runs_without_being_installed(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    assert "gae" in run([python, "-m", "goldenppo", "list", "ops"], checkout)
    assert "conforms" in run([python, "-m", "goldenppo", "check", "reference", "--op", "ratio"], checkout)
