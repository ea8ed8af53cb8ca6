"""Known mistakes as executable deviations: what a trainer computes when it has this or that bug.

One file an op, one function a mistake, with the signature of the reference function and the name of the
mistake's id with underscores (gae-pad-bootstrap is gae_pad_bootstrap in gae.py). What each one is, where it
was seen and how it is put right stands in spec/deviations.yaml.
"""

from collections.abc import Callable
from importlib import import_module

__all__ = ["deviations"]


def deviations(op: str) -> dict[str, Callable]:
    """Return the deviations of an op by id, in the order of its file.

    Args:
        op: name of an op in spec/ops.yaml. Only that op's file is imported.

    Returns:
        {id: function}; each function takes what the reference function of the op takes.

    Raises:
        ModuleNotFoundError: there is no file of this name.
    """
    module = import_module(f"{__name__}.{op}")
    return {
        name.replace("_", "-"): value
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and value.__module__ == module.__name__
    }
