"""Training a page predictor: per layer, a gate whose scores match where the model attends.

The target of a query head is its own attention, summed by page. Pages that a policy always reads
count as one class, with their true mass: they need no score, and as they anchor the others, scores
become estimates of log mass, not only of an order. A layer keeps its gate only if text that it was
not trained on is read better with it; otherwise only what moves the bound's scores to their height,
which chooses the same pages.

Source: distilling attention summed by block, SeerAttention (Gao et al., arXiv:2410.13276); the
per-head target and the anchor are ours.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.attention.learned import AttentionShape, LearnedPredictor, PageGate
from dspark_hf.attention.pages import PAGE
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.windows import spread_windows
from dspark_hf.targets.select import choose_target, position_limit
from dspark_hf.training.page_lessons import ALPHA, POLICY, Lesson, mean_loss, measure
from dspark_hf.training.page_samples import SampleFolder, record_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.training.page_lessons import Quality
    from dspark_hf.training.page_samples import PageSamples

    Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

SHARE = 8
"""A window's tokens per token read, where captured attention is measured."""
MIN_CONTEXT = 16 * PAGE
"""Tokens of the shortest window with pages to choose from."""
LOOK_EVERY = 10
"""Steps between looks at text that is not trained on."""
PATIENCE = 8
"""Looks without a better one after which a layer is done."""
OFFSET_RATE = 30
"""Learning rate of offsets, as a multiple: they have nats to go, and nothing depends on them."""


@dataclass(frozen=True)
class PredictorSettings:
    """How a page predictor is trained.

    Attributes:
        windows: Windows of text to train on. A quarter as many, at least one, tell when to stop,
            and as many again are measured on.
        context: Tokens of a window, with its BOS where the tokenizer puts one before texts.
        queries: Tokens of each window whose attention is looked at, all in its second half.
        rank: Of the gates.
        steps: Most steps per layer, each over all queries of one window.
        learning_rate: Of Adam.
        seed: Of the choice of tokens and the gates' first values.
    """

    windows: int = 6
    context: int = 4096
    queries: int = 64
    rank: int = 16
    steps: int = 300
    learning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        for name in ("windows", "queries", "rank", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.context < MIN_CONTEXT:
            raise ConfigError(
                f"context must be at least {MIN_CONTEXT} tokens, so that there are pages to choose "
                f"from; got {self.context}."
            )
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate must be above 0; got {self.learning_rate}.")
        if self.queries > len(_page_ends(self.context)):
            raise ConfigError(
                f"queries must be at most {len(_page_ends(self.context))}, the pages that end in "
                f"the second half of a window of {self.context} tokens; got {self.queries}. Raise "
                "context or lower it."
            )

    @property
    def held_out(self) -> int:
        """Windows that tell when to stop, and as many that are measured on."""
        return max(1, self.windows // 4)

    @property
    def budget(self) -> int:
        """Pages per key head that are read where captured attention is measured."""
        kept = POLICY.sink_pages + POLICY.recent_pages
        return max(self.context // SHARE // PAGE, kept + 1)


@dataclass(frozen=True)
class LayerReport:
    """What came of a layer, on text it was neither trained on nor stopped by.

    Attributes:
        layer: Its index.
        steps: Steps its correction was trained; 0 if none was kept, and pages are the bound's.
        bound: Of the softened bound.
        learned: Of what was kept.
        best: Share of attention that the best choice of as many pages captures.
    """

    layer: int
    steps: int
    bound: Quality
    learned: Quality
    best: float


@contextmanager
def _no_bar(_what: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def train_predictor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any = None,
    settings: PredictorSettings | None = None,
    *,
    bar: Bar = _no_bar,
) -> tuple[LearnedPredictor, list[LayerReport]]:
    """Train a page predictor for a model.

    Args:
        model: A causal LM that runs on the flat target, wrapped or not.
        tokenizer: Its tokenizer.
        data: See `evaluation.corpus.read_documents`; None for Python's language reference.
        settings: How; defaults when None.
        bar: Shows progress: a context manager of what is counted and how much there will be, which
            yields what is told of progress.

    Returns:
        tuple[LearnedPredictor, list[LayerReport]]: The predictor, to be kept by `save`, and what
        each layer that selects gained on held-out text.

    Raises:
        ConfigError: If the text is too short, the model has fewer positions than a window, or no
            layer selects.
        NotImplementedError: If the model does not run on the flat target, or its heads are not
            those its configuration tells.

    Cost: each window is read once, densely, and once more per query for that query alone; then
    `steps` small products per layer. Samples lie in temporary files.
    """
    settings = settings or PredictorSettings()
    choose_target(model).require_sparse(model, "Its layers do not select.")
    windows = _windows(model, tokenizer, data, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    with TemporaryDirectory(prefix="dspark-pages-") as name:
        folder = SampleFolder(Path(name))
        ends = torch.tensor(_page_ends(settings.context))
        with bar("windows", len(windows)) as tell:
            for number, ids in enumerate(windows):
                drawn = torch.randperm(len(ends), generator=generator)[: settings.queries]
                samples = record_window(model, ids, ends[drawn].sort().values.tolist())
                for layer, held in samples.items():
                    folder.write(number, layer, held)
                tell(1)
        return _fit(folder, AttentionShape.of(model), settings, generator, bar)


def _windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    settings: PredictorSettings,
) -> list[list[int]]:
    limit, _ = position_limit(model)
    if limit is not None and settings.context > limit:
        raise ConfigError(
            f"context must be at most the model's {limit} positions; got {settings.context}."
        )
    wanted = settings.windows + 2 * settings.held_out
    windows = spread_windows(tokenizer, data, settings.context, wanted)
    if len(windows) < wanted:
        raise ConfigError(
            f"data must hold {wanted} windows of {settings.context} tokens, {settings.windows} to "
            f"train on and {2 * settings.held_out} held out; got {len(windows)}. Lower windows or "
            "context, or give more text."
        )
    return windows


def _page_ends(context: int) -> list[int]:
    """Return the last token of each page that ends in the second half of a window."""
    return [end for end in range(PAGE - 1, context, PAGE) if end >= context // 2]


def _fit(
    folder: SampleFolder,
    shape: AttentionShape,
    settings: PredictorSettings,
    generator: torch.Generator,
    bar: Bar,
) -> tuple[LearnedPredictor, list[LayerReport]]:
    """Train and measure layer by layer; windows come in the order train, stop, measure."""
    if not folder.layers:
        raise ConfigError(
            "the model must have a layer of full attention whose pages may be left unread; got "
            "none. There is nothing to predict."
        )
    first, second = settings.windows, settings.windows + settings.held_out
    gates: dict[int, PageGate] = {}
    reports = []
    with bar("layers", len(folder.layers)) as tell:
        for layer in folder.layers:
            lessons = [
                Lesson.of(folder.read(window, layer))
                for window in range(second + settings.held_out)
            ]
            _check_heads(layer, lessons[0].samples, shape)
            start = PageGate.start(shape, settings.rank, generator)
            gate, steps = fit_gate(start, lessons[:first], lessons[first:second], settings)
            if gate is not None:
                gates[layer] = gate
            reports.append(_report(layer, gate, steps, lessons[second:], settings.budget))
            tell(1)
    return LearnedPredictor(shape, settings.rank, gates, ALPHA), reports


def _check_heads(layer: int, samples: PageSamples, shape: AttentionShape) -> None:
    num_kv, group, _, dim = samples.query.shape
    if (num_kv, group, dim) != (shape.num_kv, shape.group, shape.dim):
        raise NotImplementedError(
            f"the model's heads must be those of its configuration, {shape}; layer {layer} has "
            f"{num_kv * group} query heads, {num_kv} key heads and width {dim}. Use the bound."
        )


def fit_gate(
    start: PageGate, train: Sequence[Lesson], stop: Sequence[Lesson], settings: PredictorSettings
) -> tuple[PageGate | None, int]:
    """Train one layer's gate.

    Args:
        start: Where it starts.
        train: Windows to learn from, taken in turn.
        stop: Windows that tell which step was best, and whether it is better than the bound.
        settings: Steps, learning rate, and the budget at which attention must be captured.

    Returns:
        tuple[PageGate | None, int]: The gate and its steps, if on `stop` it has both a lower loss
        and more captured attention than the bound. Else one of offsets only and 0, if its loss is
        lower; else None and 0.
    """
    gate = PageGate(**{n: t.clone().requires_grad_() for n, t in start.parameters().items()})
    rates: list[dict[str, Any]] = [
        {"params": [gate.query, gate.page]},
        {"params": [gate.offset], "lr": settings.learning_rate * OFFSET_RATE},
    ]
    adam = torch.optim.Adam(rates, lr=settings.learning_rate)
    least, best, best_step = mean_loss(None, stop), None, 0
    for step in range(1, settings.steps + 1):
        lesson = train[(step - 1) % len(train)]
        adam.zero_grad()
        lesson.loss(lesson.scores(gate)).backward()
        adam.step()
        if step % LOOK_EVERY and step != settings.steps:
            continue
        loss = mean_loss(gate, stop)
        if loss < least:
            copy = {name: t.detach().clone() for name, t in gate.parameters().items()}
            least, best, best_step = loss, PageGate(**copy), step
        elif step - best_step > PATIENCE * LOOK_EVERY:
            break
    bound = measure(None, stop, settings.budget)
    if best is not None and measure(best, stop, settings.budget).captured > bound.captured:
        return best, best_step
    level = _levelled(start, train)
    return (level if mean_loss(level, stop) < bound.loss else None), 0


@torch.no_grad()
def _levelled(start: PageGate, lessons: Sequence[Lesson]) -> PageGate:
    """Return a gate of offsets only: those that are right for the bound, on average by head."""
    errors = torch.cat([each.errors(each.scores(None)) for each in lessons], dim=-1)
    return PageGate(
        torch.zeros_like(start.query), torch.zeros_like(start.page), -errors.mean(dim=-1)
    )


def _report(
    layer: int, gate: PageGate | None, steps: int, lessons: Sequence[Lesson], budget: int
) -> LayerReport:
    bound = measure(None, lessons, budget)
    learned = bound if gate is None else measure(gate, lessons, budget)
    # The true log masses as scores: no choice captures more.
    best = sum(each.captured(each.samples.log_mass, budget) for each in lessons) / len(lessons)
    return LayerReport(layer, steps, bound, learned, best)
