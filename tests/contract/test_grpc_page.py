"""docs/grpc.md shows the programs of docs/examples/grpc, and the calls that exist."""

import re
from pathlib import Path

from kvferry.v1 import common_pb2, inference_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/grpc.md").read_text("utf-8")
EXAMPLES = ROOT / "docs/examples/grpc"


def test_the_page_has_the_programs() -> None:
    for language, file in (("go", "go/main.go"), ("js", "node/client.mjs")):
        assert f"```{language}\n{(EXAMPLES / file).read_text('utf-8')}```\n" in PAGE


def test_the_page_names_each_call() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", "".join(line for line in PAGE.splitlines() if line.startswith("| `"))))
    assert named == {method.name for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}


def test_each_file_has_the_package_of_go_that_the_page_names() -> None:
    for file in (inference_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR):
        package, _, name = file.GetOptions().go_package.partition(";")
        assert f"`{package}`" in PAGE
        assert name == "kvferryv1"
    for path in sorted((ROOT / "proto/kvferry/v1").glob("*.proto")):
        assert 'option go_package = "kvferry.dev/kvferry/v1;kvferryv1";' in path.read_text("utf-8"), path.name


def test_the_list_of_pages_has_it() -> None:
    assert "(grpc.md)" in (ROOT / "docs/index.md").read_text("utf-8")
