"""What queues of all kinds have in common where they show their metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def prometheus_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics in the text form that Prometheus reads.

    Args:
        metrics: Of a queue, of replicas or of a router.

    Raises:
        ConfigError: If prometheus-client is not installed.
    """
    try:
        import prometheus_client  # noqa: F401 - not needed by who reads no metrics as text
    except ImportError as error:
        raise ConfigError(
            "prometheus() needs the package prometheus-client; it is not installed. Run: "
            "pip install 'dspark-hf[serve]'"
        ) from error
    from dspark_hf.serving.exposition import exposition

    return exposition(metrics)
