"""`goldenppo init FILE.py`: a commented adapter template."""

from pathlib import Path

HEAD = '''"""Checks {name} with goldenppo: `goldenppo check {file}`.

Fill in the functions that your trainer has and delete the others. Inputs come positionally in the order shown, as torch
tensors; parameters come by keyword. Drive your trainer's own code: a retyped formula would only check itself.
"""

from goldenppo.adapters import Unsupported

# from mytrainer.losses import ppo_actor_loss

# NAME, VERSION = "mytrainer", "1.0"
# MASK = "float"       # "bool" (default), "float" or "int": what your code wants
# ARRAYS = "numpy"     # "torch" (default), "numpy" or "jax"
# VARIANTS = {{"policy_loss": {{"aggregation": "token_mean"}}}}   # say so where you mean one; else it is identified
# SOURCES = {{"policy_loss": "mytrainer.losses:ppo_actor_loss"}}  # what really runs
'''


def add_parser(commands) -> None:
    parser = commands.add_parser("init", help="write a commented adapter template")
    parser.add_argument("file", metavar="FILE.py")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="a function for this op (may be repeated)")
    parser.set_defaults(main=main)


def main(args) -> int:
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import files
    from goldenppo.conformance.cases import table

    path = Path(args.file)
    if path.suffix != ".py":
        raise UsageError(f"{args.file!r} is no Python file name; expected something like my_trainer.py")
    if path.exists():
        raise UsageError(f"{args.file!r} exists already and is left as it is; give another name")
    for op in args.op:
        if op not in table()["ops"]:
            raise UsageError(f"there is no op {op!r}; `goldenppo list ops` shows them")
    files.check_writable(path)
    ops = args.op or ["policy_loss", "value_loss", "shaped_rewards", "gae", "reward_model_loss"]
    text = HEAD.format(name=path.stem, file=path.name) + "".join(function(op) for op in ops)
    files.write(path, text)
    print(f"{path} written; fill it in, then: goldenppo check {path}")
    return 0


def function(op: str) -> str:
    """The template of one op's function."""
    from goldenppo.adapters.binding import axes_of
    from goldenppo.conformance.cases import table

    spec = table()["ops"][op]
    needed = [name for name, about in spec["params"].items() if not about.get("optional") and "needed_by" not in about]
    extra = [name for name in spec["params"] if name not in needed]
    keywords = f", *, {', '.join(needed)}" if needed else ""
    shapes = ", ".join(f"{name} [{', '.join(about['shape'])}]" for name, about in spec["inputs"].items())
    outputs = "\n".join(f"#   {name} [{', '.join(about['shape'])}]" for name, about in spec["outputs"].items())
    more = [f"# can also be taken by keyword: {', '.join(extra)}"] if extra else []
    more += [f"# axis {axis}: {', '.join(map(str, table()['axes'][axis]))}" for axis in axes_of(spec)]
    comments = "\n".join([f"\n\n# {spec['title']}: {shapes}", *more, "# returns an array, or a dict of", outputs])
    return f'{comments}\ndef {op}({", ".join(spec["inputs"])}{keywords}):\n    raise Unsupported("not filled in yet")\n'
