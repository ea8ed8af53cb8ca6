"""A check as JUnit XML: one test case per case and dtype, its clauses as properties."""

from xml.etree import ElementTree

from goldenppo.conformance.result import Check, wrong_element


def text(check: Check) -> str:
    """The XML document."""
    suites = ElementTree.Element("testsuites", name=f"goldenppo {check.hello['name']}")
    for report in check.ops:
        if not report.cases:
            continue
        suite = ElementTree.SubElement(suites, "testsuite", name=report.op)
        failures = errors = skipped = 0
        for verdict in report.cases:
            row = ElementTree.SubElement(
                suite, "testcase", classname=f"goldenppo.{report.op}", name=f"{verdict.case.id.split('/')[1]}[{verdict.dtype}]"
            )
            properties = ElementTree.SubElement(row, "properties")
            for label in verdict.case.clauses:
                ElementTree.SubElement(properties, "property", name="clause", value=label)
            ElementTree.SubElement(properties, "property", name="level", value=verdict.case.level)
            if verdict in report.failed:
                kind = "error" if verdict.verdict == "error" else "failure"
                errors, failures = errors + (kind == "error"), failures + (kind == "failure")
                found = ElementTree.SubElement(row, kind, message=_clean(message(report, verdict)))
                found.text = _clean(verdict.case.purpose)
            elif verdict.verdict not in ("pass", "coarse"):
                skipped += 1
                ElementTree.SubElement(row, "skipped", message=_clean(verdict.reason or verdict.verdict))
        counts = {"tests": len(report.cases), "failures": failures, "errors": errors, "skipped": skipped}
        for name, count in counts.items():
            suite.set(name, str(count))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def message(report, verdict) -> str:
    """One line that says what is wrong with a case."""
    element = wrong_element(verdict)
    if element is None:
        said = verdict.reason or (verdict.match.problem if verdict.match else "fails")
    else:
        where = f"[{', '.join(map(str, element['index']))}]" if element["index"] else ""
        said = f"{element['output']}{where}: got {element['got']!r}, want {element['want']!r} ({verdict.use:.3g} × the tolerance)"
    named = [item.id for item in report.matches if item.exact]
    named += [report.precision] if report.precision.startswith("computes") else []
    return f"{said}; matches {', '.join(named)}" if named else said


def _clean(said: str) -> str:
    """XML 1.0 has no control characters; an exception's text may."""
    return "".join(letter if letter >= " " or letter in "\t\n" else "�" for letter in said)
