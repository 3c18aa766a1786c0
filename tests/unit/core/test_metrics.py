from kvferry.core.metrics.all_metrics import ALL
from kvferry.core.metrics.metric import MetricKind


def test_names_are_unique_and_contain_their_unit():
    assert len({metric.name for metric in ALL}) == len(ALL) > 10
    for metric in ALL:
        if metric.name.startswith("vllm:"):
            continue
        assert metric.name.startswith("kvferry_")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        if metric.kind is MetricKind.HISTOGRAM:
            assert metric.name.endswith(("_seconds", "_bytes", "_tokens", "_sequences"))


def test_only_histograms_have_buckets_and_they_rise():
    for metric in ALL:
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
