"""A wrong command line, file, device or installation ends with one sentence that says what to do, and the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from goldenppo.conformance import cli
from goldenppo.conformance.cli import main

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA = "cuda:99"  # absent wherever the tests run

FILES = {
    "empty.py": "",
    "folder/inside.txt": "",
    "broken.json": "{",
    "other.json": '{"schema": "another/1"}',
    "broken.yaml": "a: [",
    "other.yaml": "schema: another",
    "broken.safetensors": "x",
    "fixtures/gae.json": '{"schema": 1}',
    "recording/manifest.json": "{",
    "quits.py": "import sys; sys.exit(3)",
    "babbles.py": "input(); print('hello')",
    "refuses.py": "from goldenppo.adapters import Unsupported\nraise Unsupported('needs a licence file; set MYTRAINER_LICENCE')",
}

# command line, exit code, what the sentence says
CASES = [
    # no such thing
    ("check missing.py", 2, "there is no file 'missing.py'; `goldenppo init missing.py`"),
    ("check ./folder", 2, "`goldenppo init folder.py`"),
    ("check ./broken.json", 2, 'a program is named as "cmd: '),
    ("check .", 2, "`goldenppo init my_trainer.py`"),
    ("check no-such-trainer", 2, "give a built-in name (reference, "),
    ("check no.such.module", 2, "there is no module 'no.such.module'"),
    ("check reference --op nothing", 2, "`goldenppo list ops` shows them"),
    ("check reference --fixtures missing", 2, "--fixtures names no folder: 'missing'"),
    ("check reference --baseline missing.yaml", 2, "make one with --update-baseline --allow-new"),
    ("check reference --source missing", 2, "--source names no directory"),
    ("check verl --python no/such/python", 2, "give the path of a program"),
    ("check cmd:no-such-program", 2, "cannot start 'no-such-program'"),
    ("check cmd:", 2, "expected for example"),
    ("identify no-such-trainer", 2, "give a built-in name"),
    ("identify reference reference reference", 2, "identify takes one or two"),
    ("audit", 2, "no dump given; `goldenppo audit step.safetensors`"),
    ("audit missing.safetensors", 2, "there is no file 'missing.safetensors'; a dump is a safetensors file"),
    ("audit broken.safetensors --edge nothing", 2, "the edges are logprobs, "),
    ("fuzz no-such-trainer", 2, "give a built-in name"),
    ("fuzz reference --op nothing", 2, "`goldenppo list ops` shows them"),
    ("fuzz reference --seconds -1", 2, "expected a number above 0"),
    ("run --verify missing", 2, "`goldenppo run --record DIR` makes one"),
    ("fixtures verify --op nothing", 2, "`goldenppo list ops` shows them"),
    ("report", 2, "`goldenppo check ADAPTER --json result.json` writes one"),
    ("report missing.json", 2, "cannot read 'missing.json'"),
    ("explain nothing-like-it", 2, "`goldenppo list cases` and `list deviations` show what there is"),
    ("explain gae-pad-bootstrapp", 2, "close to it: gae-pad-bootstrap"),
    ("init new.py --op nothing", 2, "`goldenppo list ops` shows them"),
    ("doctor --op nothing", 2, "`goldenppo list ops` shows them"),
    # there, and not what is expected
    ("check reference --fixtures fixtures --op gae", 2, "`goldenppo fixtures write` makes them"),
    ("check reference --fixtures folder", 4, "nothing was compared"),
    ("check reference --baseline broken.yaml", 2, "cannot be read as YAML"),
    ("check reference --baseline other.yaml", 2, "expected a mapping with schema: goldenppo/baseline/1"),
    ("check reference --source broken.json", 2, "--source names no directory"),
    ("check quits.py", 4, "does not import: SystemExit: 3 (quits.py:1)"),
    ("check refuses.py", 4, "needs a licence file; set MYTRAINER_LICENCE"),
    ("check empty.py", 4, "nothing was compared"),
    (f"check cmd:{sys.executable}=quits.py", 4, "quits.py ended with exit status 3"),
    (f"check cmd:{sys.executable}=babbles.py", 4, "babbles.py printed a line that is no answer: hello"),
    ("audit broken.safetensors", 2, "it may be truncated, or written with torch.save"),
    ("run --verify recording", 4, "is not JSON"),
    ("report broken.json", 2, "`goldenppo check ADAPTER --json broken.json` writes it"),
    ("report other.json", 2, "expected 'goldenppo/result/1'"),
    # cannot be done
    ("check reference --timeout 0", 2, "expected seconds above 0"),
    ("check reference --update-baseline", 2, "--update-baseline needs --baseline F"),
    ("check reference --allow-new", 2, "--allow-new does nothing without --update-baseline"),
    ("check cmd:x --python python", 2, "names its own program"),
    ("run --steps 0", 2, "give at least 1"),
    ("run --seed -1", 2, "integers from 0 to"),
    ("run --free-running", 2, "--free-running goes with --verify"),
    ("fixtures write --device cpu", 2, "drop --device"),
    ("report other.json other.json --badge b.json", 2, "--badge shows one result"),
    ("init new.txt", 2, "expected something like my_trainer.py"),
    ("init empty.py", 2, "exists already and is left as it is; give another name"),
    # a device that is not there
    (f"check reference --device {NO_CUDA}", 2, "use --device cpu, or a torch built for it"),
    (f"identify reference --device {NO_CUDA}", 2, "use --device cpu"),
    (f"fuzz reference --device {NO_CUDA}", 2, "use --device cpu"),
    (f"fixtures verify --device {NO_CUDA}", 2, "use --device cpu"),
    # an output that cannot be written
    ("check reference --json missing/r.json", 2, "there is no folder 'missing'; make it first"),
    ("check reference --junit folder", 2, "it is a folder; give a file name"),
    ("check reference --markdown missing/s.md", 2, "there is no folder"),
    ("check reference --baseline missing/b.yaml --update-baseline", 2, "there is no folder"),
    ("audit broken.safetensors --json missing/a.json", 2, "there is no folder"),
    ("run --plot missing/c.svg", 2, "there is no folder"),
    ("run --record folder", 2, "it exists; name a folder that does not, or remove it"),
    ("run --record missing/deeper/r", 2, "there is no folder"),
    ("report other.json --html missing/r.html", 2, "there is no folder"),
    ("init missing/new.py", 2, "there is no folder"),
    ("fuzz reference --save empty.py", 2, "cannot make the folder 'empty.py'"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with files that are not what a command expects."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    yield tmp_path
    for name in ("empty", "quits", "refuses", "folder"):
        sys.modules.pop(name, None)


def words(line: str) -> list[str]:
    """A command line; `=` stands for the space inside `cmd:PROGRAM=FILE`."""
    return [word.replace("=", " ") if word.startswith("cmd:") else word for word in line.split()]


def sentence(captured) -> str:
    """What was said: one line, unless a whole report ends with it."""
    assert "Traceback" not in captured.out + captured.err
    if captured.err:
        assert captured.err.startswith("goldenppo: ")
        assert captured.err.count("\n") == 1, captured.err
        return captured.err
    return captured.out.strip().rsplit("\n", 1)[-1]


@pytest.mark.parametrize(("line", "code", "says"), CASES, ids=[line.replace(sys.executable, "python") for line, _, _ in CASES])
def test_one_sentence_says_what_to_do(folder, line, code, says, capsys):
    assert main(words(line)) == code
    assert says in sentence(capsys.readouterr())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "invalid choice: 'nothing'"),
        ("check reference --level never", "invalid choice: 'never'"),
        ("check reference --dtype float8", "invalid choice: 'float8'"),
        ("check reference --nothing", "unrecognized arguments: --nothing"),
        ("check reference --timeout soon", "invalid float value: 'soon'"),
        ("list nothing", "invalid choice: 'nothing'"),
        ("identify", "the following arguments are required: ADAPTER"),
        ("init", "the following arguments are required: FILE.py"),
    ],
)
def test_a_wrong_flag_ends_2_with_the_usage(line, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: goldenppo")
    assert says in said


@pytest.mark.parametrize(
    "line", ["check reference --json r.json", "check reference --baseline b.yaml --update-baseline", "init new.py"]
)
def test_without_permission_nothing_runs(folder, line, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    assert main(line.split()) == 2
    assert "no permission; name another place" in sentence(capsys.readouterr())


def test_without_an_argument_check_says_what_can_be_checked(capsys):
    assert main(["check"]) == 2
    assert "goldenppo init my_trainer.py" in capsys.readouterr().out


def _raising(problem):
    def raises(args):
        raise problem

    return raises


class OutOfMemoryError(RuntimeError):
    """As torch's own, which needs a device to be raised."""


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nmore lines"), "out of memory (CUDA out of memory. "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "out of memory (Default"),
        (MemoryError(), "free some, or take a smaller run"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is not installed; `pip install torch`"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), "`pip install pyyaml`"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "does not load (libcudart.so.12: cannot open"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_goes_wrong_outside_is_no_traceback(problem, says, monkeypatch, capsys):
    monkeypatch.setattr("goldenppo.conformance.commands.list.main", _raising(problem))

    assert main(["list", "ops"]) == 4
    assert says in sentence(capsys.readouterr())


@pytest.mark.parametrize("problem", [RuntimeError("a fault"), ImportError("x", name="goldenppo.y"), ZeroDivisionError()])
def test_a_fault_of_our_own_is_not_hidden(problem, monkeypatch):
    monkeypatch.setattr("goldenppo.conformance.commands.list.main", _raising(problem))

    with pytest.raises(type(problem)):
        main(["list", "ops"])


@pytest.mark.parametrize("line", ["check reference", "identify reference", "fuzz reference", "run", "fixtures verify", "doctor"])
def test_without_torch_a_command_that_needs_it_says_so(tmp_path, line):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "goldenppo", *line.split()]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "goldenppo: torch is not installed; `pip install torch` and run again\n"


@pytest.mark.parametrize("name", ["verl", "openrlhf", "torchtune", "trl", "trl-ppo", "trl-classic"])
def test_a_trainer_that_is_not_installed_is_named_with_its_version(name, monkeypatch, capsys):
    package = name.split("-")[0]
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, f"goldenppo.adapters.{name.replace('-', '_')}", raising=False)
    absent = _absent(package)
    monkeypatch.setattr("importlib.metadata.version", absent)

    assert main(["check", name]) == 4
    assert "pip install" in sentence(capsys.readouterr())


def _absent(package):
    import importlib.metadata

    known = importlib.metadata.version

    def version(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    return version


def test_every_command_is_walked():
    walked = {line.split()[0] for line, _, _ in CASES}

    assert {*walked, "list"} == set(cli.COMMANDS)
