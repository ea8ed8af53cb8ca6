"""The worst shares of the tolerance, shown at the end: the evidence for the law."""

import pytest

EVIDENCE = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[EVIDENCE] = {}


@pytest.fixture
def evidence(request):
    """(implementation, op, dtype) → worst share of the tolerance."""
    return request.config.stash[EVIDENCE]


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash[EVIDENCE]
    if not found:
        return
    from tabulate import tabulate

    dtypes = ("float64", "float32", "float16", "bfloat16")
    rows = []
    for name in dict.fromkeys(name for name, _, _ in found):
        row = [name, len({op for who, op, _ in found if who == name})]
        for dtype in dtypes:
            shares = [(share, op) for (who, op, d), share in found.items() if (who, d) == (name, dtype)]
            row.append("{:.2f} {}".format(*max(shares)) if shares else "")
        rows.append(row)
    terminalreporter.section("worst share of the tolerance")
    terminalreporter.write_line(tabulate(rows, headers=["implementation", "ops", *dtypes]))
