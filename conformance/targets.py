"""From the ADAPTER word of a command to something that answers requests."""

from goldenppo.adapters.interface import UsageError
from goldenppo.conformance.cases import table


def open_adapter(word: str, python: str | None = None, source: str | None = None, timeout: float = 60.0):
    """Opens an adapter in this process, in another interpreter, or as a harness.

    Args:
        word: a built-in name (`reference` among them), a Python file, a dotted module, or "cmd: …".
        python: an interpreter in which the adapter is to run.
        source: a trainer's checkout, for adapters that need one.
        timeout: seconds that one answer of another process may take.

    Raises:
        UsageError: there is no such adapter, interpreter or directory.
        AdapterError: the adapter does not load.
    """
    import os
    from pathlib import Path

    if source is not None and not os.path.isdir(source):
        raise UsageError(f"--source names no directory: {source!r}")
    if word.startswith("cmd:"):
        from goldenppo.adapters.process import harness

        if python:
            raise UsageError('--python runs a Python adapter elsewhere; a "cmd: …" harness names its own program')
        return harness(word, table(), timeout)
    if python:
        from goldenppo.adapters.process import python_worker

        return python_worker(word, python, source, table(), timeout)
    from goldenppo.adapters.loader import load
    from goldenppo.adapters.session import Session

    if word == "reference":
        return Session(_reference(), table(), name="reference")
    return Session(load(word), table(), source, Path(word).stem if word.endswith(".py") else word)


def _reference():
    """The reference as an adapter: its functions already have the ops' names and signatures."""
    import types

    import goldenppo
    import goldenppo.reference as reference

    module = types.ModuleType("goldenppo.reference")
    for name in (*table()["ops"], "accumulated_policy_loss", "accumulated_value_loss"):
        setattr(module, name, getattr(reference, name))
    module.NAME, module.VERSION = "reference", goldenppo.__version__
    return module


def check_device(device: str) -> None:
    """Refuses a device that is not there.

    Raises:
        UsageError: torch does not know the device, or it is absent.
    """
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).split("\n")[0]
        raise UsageError(
            f"the device {device!r} cannot be used here ({reason}); use --device cpu, or a torch built for it"
        ) from None
