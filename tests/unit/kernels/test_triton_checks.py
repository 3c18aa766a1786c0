"""Unsupported inputs of a kernel are refused by name before a launch; the table of launch choices can be written and
read.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.core.errors import InvariantBroken, UsageError
from kvferry.kernels.batch import AttentionBatch, AttentionRules, HeadNorms
from kvferry.kernels.block_moves import Overlay
from kvferry.kernels.gpu import blocks, digest, heads, launch, norms, rows
from kvferry.kernels.gpu.attention import attend, plan
from kvferry.kernels.gpu.check import BadKernelInput
from kvferry.kernels.gpu.sampling import draw, logits
from kvferry.kernels.logit_rows import Adjustments, Draws, TokenLists

X = torch.zeros(2, 8)
W = torch.zeros(8)
ROWS = torch.zeros(2, dtype=torch.int64)
PAGES = torch.zeros(4, 2, 2, 2, 4, 8)
QKV = torch.zeros(2, 8, 8)
ANGLES = torch.zeros(2, 8)
META = torch.zeros(2, 8, device="meta")


def batch(queries: list[int], contexts: list[int], columns: int = 2, page: int = 0) -> AttentionBatch:
    tables = np.full((len(queries), columns), page, np.int64)
    return AttentionBatch(np.array(queries), np.array(contexts), tables, torch.zeros(sum(queries), dtype=torch.int64))


def attended(q: torch.Tensor, rules: AttentionRules, pages: torch.Tensor = PAGES) -> torch.Tensor:
    return attend.attend(q, pages, 0, plan.plan_attention(batch([1, 1], [20, 20], 5), PAGES, 4), rules)


def draws(**other: torch.Tensor) -> Draws:
    ints, floats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    return replace(Draws(floats, ints, floats, floats, ints, ints, ints), **other)


Q = torch.zeros(2, 4, 8)
PLAIN = AttentionRules(0.1)
CASES: dict[str, tuple[Callable[[], object], str, str]] = {
    "embedding of integers": (lambda: rows.take_rows(ROWS[None], ROWS), "DTYPE", "table: torch.int64 is not one of"),
    "rows by floats": (lambda: rows.take_rows(X, W), "DTYPE", "numbers: torch.float32 is not supported"),
    "columns for rows": (lambda: rows.take_rows(torch.zeros(8, 2).T, ROWS), "STRIDES", "call contiguous"),
    "rows elsewhere": (
        lambda: rows.take_rows(X, ROWS.to("meta")),
        "DEVICE",
        "is on cpu, another is on meta",
    ),
    "a device without kernels": (lambda: rows.silu_mul(META), "DEVICE", "on CUDA and ROCm devices, not on meta"),
    "doubles": (lambda: norms.rms_norm(X.double(), W, 1e-5), "DTYPE", "float64 is not one of float32, float16"),
    "weights of another type": (
        lambda: norms.rms_norm(X, W.half(), 1e-5),
        "DTYPE",
        "float16 does not match torch.float32",
    ),
    "too few weights": (
        lambda: norms.rms_norm(X, W[:7], 1e-5),
        "SHAPE",
        r"weight: the shape must be \(8,\), not \(7,\)",
    ),
    "four dimensions": (lambda: norms.rms_norm(X[None, None], W, 1e-5), "SHAPE", "1 to 3 dimensions, not 4"),
    "wide rows": (lambda: norms.rms_norm(torch.zeros(1, 65537), torch.zeros(65537), 1e-5), "SHAPE", "at most 65536"),
    "another residual": (lambda: norms.add_rms_norm(X, X[:1], W, 1e-5), "SHAPE", "residual: the shape must be"),
    "residual of heads": (lambda: norms.add_rms_norm(QKV, QKV, W, 1e-5), "SHAPE", r"2 dimensions, \[T, n\], not 3"),
    "odd heads": (lambda: heads.rotate(torch.zeros(2, 1, 7), W, W), "HEAD_SIZE", "heads have 7 values; even numbers"),
    "large heads": (lambda: heads.rotate(torch.zeros(2, 1, 258), W, W), "HEAD_SIZE", "heads have 258"),
    "angles of 16 bits": (
        lambda: heads.rotate(QKV, ANGLES.half(), ANGLES),
        "DTYPE",
        "cos: the dtype must be torch.float32, not torch.float16",
    ),
    "flat heads": (lambda: heads.rotate(X, ANGLES, ANGLES), "SHAPE", r"the shape must be \[T, heads, D\], not"),
    "norms of another size": (
        lambda: heads.place_qkv(QKV, HeadNorms(W, W[:4], 1e-6), ANGLES, ANGLES, PAGES, 0, ROWS),
        "SHAPE",
        "key norm: the shape must be",
    ),
    "slots of 32 bits": (
        lambda: heads.place_qkv(QKV, None, ANGLES, ANGLES, PAGES, 0, ROWS.int()),
        "DTYPE",
        "slots: the dtype must be torch.int64, not torch.int32",
    ),
    "heads that do not fit pages": (
        lambda: heads.place_qkv(QKV[:, :3], None, ANGLES, ANGLES, PAGES, 0, ROWS),
        "SHAPE",
        "does not match pages",
    ),
    "keys away from values": (
        lambda: heads.write_kv(torch.zeros(2, 2, 4, 8)[:, :, :2], PAGES, 0, ROWS),
        "STRIDES",
        "are not adjacent",
    ),
    "three dimensions of keys": (
        lambda: heads.write_kv(QKV, PAGES, 0, ROWS),
        "SHAPE",
        r"the shape must be \[T, 2, K, D\], not",
    ),
    "no pages": (lambda: plan.plan_attention(batch([1], [1]), QKV, 4), "SHAPE", r"is not \[pages"),
    "pages from the side": (
        lambda: plan.plan_attention(batch([1], [1]), PAGES.transpose(4, 5).contiguous().transpose(4, 5), 4),
        "STRIDES",
        "the last dimension has stride 4",
    ),
    "heads that do not share": (lambda: plan.plan_attention(batch([1], [1]), PAGES, 3), "SHAPE", "3 query heads"),
    "a crowd of heads": (lambda: plan.plan_attention(batch([1], [1]), PAGES, 258), "SHAPE", "at most 128"),
    "a short table": (
        lambda: plan.plan_attention(batch([1, 1], [8, 9]), PAGES, 4),
        "TABLE",
        "row 1 has 2 blocks; 9 tokens need 3",
    ),
    "a page that is not there": (
        lambda: plan.plan_attention(batch([1], [5], page=4), PAGES, 4),
        "TABLE",
        "page ids must be between 0 and 3",
    ),
    "rows without context": (lambda: plan.plan_attention(batch([3], [2]), PAGES, 4), "SHAPE", "at most as many rows"),
    "queries of another type": (lambda: attended(Q.half(), PLAIN), "DTYPE", "q: torch.float16 does not match"),
    "queries for another plan": (lambda: attended(Q[:, :2], PLAIN), "SHAPE", "q: the shape must be"),
    "pages of another plan": (lambda: attended(Q, PLAIN, PAGES[:, :1]), "SHAPE", "the plan is for"),
    "no window": (lambda: attended(Q, AttentionRules(0.1, window=0)), "SHAPE", "must be at least 1"),
    "sinks of another number": (lambda: attended(Q, AttentionRules(0.1, sinks=W)), "SHAPE", "sinks: the shape must be"),
    "draws of float32": (
        lambda: draw.sample(X, draws(top_p=torch.zeros(2))),
        "DTYPE",
        "top_p: the dtype must be torch.float64, not torch.float32",
    ),
    "draws for other rows": (lambda: draw.sample(X, draws(seed=torch.zeros(3, dtype=torch.int64))), "SHAPE", "seed"),
    "logits of 16 bits": (lambda: logits.adjust_logits(X.half(), Adjustments()), "DTYPE", "must be torch.float32"),
    "lists without their values": (
        lambda: logits.adjust_logits(
            X,
            Adjustments(
                bias=TokenLists(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), W[:0].double(), 1)
            ),
        ),
        "SHAPE",
        "bias.values",
    ),
    "bits of 64": (lambda: logits.adjust_logits(X, Adjustments(allowed=ROWS[:, None])), "DTYPE", "allowed"),
    "blocks of 32 bits": (
        lambda: blocks.gather_blocks(PAGES, ROWS.int()),
        "DTYPE",
        "blocks: the dtype must be torch.int64, not torch.int32",
    ),
    "sliced pages": (
        lambda: digest.digest_blocks(PAGES[:, :1], ROWS),
        "STRIDES",
        "pages: the tensor of shape .* has strides",
    ),
    "staged pages of another shape": (lambda: blocks.scatter_blocks(PAGES, PAGES, ROWS), "SHAPE", "staged"),
    "heads that are not staged": (
        lambda: blocks.relayout_blocks(PAGES, PAGES, ROWS, Overlay(0, 0, 1, 8)),
        "SHAPE",
        "it has 2 heads; 2 heads from index 1 on are required",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_by_name(name: str) -> None:
    call, reason, message = CASES[name]
    with pytest.raises(BadKernelInput, match=message) as caught:
        call()
    assert caught.value.reason == f"KERNEL_{reason}"
    assert isinstance(caught.value, UsageError)
    assert caught.value.field


def test_the_shipped_table_reads_as_it_was_written(tmp_path: Path) -> None:
    shipped = launch.read(launch.TABLE)
    again = tmp_path / "launch.toml"
    launch.write(again, shipped)
    assert launch.read(again) == shipped
    assert again.read_text() == launch.TABLE.read_text()
    assert all(row.why for row in shipped)


def test_a_measured_row_replaces_the_row_of_its_key(tmp_path: Path) -> None:
    shipped = launch.read(launch.TABLE)
    measured = replace(shipped[0], warps=2, why='measured: "H200", 1.0 of 1.1 TB/s\nat 64 \\ rows')
    fresh = replace(measured, device="sm90")
    found = launch.merged(shipped, [measured, fresh])
    assert len(found) == len(shipped) + 1
    launch.write(tmp_path / "t.toml", found)
    again = launch.read(tmp_path / "t.toml")
    assert measured in again
    assert fresh in again
    assert shipped[0] not in again


def test_a_row_for_the_device_counts_for_more_than_one_for_the_shape() -> None:
    found = launch._chosen("attend_small", "interpreter", "d128-32bit")
    assert (found.device, found.shape) == ("interpreter", "any")
    assert launch._chosen("attend_small", "sm90", "d128-32bit").key == ("attend_small", "any", "d128-32bit")
    assert launch._chosen("attend_small", "sm90", "d64-16bit").key == ("attend_small", "any", "any")
    with pytest.raises(InvariantBroken, match="no row for 'magic'"):
        launch._chosen("magic", "sm90", "any")


@pytest.mark.parametrize("text", ["x = 1", "[[choice]]\nop = 'a'", "not toml"])
def test_an_invalid_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(UsageError, match=r"t\.toml is not a table of launch configurations"):
        launch.read(tmp_path / "t.toml")


def test_partitions_are_whole_tiles_of_keys() -> None:
    """A tile of keys in two partitions would be computed twice or not at all."""
    for row in launch.read(launch.TABLE):
        if row.op == "attend_small":
            assert row.sizes["partition"] % row.sizes["keys"] == 0, row
            keys = [
                r.sizes["keys"] for r in launch.read(launch.TABLE) if (r.op, r.device) == ("attend_shared", row.device)
            ]
            assert all(row.sizes["partition"] % k == 0 for k in keys)
