"""Specification, reference implementation, golden fixtures and conformance tests for RLHF-PPO trainers."""

from pathlib import Path as _Path

__version__ = "0.1.0"

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    # A checkout: spec/, reference/, ... lie at the repository root. The wheel carries
    # them inside this package (see force-include in pyproject.toml).
    __path__.append(str(_root))
