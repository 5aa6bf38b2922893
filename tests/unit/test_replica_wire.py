"""What passes between processes: tensors, errors, and that sending never waits for a reader."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, TextStreamer

import tiny
from dspark_hf import DSparkForCausalLM
from dspark_hf.errors import ConfigError, QueueError
from dspark_hf.generation import DSparkGenerateOutput
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.job import packed_call
from dspark_hf.serving.replica_process import own_share
from dspark_hf.serving.replicas import ReplicaQueue
from dspark_hf.serving.wire import Drop, Failed, Failure, Post, Refused, pack, receive, unpack
from harness import toy_tokenizer

TENSORS = {
    "bfloat16": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
    "strided": torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)[1:],
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 5),
    "wanted": torch.ones(3, requires_grad=True),
}


def pair() -> tuple[Any, Any]:
    return multiprocessing.get_context("spawn").Pipe()


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name: str) -> None:
    tensor = TENSORS[name]
    ours, theirs = pair()
    post = Post(ours)
    post.put(Drop(1))
    post.put({"scores": (tensor, tensor.clone())})
    post.close()
    messages = receive(theirs)
    while len(messages) < 2:
        messages += receive(theirs)
    assert messages[0] == Drop(1)
    for found in [*messages[1]["scores"], unpack(pack(tensor))]:
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.detach())
        found.add_(1) if found.dtype != torch.bool else found.logical_not_()


def test_a_dict_output_arrives_without_its_cache() -> None:
    output = DSparkGenerateOutput(
        sequences=torch.tensor([[1, 2]]), scores=(torch.ones(1, 3),), past_key_values=DynamicCache()
    )
    found = unpack(pack(output))
    assert type(found) is DSparkGenerateOutput
    assert torch.equal(found.sequences, output.sequences)
    assert torch.equal(found["scores"][0], torch.ones(1, 3))
    assert found.past_key_values is None


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_keep_their_type_where_they_can() -> None:
    try:
        raise ConfigError("num_beams must be right.")
    except ConfigError as error:
        found = unpack(pack(Failure.of(error))).error()
    assert type(found) is ConfigError
    assert str(found) == "num_beams must be right."
    assert "test_errors_keep_their_type" in str(found.__cause__)
    odd = Failure.of(OddError(1, 2)).error()
    assert type(odd) is QueueError
    assert str(odd) == "in a replica, OddError: 1 and 2"
    assert type(Failure(b"no pickle", "Odd: it", "").error()) is QueueError


def test_a_message_that_cannot_be_pickled_fails_alone() -> None:
    ours, theirs = pair()
    post = Post(ours)
    post.put(Drop(1))
    post.put(Refused(2, lambda: None))  # type: ignore[arg-type]
    post.put(Drop(3))
    post.close()
    messages: list[Any] = []
    while len(messages) < 3:
        messages += receive(theirs)
    assert messages[0] == Drop(1)
    assert messages[2] == Drop(3)
    assert isinstance(messages[1], Failed)
    assert messages[1].run == 2
    assert "pickle" in messages[1].failure.description


def test_nobody_waits_for_a_reader_that_is_held_up_or_gone() -> None:
    ours, theirs = pair()
    post = Post(ours)
    for _ in range(100):
        post.put(b"x" * 100_000)
    post.close(timeout=0.01)
    theirs.close()
    post.close()
    post.put(Drop(1))
    post.flush()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"streamer": TextStreamer(toy_tokenizer())}, "streamer cannot be sent"),
        (
            {"prefix_allowed_tokens_fn": lambda *_: [1]},
            "_tokens_fn must be picklable",
        ),
        ({"past_key_values": DynamicCache()}, "past_key_values cannot be handed to a queue"),
    ],
)
def test_what_cannot_be_sent_is_named(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        packed_call(torch.ones(1, 2).long(), {"max_new_tokens": 3, **kwargs})


def test_a_drafting_model_is_not_sent_along() -> None:
    with pytest.raises(ConfigError, match="assistant_model cannot be a model"):
        packed_call(torch.ones(1, 2).long(), {"assistant_model": tiny.llama()})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"load": "a path"}, "load must be a function"),
        ({"load": []}, "load must be a function"),
        ({"load": print, "replicas": 0}, "replicas must be an integer of at least 1; got 0"),
        ({"load": [print, print], "replicas": 3}, "replicas must be as many as load lists, 2"),
        ({"load": lambda: None}, "load must be picklable"),
        ({"load": print, "config": {}}, "config must be a QueueConfig"),
        ({"load": print, "replica_config": 3}, "replica_config must be a ReplicaConfig"),
    ],
)
def test_a_replica_queue_checks_its_arguments_before_it_starts(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ReplicaQueue(**arguments)


def test_loading_by_partials_can_be_sent() -> None:
    load = partial(DSparkForCausalLM.from_pretrained, "somewhere", device_map={"": "cpu"})
    found = unpack(pack(load))
    assert found.func == DSparkForCausalLM.from_pretrained
    assert found.keywords == {"device_map": {"": "cpu"}}


def test_shares_of_common_memory_are_divided_and_bytes_are_not() -> None:
    config = QueueConfig(kv_budget=0.5, host_cache=0.1, max_pending=3, when_full="block")
    on_cpu = own_share(config, torch.device("cpu"), 2)
    assert (on_cpu.kv_budget, on_cpu.host_cache) == (0.25, 0.05)
    assert on_cpu.when_full == "error"
    assert on_cpu.max_pending > 10**6
    on_gpu = own_share(config, torch.device("cuda:1"), 2)
    assert (on_gpu.kv_budget, on_gpu.host_cache) == (0.5, 0.05)
    in_bytes = QueueConfig(kv_budget=10**9, host_cache=10**8)
    found = own_share(in_bytes, torch.device("cpu"), 4)
    assert (found.kv_budget, found.host_cache) == (10**9, 10**8)
