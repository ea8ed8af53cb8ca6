"""A badge endpoint file: level, suite version and n of m ops, never a bare percent."""

import json


def text(result: dict) -> str:
    """The JSON that a badge service reads.

    Args:
        result: a result document.
    """
    offered = [op for op in result["ops"] if op["verdict"] in ("conforms", "does-not-conform", "error")]
    good = sum(op["verdict"] == "conforms" for op in offered)
    colour = "lightgrey" if not offered else "brightgreen" if good == len(offered) else "red"
    message = f"{result['level']} {good}/{len(offered)} ops, suite {result['suite']['version']}"
    return (
        json.dumps({"schemaVersion": 1, "label": f"goldenppo: {result['adapter']['name']}", "message": message, "color": colour})
        + "\n"
    )
