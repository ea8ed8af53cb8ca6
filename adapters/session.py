"""A loaded adapter, ready to be called: says what it offers and answers one request at a time.

The same requests and answers travel as JSON lines when the adapter runs in another process (adapters/process.py), so
everything here is plain dictionaries. A request:

    {"op", "inputs": {name: nested list}, "params": {…}, "axes": {…}, "dtype", "device",
     "gradients": [inputs to differentiate by], "constants": [inputs that no gradient may reach]}

A request for the trainer's own accumulation has two keys more: "parts", lists of rows, one per micro-batch, and "group",
{"rank", "ranks", "store"}, where the rows are spread over processes.

An answer is one of

    {"result": {"outputs": {name: {"dtype", "shape", "data"}}, "gradients": {…}, "dead": bool,
                "leaks": [names], "changed": [names]}}
    {"unsupported": reason}
    {"error": {"type", "message", "traceback"}}
"""

import hashlib
import importlib
import inspect
import traceback

from goldenppo.adapters import ranks
from goldenppo.adapters.arrays import LIBRARIES
from goldenppo.adapters.binding import Bound, NotTheOp, bind, keyword_arguments
from goldenppo.adapters.interface import AdapterError, Unsupported


class Session:
    """An adapter module bound to the op table."""

    def __init__(self, module, table: dict, source: str | None = None, name: str | None = None):
        self.module, self.table = module, table
        self.name = str(getattr(module, "NAME", name or module.__name__))
        self.mask = _choice(module, "MASK", ("bool", "float", "int"))
        self.arrays = _choice(module, "ARRAYS", tuple(LIBRARIES))
        self.libraries: dict = {}
        self.ops: dict[str, Bound] = {}
        self.accumulated: dict[str, Bound] = {}
        self.skipped: dict[str, str] = {}
        for op, spec in table["ops"].items():
            function = getattr(module, op, None)
            if callable(function):
                if _is_ours(function, module):
                    self.skipped[op] = f"{op} comes from goldenppo; a trainer is checked with its own code"
                    continue
                try:
                    self.ops[op] = bind(op, spec, function)
                except NotTheOp as reason:
                    self.skipped[op] = str(reason)
            accumulating = getattr(module, f"accumulated_{op}", None)
            if callable(accumulating):
                try:
                    self.accumulated[op] = bind(f"accumulated_{op}", {**spec, "inputs": {"parts": {}}}, accumulating)
                except NotTheOp as reason:
                    raise AdapterError(f"{self.name}: {reason}") from None
        check_variants(getattr(module, "VARIANTS", {}), table)
        if callable(getattr(module, "setup", None)):
            try:
                module.setup(source)
            except Unsupported as reason:
                raise AdapterError(f"{self.name}: {reason}") from None

    def hello(self) -> dict:
        """What the adapter is and offers."""
        module = self.module
        gradients = getattr(module, "GRADIENTS", {})
        variants = getattr(module, "VARIANTS", {})
        return {
            "name": self.name,
            "version": str(getattr(module, "VERSION", "")),
            "known_versions": [str(version) for version in getattr(module, "KNOWN_VERSIONS", [])],
            "arrays": self.arrays,
            "ops": {
                op: {
                    "axes": list(bound.axes),
                    "withheld": bound.withheld(),
                    "missing": list(bound.missing),
                    "variants": dict(variants.get(op, {})),
                    "gradients": bool(gradients.get(op, True)),
                    "accumulated": op in self.accumulated,
                }
                for op, bound in self.ops.items()
            },
            "skipped": self.skipped,
            "sources": sources(module, [*self.ops, *(f"accumulated_{op}" for op in self.accumulated)]),
        }

    def call(self, request: dict) -> dict:
        """Answers one request; whatever the adapter raises becomes an answer."""
        try:
            return {"result": self._accumulate(request) if "parts" in request else self._call(request)}
        except Unsupported as reason:
            return {"unsupported": str(reason) or "not offered"}
        except Exception as problem:
            text = "".join(traceback.format_exception(problem)[-6:])
            return {"error": {"type": type(problem).__name__, "message": str(problem), "traceback": text}}

    def close(self) -> None:
        """Nothing to close in this process."""

    def _call(self, request: dict) -> dict:
        bound = self.ops[request["op"]]
        library = self._library(request["device"])
        spec, dtype = bound.spec, request["dtype"]
        given = request["inputs"]
        for name in bound.missing:
            if not _all_true(given[name]):
                raise Unsupported(f"takes no {name}; the case has masked positions")
        keywords = keyword_arguments(bound, request["params"], request["axes"])
        for name, value in keywords.items():
            about = spec["params"].get(name, {})
            if "shape" in about:
                keywords[name] = library.make(value, self._dtype(name, about, dtype))
        arrays = {name: library.make(given[name], self._dtype(name, spec["inputs"][name], dtype)) for name in bound.inputs}
        tracked = [name for name in (*request["gradients"], *request["constants"]) if name in arrays]
        if self.arrays == "torch":
            for name in tracked:
                arrays[name].requires_grad_(True)
        marks = {name: library.mark(array) for name, array in arrays.items()}
        raw = bound.function(*arrays.values(), **keywords)
        named = _named(raw, spec)
        outputs = _outputs(named, spec, library)
        result = {"outputs": outputs, "gradients": {}, "dead": False, "leaks": []}
        result["changed"] = [name for name, array in arrays.items() if library.changed(array, marks[name])]
        if request["gradients"] and outputs:
            self._gradients(request, spec, named, arrays, library, result)
        return result

    def _accumulate(self, request: dict) -> dict:
        """One optimizer step's loss and gradient by the trainer's own accumulation over micro-batches, and over ranks."""
        op, spec, library = request["op"], self.table["ops"][request["op"]], self._library(request["device"])
        if self.arrays != "torch":
            raise Unsupported("accumulation is driven through torch's autograd")
        keywords = keyword_arguments(self.accumulated[op], request["params"], request["axes"])
        arrays = {
            name: library.make(request["inputs"][name], self._dtype(name, about, request["dtype"]))
            for name, about in spec["inputs"].items()
        }
        for name in request["gradients"]:
            arrays[name].requires_grad_(True)
        parts = [tuple(array[rows] for array in arrays.values()) for rows in request["parts"]]
        with ranks.joined(request.get("group")) as average:
            loss = self.accumulated[op].function(parts, **keywords)
            if getattr(loss, "requires_grad", False):
                loss.backward()
            gradients = {
                name: average(arrays[name].detach() * 0 if arrays[name].grad is None else arrays[name].grad)
                for name in request["gradients"]
            }
            loss = average(loss.detach())
        output = next(name for name, about in spec["outputs"].items() if about.get("gradients"))
        outputs = {output: _read(loss, output, library)}
        return {
            "outputs": outputs,
            "gradients": {name: _read(grad, f"grad_{name}", library) for name, grad in gradients.items()},
            "dead": False,
            "leaks": [],
            "changed": [],
        }

    def _gradients(self, request, spec, named, arrays, library, result) -> None:
        """Adds the gradients: the adapter's own (`grad_*`), else those of autograd."""
        own = {name: named[f"grad_{name}"] for name in request["gradients"] if f"grad_{name}" in named}
        if own:
            result["gradients"] = {name: _read(value, f"grad_{name}", library) for name, value in own.items()}
            return
        if self.arrays != "torch":
            return
        output = next((name for name, about in spec["outputs"].items() if about.get("gradients") and name in named), None)
        if output is None:
            return
        loss = named[output]
        if not getattr(loss, "requires_grad", False):
            result["dead"] = True
            return
        loss.sum().backward()
        for name in request["gradients"]:
            if name in arrays:
                grad = arrays[name].grad
                result["gradients"][name] = library.read(grad if grad is not None else arrays[name].detach() * 0)
        result["leaks"] = [
            name
            for name in request["constants"]
            if name in arrays and arrays[name].grad is not None and bool(arrays[name].grad.any())
        ]

    def _dtype(self, name: str, about: dict, dtype: str) -> str:
        kind = about.get("kind", "float")
        if kind == "bool" and name.endswith("mask"):
            kind = self.mask
        return dtype if kind == "float" else kind

    def _library(self, device: str):
        if device not in self.libraries:
            self.libraries[device] = LIBRARIES[self.arrays](device)
        return self.libraries[device]


def _is_ours(function, module) -> bool:
    home = getattr(getattr(function, "func", function), "__module__", None) or ""
    return home.startswith("goldenppo.reference") and not module.__name__.startswith("goldenppo.reference")


def _choice(module, name: str, allowed: tuple[str, ...]) -> str:
    value = getattr(module, name, allowed[0])
    if value not in allowed:
        raise AdapterError(f"{name} is {value!r}; it can be {', '.join(map(repr, allowed))}")
    return value


def check_variants(declared, table: dict) -> None:
    """VARIANTS must name ops, axes and values of the op table; a typing mistake would otherwise declare nothing."""
    if not isinstance(declared, dict):
        raise AdapterError(f"VARIANTS is a {type(declared).__name__}; expected {{op: {{axis: value}}}}")
    for op, axes in declared.items():
        if op not in table["ops"]:
            raise AdapterError(f"VARIANTS names {op!r}, which is no op; `goldenppo list ops` shows them")
        known = {axis for output in table["ops"][op]["outputs"].values() for axis in output["axes"]}
        for axis, value in axes.items():
            if axis not in known:
                raise AdapterError(f"VARIANTS names the axis {axis!r} of {op}; its axes are {', '.join(sorted(known)) or 'none'}")
            if value not in table["axes"][axis]:
                allowed = ", ".join(map(str, table["axes"][axis]))
                raise AdapterError(f"VARIANTS gives {op}.{axis} the value {value!r}; it can be {allowed}")


def _all_true(nested) -> bool:
    return all(_all_true(item) for item in nested) if isinstance(nested, list) else bool(nested)


def _named(raw, spec: dict) -> dict:
    """A result by output name: a mapping or NamedTuple as it is, anything else as the op's first output."""
    if hasattr(raw, "_asdict"):
        return dict(raw._asdict())
    if isinstance(raw, dict):
        return raw
    first = next(iter(spec["outputs"]))
    if isinstance(raw, tuple | list):
        names = ", ".join(f'"{name}": …' for name in spec["outputs"])
        raise TypeError(f"returned a {type(raw).__name__} of {len(raw)}; expected an array, or a dict such as {{{names}}}")
    return {first: raw}


def _outputs(named: dict, spec: dict, library) -> dict:
    unknown = [name for name in named if name not in spec["outputs"] and not name.startswith("grad_")]
    known = [name for name in named if name in spec["outputs"]]
    if not known:
        raise KeyError(f"returned {', '.join(map(repr, unknown)) or 'nothing'}; expected one of {', '.join(spec['outputs'])}")
    return {name: _read(named[name], name, library) for name in known}


def _read(value, name: str, library) -> dict:
    read = library.read(value)
    if read is None:
        raise TypeError(f"returned a {type(value).__name__} for {name}; expected an array")
    return read


def sources(module, ops) -> dict[str, list[dict]]:
    """For each op, what really runs: the names in SOURCES, else the adapter's function, each with a hash of its source."""
    declared = getattr(module, "SOURCES", {})
    found: dict[str, list[dict]] = {}
    for op in ops:
        names = declared.get(op, f"{module.__name__}:{op}")
        found[op] = [{"name": name, "sha256": _hash(name, module)} for name in ([names] if isinstance(names, str) else names)]
    return found


def _hash(name: str, module) -> str | None:
    """The hash of a function's source text; None where it cannot be found (a C function, a wrong name)."""
    where, _, qualified = name.partition(":")
    try:
        found = module if where == module.__name__ else importlib.import_module(where)
        for part in filter(None, qualified.split(".")):
            found = getattr(found, part)
        return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()
    except Exception:
        return None
