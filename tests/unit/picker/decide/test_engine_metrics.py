"""Pages of vLLM, SGLang and kvferry's gateways, and pages that lie."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.picker.decide.engine_metrics import MAX_PAGE_BYTES, read_page

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="27000",engine="0"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.8e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 600.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 5.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 10.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 7
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:cache_config_info{page_size="64",num_pages="512"} 1
"""


def test_a_page_of_vllm() -> None:
    load = read_page(VLLM)
    assert load is not None
    assert (load.flavor, load.running, load.waiting, load.usage) == ("vllm", 7, 2, 0.5)
    assert (load.block_tokens, load.num_blocks) == (16, 27000)
    assert (load.adapters, load.max_adapters) == (frozenset("abc"), 4)
    assert (load.prompt_tokens, load.cached_tokens) == (1000, 600)
    assert load.prefill is not None
    assert (load.prefill.total, load.prefill.count) == (5.0, 10.0)
    assert load.steps is None


def test_the_older_name_of_the_usage_of_vllm() -> None:
    load = read_page(VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc"))
    assert load is not None
    assert load.usage == 0.5


def test_a_page_of_sglang() -> None:
    load = read_page(SGLANG)
    assert load is not None
    assert (load.flavor, load.running, load.waiting, load.usage) == ("sglang", 7, 1, 0.5)
    assert (load.block_tokens, load.num_blocks) == (64, 512)


def test_a_page_of_a_gateway_of_kvferry() -> None:
    load = read_page(
        b"kvferry_gateway_streams_open 5.0\n"
        b'kvferry_gateway_queued_requests{band="high"} 1.0\nkvferry_gateway_queued_requests{band="low"} 2.0\n'
    )
    assert load is not None
    assert (load.flavor, load.running, load.waiting, load.usage) == ("kvferry", 5, 3, None)


def test_a_flavor_that_is_set_reads_no_other() -> None:
    assert read_page(VLLM, "sglang") is None
    both = read_page(VLLM + SGLANG, "sglang")
    assert both is not None
    assert both.waiting == 1


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running -1\n",
        b"vllm:num_requests_running +Inf\n",
        b'vllm:num_requests_running{a="} 5\n\xff\xfe',
        b"# vllm:num_requests_running 5\n",
        b"vllm:num_requests_running_other 5\n",
        b"<html>not found</html>",
    ],
)
def test_pages_without_a_load(page: bytes) -> None:
    found = read_page(page)
    assert found is None or found.running == 5


@pytest.mark.parametrize("value", ["1e300", "1e18", "9007199254740993", "1000001"])
def test_a_page_with_more_requests_than_a_server_can_have_is_not_believed(value: str) -> None:
    assert read_page(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting {value}\n".encode()) is None


@pytest.mark.parametrize("value", ["1.5", "-0.1", "NaN", "1e300"])
def test_a_usage_that_is_no_share_is_left_out(value: str) -> None:
    load = read_page(f"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc {value}\n".encode())
    assert load is not None
    assert load.usage is None


@pytest.mark.parametrize("value", ["-1", "1e9", "x", "9" * 40, ""])
def test_sizes_that_are_none_are_unknown(value: str) -> None:
    page = f'vllm:num_requests_running 1\nvllm:cache_config_info{{block_size="16",num_gpu_blocks="{value}"}} 1\n'
    load = read_page(page.encode())
    assert load is not None
    assert load.num_blocks == 0


def test_a_flood_of_series_and_adapters_is_bounded() -> None:
    page = b"".join(b'vllm:num_requests_running{a="%d"} 1\n' % number for number in range(100_000))
    adapters = ",".join(f"a{number}" for number in range(100_000))
    page += f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{adapters}"}} 1\n'.encode()
    load = read_page(page)
    assert load is not None
    assert load.running == 64
    assert len(load.adapters) <= 1025


def test_only_the_beginning_of_a_large_page_is_read() -> None:
    assert read_page(b" " * MAX_PAGE_BYTES + b"\n" + VLLM) is None


@given(st.binary(max_size=400))
def test_no_bytes_break_it(noise: bytes) -> None:
    load = read_page(VLLM + noise + SGLANG + noise, "vllm")
    assert load is not None
    assert 0 <= load.running <= 10**6
    assert load.usage is None or (math.isfinite(load.usage) and 0 <= load.usage <= 1)


@pytest.mark.parametrize(
    "labels", [b"a" * 60_000, b"a" * 4_000_000, b'a="' * 20_000, b'a="' + b'\\"' * 20_000, b"," * 1_000_000]
)
def test_labels_of_any_form_are_read_in_one_pass(labels: bytes) -> None:
    """A reader that begins at every letter would take minutes to days."""
    page = b"vllm:num_requests_running{" + labels + b"} 1\nvllm:num_requests_running 2\n"
    load = read_page(page)
    assert load is None or load.running in (1, 2, 3)


def test_names_without_values_are_not_looked_at_for_ever() -> None:
    assert read_page(b"vllm:num_requests_running x\n" * 100_000) is None


@pytest.mark.parametrize("value", ["1e308", "5e6", "inf"])
def test_more_requests_than_a_server_can_have_are_left_out(value: str) -> None:
    page = f"vllm:num_requests_running 1\nvllm:num_requests_waiting {value}\nvllm:prompt_tokens_total {value}\n" * 2
    load = read_page(page.encode())
    assert load is not None
    assert load.waiting == 0
    assert load.prompt_tokens in (None, 1e7)
