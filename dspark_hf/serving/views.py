"""What queues of all kinds have in common where they show their metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from dspark_hf.errors import ConfigError
from dspark_hf.serving.watch import render, watching
from dspark_hf.serving.watch_many import render_groups, render_replicas

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from rich.console import Console, RenderableType


class MetricsViews(ABC):
    """Shows `metrics()` as text and live: of a queue, of replicas and of a router."""

    _pictures_per_s: ClassVar[float] = 4.0

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return what is shown."""

    def prometheus(self) -> str:
        """Return `metrics()` in the text form that Prometheus reads, by group and replica.

        Raises:
            ConfigError: If prometheus-client is not installed.
        """
        return prometheus_text(self.metrics())

    def watch(
        self, console: Console | None = None, refresh_per_s: float | None = None
    ) -> AbstractContextManager[None]:
        """Show live, inside the context, what is done; nothing where there is no terminal.

        Args:
            console: Where; standard error when None.
            refresh_per_s: Pictures per second; 4 of a queue and 2 of several when None. Each asks
                every replica there is, which may take longer.
        """
        rate = self._pictures_per_s if refresh_per_s is None else refresh_per_s
        return watching(self.metrics, console, rate, picture)


def picture(metrics: Mapping[str, Any]) -> RenderableType:
    """Return a picture of metrics.

    Args:
        metrics: Of a queue, of replicas or of a router.
    """
    if "groups" in metrics:
        return render_groups(metrics)
    return render_replicas(metrics) if "replicas" in metrics else render(metrics)


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
