"""`goldenppo audit DUMP…`: is the arithmetic of this training step right?"""

import argparse
import json
import textwrap

EPILOG = """names in a dump (safetensors; any subset, an edge is checked where all its ends are there):
  logits [B, L, V], tokens [B, L], logprobs, old_logprobs, ref_logprobs [B, T], ref_logits,
  values, old_values, scores [B], rewards, raw_advantages, advantages, returns, kl, ratio, entropy,
  mask [B, T] (True = counts), value_mask (where the value loss has its own), attention_mask,
  policy_loss, clip_fraction, approx_kl, value_loss,
  value_clip_fraction, mean_entropy, kl_loss, loss, chosen_scores, rejected_scores, ...
parameters: a JSON object under the metadata key `params`:
  {"gamma": 1.0, "lam": 0.95, "kl_coef": 0.05, "clip": 0.2, "value_clip": 0.2, "temperature": 1.0}

exit codes:
  0  every edge that was checked is right
  1  an edge is wrong
  2  usage: a file is missing, truncated or no dump; shapes that do not belong together
  4  nothing could be checked

examples:
  goldenppo audit step.safetensors
  goldenppo audit rank0.safetensors rank1.safetensors --json audit.json
  goldenppo audit step.safetensors --mask-from attention_mask --layout aligned
"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "audit",
        help="recompute a training step from its dumped tensors",
        description="Recomputes every edge that a dump of a real training step allows: which are right, as which variants.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dumps", nargs="*", metavar="DUMP", help="a safetensors file, or one per rank")
    parser.add_argument("--edge", action="append", default=[], metavar="EDGE", help="only this edge (may be repeated)")
    parser.add_argument("--layout", choices=("shifted", "aligned"), help="logits at t speak of the token at t+1, or at t")
    parser.add_argument("--mask-from", choices=("mask", "attention_mask", "pad", "all"), help="where the mask comes from")
    parser.add_argument("--json", metavar="F", help="write the findings as JSON")
    parser.set_defaults(main=main)


def main(args) -> int:
    from goldenppo.adapters.interface import UsageError
    from goldenppo.conformance import files
    from goldenppo.conformance.audit.edges import EDGES
    from goldenppo.conformance.audit.engine import audit_ranks
    from goldenppo.conformance.audit.micro import LOSSES

    if not args.dumps:
        raise UsageError("no dump given; `goldenppo audit step.safetensors` (`--help` lists the names in a dump)")
    known = [*(edge.name for edge in EDGES), *(f"micro_{loss}" for loss in LOSSES)]
    for edge in args.edge:
        if edge not in known:
            raise UsageError(f"there is no edge {edge!r}; the edges are {', '.join(known)}")
    if args.json:
        files.check_writable(args.json)
    step, findings = audit_ranks(args.dumps, args.layout, args.mask_from, args.edge)
    padding = step.padding() if step.width else ""
    if step.width and not padding:
        findings = []
    code = 1 if any(f.verdict == "wrong" for f in findings) else 0 if any(f.verdict == "right" for f in findings) else 4
    if args.json:
        files.write(args.json, json.dumps(document(step, findings, code), indent=1) + "\n")
    print(show(args.dumps, step, padding, findings, code))
    return code


def show(dumps: list[str], step, padding: str, findings: list, code: int) -> str:
    """The report: what was assumed, a table over the edges, a screen for each wrong one."""
    from goldenppo.conformance.render.terminal import paint, wrap

    parts = [f"{dumps[0]}" + (f" and {len(dumps) - 1} more" if len(dumps) > 1 else "")]
    if step.width:
        parts[0] += f"\n{wrap(padding, '') if padding else 'the mask has no token: nothing can be compared'}"
    if step.assumed:
        parts.append("\n".join(["Assumed", *(wrap(line) for line in step.assumed)]))
    if findings:
        parts.append(matrix(findings))
    inferred = [
        f"{name} = {item}, read from {finding.edge.name}"
        for finding in findings
        for name, item in finding.inferred.items()
        if finding.verdict == "right"
    ]
    if inferred:
        parts.append("\n".join(["Not given, read from the numbers", *(wrap(line) for line in dict.fromkeys(inferred))]))
    coarse = [finding.edge.name for finding in findings if finding.report and finding.report.precision == "coarse"]
    if coarse:
        parts.append(wrap(f"agrees to float32 accuracy at float64: {', '.join(coarse)}", ""))
    unchecked = [f"{finding.edge.name}: {finding.reason}" for finding in findings if finding.verdict == "unchecked"]
    if unchecked:
        parts.append("\n".join(["Not checked", *(wrap(line) for line in unchecked)]))
    parts += [failure(finding) for finding in findings if finding.verdict == "wrong"]
    wrong = [finding.edge.name for finding in findings if finding.verdict == "wrong"]
    right = sum(finding.verdict == "right" for finding in findings)
    last = {0: f"right: {right} edges", 1: f"wrong: {', '.join(wrong)}", 4: "no verdict: nothing could be checked"}[code]
    return "\n\n".join([*parts, paint(last, {0: "32", 1: "31", 4: "33"}[code])])


def matrix(findings: list) -> str:
    """One row per edge that was checked, and the dtypes whose law they were held against."""
    from tabulate import tabulate

    from goldenppo.conformance.render import terminal

    rows: list[list] = []
    dtypes: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict != "unchecked":
            worst = f"{finding.worst:.2f}" if finding.verdict == "right" else ""
            variant = terminal.variant(finding.report) if finding.report else ""
            wrong = finding.verdict == "wrong"
            mark = terminal.paint("WRONG" if wrong else "right", "31" if wrong else "32")
            name = textwrap.wrap(finding.edge.name, 16, break_on_hyphens=False)
            name += [_short(finding.place)] if finding.place else []
            rows.append(["\n".join(name), mark, variant, finding.compared, worst])
            if finding.dtype:
                dtypes.setdefault(finding.dtype, []).append(finding.edge.name)
    if not rows:
        return ""
    table = tabulate(rows, headers=["edge", "verdict", "variant", "numbers", "worst"], disable_numparse=True)
    laws = [dtype if len(dtypes) == 1 else f"{dtype} ({', '.join(dict.fromkeys(names))})" for dtype, names in dtypes.items()]
    return f"{table}\n\n{terminal.wrap('held against the law of ' + ', '.join(laws), '')}" if laws else table


def _short(path: str) -> str:
    """The end of a file's name."""
    return path.replace("\\", "/").rpartition("/")[2][-16:]


def failure(finding) -> str:
    """What is wrong with an edge: the clause, the numbers, the deviation."""
    from goldenppo.conformance.render import terminal

    ends = ", ".join(f"{name}" for end, name in finding.ends.items() if end in finding.edge.inputs)
    made = ", ".join(name for end, name in finding.ends.items() if end in finding.edge.outputs)
    place = f" in {finding.place}" if finding.place else ""
    head = terminal.paint(f"WRONG {finding.edge.name}{place}: {made} from {ends}", "31")
    if finding.reason:
        return "\n".join([head, terminal.wrap(finding.reason)])
    report = finding.report
    if finding.first:
        lines = [head, terminal.wrap(finding.first), f"    error {finding.worst:.3g} × the tolerance of {finding.dtype}"]
        return "\n".join([*lines, "", *terminal.named(report)])
    text = terminal.screen(report, report.failed).split("\n")
    return "\n".join([head, *text[1:]])


def document(step, findings: list, code: int) -> dict:
    """The findings as a JSON document."""
    return {
        "schema": "goldenppo/audit/1",
        "assumed": step.assumed,
        "edges": [
            {
                "edge": finding.edge.name,
                "op": finding.edge.op,
                "ends": finding.ends,
                "file": finding.place or None,
                "verdict": finding.verdict,
                "reason": finding.reason,
                "dtype": finding.dtype,
                "compared": finding.compared,
                "worst": finding.worst if finding.worst < float("inf") else "inf",
                "variant": {axis: values[0] if len(values) == 1 else values for axis, values in finding.variant.items()},
                "matches": [named.id for named in (finding.report.matches if finding.report else []) if named.exact]
                + ([finding.report.precision] if finding.report and finding.report.precision.startswith("computes") else []),
                "inferred": {name: item.value for name, item in finding.inferred.items()},
            }
            for finding in findings
        ],
        "exit_code": code,
    }
