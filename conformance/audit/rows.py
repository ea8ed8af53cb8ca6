"""Edges of a large dump whose result has a number per position: a few windows tell the variant, a full pass compares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

import goldenppo.reference as reference
from goldenppo.conformance.audit import engine
from goldenppo.conformance.audit.step import Step
from goldenppo.conformance.audit.tracked import Tracked, tracked, tracked_gae, within
from goldenppo.conformance.cases import Entry, table
from goldenppo.conformance.run import Attempt
from goldenppo.reference.shaped_rewards import score_slot
from goldenppo.reference.whiten import EPSILONS, deviation

BLOCK = 1 << 18  # positions of a block
CHAIN = 1 << 20  # positions of a block where the work is a loop over the columns: fewer, taller blocks
LOGITS = 1 << 21  # numbers of a block of logits
NAMED = 1 << 16  # positions of a dump up to which deviations of a whole batch are tried
LAWS = {"float64": ("float64", "float32"), "float32": ("float32", "bfloat16")}  # a dump's dtype, and the one it may be right to


def judge_rows(finding: engine.Finding, step: Step, params: dict) -> None:
    """Judges an edge block by block; fills the finding in.

    As in `check`, float64 numbers that are right to float32 accuracy are coarse, and float32 numbers that are right to 16 bits
    only are wrong, and computed in 16 bits.
    """
    said = None
    for law in LAWS.get(finding.dtype, (finding.dtype,)):
        _judge_by(finding, step, params, law)
        if finding.verdict == "right":
            break
        said = said or (finding.report, finding.first, finding.worst)
    assert finding.report is not None
    if said is None:
        return
    if finding.verdict == "right" and finding.dtype == "float64":
        finding.report.precision = "coarse"
        return
    computes = finding.verdict == "right"
    finding.report, finding.first, finding.worst = said
    finding.verdict = "wrong"
    if computes and finding.report is not None:
        finding.report.precision = "computes-in-bfloat16"
    elif finding.first:
        _name(finding, step, params)


def _judge_by(finding: engine.Finding, step: Step, params: dict, law: str) -> None:
    """Judges by the law of one dtype."""
    finding.verdict, finding.first = "wrong", ""
    if finding.edge.op == "whiten":
        _whitened(finding, step, Tracked(step.get(finding.ends["x"])), "whitened", ["removed", "kept"], law)
        return
    for number, variant in enumerate(_identified(finding, step, params, law)):
        raw = _compare(finding, step, params, variant, law)
        assert finding.report is not None
        if finding.verdict == "right":
            if number:  # the first one that was left is wrong further on, so the windows could not tell them apart
                finding.report.variant = {axis: [value] for axis, value in variant.items()}
            if raw is not None:
                _whitened(finding, step, raw, "advantages", ["removed"], law)
            elif "advantages" in finding.ends and finding.edge.op in ("gae", "experience"):
                finding.report.variant["whitening"] = ["none"]
            return


def _identified(finding: engine.Finding, step: Step, params: dict, law: str) -> Iterator[dict]:
    """The variants that the exact oracle leaves on a few windows; sets the finding where the windows are wrong already."""
    op = finding.edge.op
    if op in ("token_logprobs", "entropy", "end_score"):  # no variants
        finding.report = engine.judging.OpReport(op, "conforms")
        yield {}
        return
    tensors = _windows(finding, step)
    if "returns" in tensors:
        tensors.pop("advantages", None)  # they may be whitened, over more than a few windows
    attempt = engine.exact_attempt(finding.edge, tensors, params, law, finding.ends)
    engine.settle(finding, attempt)
    if finding.verdict == "right" or (op in ("gae", "experience") and "returns" not in tensors):
        assert finding.report is not None
        yield from engine.variants_left(finding.report)


def _windows(finding: engine.Finding, step: Step) -> dict[str, torch.Tensor]:
    """A few rows, at the positions up to one past each row's last token; rows with holes first."""
    stop = next(iter(step.blocks(1, 1 << 17)))[1]
    tensors = engine.tensors_of(finding.edge, finding.ends, step, 0, stop)
    mask, width = step.mask(0, stop), min(engine.WINDOW, step.width)
    starts = mask[:, 1:] & ~mask[:, :-1]
    interest = (starts.sum(1) + mask[:, 0]).float() * 1000 - mask.sum(1)  # holes, then short rows
    rows = torch.where(mask.any(1), interest, -math.inf).argsort(descending=True)[: engine.WINDOWS]
    position = torch.arange(step.width)
    last = torch.where(mask, position, -1).amax(1)[rows]
    first = (last + 2 - width).clamp(0, step.width - width)
    columns = first[:, None] + torch.arange(width)  # [rows, width]
    return {
        name: tensor[rows].gather(1, columns) if tensor.dim() == 2 and tensor.shape[1] == step.width else tensor[rows]
        for name, tensor in tensors.items()
        if tensor.dim()
    }


def _blocks(finding: engine.Finding, step: Step) -> Iterator[tuple[int, int, slice, dict]]:
    """Rows, columns and tensors of one block after the other."""
    edge, ends = finding.edge, finding.ends
    if "logits" not in ends:
        for start, stop in step.blocks(1, CHAIN if edge.op in ("gae", "experience") else BLOCK):
            yield start, stop, slice(0, step.width), engine.tensors_of(edge, ends, step, start, stop)
        return
    vocabulary = step.dump.shapes[ends["logits"]][2]
    columns = max(1, min(step.width, LOGITS // vocabulary))
    rows = max(1, LOGITS // (vocabulary * columns))
    output = next(iter(edge.outputs))
    for start in range(0, step.rows, rows):
        stop = min(start + rows, step.rows)
        got = step.get(ends[output], start, stop)
        compared = engine.compared(edge, ends, step, step.mask(start, stop))
        for low in range(0, step.width, columns):
            part = slice(low, min(low + columns, step.width))
            logits, tokens = step.logits(ends["logits"], start, stop, part)
            given = {"logits": logits, "tokens": tokens} if edge.op == "token_logprobs" else {"logits": logits[:, :-1]}
            yield start, stop, part, given | {output: got[:, part], "compared": compared[:, part]}


def _compare(finding: engine.Finding, step: Step, params: dict, variant: dict, law: str) -> Tracked | None:
    """Compares all of the dump under one variant.

    Returns:
        The advantages before whitening, where they are all that differs; None otherwise.
    """
    op, wrong, worst, compared = finding.edge.op, {}, 0.0, 0
    plain = {axis: value for axis, value in variant.items() if axis not in ("whitening", "variance", "epsilon")}
    kept = None
    for start, stop, columns, tensors in _blocks(finding, step):
        made = _made(op, tensors, params, plain)
        for output in finding.edge.outputs:
            if output not in tensors:
                continue
            want = made[output]
            share = engine.shares(tensors[output], want, law, finding.dtype)
            share = torch.where(tensors["compared"], share, 0.0) if "compared" in tensors else share
            compared += int(tensors["compared"].sum()) if "compared" in tensors else share.numel()
            worst = max(worst, float(share.max())) if output not in wrong else worst
            if (share > 1).any() and output not in wrong:
                at = (share > 1).nonzero()[-1 if op == "gae" else 0].tolist()
                got, right = float(tensors[output][tuple(at)]), float(want.value[tuple(at)])
                where = [at[0] + start, *(index + columns.start for index in at[1:])]
                wrong[output] = (where, f"{finding.ends[output]}{where}: got {got!r}, want {right!r}", float(share.max()))
            if output == "advantages":
                if kept is None:
                    kept = Tracked(torch.empty(step.rows, step.width, dtype=torch.float64), torch.empty(step.rows, step.width))
                kept[start:stop] = want  # its gauge in float32: an error bound needs no 53 bits
    finding.compared, finding.worst = compared, worst
    if set(wrong) == {"advantages"}:
        finding.verdict, finding.first = "right", ""
        return kept
    finding.verdict = "wrong" if wrong else "right"
    if wrong:
        _, finding.first, finding.worst = next(iter(wrong.values()))
    return None


def _made(op: str, tensors: dict, params: dict, variant: dict) -> dict[str, Tracked]:
    """What the reference makes of a block, by output; advantages not whitened."""
    if op == "gae":
        given = {name: tensors[name] for name in ("rewards", "values", "mask")}
        return dict(zip(("advantages", "returns"), tracked_gae(**given, **params, **variant), strict=True))
    if op == "experience":
        shaping = {axis: value for axis, value in variant.items() if axis != "gaps"}
        mask, own = tensors["mask"], {name: value for name, value in params.items() if name in ("kl_coef", "score_clip")}
        rewards = engine.call(reference.shaped_rewards, tensors, own, "shaped_rewards", shaping)
        steps = mask | score_slot(mask, variant.get("score_at", "last_token"))
        chain = {name: params[name] for name in ("gamma", "lam")} | {"gaps": variant.get("gaps", "skip")}
        made = tracked_gae(rewards.value, tensors["values"], steps, **chain)
        advantages, returns = (Tracked(part.value, part.gauge + _carried(rewards, steps, chain)) for part in made)
        return {"rewards": rewards, "advantages": advantages, "returns": returns}
    made = engine.call(getattr(reference, op), tensors, params, op, variant)
    return {next(iter(table()["ops"][op]["outputs"])): tracked(made)}


def _carried(rewards: Tracked, steps: torch.Tensor, chain: dict) -> torch.Tensor:
    """The gauge that rewards bring into the advantages: Σ (γλ)^k of it, the recursion itself."""
    zeros = torch.zeros_like(rewards.value)
    decay = chain["gamma"] * chain["lam"]
    return reference.gae(rewards.gauge, zeros, steps, gamma=1.0, lam=decay, gaps=chain["gaps"]).advantages


def _whitened(finding: engine.Finding, step: Step, x: Tracked, output: str, means: list[str], law: str) -> None:
    """Compares with the whitening of x over the whole batch, in each of its forms."""
    mask = step.mask()
    statistics: dict[str, tuple[Tracked, Tracked]] = {}
    best: tuple[float, dict, str] = (math.inf, {}, "")
    for variance, epsilon, mean in itertools.product(("unbiased", "biased"), EPSILONS, means):
        if variance not in statistics:
            statistics[variance] = _moments(x, mask, step, variance)
        mu, var = statistics[variance]
        worst, first = _whitening_error(finding, step, x, mask, (mu, deviation(var, epsilon), mean), output, law)
        if worst < best[0]:
            best = (worst, {"variance": variance, "epsilon": epsilon, "mean": mean}, first)
        if worst <= 1:
            break
    finding.worst, chosen, finding.first = best
    finding.verdict, finding.first = ("right", "") if best[0] <= 1 else ("wrong", finding.first)
    if finding.report is None:
        finding.report = engine.judging.OpReport(finding.edge.op, "conforms")
    if output == "advantages":
        chosen = {"whitening": "inside", "variance": chosen["variance"], "epsilon": chosen["epsilon"]}
        if finding.edge.op == "experience":
            chosen = {"whitening": "inside"}
    finding.report.variant |= {axis: [value] for axis, value in chosen.items()}
    finding.compared = max(finding.compared, int(mask.sum()))


def _whitening_error(
    finding: engine.Finding, step: Step, x: Tracked, mask: torch.Tensor, form: tuple[Tracked, Tracked, str], output: str, law: str
) -> tuple[float, str]:
    """The worst share of the tolerance under one form of whitening (mean, divisor, what becomes of the mean), and where it is.

    Stops at the first block that is wrong.
    """
    mu, divisor, mean = form
    name, worst, first = finding.ends[output], 0.0, ""
    for start, stop in step.blocks(1):
        rows = slice(start, stop)
        want = (x[rows] - mu) / divisor
        want = want + mu if mean == "kept" else want
        got = step.get(name, start, stop)
        share = torch.where(mask[rows], engine.shares(got, want, law, finding.dtype), 0.0)
        if float(share.max()) > worst:
            worst = float(share.max())
            row, column = (share == share.max()).nonzero()[0].tolist()
            numbers = f"got {float(got[row, column])!r}, want {float(want.value[row, column])!r}"
            first = f"{name}[{row + start}, {column}]: {numbers}"
        if worst > 1:
            break
    return worst, first


def _moments(x: Tracked, mask: torch.Tensor, step: Step, variance: str) -> tuple[Tracked, Tracked]:
    """`moments` of the reference, block by block: Σ x/n, and Σ (x − μ)²/(n − 1) or /n."""
    n = int(mask.sum())
    mu = _total(within(x[rows], mask[rows]) for rows in _slices(step)) / n
    squares = _total(within(x[rows] - mu, mask[rows]) ** 2 for rows in _slices(step))
    return mu, squares / (n - 1 if variance == "unbiased" else n)


def _total(parts: Iterator[Tracked]) -> Tracked:
    total = tracked(0.0)
    for part in parts:
        total = total + part.sum()
    return total


def _slices(step: Step) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in step.blocks(1))


def _name(finding: engine.Finding, step: Step, params: dict) -> None:
    """Holds the deviations against the first rows of the dump: all of it where that is not too much."""
    op = finding.edge.op
    if "logits" in finding.ends:
        _, _, _, tensors = next(block for block in _blocks(finding, step) if _is_wrong(finding, block[3], params))
        keep = min(4, tensors["logits"].shape[0])
        tensors = {name: tensor[:keep, :9] for name, tensor in tensors.items()}
        for name in [output for output in finding.edge.outputs if output in tensors] + ["compared"]:
            tensors[name] = tensors[name][:, : tensors["logits"].shape[1] - (op == "token_logprobs")]
    else:
        tensors = engine.tensors_of(finding.edge, finding.ends, step, 0, max(1, min(step.rows, NAMED // max(1, step.width))))
    answers: dict[str, list[Entry]] = {}
    assert finding.report is not None
    variant = {axis: values[0] for axis, values in finding.report.variant.items()}
    made = engine.call(getattr(reference, op), tensors, params, op, variant)
    for output in table()["ops"][op]["outputs"]:
        if output in tensors:
            right = engine.block(getattr(made, output) if hasattr(made, "_asdict") else made)
            if "compared" in tensors:
                keep = tensors["compared"].reshape(-1).tolist()
                want = tuple(number if on else None for number, on in zip(right.want, keep, strict=True))
                right = engine.Block(right.shape, want, right.gauge, right.low, right.high)
            answers[output] = [Entry({axis: [value] for axis, value in variant.items()}, right, {})]
    mask = tensors.get("mask")
    case = engine.case_of(finding, answers, params, mask is None or bool(mask.all()))
    attempt = Attempt(case, finding.dtype, dict(variant), {"result": engine.result(finding.edge, tensors, finding.dtype)})
    first, worst, compared = finding.first, finding.worst, finding.compared
    engine.settle(finding, attempt, engine.prepared(op, case, tensors))
    finding.verdict, finding.first, finding.worst, finding.compared = "wrong", first, worst, compared


def _is_wrong(finding: engine.Finding, tensors: dict, params: dict) -> bool:
    op, output = finding.edge.op, next(iter(finding.edge.outputs))
    want = engine.call(getattr(reference, op), tensors, params, op, {})
    return bool(
        (torch.where(tensors["compared"], engine.shares(tensors[output], want, finding.dtype, finding.dtype), 0.0) > 1).any()
    )
