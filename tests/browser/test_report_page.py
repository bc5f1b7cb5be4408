"""The HTML report in a real browser: it opens, filters, can be read in every size and scheme, and talks to nobody.

Screenshots are kept for review in `ci/results/`; remove them there to have them taken again.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from cachepipe.adapters.html_page import render_page
from cachepipe.adapters.workdir import write_evidence
from cachepipe.workflows.report import report
from cachepipe.workflows.report_page import report_page
from tests.support.evidence_files import ATTACK, ENTRIES, WARM, evidence, write_release
from tests.support.release import REPOSITORY

SHOTS = REPOSITORY / "ci" / "results"
MAX_SHOT_BYTES = 300_000
MIN_CONTRAST = 4.5
"""WCAG 2.1 AA for text of usual size."""

CONTRASTS = """
const parse = (text) => { const p = text.match(/[\\d.]+/g).map(Number); return p.length > 3 ? p : [...p, 1]; };
const light = (rgb) => { const c = rgb.slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
const ground = (element) => { for (let at = element; at; at = at.parentElement) { const c = parse(getComputedStyle(at).backgroundColor); if (c[3] > 0.99) return c; }
  return [255, 255, 255, 1]; };
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(element.tagName) || !element.offsetParent) continue;
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walker.currentNode.textContent.trim().slice(0, 40)]);
}
return found;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "this test needs a browser: apt-get install chromium chromium-driver fonts-dejavu-core"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-GB"):
        options.add_argument(word)
    options.add_argument("--disable-dev-shm-usage")  # 64 MB in a container are too few
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options, Service(driver))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    now = report([write_release(folder / "now")])
    before = report([write_release(folder / "before", has_misses=False, warm=(1.71, 1.2, 1.28), factor=1.3)])
    path = folder / "report.html"
    path.write_text(render_page(report_page(now, before, "release 41")), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: webdriver.Chrome, page: Path) -> webdriver.Chrome:
    show(browser, 1280)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    return browser


def show(browser: webdriver.Chrome, width: int, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def rows(browser: webdriver.Chrome) -> list[str]:
    """Returns the texts of the rows that are shown."""
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('[data-text]')].filter((row) => row.offsetParent).map((row) => row.dataset.text)"
    )
    return found


def test_it_opens_without_console_errors_and_no_request_leaves_the_page(opened: webdriver.Chrome, page: Path) -> None:
    assert opened.title == "cachepipe: text-encoder"
    assert "not warm" in opened.find_element(By.CLASS_NAME, "verdict").text
    messages: list[Any] = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith("data:")} == {page.as_uri()}
    assert [entry for entry in opened.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_what_evidence_says_is_text_and_never_markup_or_script(opened: webdriver.Chrome) -> None:
    assert ATTACK in opened.find_element(By.TAG_NAME, "body").text
    assert opened.find_elements(By.TAG_NAME, "img") == []
    assert len(opened.find_elements(By.TAG_NAME, "script")) == 1
    inserted = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); return window.ran"
    assert opened.execute_script(inserted) is None  # the page's own policy forbids it


def test_the_filter_and_the_switches_choose_rows(opened: webdriver.Chrome) -> None:
    every = rows(opened)
    box = opened.find_element(By.ID, "filter")
    box.send_keys("RERANKER seq=512")
    few = rows(opened)
    assert 0 < len(few) < len(every) and all("reranker" in text and "seq=512" in text for text in few)
    assert opened.find_element(By.ID, "shown").text == f"{len(few)} of {len(every)} rows"
    box.send_keys("\ue003" * 40)  # backspace
    assert rows(opened) == every and opened.find_element(By.ID, "shown").text == ""
    opened.find_element(By.ID, "only-misses").click()
    missed = rows(opened)
    assert 0 < len(missed) < len(every) and any("attribute renamed" in text for text in missed)
    assert not any(text.startswith("bert-base") for text in missed)
    opened.find_element(By.ID, "only-misses").click()
    bar = opened.find_element(By.CSS_SELECTOR, ".bar.restored .track > span")
    before = bar.size["width"]
    opened.find_element(By.ID, "zoom").click()
    assert bar.size["width"] > 5 * max(1, before)
    assert opened.find_element(By.ID, "zoom").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_can_be_read_at_every_width_and_in_both_schemes(opened: webdriver.Chrome, width: int, scheme: str) -> None:
    show(opened, width, scheme)
    assert opened.execute_script("return document.scrollingElement.scrollWidth") <= width
    contrasts = opened.execute_script(CONTRASTS)
    assert len(contrasts) > 100
    assert [row for row in contrasts if row[0] < MIN_CONTRAST] == []
    smallest = (
        "return Math.min(...[...document.querySelectorAll('main *')].filter((e) => e.offsetParent && e.innerText)"
    )
    assert opened.execute_script(f"{smallest}.map((e) => parseFloat(getComputedStyle(e).fontSize)))") >= 11
    ground = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) == (scheme == "dark")
    keep(opened, f"report-{width}-{scheme}.png")


@pytest.mark.parametrize("width", [400, 1280])
def test_a_process_that_stopped_with_pages_of_an_error_leaves_the_page_readable(
    browser: webdriver.Chrome, tmp_path: Path, width: int
) -> None:
    command = f"g++ /cache/{'a' * 150}.cpp {'-DSOMETHING_OR_OTHER ' * 80}"
    error = f"InductorError: CppCompileError: C++ compile error\n\nCommand:\n{command}\n\nOutput:\ncachepipe: there is no compiler: {command}"
    whole = evidence(ENTRIES[0], "verify", WARM, 0)
    (first, *_) = whole.graphs
    stopped = replace(whole, error=error, graphs=(replace(first, failure=error),), shape_buckets=(), ready_s=0.0)
    write_evidence(tmp_path, stopped)
    path = tmp_path / "report.html"
    path.write_text(render_page(report_page(report([tmp_path]))), encoding="utf-8")
    show(browser, width)
    browser.get(path.as_uri())
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "verify stopped: InductorError: there is no compiler: g++" in text and "1 entry · 0 shape buckets" in text
    assert "No shape bucket was called." in text and "Command:" not in text
    wide = "return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.execute_script(wide) == 0
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width


def keep(browser: webdriver.Chrome, name: str) -> None:
    """Keeps a picture of the page, from its top as far as a small file holds."""
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    height, scale = (3000, 1) if size["width"] < 600 else (2500, 0.75)
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height), "scale": scale}
    shot = {"format": "png", "captureBeyondViewport": True, "clip": clip, "optimizeForSpeed": False}
    data = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"])
    assert 10_000 < len(data) < MAX_SHOT_BYTES, len(data)
    path = SHOTS / name
    if not path.exists():  # fonts differ between machines: a run must not change what is kept
        path.write_bytes(data)
