"""The conformance engine: runs a trainer's code against the fixtures and says what it found."""


def __getattr__(name: str):
    """`from goldenppo.conformance import Recorder`, without importing torch for those who do not ask."""
    if name == "Recorder":
        from goldenppo.conformance.audit.recorder import Recorder

        return Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
