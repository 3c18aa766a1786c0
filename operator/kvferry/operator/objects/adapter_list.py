"""The ConfigMap with a pool's list of adapters, which the worker pods mount and follow (`--adapters-file`)."""

import json

from kvferry.operator.objects.pods import child
from kvferry.operator.pool import names
from kvferry.operator.pool.spec import InferencePool, Json

ADAPTERS_FILE = "adapters.toml"


def adapter_list(pool: InferencePool) -> Json:
    """Build the ConfigMap; for a pool without adapters, its list is empty, which removes earlier adapters."""
    entries = [
        f"[[adapters]]\nname = {_text(one.name)}\npath = {_text(one.source)}\ndigest = {_text(one.digest)}\n"
        for one in pool.spec.adapters
    ]
    data = {ADAPTERS_FILE: "\n".join(entries)}
    return child(pool, "v1", "ConfigMap", names.adapters_object(pool.name), data=data)


def _text(value: str) -> str:
    """Return a TOML string: a JSON string of ASCII characters is also a TOML string."""
    return json.dumps(value)
