"""Learning curves as an SVG file and as a line of text, without a plotting library."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

PANELS = (
    ("true_reward", "true reward"),
    ("learned_reward", "learned reward"),
    ("sequence_kl", "KL from the reference model, per response"),
    ("mean_entropy", "entropy per token"),
)
COLOURS = ("#0b6e99", "#c44e52", "#55a868", "#8172b2", "#cc8b2c", "#64748b")
WIDTH, HEIGHT, MARGIN = 420, 220, 46
BARS = "▁▂▃▄▅▆▇█"


def svg(tables: dict[str, list[dict]], title: str) -> str:
    """Draw four panels over the PPO steps, one line per run.

    Args:
        tables: name of the run → its rows, one per step.
        title: a sentence over the picture.
    """
    total_height = 2 * HEIGHT + 76
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{total_height}" '
        f'viewBox="0 0 {2 * WIDTH} {total_height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{2 * WIDTH}" height="{total_height}" fill="#ffffff"/>',
        f'<text x="16" y="22" font-size="14">{escape(title)}</text>',
    ]
    for index, (key, label) in enumerate(PANELS):
        x, y = index % 2 * WIDTH, 32 + index // 2 * HEIGHT
        parts += _panel({name: [row[key] for row in rows] for name, rows in tables.items()}, label, x, y)
    for index, name in enumerate(tables):
        x, y = 16 + 100 * index, total_height - 16
        parts.append(f'<path d="M{x} {y - 4}h16" stroke="{_colour(index)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 22}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def spark(values: Sequence[float], width: int = 40) -> str:
    """Draw one curve as a line of block characters, its smallest value lowest."""
    if len(values) > width:
        values = [values[i * len(values) // width] for i in range(width)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def _panel(curves: dict[str, list[float]], label: str, left: float, top: float) -> list[str]:
    numbers = [value for curve in curves.values() for value in curve]
    low, high = min(numbers), max(numbers)
    if high == low:
        low, high = low - 0.5, high + 0.5
    steps = max(len(curve) for curve in curves.values())
    x0, x1, y0, y1 = left + MARGIN, left + WIDTH - 16, top + HEIGHT - 30, top + 28

    def place(step: int, value: float) -> str:
        x = x0 + (x1 - x0) * step / max(steps - 1, 1)
        return f"{x:.1f},{y0 + (y1 - y0) * (value - low) / (high - low):.1f}"

    parts = [
        f'<text x="{x0}" y="{top + 18}">{escape(label)}</text>',
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#94a3b8"/>',
        f'<text x="{x0}" y="{y0 + 14}">0</text>',
        f'<text x="{x1}" y="{y0 + 14}" text-anchor="end">step {steps - 1}</text>',
        f'<text x="{x0 - 6}" y="{y0}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{x0 - 6}" y="{y1 + 8}" text-anchor="end">{high:.3g}</text>',
    ]
    for index, curve in enumerate(curves.values()):
        points = " ".join(place(step, value) for step, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(index)}" stroke-width="1.5"/>')
    return parts


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
