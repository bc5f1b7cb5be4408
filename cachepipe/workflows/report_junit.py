"""A report as JUnit XML, so that CI shows each shape bucket as a test.

A shape bucket fails where a restored process missed, tuned, compiled, or gave other outputs than eager. What gates of a
verification refused are cases of the suite `gates`. Without a restored process every case is skipped: nothing is proved.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from cachepipe.workflows.report import RESTORED_STEPS, BucketRow, Report, work_text
from cachepipe.workflows.report_page import report_page

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, not even escaped."""


def report_junit(found: Report) -> bytes:
    """Returns the document, UTF-8."""
    root = Element("testsuites", name="cachepipe")
    restored = {row.entry for row in found.steps if row.step in RESTORED_STEPS}
    causes = report_page(found)["misses"]
    failed = [step.entry for step in found.steps if step.error]  # a process may die before its first shape bucket
    for entry in dict.fromkeys([*(row.entry for row in found.shape_buckets), *failed]):
        suite = SubElement(root, "testsuite", name=_clean(entry))
        for row in found.shape_buckets:
            if row.entry == entry:
                _case(suite, row, entry in restored, _missing(row, causes))
        for step in found.steps:
            if step.entry == entry and step.error:
                _failed(
                    SubElement(suite, "testcase", classname=_clean(entry), name=_clean(f"process {step.step}")),
                    [step.error],
                )
    if found.violations or any(summary.get("kind") == "verify" for summary in found.summaries):
        suite = SubElement(root, "testsuite", name="gates")
        for text in found.violations or ("all gates",):
            case = SubElement(suite, "testcase", classname="gates", name=_clean(text.partition(": limit")[0]))
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


def _case(suite: Element, row: BucketRow, is_restored: bool, problems: Sequence[str]) -> None:
    case = SubElement(suite, "testcase", classname=_clean(row.entry), name=_clean(row.shape_bucket))
    case.set("time", f"{row.restored_s or 0.0:.3f}")
    if not is_restored:
        SubElement(case, "skipped", message="no restored process is among the evidence")
        return
    work = row.work
    done = work.benchmarks + work.tuning_runs + work.triton_compiles + work.native_builds
    found = [*row.problems, *problems, *([f"work was done: {work_text(work)}"] if done else [])]
    if found:
        _failed(case, found)


def _missing(row: BucketRow, causes: Sequence[dict[str, str]]) -> list[str]:
    missed = [f"{layer}: {count} hit" for layer, count in row.hits.items() if len({*count.split("/")}) > 1]
    if not missed:
        return []
    mine = [one for one in causes if row.entry in one["where"] and f"· {row.shape_bucket} ·" in f"{one['where']} ·"]
    return [*missed, *(f"{one['cause']}{' → ' + one['fix'] if one['fix'] else ''}" for one in mine)]


def _failed(case: Element, lines: Sequence[str]) -> None:
    failure = SubElement(case, "failure", message=_clean(lines[0])[:500])
    failure.text = _clean("\n".join(lines))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
