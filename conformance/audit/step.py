"""A dump brought into one layout: response windows [B, T], a mask, and logits that speak of the tokens beside them.

Trainers keep full sequences or response windows, shifted or not. Which one a dump holds is read from the shapes, and from
the numbers where the shapes leave two readings; everything that was assumed is said in `Step.assumed`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from goldenppo.adapters.interface import UsageError
from goldenppo.conformance.audit.dump import Dump
from goldenppo.conformance.audit.edges import MASKS, STATES, TOKENWISE

LAYOUTS = ("shifted", "aligned")
MASK_SOURCES = ("mask", "attention_mask", "pad", "all")
_ROWS = 8  # rows that are looked at to tell layouts apart


class Step:
    """Aligned views of a dump.

    Attributes:
        dump: the files.
        rows, width: B and T.
        params: parameters as given.
        assumed: sentences on what was read from shapes and numbers.
    """

    def __init__(self, dump: Dump, layout: str | None = None, mask_from: str | None = None):
        """Finds the layout.

        Args:
            dump: an opened dump.
            layout: "shifted" (logits at position t speak of the token at t + 1) or "aligned" (of the token at t); found if None.
            mask_from: where the mask comes from, one of MASK_SOURCES; found if None.

        Raises:
            UsageError: the shapes do not belong together, or what was stated is not in the dump.
        """
        self.dump, self.params, self.assumed = dump, dump.params, []
        self.layout = layout or self.params.get("layout")
        self.mask_from = mask_from or self.params.get("mask_from")
        if self.layout not in (None, *LAYOUTS):
            raise UsageError(f"the layout is {self.layout!r}; expected {' or '.join(LAYOUTS)}")
        if self.mask_from not in (None, *MASK_SOURCES):
            raise UsageError(f"the mask's source is {self.mask_from!r}; expected one of {', '.join(MASK_SOURCES)}")
        self.mask_name = next((name for name in MASKS if name in dump), None)
        widths = {name: dump.shapes[name][1] for name in (*TOKENWISE, *STATES) if len(dump.shapes.get(name, ())) == 2}
        if self.mask_name and len(dump.shapes[self.mask_name]) != 2:
            raise UsageError(f"{self.mask_name} has shape {dump.shapes[self.mask_name]}; expected [B, T]")
        masks = {name: dump.shapes[name][1] for name in (self.mask_name,) if name}
        self.rows = self._rows([*widths, *masks])
        self.width = min((widths | masks).values(), default=0)
        if self.width == 0 and "tokens" in dump and len(dump.shapes["tokens"]) == 2:
            self.rows, self.width = dump.shapes["tokens"][0], dump.shapes["tokens"][1] - 1
        for name, width in (widths | masks).items():
            if width != self.width:
                self.assumed.append(f"{name} has {width} positions: {self._cut_text(name, width)}")
        self._find_mask()
        if self.layout is None and "logits" in dump and self.width:
            self._find_layout()

    def _rows(self, names: list[str]) -> int:
        rows = {name: self.dump.shapes[name][0] for name in names}
        if len(set(rows.values())) > 1:
            given = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise UsageError(f"the tensors have different numbers of rows: {given}; expected one row per response in each")
        return next(iter(rows.values()), 0)

    def _cut(self, name: str, width: int) -> slice:
        """The columns of a tensor that make up the window."""
        if name in STATES:  # the state after the last token speaks of no token
            return slice(width - self.width - 1, width - 1) if width > self.width else slice(0, width)
        return slice(width - self.width, width)

    def _cut_text(self, name: str, width: int) -> str:
        cut = self._cut(name, width)
        return f"columns {cut.start} to {cut.stop - 1} are taken for the {self.width} response positions"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a tensor with the columns of the window, float64, int64 or bool."""
        if len(self.dump.shapes[name]) == 2 and name in (*TOKENWISE, *STATES, *MASKS):
            return self.dump.read(name, start, stop, self._cut(name, self.dump.shapes[name][1]))
        return self.dump.read(name, start, stop)

    def mask(self, start: int = 0, stop: int | None = None, name: str | None = None) -> torch.Tensor:
        """bool [rows, T], True where a token counts; `name` may be that of a loss's own mask."""
        stop = self.rows if stop is None else stop
        if name == "value_mask":
            return self.get(name, start, stop) > 0
        if self.mask_from == "mask":
            assert self.mask_name is not None  # or it would come from elsewhere
            return self.get(self.mask_name, start, stop) > 0
        if self.mask_from == "attention_mask":
            width = self.dump.shapes["attention_mask"][1]
            return self.dump.read("attention_mask", start, stop, slice(width - self.width, width)) > 0
        if self.mask_from == "pad":
            return self.targets(start, stop) != self.params["pad_id"]
        return torch.ones(stop - start, self.width, dtype=torch.bool)

    def _find_mask(self) -> None:
        has = {
            "mask": self.mask_name is not None,
            "attention_mask": "attention_mask" in self.dump and len(self.dump.shapes["attention_mask"]) == 2,
            "pad": "tokens" in self.dump and "pad_id" in self.params,
            "all": True,
        }
        if self.mask_from is not None:
            if not has[self.mask_from]:
                raise UsageError(f"the mask is to come from {self.mask_from}, which the dump does not have")
            return
        self.mask_from = next(source for source in MASK_SOURCES if has[source])
        text = {
            "attention_mask": f"no mask: the last {self.width} columns of attention_mask are taken for it",
            "pad": f"no mask: tokens other than pad_id {self.params.get('pad_id')} count",
            "all": "no mask, attention_mask or pad_id: every position counts",
        }
        if self.width and self.mask_from in text:
            self.assumed.append(text[self.mask_from])

    def padding(self) -> str:
        """Which side the responses are padded on, as the mask has it, in words; whether there is a token at all."""
        left = right = holes = tokens = 0
        for start, stop in self.blocks(1):
            mask = self.mask(start, stop)
            tokens += int(mask.sum())
            left += int((~mask[:, 0] & mask.any(1)).sum())
            right += int((~mask[:, -1] & mask.any(1)).sum())
            edges = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
            holes += int((edges > 1).sum())
        if not tokens:
            return ""
        sides = [f"{count} rows padded on the {side}" for side, count in (("left", left), ("right", right)) if count]
        sides += [f"{holes} rows with masked positions between tokens"] if holes else []
        return f"{self.rows} responses of up to {self.width} positions, {tokens} tokens" + (
            f"; {', '.join(sides)}" if sides else ""
        )

    def blocks(self, width: int, elements: int = 1 << 18) -> Iterator[tuple[int, int]]:
        """Ranges of rows such that a tensor of `width` numbers per position stays small."""
        size = max(1, elements // max(1, self.width * width))
        for start in range(0, self.rows, size):
            yield start, min(start + size, self.rows)

    def targets(self, start: int, stop: int) -> torch.Tensor:
        """int64 [rows, T], the response tokens."""
        width = self.dump.shapes["tokens"][1]
        return self.dump.read("tokens", start, stop, slice(max(width - self.width, 0), width))

    def logits(self, name: str, start: int, stop: int | None, columns: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and tokens such that position t speaks of token t + 1, over some columns of the window.

        Returns:
            float64 [rows, n + 1, V], the last position is not read; int64 [rows, n + 1], the first token is not read.
        """
        first, last, _ = columns.indices(self.width)
        offset = self.dump.shapes[name][1] - self.width - (1 if self.layout != "aligned" else 0)
        logits = self._columns(name, start, stop, first + offset, last + offset + 1)
        if "tokens" not in self.dump:  # an entropy needs none
            return logits, torch.zeros(logits.shape[:-1], dtype=torch.int64)
        before = self.dump.shapes["tokens"][1] - self.width - 1
        return logits, self._columns("tokens", start, stop, first + before, last + before + 1)

    def _columns(self, name: str, start: int, stop: int | None, first: int, last: int) -> torch.Tensor:
        """Columns first … last−1 of some rows; those beyond an end repeat the one there, and are read by nothing that counts."""
        width = self.dump.shapes[name][1]
        block = self.dump.read(name, start, stop, slice(max(first, 0), min(last, width)))
        return torch.cat([block[:, :1]] * max(-first, 0) + [block] + [block[:, -1:]] * max(last - width, 0), 1)

    def unspoken(self, name: str) -> bool:
        """Whether no logits speak of the first token of the window."""
        return self.dump.shapes[name][1] - self.width - (1 if self.layout != "aligned" else 0) < 0

    def _find_layout(self) -> None:
        """Logits and tokens of one width T fit twice: the log-probs tell which."""
        from goldenppo.reference import token_logprobs

        self.layout = "shifted"
        name = next((name for name in ("logprobs", "old_logprobs") if name in self.dump), None)
        if self.dump.shapes["logits"][1] > self.width or len(self.dump.shapes["logits"]) != 3:
            return
        if name is None or "tokens" not in self.dump:  # one entropy for the logits of each position
            self.layout = "aligned"
            return
        stop, columns = min(_ROWS, self.rows), slice(0, 256)
        mask, given = self.mask(0, stop)[:, columns], self.get(name, 0, stop)[:, columns]
        off: dict[str, float] = {}
        for layout in LAYOUTS:
            self.layout = layout
            made = token_logprobs(*self.logits("logits", 0, stop, columns), temperature=float(self.params.get("temperature", 1)))
            keep = mask.clone()
            keep[:, 0] &= not self.unspoken("logits")
            off[layout] = float((made - given)[keep].abs().median()) if keep.any() else float("inf")
        self.layout = min(off, key=lambda layout: off[layout])
        meaning = {"shifted": "logits at position t speak of the token at t + 1", "aligned": "of the token at t"}[self.layout]
        self.assumed.append(f"logits are {self.layout}, which {name} fits better: {meaning}")
