"""Which group a request goes to, with queues that only pretend; two real ones in the end."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from dspark_hf import DSparkConfig, GenerationQueue, QueueConfig
from dspark_hf.errors import ConfigError, InputError, QueueClosedError, QueueFullError
from dspark_hf.serving import LoadLimit, Router
from dspark_hf.serving.handle import CANCELLED, DONE, FAILED, RequestHandle, RequestResult
from dspark_hf.serving.routing import Asked, Decision, Routes
from harness import wrapped
from made_metrics import samples

IDLE = {"flash": 0.0, "pro": 0.0}
WAIT_S = 60


def long_prompt(num_prompt_tokens: int, max_new_tokens: int | None, priority: int) -> bool:
    return num_prompt_tokens > 100


def long_answer(num_prompt_tokens: int, max_new_tokens: int | None, priority: int) -> bool:
    return max_new_tokens is None or max_new_tokens > 500


RULES = {"chat": "flash", long_prompt: "pro", "batch": "pro", long_answer: "pro"}


@pytest.mark.parametrize(
    ("asked", "group", "reason"),
    [
        (Asked(5, 10), "flash", "default"),
        (Asked(101, 10), "pro", "rule"),
        (Asked(5, 501), "pro", "rule"),
        (Asked(5, None), "pro", "rule"),
        (Asked(101, 999, request_class="chat"), "flash", "class"),
        (Asked(5, 10, request_class="batch"), "pro", "class"),
        (Asked(5, 10, group="pro"), "pro", "named"),
        (Asked(101, 10, group="flash", request_class="batch"), "flash", "named"),
    ],
)
def test_names_come_before_classes_and_classes_before_rules(
    asked: Asked, group: str, reason: str
) -> None:
    routes = Routes(["flash", "pro"], rules=RULES)
    assert routes.choose(asked, IDLE) == Decision(group, group, reason)


def test_rules_are_asked_in_order_and_see_the_priority() -> None:
    rules = {lambda n, new, priority: priority > 5: "pro", lambda n, new, priority: True: "flash"}
    routes = Routes(["big", "flash", "pro"], rules=rules)
    delays = dict.fromkeys(["big", "flash", "pro"], 0.0)
    chosen = [routes.choose(Asked(1, 1, priority), delays).group for priority in (0, 6, 5)]
    assert chosen == ["flash", "pro", "flash"]


def test_an_overloaded_group_is_left_until_it_has_caught_up() -> None:
    routes = Routes(
        ["flash", "pro"], limits={"flash": LoadLimit(high=2.0, low=0.5)}, fallback={"flash": "pro"}
    )
    delays = [0.0, 1.9, 2.0, 2.1, 1.9, 0.6, 0.5, 0.4, 1.9, 2.1, 0.0]
    chosen = [routes.choose(Asked(1), {"flash": d, "pro": 9.0}) for d in delays]
    assert [c.group for c in chosen] == ["flash"] * 3 + ["pro"] * 4 + ["flash"] * 2 + [
        "pro", "flash",
    ]  # fmt: skip
    assert chosen[3] == Decision("pro", "flash", "load")


def test_a_limit_for_all_leaves_the_overloaded_and_no_place_to_go_changes_nothing() -> None:
    routes = Routes(["flash", "pro"], limits=LoadLimit(1.0, 0.0), fallback="pro")
    assert routes.choose(Asked(1), {"flash": 2.0, "pro": 0.5}).group == "pro"
    assert routes.left == ["flash"]
    assert routes.choose(Asked(1), {"flash": 2.0, "pro": 3.0}).group == "flash"
    assert routes.left == ["flash", "pro"]
    # The fallback of all others has none itself.
    assert routes.choose(Asked(1, group="pro"), IDLE, ["pro"]) is None
    # A limit down to nothing is reached when nothing is left.
    assert routes.left == []


def test_a_named_group_is_kept_under_load_but_not_when_it_is_unavailable() -> None:
    routes = Routes(["flash", "pro"], limits=LoadLimit(1.0, 0.5), fallback="pro")
    loaded = {"flash": 5.0, "pro": 0.0}
    assert routes.choose(Asked(1, group="flash"), loaded).group == "flash"
    assert routes.choose(Asked(1), loaded).group == "pro"
    found = routes.choose(Asked(1, group="flash"), loaded, ["flash"])
    assert found == Decision("pro", "flash", "unavailable")


def test_fallbacks_are_followed_one_after_another_and_never_round() -> None:
    names = ["a", "b", "c"]
    routes = Routes(names, fallback={"a": "b", "b": "c", "c": "a"})
    delays = dict.fromkeys(names, 0.0)
    assert routes.choose(Asked(1), delays, ["a"]).group == "b"
    assert routes.choose(Asked(1), delays, ["a", "b"]).group == "c"
    assert routes.choose(Asked(1), delays, names) is None
    assert Routes(names).choose(Asked(1), delays, ["a"]) is None


def test_decisions_are_the_same_for_the_same_past() -> None:
    def run() -> list[Any]:
        routes = Routes(["flash", "pro"], rules=RULES, limits=LoadLimit(1.0, 0.2), fallback="pro")
        return [
            routes.choose(Asked(i % 150, i % 700), {"flash": i % 3, "pro": 0.1 * (i % 7)})
            for i in range(200)
        ]

    assert run() == run()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"default": "fast"}, r"default must be one of \['flash', 'pro'\]; got 'fast'"),
        ({"rules": {"chat": "fast"}}, "the group of a rule must be one of"),
        ({"rules": {3: "pro"}}, "a rule must be a request class, as text, or a function"),
        ({"fallback": "fast"}, "fallback"),
        ({"fallback": {"fast": "pro"}}, "fallback must be one of"),
        ({"limits": {"fast": LoadLimit(2, 1)}}, "limits must be one of"),
        ({"limits": {"pro": 2.0}}, r"limits must hold LoadLimit\(high, low\); got 2.0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Routes(["flash", "pro"], **settings)


@pytest.mark.parametrize(("high", "low"), [(0, 0), (1, 2), (1, -1), ("1", 0), (True, 0)])
def test_limits_belong_together(high: Any, low: Any) -> None:
    with pytest.raises(ConfigError, match=r"(high|low) must be seconds"):
        LoadLimit(high, low)


def test_unknown_names_are_config_errors() -> None:
    routes = Routes(["flash", "pro"], rules=RULES)
    with pytest.raises(ConfigError, match=r"group must be one of \['flash', 'pro'\]; got 'fast'"):
        routes.choose(Asked(1, group="fast"), IDLE)
    with pytest.raises(ConfigError, match=r"request_class must be one of \['batch', 'chat'\]"):
        routes.choose(Asked(1, request_class="talk"), IDLE)


class Pretender:
    """A queue that takes requests, or raises what the test tells it to."""

    def __init__(self) -> None:
        self.tokenizer: Any = None
        self.config = QueueConfig(max_rows=1, max_pending=1)
        self.is_open, self.expected_delay_s = True, 0.0
        self.raises: list[Exception] = []
        self.taken: list[tuple[Any, dict[str, Any], RequestHandle]] = []
        self.closed: list[tuple[bool, float | None]] = []

    def submit(self, inputs: Any, **kwargs: Any) -> RequestHandle:
        if self.raises:
            raise self.raises.pop(0)
        handle = RequestHandle(lambda handle: handle.end(CANCELLED, error=None))
        self.taken.append((inputs, kwargs, handle))
        return handle

    def end(self, error: Exception | None = None) -> None:
        handle = self.taken[-1][2]
        if error is not None:
            handle.end(FAILED, error=error)
        else:
            handle.end(DONE, result=RequestResult(None, [], None, handle.stats))

    def metrics(self) -> dict[str, Any]:
        return {"taken": len(self.taken)}

    def close(self, *, drain: bool, timeout: float | None) -> bool:
        self.closed.append((drain, timeout))
        return timeout != 0


@pytest.fixture
def queues() -> dict[str, Any]:
    return {"flash": Pretender(), "pro": Pretender()}


def test_requests_reach_their_group_as_they_were_submitted(queues: dict[str, Any]) -> None:
    router = Router(queues, RULES)
    handle = router.submit([1] * 101, max_new_tokens=4, priority=2, deadline_s=9.0, top_k=3)
    router.submit([1, 2], request_class="chat")
    assert queues["pro"].taken == [
        ([1] * 101, {"max_new_tokens": 4, "priority": 2, "deadline_s": 9.0, "top_k": 3}, handle)
    ]
    assert handle.stats.group == "pro"
    assert queues["flash"].taken[0][1] == {"priority": 0, "deadline_s": None}
    assert router.metrics() == {
        "decisions": {"pro": {"rule": 1}, "flash": {"class": 1}},
        "left": [],
        "breakers": {"flash": "closed", "pro": "closed"},
        "open": {"flash": True, "pro": True},
        "expected_delay_s": {"flash": 0.0, "pro": 0.0},
        "groups": {"flash": {"taken": 1}, "pro": {"taken": 1}},
    }


@pytest.mark.parametrize(
    "trouble",
    [QueueFullError("too many wait"), QueueClosedError("it ended"), OSError("no device")],
    ids=lambda trouble: type(trouble).__name__,
)
def test_a_group_that_does_not_take_a_request_is_stood_in_for(
    queues: dict[str, Any], trouble: Exception
) -> None:
    router = Router(queues, fallback="pro")
    queues["flash"].raises = [trouble]
    assert router.submit([1]).stats.group == "pro"
    assert router.submit([1]).stats.group == "flash"
    assert router.metrics()["decisions"] == {"pro": {"unavailable": 1}, "flash": {"default": 1}}
    alone = Router(queues)
    queues["flash"].raises = [trouble]
    with pytest.raises(type(trouble), match=str(trouble)):
        alone.submit([1])


def test_closed_groups_and_those_without_a_replica_are_not_asked(queues: dict[str, Any]) -> None:
    router = Router(queues, fallback="pro")
    queues["flash"].expected_delay_s = float("inf")
    assert router.submit([1]).stats.group == "pro"
    queues["flash"].expected_delay_s, queues["flash"].is_open = 0.0, False
    assert router.submit([1]).stats.group == "pro"
    assert router.is_open
    queues["pro"].is_open = False
    with pytest.raises(QueueClosedError, match="no group can take the request"):
        router.submit([1])
    assert not queues["flash"].taken
    assert not router.is_open


def test_wrong_calls_are_not_passed_on(queues: dict[str, Any]) -> None:
    router = Router(queues, fallback="pro")
    for error in (ConfigError("no"), InputError("no"), ValueError("no"), TypeError("no")):
        queues["flash"].raises = [error]
        with pytest.raises(type(error)):
            router.submit([1])
    assert not queues["pro"].taken
    assert router.metrics()["breakers"]["flash"] == "closed"


def test_a_group_whose_requests_fail_is_left_alone_for_a_while(queues: dict[str, Any]) -> None:
    router = Router(queues, fallback="pro", max_failures=2, retry_s=10.0)
    now = [0.0]
    for breaker in router._breakers.values():
        breaker.clock = lambda: now[0]

    def group_of_next(error: Exception | None) -> str:
        group = router.submit([1]).stats.group
        queues[group].end(error)
        return group

    sick, mine = RuntimeError("no device"), InputError("a bad prompt")
    assert [group_of_next(error) for error in (sick, None, sick, mine, sick)] == ["flash"] * 5
    assert router.metrics()["breakers"]["flash"] == "open"
    assert group_of_next(None) == "pro"
    now[0] = 11.0
    assert group_of_next(sick) == "flash"
    assert group_of_next(None) == "pro"
    now[0] = 22.0
    assert [group_of_next(None) for _ in range(3)] == ["flash"] * 3


def test_closing_closes_every_group_at_the_same_time(queues: dict[str, Any]) -> None:
    with Router(queues) as router:
        router.submit([1])
    assert [queue.closed for queue in queues.values()] == [[(True, 0), (True, None)]] * 2
    assert not router.close(drain=False, timeout=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"groups": {}}, "groups must hold at least one queue"),
        ({"groups": {"flash": 3}}, "groups must map names to queues; got 'flash': 3"),
        ({"groups": {"flash": Pretender()}, "max_failures": 0}, "max_failures must be an integer"),
    ],
)
def test_a_router_checks_what_it_is_given(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Router(**arguments)


def test_each_group_answers_as_its_own_model_does() -> None:
    models = {"flash": tiny.llama(seed=1), "pro": tiny.llama(seed=2)}
    config = DSparkConfig(schedule="fixed", max_draft_tokens=4, never_slower=False)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompts = [tiny.prompt(n, seed=n) for n in (5, 120, 7)]
    with wrapped(models["flash"], "lookup", config), wrapped(models["pro"], "lookup", config):
        queues = {name: GenerationQueue(model) for name, model in models.items()}
        with Router(queues, RULES) as router:
            results = list(router.map(prompts, progress=False, **options))
            file = io.StringIO()
            with router.watch(Console(file=file, force_terminal=True, width=140)):
                named = router.submit(prompts[0], group="pro", **options).result(WAIT_S)
            found = samples(router.prometheus())
        groups = [result.stats.group for result in [*results, named]]
        assert groups == ["flash", "pro", "flash", "pro"]
        assert [found["dspark_requests_total", name, "done"] for name in models] == [2, 2]
        assert found["dspark_group_decisions_total", "pro", "named"] == 1
        assert "flash" in file.getvalue()
        assert "tokens/s" in file.getvalue()
        for result, ids, group in zip(
            [*results, named], [*prompts, prompts[0]], groups, strict=True
        ):
            whole = models[group].generate(torch.tensor([ids]), **options)
            assert result.output.tolist() == whole.tolist()
