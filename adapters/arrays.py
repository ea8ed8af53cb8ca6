"""Array libraries, as far as a call needs them: make inputs, watch for changes, read results.

Each library is one small class with the same four methods, imported only when an adapter asks for it.
"""

import math

from goldenppo.adapters.interface import Unsupported

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def numbers(nested):
    """Turns the strings "nan", "inf" and "-inf" of a JSON document back into numbers, at any depth."""
    if isinstance(nested, list):
        return [numbers(item) for item in nested]
    return _SPECIAL[nested] if isinstance(nested, str) else nested


def words(value):
    """Turns numbers that are not finite into strings, at any depth: JSON has none."""
    if isinstance(value, dict):
        return {key: words(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [words(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Torch:
    """torch tensors; gradients by autograd."""

    def __init__(self, device: str = "cpu"):
        import torch

        self.torch, self.device = torch, device
        self.kinds = {"bool": torch.bool, "int": torch.int64}

    def make(self, nested, dtype: str):
        """An array of a dtype that adapters know (float64 …, bool, int) from nested lists."""
        kind = self.kinds.get(dtype) or getattr(self.torch, dtype)
        return self.torch.tensor(nested, dtype=kind, device=self.device)

    def mark(self, array):
        """What `changed` compares with later."""
        return array._version

    def changed(self, array, mark) -> bool:
        """Whether the array was written to since its mark was taken."""
        return array._version != mark

    def read(self, value) -> dict | None:
        """A result as {"dtype", "shape", "data"}; None where it is no array or number of this library."""
        if isinstance(value, self.torch.Tensor):
            detached = value.detach()
            wide = detached if detached.dtype in (self.torch.float64, self.torch.bool) else detached.double()
            data = wide.reshape(-1).tolist()
            return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}
        return read_numpy(value)


class Numpy:
    """numpy arrays; gradients only where the adapter returns them."""

    def __init__(self, device: str = "cpu"):
        import numpy

        if device != "cpu":
            raise Unsupported(f"numpy arrays live on the CPU; the device asked for is {device}")
        self.numpy = numpy

    def make(self, nested, dtype: str):
        """An array of a dtype that adapters know (float64 …, bool, int) from nested lists."""
        if dtype == "bfloat16":
            raise Unsupported("numpy has no bfloat16")
        return self.numpy.array(nested, dtype={"int": "int64"}.get(dtype, dtype))

    def mark(self, array):
        """What `changed` compares with later."""
        return array.tobytes()

    def changed(self, array, mark) -> bool:
        """Whether the array was written to since its mark was taken."""
        return array.tobytes() != mark

    def read(self, value) -> dict | None:
        """A result as {"dtype", "shape", "data"}; None where it is no array and no number."""
        return read_numpy(value)


class Jax:
    """JAX arrays in 64-bit mode; gradients only where the adapter returns them (jax.grad)."""

    def __init__(self, device: str = "cpu"):
        import jax

        jax.config.update("jax_enable_x64", True)
        self.numpy = jax.numpy
        if device != "cpu":
            raise Unsupported(f"JAX adapters run on the CPU; the device asked for is {device}")

    def make(self, nested, dtype: str):
        """An array of a dtype that adapters know (float64 …, bool, int) from nested lists."""
        return self.numpy.asarray(nested, dtype={"int": "int64", "bool": "bool"}.get(dtype, dtype))

    def mark(self, array):
        """What `changed` compares with later."""
        return None

    def changed(self, array, mark) -> bool:
        """Whether the array was written to since its mark was taken."""
        return False  # JAX arrays cannot be changed

    def read(self, value) -> dict | None:
        """A result as {"dtype", "shape", "data"}; None where it is no array and no number."""
        return read_numpy(value)


def read_numpy(value) -> dict | None:
    """Reads anything that looks like a numpy array, and Python numbers."""
    if isinstance(value, bool):
        return {"dtype": "bool", "shape": [], "data": [value]}
    if isinstance(value, int):
        return {"dtype": "int64", "shape": [], "data": [value]}
    if isinstance(value, float):
        return {"dtype": "float64", "shape": [], "data": [value]}
    if not hasattr(value, "__array__"):
        return None
    import numpy

    array = numpy.asarray(value)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        name, array = "bfloat16", array.astype("float32")
    else:
        name = array.dtype.name
    data = array.reshape(-1).tolist() if array.dtype.kind in "biu" else array.astype("float64").reshape(-1).tolist()
    return {"dtype": name, "shape": list(array.shape), "data": data}


LIBRARIES = {"torch": Torch, "numpy": Numpy, "jax": Jax}
