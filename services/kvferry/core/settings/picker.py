"""Settings of the endpoint picker."""

from dataclasses import replace

from kvferry.core.settings.parsers import ADDRESS, MODEL_SERVER, NAME, TEXT, boolean, seconds, share, size_bytes, whole
from kvferry.core.settings.processes import DRAIN, HEALTH, METRICS, POLICY, TLS
from kvferry.core.settings.setting import Setting

_CERTIFICATE = {
    "tls_cert_file": "Certificate chain, PEM; default: a self-signed one, which gateways do not verify.",
    "tls_key_file": "Private key, PEM. Renewed files are reloaded while serving.",
}
PICKER = (
    Setting("listen", "0.0.0.0:9002", "HOST:PORT of the external processing service.", parse=ADDRESS),
    Setting(
        "endpoints",
        (),
        "HOST:PORT[/METRICS_PORT] of a model server, by IP address; may be repeated.",
        is_repeated=True,
        parse=MODEL_SERVER,
    ),
    Setting(
        "prefill_endpoints",
        (),
        "HOST:PORT[/METRICS_PORT] of a server that only computes prompts; may be repeated.",
        is_repeated=True,
        parse=MODEL_SERVER,
    ),
    Setting(
        "inference_pool",
        "",
        "NAMESPACE/NAME of an InferencePool of inference.networking.k8s.io whose pods are the endpoints.",
        parse=NAME,
    ),
    Setting(
        "flavor",
        "auto",
        "Kind of the model servers, by which their metrics are read; auto: by the metrics themselves.",
        choices=("auto", "kvferry", "vllm", "sglang"),
    ),
    Setting("metrics_path", "/metrics", "Path of the model servers' metrics.", parse=TEXT),
    Setting("metrics_port", 0, "Port of the model servers' metrics; 0: that of requests.", parse=whole(0, 0xFFFF)),
    Setting(
        "scrape_seconds",
        0.2,
        "Seconds between two scrapes of an endpoint; with more than 100 endpoints, 2 ms for each.",
        parse=seconds(0.02, 60),
    ),
    Setting(
        "stale_seconds",
        10.0,
        "Seconds after which an endpoint without metrics is used only if no other has any.",
        parse=seconds(0.1, 3600),
    ),
    Setting(
        "body_mode",
        "auto",
        "How the proxy sends bodies; auto: as it says, or else full-duplex.",
        choices=("auto", "none", "buffered", "full-duplex"),
    ),
    Setting(
        "max_body_bytes",
        1 << 20,
        "Bytes of a body that are read; requests with larger ones are routed by load.",
        parse=size_bytes,
    ),
    Setting(
        "prefill_header", "x-prefiller-host-port", "Header that names the prefill endpoint to decode pods.", parse=NAME
    ),
    Setting(
        "fallbacks",
        0,
        "Further endpoints that the proxy may try in order; Envoy's ORIGINAL_DST clusters accept none.",
        parse=whole(0, 8),
    ),
    Setting("plaintext", False, "Serve without TLS.", parse=boolean),
    *(replace(one, help=_CERTIFICATE[one.name]) for one in TLS if one.name in _CERTIFICATE),
    HEALTH,
    METRICS,
    POLICY,
    Setting(
        "prefix_blocks",
        4,
        "Number of leading blocks of a prompt, 256 bytes each, whose hash determines its preferred endpoint.",
        parse=whole(1, 1024),
    ),
    Setting(
        "skip_prefill_below",
        0,
        "Prompts with fewer estimated tokens, not counting cached ones, are computed by the endpoint that answers.",
        parse=whole(0, 1 << 20),
    ),
    Setting(
        "objective",
        (),
        "NAME=PRIORITY of an InferenceObjective; higher ones first, negative ones may be shed; may be repeated.",
        is_repeated=True,
        parse=NAME,
    ),
    Setting("saturation_waiting", 5, "Waiting requests from which an endpoint is full.", parse=whole(0, 1 << 20)),
    Setting("saturation_usage", 0.95, "Share of KV memory in use from which an endpoint is full.", parse=share()),
    Setting(
        "queue_seconds",
        1.0,
        "Longest wait in seconds while all endpoints are full; less than the proxy's message timeout.",
        parse=seconds(0, 600),
    ),
    Setting("max_queued", 1024, "Maximum number of waiting requests.", parse=whole(0, 1 << 20)),
    Setting(
        "share_ports",
        False,
        "Whether other pickers of this user may listen on the same port.",
        parse=boolean,
    ),
    DRAIN,
)
"""Settings of `kvferry picker`."""
