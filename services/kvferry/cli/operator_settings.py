"""Settings of the operator and of commands that access a cluster. Their names, units and defaults are a public
interface."""

from kvferry.core.settings.parsers import ADDRESS, FILE, NAME, Parser, seconds, whole
from kvferry.core.settings.setting import Setting

OPERATOR = (
    Setting(
        "namespace",
        (),
        "Namespace whose pools are reconciled; may be repeated. Default: all namespaces.",
        parse=NAME,
        is_repeated=True,
    ),
    Setting(
        "image",
        "",
        "Default image for pools without spec.image; default: kvferry:<this version>.",
        parse=Parser("IMAGE", str),
    ),
    Setting(
        "template",
        "Any",
        "What the templates of pools may contain: Any, or Restricted to labels, annotations, placement, resources and "
        "env values. A pool with more is refused.",
        choices=("Any", "Restricted"),
    ),
    Setting(
        "kubeconfig", "", "Kubeconfig file; default: the pod's service account, or else ~/.kube/config.", parse=FILE
    ),
    Setting("lease_namespace", "default", "Namespace of the leader election lease.", parse=NAME),
    Setting("lease_seconds", 15.0, "Duration of the leader election lease in seconds.", parse=seconds(2, 300)),
    Setting("identity", "", "Identity in the lease; default: the host name.", parse=NAME),
    Setting("health", "0.0.0.0:8080", "HOST:PORT of /healthz, /readyz and /metrics.", parse=ADDRESS),
    Setting("watch_probe_seconds", 10.0, "Seconds between liveness probes of each watch.", parse=seconds(1, 3600)),
    Setting(
        "discovery_seconds",
        30.0,
        "Seconds between checks for optional kinds (InferencePool of the inference extension, PodMonitor).",
        parse=seconds(1, 3600),
    ),
    Setting("workers", 4, "Maximum number of pools reconciled concurrently.", parse=whole(1, 64)),
)

OPERATOR_CHECK = (
    *(s for s in OPERATOR if s.name in {"kubeconfig", "lease_namespace"}),
    Setting("timeout", 60.0, "Seconds to wait for a leader.", parse=seconds(1, 3600)),
)

CLUSTER = (
    *(s for s in OPERATOR if s.name == "kubeconfig"),
    Setting(
        "lease_namespace",
        "",
        "Namespace of the leader election lease; default: all namespaces are searched.",
        parse=NAME,
    ),
    Setting("timeout", 10.0, "Seconds to wait for a leading operator.", parse=seconds(1, 3600)),
)
