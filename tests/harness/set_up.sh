#!/usr/bin/env bash
# Set up .venv: `tests/harness/set_up.sh run` for what `make run` needs, `… test` for the tests and checks, too.
#
# `tests/harness/set_up.sh modules` lists the Python modules, which the installation names one by one: if the list has
# changed since, for example after a pull, the installation is repeated, which takes some seconds.
#
# The C++ kernels compile while the packages are downloaded; every package is one of the lock, with its hash.
# TORCH_INDEX=URL takes torch, and nothing else, from an index of builds for CPUs: 5 GB of libraries for GPUs are left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
list_modules() {
  local found
  found=$(find services operator kernels proto -name '*.py' | sort)
  test "$(cat .venv/.modules 2>/dev/null)" = "$found" || echo "$found" >.venv/.modules
}
case ${1:-} in
  modules) test ! -e .venv/.ready-run || list_modules; exit 0 ;;
  run) lock=requirements-run.lock levels=chosen what="what make run needs" ;;
  test) lock=requirements.lock levels=usable what="what the tests need" ;;
  *) echo "set_up.sh ${1:-}: the argument must be run, test or modules" >&2; exit 2 ;;
esac
python=${PYTHON:-python3} venv=.venv
log=build/set-up.log begun=$SECONDS
say() { echo "[$((SECONDS - begun)) s] $*"; }

"$python" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvferry needs Python 3.11 or newer; set PYTHON=...")'
mkdir -p build
size="about 3 GB to download, 6 GB on disk: torch brings its libraries for GPUs; TORCH_INDEX=URL takes torch from an index for CPUs"
test -z "${TORCH_INDEX:-}" || size="torch from TORCH_INDEX"
say "setting up $venv with $what, once: $(grep -c == "$lock") packages ($size)"
test -x $venv/bin/python || "$python" -m venv $venv
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-build.lock

say "compiling the C++ kernels meanwhile ($log); two cores need about a minute"
$venv/bin/python -m pip install --verbose --disable-pip-version-check --no-deps --no-build-isolation \
  -C cmake.define.KVFERRY_LEVELS=$levels -e '.[serve,nixl,encryption,bench,operator,traces]' >$log 2>&1 &
compiling=$!
trap 'kill $compiling 2>/dev/null || true' EXIT

quiet=--quiet
if test -t 2; then quiet=; fi
packages() { VIRTUAL_ENV=$venv $venv/bin/uv pip install $quiet --no-deps "$@"; }
if test -n "${TORCH_INDEX:-}"; then
  version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' $lock)
  packages --default-index "$TORCH_INDEX" "torch==$version+cpu"  # the lock has the hashes of other builds
  # An entry of the lock is a line and the indented lines of its hashes.
  awk '/^[^ ]/ { keep = !/^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/ } keep' $lock >build/without-torch.lock
  lock=build/without-torch.lock
fi
packages --require-hashes -r $lock
say "packages are installed"

last=$SECONDS
while kill -0 $compiling 2>/dev/null; do
  if ((SECONDS - last >= 10)); then
    last=$SECONDS
    say "compiling: $(grep -oE '\[[0-9]+/[0-9]+\]' $log | tail -1 | tr -d '[]' | sed 's,/, of ,') files"
  fi
  sleep 0.2
done
trap - EXIT
if ! wait $compiling; then
  tail -40 $log >&2
  echo "the kernels could not be compiled: see above, or $log; they need a C++20 compiler (apt-get install g++)" >&2
  exit 1
fi
list_modules
if test "$1" = test; then
  $venv/bin/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "kvferry-tests.pth").write_text(str(pathlib.Path("tests").resolve()))'
  touch $venv/.ready
fi
touch $venv/.ready-run
say "$venv is ready"
