"""A report as JUnit XML, so that CI shows each shape bucket as a test.

A shape bucket fails by its faults (domain/verdict.py), a process by what no shape bucket shows: an error, work outside of the
calls, nothing looked up. What gates of a verification refused are cases of the suite `gates`. Without a restored process the
shape buckets of an entry are skipped and its case `process` fails: nothing is proved. So a document without a failure is a release
that is warm, and no other is.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from cachepipe.domain.evidence import Uncounted
from cachepipe.domain.job import PROOF_STEPS
from cachepipe.domain.printable import one_line, printable
from cachepipe.domain.verdict import Fault
from cachepipe.workflows.report import BucketRow, Report, process_faults
from cachepipe.workflows.report_page import report_page


def report_junit(found: Report) -> bytes:
    """Returns the document, UTF-8."""
    root = Element("testsuites", name="cachepipe")
    restored = {row.entry for row in found.steps if row.step in PROOF_STEPS}
    causes = report_page(found)["misses"]
    for entry in dict.fromkeys(step.entry for step in found.steps):
        suite = SubElement(root, "testsuite", name=one_line(entry))
        _properties(suite, [one for step in found.steps if step.entry == entry for one in step.uncounted])
        for row in found.shape_buckets:
            if row.entry == entry:
                faults = found.verdict.at(entry, row.shape_bucket)
                _case(suite, row, entry in restored, [*_words(faults), *_causes(row, faults, causes)])
        whole = process_faults(found, entry)
        for step in dict.fromkeys(fault.step for fault in whole):
            name = one_line(f"process {step}".strip())
            case = SubElement(suite, "testcase", classname=one_line(entry), name=name)
            _failed(case, _words([fault for fault in whole if fault.step == step]))
    if found.violations or any(summary.get("kind") == "verify" for summary in found.summaries):
        suite = SubElement(root, "testsuite", name="gates")
        for text in found.violations or ("all gates",):
            case = SubElement(suite, "testcase", classname="gates", name=one_line(text.partition(": limit")[0]))
            if found.violations:
                _failed(case, [text])
    for suite in [*root, root]:
        cases = list(suite.iter("testcase"))
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
        suite.set("errors", "0")
        suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
        suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    indent(root)
    document: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _properties(suite: Element, uncounted: Sequence[Uncounted]) -> None:
    """Tells what could not be counted; where a gate needs it, it is a failure too."""
    for number, one in enumerate(dict.fromkeys(uncounted)):
        properties = suite[0] if number else SubElement(suite, "properties")
        SubElement(properties, "property", name="not counted", value=one_line(str(one)))


def _case(suite: Element, row: BucketRow, is_restored: bool, problems: Sequence[str]) -> None:
    case = SubElement(suite, "testcase", classname=one_line(row.entry), name=one_line(row.shape_bucket))
    case.set("time", f"{row.restored_s or 0.0:.3f}")
    if problems:
        _failed(case, problems)
    elif not is_restored:
        SubElement(case, "skipped", message="no restored process is among the evidence")


def _words(faults: Sequence[Fault]) -> list[str]:
    return list(dict.fromkeys(fault.text for fault in faults))


def _causes(row: BucketRow, faults: Sequence[Fault], causes: Sequence[dict[str, str]]) -> list[str]:
    if not any(fault.is_lookup for fault in faults):
        return []
    mine = [one for one in causes if row.entry in one["where"] and f"· {row.shape_bucket} ·" in f"{one['where']} ·"]
    return [f"{one['cause']}{' → ' + one['fix'] if one['fix'] else ''}" for one in mine]


def _failed(case: Element, lines: Sequence[str]) -> None:
    failure = SubElement(case, "failure", message=one_line(lines[0])[:500])
    failure.text = "\n".join(printable(part) for line in lines for part in line.split("\n"))
