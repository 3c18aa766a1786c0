"""The Prometheus server, built from its Go module."""

from pathlib import Path

from harness.go_binary import go_binary

_PACKAGE = "github.com/prometheus/prometheus/cmd/prometheus"


def prometheus() -> Path:
    """Return the path of the server's binary; build it if it is missing, which takes minutes.

    Raises:
        Unavailable: there is no Go toolchain, or the build failed.
    """
    # Service discovery of clouds is left out: it is most of the code, and the tests scrape fixed addresses.
    return go_binary(Path(__file__).parent / "build", "prometheus", _PACKAGE, "-tags", "remove_all_sd")
