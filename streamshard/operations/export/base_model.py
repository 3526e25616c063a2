"""Compares what an export would write with a base model, by names and shapes."""

from collections.abc import Sequence

from streamshard.errors import DisagreementError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.operations.export.weights import Weight
from streamshard.operations.verb_options import ExportOptions


def require_same_model(
    weights: Sequence[Weight], model: Checkpoint, options: ExportOptions
) -> None:
    """Refuse weights of which a base model has other names or shapes.

    A model that lists a tied weight under one of its names alone has the weight. Where options
    choose some of the weights, the model may have more.
    """
    shapes = {entry.name: entry.shape for entry in model.families[0].module}
    unknown = [weight.names[0] for weight in weights if not shapes.keys() & {*weight.names}]
    if unknown:
        message = f"the base model given with --like lacks {show_few(unknown)}: leave out with"
        raise DisagreementError(
            f"{message} --exclude what is not its own, and take prefixes away with --strip-prefix"
        )
    for weight in weights:
        for name in weight.names:
            if shapes.get(name, weight.shape) != weight.shape:
                message = f"'{name}' is {list(weight.shape)}, in the base model given with --like"
                raise DisagreementError(f"{message} {list(shapes[name])}")
    written = {name for weight in weights for name in weight.names}
    is_part = options.include or options.exclude or not options.frozen
    missing = [] if is_part else [name for name in shapes if name not in written]
    if missing:
        message = f"lacks {show_few(missing)}, which the base model given with --like has"
        raise DisagreementError(message)
