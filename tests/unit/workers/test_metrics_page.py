"""The metrics of engines in Prometheus' format: by worker, and summed under vLLM's names."""

from harness.fakes.engines import a_request, an_engine, run_until_idle
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvferry.engine.engine import Engine
from kvferry.workers.metrics_page import engine_families


class Page(Collector):
    def __init__(self, engines: list[tuple[str, Engine]]) -> None:
        self.engines = engines

    def collect(self):
        yield from engine_families("tiny", self.engines)


def samples(engines: list[tuple[str, Engine]]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(Page(engines))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_counters_and_histograms_by_worker_and_as_sums() -> None:
    engines: list[tuple[str, Engine]] = []
    for worker, count in (("w0", 1), ("w1", 2)):
        engine, _ = an_engine()
        for number in range(count):
            engine.add(a_request(f"r{number}", [1, 2, 3], max_tokens=4))
        run_until_idle(engine)
        engines.append((worker, engine))
    found = samples(engines)
    assert found["kvferry_worker_output_tokens_total", (("worker", "w0"),)] == 4
    assert found["kvferry_worker_output_tokens_total", (("worker", "w1"),)] == 8
    assert found["vllm:generation_tokens_total", (("model_name", "tiny"),)] == 12
    assert found["kvferry_worker_time_to_first_token_seconds_count", (("worker", "w1"),)] == 2
    assert found["vllm:time_to_first_token_seconds_count", (("model_name", "tiny"),)] == 3
    assert found["vllm:iteration_tokens_total_bucket", (("le", "1.0"), ("model_name", "tiny"))] == 3
    assert found["vllm:iteration_tokens_total_bucket", (("le", "+Inf"), ("model_name", "tiny"))] == 8
    assert found["kvferry_worker_grammar_late_masks_total", (("worker", "w0"),)] == 0
