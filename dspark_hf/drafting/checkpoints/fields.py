"""Reading config.json: typed fields, and the few facts that layouts keep in several places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"
REPAIR = "Repair the drafter's config.json."


@dataclass(frozen=True)
class Fields:
    """Typed access to one object of config.json.

    Attributes:
        values: The object.
        where: Its path inside config.json, with a dot at the end; "" for the whole.
    """

    values: Mapping[str, Any]
    where: str = ""

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number that is at least `least`; required without a default."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, f"a whole number, at least {least}", value)
        return value

    def number(self, name: str) -> float:
        """Return a required number above 0."""
        value = self._required(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, "a number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return true or false; required without a default."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; required without a default."""
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def integers(self, name: str, *, least: int) -> tuple[int, ...]:
        """Return a required list of distinct whole numbers, each at least `least`."""
        value = self._required(name, None)
        is_list = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) and item >= least for item in value
        )
        if not is_list or not value or len(set(value)) != len(value):
            raise self._wrong(name, f"a list of distinct whole numbers, at least {least}", value)
        return tuple(value)

    def part(self, name: str) -> Fields:
        """Return the object of that name; an empty one if there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value or {}, f"{self.where}{name}.")

    def has(self, name: str) -> bool:
        """Whether there is such a field, other than null."""
        return self.values.get(name) is not None

    def _required(self, name: str, default: T | None) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(
                f"config.json must say {self.where}{name}; got no such field. {REPAIR}"
            )
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> CheckpointError:
        return CheckpointError(f"{self.where}{name} must be {wanted}; got {value!r}. {REPAIR}")


def mask_token(*places: Fields) -> int:
    """Return the mask token's id from wherever the layout keeps it.

    Args:
        places: Objects that may hold mask_token_id.

    Returns:
        int: The one value found.

    Raises:
        CheckpointError: If there is none, or two that differ.
    """
    found = {
        f"{place.where}mask_token_id": place.integer("mask_token_id", least=0)
        for place in places
        if place.has("mask_token_id")
    }
    if not found:
        names = " or ".join(f"{place.where}mask_token_id" for place in places)
        raise CheckpointError(f"config.json must say {names}; got neither. {REPAIR}")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        raise CheckpointError(
            f"mask_token_id must be the same in all places; got {listed}. {REPAIR}"
        )
    return next(iter(found.values()))


def layer_types(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return the type of every layer and the window of the sliding ones.

    Without layer_types the rule is Qwen3's: with use_sliding_window, layers from max_window_layers
    on slide.

    Args:
        fields: The backbone's part of config.json.
        num_layers: Layers of the backbone.

    Returns:
        tuple[tuple[str, ...], int | None]: Types, and the window in tokens; None if none slides.

    Raises:
        CheckpointError: If a layer slides and there is no window to slide.
    """
    values = fields.values
    given = values.get("layer_types")
    if given is None:
        first = num_layers
        if values.get("use_sliding_window") and fields.has("sliding_window"):
            first = fields.integer("max_window_layers", least=0)
        given = [FULL if layer < first else SLIDING for layer in range(num_layers)]
    if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
        raise CheckpointError(
            f"{fields.where}layer_types must be a list of texts; got {given!r}. {REPAIR}"
        )
    if SLIDING not in given:
        return tuple(given), None
    if values.get("use_sliding_window") is False:
        raise CheckpointError(
            f"{fields.where}use_sliding_window must be true where layer_types has sliding layers; "
            f"got false. {REPAIR}"
        )
    return tuple(given), fields.integer("sliding_window")


@dataclass(frozen=True)
class Rope:
    """Rotary angles of a backbone.

    Attributes:
        theta: Base in full layers, and in sliding ones unless they have their own.
        sliding_theta: Base in sliding layers; None for `theta`.
        share: Part of a head's dimensions that is rotated in full layers.
    """

    theta: float
    sliding_theta: float | None = None
    share: float = 1.0


def rope(
    fields: Fields, kinds: Sequence[str], *, prefer: str | None = None, allowed: str = "default"
) -> Rope:
    """Return the rotary angles; the base is never a default.

    Newer configurations keep them in rope_parameters, once or by layer type; older ones keep the
    base at the top.

    Args:
        fields: The backbone's part of config.json.
        kinds: Types of the layers.
        prefer: Entry to use for all layers where rope_parameters is by layer type and has it.
        allowed: Rotary type that full layers may have besides "default".

    Returns:
        Rope: Of full and sliding layers.

    Raises:
        CheckpointError: If there is no base.
        UnsupportedCheckpointError: If angles are scaled.
    """
    nested = fields.part("rope_parameters")
    by_type = {kind for kind in (FULL, SLIDING) if isinstance(nested.values.get(kind), dict)}
    if prefer in by_type:
        theta, _ = _rope_entry(nested.part(prefer), fields, "default")
        return Rope(theta)
    if not by_type:
        theta, share = _rope_entry(nested, fields, allowed)
        return Rope(theta, share=share)
    parts = {
        kind: _rope_entry(nested.part(kind), fields, allowed if kind == FULL else "default")
        for kind in sorted(set(kinds))
    }
    theta, share = parts.get(FULL) or parts[SLIDING]
    sliding = parts[SLIDING][0] if SLIDING in parts else theta
    return Rope(theta, None if sliding == theta else sliding, share)


def _rope_entry(entry: Fields, fields: Fields, allowed: str) -> tuple[float, float]:
    """Return base and rotated share."""
    for place in (entry, fields.part("rope_scaling")):
        kind = place.values.get("rope_type", place.values.get("type")) or "default"
        if kind not in ("default", allowed):
            raise UnsupportedCheckpointError(
                f"{place.where}rope_type must be 'default'; got {kind!r}. Scaled rotary angles are "
                "not supported: load another drafter."
            )
    places = (entry, fields)
    shares = [place for place in places if place.has("partial_rotary_factor")]
    share = shares[0].number("partial_rotary_factor") if shares else 1.0
    if share != 1.0 and allowed == "default":
        raise UnsupportedCheckpointError(
            f"partial_rotary_factor must be 1; got {share}. Load another drafter."
        )
    for place in places:
        if place.has("rope_theta"):
            return place.number("rope_theta"), share
    raise CheckpointError(
        f"config.json must say {entry.where}rope_theta or {fields.where}rope_theta; got neither, "
        f"and there is no safe default. {REPAIR}"
    )


def refuse_quantized(fields: Fields) -> None:
    """Refuse weights stored in a quantized form."""
    if fields.has("quantization_config"):
        raise UnsupportedCheckpointError(
            "a drafter's weights must be stored in full; got a quantization_config. Get the "
            "checkpoint before it was quantized."
        )
