"""From the word a user types (a built-in name, a file, a dotted module, "cmd: …") to something that can be called."""

import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from goldenppo.adapters.interface import AdapterError, Unsupported, UsageError

FOLDER = Path(__file__).resolve().parent


def built_in() -> dict[str, tuple[str, str]]:
    """The built-in adapters: name → (module file stem, first line of its docstring), read without importing them."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
                continue
            if [getattr(target, "id", None) for target in node.targets] == ["NAME"]:
                found[str(node.value.value)] = (path.stem, (ast.get_docstring(tree) or "").split("\n")[0])
    return found


def load(word: str):
    """Imports the adapter that a user named.

    Args:
        word: a built-in name, a path to a Python file, or a dotted module name.

    Returns:
        The module.

    Raises:
        UsageError: there is no such adapter.
        AdapterError: it exists and does not import.
    """
    names = built_in()
    if word in names:  # a trainer of the same name may be missing: that is no unknown adapter
        return _import(f"goldenppo.adapters.{names[word][0]}", f"the adapter {word}")
    if word.endswith(".py") or os.sep in word or word.startswith("."):
        return _load_file(Path(word))
    if "." in word or importlib.util.find_spec(word) is not None:
        return _import(word, word)
    known = ", ".join(["reference", *names])
    raise UsageError(f'there is no adapter {word!r}; give a built-in name ({known}), a Python file, a dotted module or "cmd: …"')


def _load_file(path: Path):
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}; `goldenppo init {path.stem or 'my_trainer'}.py` writes a template")
    name = path.stem.replace("-", "_")
    name = name if name not in sys.modules and name.isidentifier() else f"goldenppo_adapter_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f'{str(path)!r} is no Python file; a program is named as "cmd: {path}"')
    module = importlib.util.module_from_spec(spec)
    execute = spec.loader.exec_module
    sys.modules[name] = module  # dataclasses and pickling look a module up by its name
    sys.path.insert(0, str(path.resolve().parent))  # the file's own neighbours, as for `python my_trainer.py`
    return _guard(lambda: execute(module) or module, str(path))


def _import(name: str, word: str):
    return _guard(lambda: importlib.import_module(name), word)


def _guard(action, word: str):
    """Runs an import; whatever goes wrong becomes one sentence."""
    try:
        return action()
    except Unsupported as reason:
        raise AdapterError(str(reason)) from None
    except SyntaxError as problem:
        where = f"{problem.filename or word}:{problem.lineno}"
        raise AdapterError(f"{word} is not valid Python: {problem.msg} ({where})") from None
    except ModuleNotFoundError as problem:
        if problem.name == word or (problem.name and word.startswith(f"{problem.name}.")):
            raise UsageError(f"there is no module {word!r}: {problem}") from None
        raise AdapterError(
            f"{word} does not import: {problem}. Install it, or name an interpreter that has it: --python EXE"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a module may call sys.exit, or raise anything
        place = _place(problem)
        raise AdapterError(f"{word} does not import: {type(problem).__name__}: {problem}{place}") from None


def _place(problem: BaseException) -> str:
    """The line of the innermost frame, so that nobody needs the traceback to find it."""
    frame = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})"
