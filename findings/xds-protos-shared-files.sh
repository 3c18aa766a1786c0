#!/usr/bin/env bash
# Installing the compiled protobuf messages of Envoy from xds-protos replaces files of googleapis-common-protos, and
# uninstalling it leaves that package broken.
#
# xds-protos ships its own google/api and google/rpc, with the paths of googleapis-common-protos, on which grpcio-status
# and the exporters of OpenTelemetry depend. pip does not compare the files of two distributions: the one that is
# installed last wins without a word, `pip check` finds nothing, and `pip uninstall xds-protos` removes the files of both.
#
# Seen with xds-protos 1.85.0 and googleapis-common-protos 1.75.0 (pip 23.2.1, Python 3.11.7):
#   files of both packages: 59
#   pip check: No broken requirements found.
#   after `pip uninstall xds-protos`: ModuleNotFoundError: No module named 'google.rpc.status_pb2'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --disable-pip-version-check "$@"; }
pip install --quiet googleapis-common-protos==1.75.0 xds-protos==1.85.0
cat > "$folder/both.py" <<'PYTHON'
from importlib.metadata import files

ours, theirs = ({str(file) for file in files(name)} for name in ("googleapis-common-protos", "xds-protos"))
both = sorted(name for name in ours & theirs if name.endswith("_pb2.py"))
print(f"files of both packages: {len(both)}")
assert "google/rpc/status_pb2.py" in both
PYTHON
"$folder/venv/bin/python" "$folder/both.py"
"$folder/venv/bin/python" -c "import google.rpc.status_pb2"
echo "pip check: $(pip check)"
pip uninstall --quiet --yes xds-protos
found=$("$folder/venv/bin/python" -c "import google.rpc.status_pb2" 2>&1 | tail -1 || true)
echo "after \`pip uninstall xds-protos\`: $found"
pip show --quiet googleapis-common-protos
[[ $found == *"No module named"* ]]
