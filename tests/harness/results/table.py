"""All rows of the table of results."""

from harness.results import capacity, engines, eviction, fleets, host, memory, mixes, policies, sharing
from harness.results.rows import Row

_PAPER = "PagedAttention"
_THESIS = "vLLM thesis"
ROWS: tuple[Row, ...] = (
    Row(
        1, f"{_PAPER}, figure 2", "Paging removes the waste of KV memory: share that holds tokens",
        "20.4 % Orca (Max), 26.8 % (Pow2), 38.2 % (Oracle), 96.3 % paged",
        "same order, each within 5 points, paged at least 95 %", memory.useful_shares,
    ),
    Row(
        2, f"{_PAPER}, section 4.3", "A sequence wastes less than one block, and no page is lost to fragmentation",
        "by design", "true after every step", memory.waste_bound, is_fast=True,
    ),
    Row(
        3, f"{_PAPER}, figure 13", "More requests are batched at the same rate",
        "ShareGPT 2/s: 7.00, 9.81, 13.62, 30.42 paged; Alpaca 30/s: 7.00, 43.24, 72.75, 132.44 paged",
        "ShareGPT: at least 1.8 times Oracle and 3.5 times Max", memory.batched_requests,
    ),
    Row(
        4, f"{_PAPER}, figure 12", "Higher request rate at equal latency, ShareGPT",
        "1.7 to 2.7 times Oracle, 2.7 to 8 times Max, up to 22 times FasterTransformer",
        "at least 1.5 times Oracle and 2.5 times Max; static batches are worst", capacity.rates,
    ),
    Row(
        5, f"{_PAPER}, abstract", "2 to 4 times the throughput at equal latency", "2 to 4 times",
        "geometric mean at least 2 over the baselines and workloads", capacity.overall,
    ),
    Row(
        6, f"{_PAPER}, figure 12f", "The gain disappears where memory is not the bottleneck", "smaller, not stated",
        "below 1.2 times Oracle", capacity.compute_bound,
    ),
    Row(
        7, f"{_PAPER}, figure 14", "The gain over Oracle grows with the number of samples",
        "Alpaca: 1.3 times with one sample, more with 2, 4 and 6", "rises with the number of samples",
        capacity.samples,
    ),
    Row(
        8, f"{_PAPER}, figure 15", "Memory saved by sharing between samples",
        "Alpaca 6.09, 8.53, 9.79 % with 2, 4, 6 samples; ShareGPT 16.2 to 30.5 %",
        "Alpaca within 3 points; ShareGPT rising", sharing.saved_pages,
    ),
    Row(
        9, f"{_PAPER}, section 4.4", "Prompts are a small part of the KV memory with parallel sampling", "12 %",
        "reported, no line", sharing.prompt_share,
    ),
    Row(
        10, f"{_PAPER}, figure 16", "A shared prefix raises the request rate",
        "1.67 times Oracle with 80 tokens, 3.58 times with 341", "at least 1.3 and 2.5 times, more for the longer one",
        capacity.shared_prefix,
    ),
    Row(
        11, f"{_PAPER}, figure 17", "Twice the rate for chats with prompts of 1,024 tokens",
        "2 times the three baselines",
        "at least 1.3 times; with KV kept between rounds more", capacity.chat,
    ),
    Row(
        13, f"{_PAPER}, figure 18b", "A block of 16 tokens suits long and short requests",
        "ShareGPT best from 16 to 128, Alpaca at 16 and 32", "16 within 5 % of the best; 256 clearly worse for Alpaca",
        memory.block_sizes,
    ),
    Row(
        14, f"{_PAPER}, section 7.3", "Computing again costs the same for all block sizes, copying much for small ones",
        "OPT-13B: computing never over 1.2 times copying; equal from 16 to 64",
        "computing varies by less than 10 % and takes at most 1.2 times as long as copying", eviction.recompute_or_copy,
    ),
    Row(
        15, f"{_PAPER}, section 4", "Paging changes no output", "by design",
        "all greedy tokens in float32 equal to a reference with whole sequences in one page", engines.same_outputs,
    ),
    Row(
        16, f"{_THESIS}, table 4.1", "One scheduler expresses all features, in any combination", "by design",
        "no token differs from a plain run in 300 drawn cases", engines.any_combination, is_fast=True,
    ),
    Row(
        17, f"{_THESIS}, section 4.4.3", "A preempted request continues after one pass",
        "one pass instead of one per token", "one step", policies.recovery, is_fast=True,
    ),
    Row(
        18, f"{_THESIS}, section 4.5", "Shortest remaining time first avoids head-of-line blocking",
        "100,000 tokens before 100: step 13 with FIFO, 1 with SRTF",
        "at once instead of step 13; mean TTFT srtf <= two-level < fcfs", policies.head_of_line,
    ),
    Row(
        19, f"{_THESIS}, section 4.5.3", "Two levels bound the wait that SRTF does not", "no number",
        "a long prompt in a stream of short ones waits less than half as long as with srtf", policies.no_starvation,
    ),
    Row(
        20, f"{_THESIS}, section 4.5.2", "SRTF raises the hit rate of the prefix cache", "no number",
        "srtf and two-level above fcfs", policies.hit_rates,
    ),
    Row(
        21, f"{_THESIS}, section 4.6", "The host's work takes over half of a short step; launching ahead hides it",
        "over 50 % without care, steps below 10 ms", "launched ahead at most 5 % above the longer of the two",
        host.hidden_work,
    ),
    Row(
        22, f"{_THESIS}, section 4.6 (1 ms)", "A millisecond of host work costs a tenth of a step of 10 ms",
        "10 %", "5 to 20 % slower without launching ahead, below 5 % with it", host.one_millisecond,
    ),
    Row(
        23, f"{_THESIS}, section 4.6.2 (inputs)", "Preparing a step costs by changed, not by all requests",
        "1 µs for each of 1,000 requests is 1 ms", "slope by changed requests; 1,000 within 10 % of 100", host.inputs,
    ),
    Row(
        24, f"{_THESIS}, section 4.6.2", "Deltas of block tables are nearly free",
        "62.5 million entries, 250 MB, for 1,000 requests of a million tokens",
        "at a million entries a delta at least 100 times faster than writing all, and flat in the table's size",
        host.table_deltas,
    ),
    Row(
        26, f"{_THESIS}, section 2.1 (steps)", "The time of a step is flat until the device is saturated",
        "about 300 tokens on an H100, 5 ms for 8 billion parameters",
        "a knee is visible; reported for the CPU", host.step_times,
    ),
    Row(
        27, f"{_THESIS}, section 2.1", "Sizes of KV caches",
        "800 KB a token and 1.6 GB for OPT-13B; 400 KB, 40 GB and 12 ms for 100,000 tokens", "exact",
        memory.kv_sizes, is_fast=True,
    ),
    Row(
        28, "Inside vLLM, prefix caching", "Only the part after the cached blocks is computed", "example",
        "prompt less the full blocks of the common prefix", policies.suffix_only, is_fast=True,
    ),
    Row(
        29, f"{_THESIS}, section 4.6.1", "Steps launched ahead delay the registration of output blocks by one step",
        "one step", "at most one token later", engines.late_registration, is_fast=True,
    ),
    Row(
        30, "Inside vLLM, chunked prefill", "Chunks bound the time of a step", "no number",
        "p99 ITL falls, and no step exceeds the bound of its budget", policies.chunks, is_fast=True,
    ),
    Row(
        31, f"{_THESIS}, section 4.4.4", "Separate prefill isolates ITL from bursts of prompts", "no number",
        "lower p99 ITL than together, also in chunks; bytes moved are those of the prompts", fleets.disaggregation,
    ),
    Row(
        32, "Inside vLLM, speculative decoding", "Drafts give several tokens a step and change no distribution",
        "up to k + 1 tokens", "all tokens equal, more than one token a step", engines.speculation, is_fast=True,
    ),
    Row(
        33, "Inside vLLM, guided decoding", "Masks of a grammar give valid outputs only", "by design",
        "all outputs of random weights are valid", engines.constraints,
    ),
    Row(
        34, f"{_PAPER}, section 4.5", "The KV of preempted sequences never needs more room than the pages of the pool",
        "by design", "true in every step", eviction.swap_space, is_fast=True,
    ),
    Row(
        36, "Inside vLLM, load score", "Routing by load and by prefix beats taking turns", "no number",
        "least-loaded below round-robin in p99 TTFT; more hits and lower p99 TTFT by prefix", fleets.routing,
    ),
    Row(
        37, "Inside vLLM, benchmarks", "A bench tool with modes latency, throughput and serve",
        "32 in, 128 out, batch 8",
        "same defaults", mixes.bench_defaults, is_fast=True,
    ),
    Row(
        38, "Inside vLLM, disaggregation", "The numbers of prefill and decode workers can follow the mix of requests",
        "no number", "goodput at least 90 % of the best fixed split's", mixes.followed_mix,
    ),
)  # fmt: skip
