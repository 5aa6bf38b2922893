"""The exceptions callers see: one type per kind of remedy."""


class DSparkError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DSparkError, ValueError):
    """A setting or argument is outside what is allowed; change the named parameter."""


class InputError(DSparkError, ValueError):
    """The prompt cannot be run as given; fix the input named in the message."""


class CheckpointError(DSparkError, ValueError):
    """A drafter does not fit the target or cannot be loaded; load another one."""


class ShapeError(DSparkError, ValueError):
    """Tensors passed together do not agree in shape."""


class CapacityError(DSparkError, RuntimeError):
    """The request needs more positions or memory than there are."""


class UnsupportedByFlatError(DSparkError, NotImplementedError):
    """The ragged forward does not know something this model asks of attention.

    Caught by the target selection, which then runs the model row by row.
    """


class ExpandsCacheError(UnsupportedByFlatError):
    """The model stores a compressed form and expands it after reading the cache (MLA).

    Caught by the target selection, which then lets the cache return every cached token.
    """


class QueueError(DSparkError, RuntimeError):
    """Base of what a batching queue raises for a request."""


class QueueFullError(QueueError):
    """Too many requests wait already; submit again later, or let submit() block."""


class QueueClosedError(QueueError):
    """The queue was closed, or ended by a fatal error; nothing more runs in it."""


class RequestCancelledError(QueueError):
    """The request was cancelled; `handle.pieces` holds what it had said until then."""


class DeadlineError(QueueError):
    """The request's deadline passed before it was done; `handle.pieces` holds what there is."""
