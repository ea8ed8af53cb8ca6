"""Adapters: thin files that drive a trainer's own code, and what loads and calls them (standard library only)."""

from goldenppo.adapters.interface import Unsupported

__all__ = ["Unsupported"]
