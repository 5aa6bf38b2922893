"""The batching queue: many callers share one model, each gets what it would have got alone."""

from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.handle import RequestHandle, RequestResult
from dspark_hf.serving.queue import GenerationQueue
from dspark_hf.serving.replica_settings import ReplicaConfig
from dspark_hf.serving.replicas import ReplicaQueue
from dspark_hf.serving.router import Router
from dspark_hf.serving.routing import LoadLimit

__all__ = [
    "GenerationQueue",
    "LoadLimit",
    "QueueConfig",
    "ReplicaConfig",
    "ReplicaQueue",
    "RequestHandle",
    "RequestResult",
    "Router",
]
