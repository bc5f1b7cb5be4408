"""Metrics: names that the dashboard asks for exist, a scrape never compiles or raises, no client is no crash."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from cachepipe.domain.evidence import LAYERS, RATED, Uncounted
from cachepipe.errors import UsageError
from cachepipe.runtime import attach as attaching
from cachepipe.runtime import metrics
from cachepipe.runtime.attach import Attached
from cachepipe.runtime.details import details
from cachepipe.runtime.late import LateCompile
from cachepipe.runtime.recorder import Recorder
from tests.support.release import REPOSITORY

DASHBOARD = REPOSITORY / "ci" / "grafana" / "cachepipe.json"


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attached]:
    made = Attached(Recorder(), 0.0)
    monkeypatch.setattr(attaching, "_state", made)
    return made  # type: ignore[return-value]


def scraped() -> str:
    registry = CollectorRegistry()
    metrics.register_metrics(registry)
    return generate_latest(registry).decode()


def test_every_metric_of_the_dashboard_is_given(attached: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEPIPE_INDEX_DATES", "1970-01-01T00:01:40Z/1970-01-15T00:01:40Z")
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"\bcachepipe_\w+", query)}
    given = {re.split(r"[{ ]", line)[0] for line in scraped().splitlines() if not line.startswith("#")}
    assert len(asked) >= 12 and asked <= given, asked - given
    (rate,) = [query for query in queries if "/ sum(cachepipe_lookups_total" in query]
    assert re.findall(r'layer!="(\w+)"', rate) == 2 * sorted(set(LAYERS) - set(RATED))
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_the_age_of_the_channels_index_is_given_where_a_channel_chose(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEPIPE_INDEX_DATES", raising=False)
    assert "cachepipe_index" not in scraped(), "a lock file's artifacts have no such age"
    monkeypatch.setenv("CACHEPIPE_INDEX_DATES", "1970-01-01T00:01:40Z/1970-01-15T00:01:40Z")
    lines = scraped().splitlines()
    assert "cachepipe_index_created_timestamp_seconds 100.0" in lines
    assert "cachepipe_index_expires_timestamp_seconds 1.2097e+06" in lines
    for text in ("soon", "/", "1970-01-01T00:01:40Z/", "9999-12-31T23:59:59Z/x"):
        monkeypatch.setenv("CACHEPIPE_INDEX_DATES", text)
        assert "cachepipe_index" not in scraped()


def test_counts_are_those_of_the_recorder(attached: Attached) -> None:
    attached.recorder.on_work("triton_compiles", "k")
    attached.recorder.on_lookup("0/0", "fxgraph", "miss", "f", "full_miss")
    attached.recorder.on_span("0/0", "frame", 1.5, False)
    attached.late_watch.count, attached.late_watch.seconds = 3, 4.5
    attached.late_watch.compiles.append(LateCompile("0/1", {}, 1.5))
    text = scraped()
    for line in (
        'cachepipe_work_total{kind="triton_compiles"} 1.0',
        'cachepipe_lookups_total{layer="fxgraph",outcome="miss"} 1.0',
        'cachepipe_lookups_total{layer="native",outcome="hit"} 0.0',
        'cachepipe_phase_seconds_total{phase="trace"} 1.5',
        "cachepipe_late_compiles_total 3.0",
        "cachepipe_late_compile_seconds_total 4.5",
        "cachepipe_ready 0.0",
    ):
        assert line in text.splitlines(), text
    assert 'outcome="cold"' in text


def test_what_is_not_counted_is_told_by_the_ready_line_the_report_and_the_metrics(attached: Attached) -> None:
    assert "uncounted" not in attaching.summary(attached) and "cachepipe_uncounted 0.0" in scraped()
    attached.recorder._counter.missing.append(Uncounted("native_builds", "torch.gone"))
    assert attaching.summary(attached)["uncounted"] == "native_builds"
    assert details(attached)["uncounted"] == [{"kind": "native_builds", "name": "torch.gone"}]
    assert "cachepipe_uncounted 1.0" in scraped()


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError) as caught:
        metrics.register_metrics()
    assert "cachepipe[prometheus]" in caught.value.hint


@pytest.mark.parametrize("auto_describe", [True, False], ids=["as the default registry", "plain"])
def test_registering_twice_gives_every_series_once(attached: Attached, auto_describe: bool) -> None:
    registry = CollectorRegistry(auto_describe=auto_describe)
    for _ in range(3):
        metrics.register_metrics(registry)
    series = [line.rpartition(" ")[0] for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert series and len(series) == len(set(series))
    other = CollectorRegistry(auto_describe=auto_describe)
    metrics.register_metrics(other)
    assert len(generate_latest(other).splitlines()) == len(generate_latest(registry).splitlines())


def test_a_registry_with_foreign_metrics_of_the_same_name_is_refused_by_name(attached: Attached) -> None:
    registry = CollectorRegistry(auto_describe=True)
    Gauge("cachepipe_ready", "not ours", registry=registry)
    with pytest.raises(UsageError, match="cachepipe_ready"):
        metrics.register_metrics(registry)
