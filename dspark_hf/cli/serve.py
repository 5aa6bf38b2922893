"""`dspark-hf serve`: a model behind HTTP, in OpenAI's form and in generate()'s own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations
from dspark_hf.errors import ConfigError

GRACE_S = 5
"""Seconds that open answers get after the first Ctrl-C."""


def serve(
    model: Annotated[str, typer.Argument(help="Path or hub id of a causal LM.")],
    drafter: Annotated[
        str, typer.Option(help="auto, lookup, none, or the path or hub id of a drafter.")
    ] = "auto",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    dtype: Dtype = "bfloat16",
    config: Annotated[
        Path | None, typer.Option(help="YAML file of DSparkConfig; `queue:` holds the queue's.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens where a request does not say.")
    ] = 256,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its last part.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show live what runs and waits.")] = False,
) -> None:
    """Serve a model: many requests at once, each answered as generate() alone would."""
    try:
        import uvicorn

        from dspark_hf.serving.server import create_app
    except ImportError as error:
        raise ConfigError(
            f"serve needs fastapi, uvicorn and prometheus-client; {error.name} is not installed. "
            "Run: pip install 'dspark-hf[serve]'"
        ) from error
    from dspark_hf.cli import session
    from dspark_hf.config import DSparkConfig
    from dspark_hf.serving import GenerationQueue

    if config is not None and not config.is_file():
        raise ConfigError(f"--config must be a YAML file; got {str(config)!r}. Name another one.")
    settings = None if config is None else DSparkConfig.from_yaml(config)
    wrapped, tokenizer = session.load(model, drafter, dtype, settings)
    wrapped.dspark.ensure_profile()
    called = name or Path(model).name
    with GenerationQueue(wrapped, tokenizer) as queue:
        if watch:
            queue.measure_bandwidth()
        app = create_app(queue, called, max_new_tokens)
        Console(stderr=True).print(f"{called} at http://{host}:{port}; its forms at /docs")
        with queue.watch() if watch else nullcontext():
            uvicorn.run(
                app,
                host=host,
                port=port,
                log_level="warning" if watch else "info",
                timeout_graceful_shutdown=GRACE_S,
            )
        # The server has ended: nobody is left to read what would still come.
        queue.close(drain=False)
