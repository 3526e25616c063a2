"""Makes sure that the master weights of experts are all that the experts' own files hold."""

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.tree_comparison import show_key
from streamshard.model import MASTER
from streamshard.operations.source.source import Source


def require_trained_experts(source: Source) -> None:
    """Refuse experts with tensors besides master weights, which only their own files hold."""
    checkpoint = source.checkpoint
    family = checkpoint.families[0]
    counts = family.model_state.get(names.EXPERT_COUNTS)
    if not counts:
        return
    if source.kind != "native" or not isinstance(counts, list):
        message = "the model has experts in files of their own, which are in a store unread: write"
        raise UnsupportedError(f"{message} its files with 'streamshard repartition', export these")
    trained = {t.name for t in checkpoint.tensors if t.state == MASTER and t.family == family.name}
    present = {file.path for file in checkpoint.files}
    for layer, count in enumerate(counts):
        for expert in range(count):
            name = f"{checkpoint.tag}/{names.expert_file(layer, expert, 0)}"
            if name not in present:
                message = f"{source.path / name}: missing, although '{names.EXPERT_COUNTS}' in the"
                raise UnsupportedError(f"{message} model file lists it: not exported")
            path = source.path / name
            root = torch_file.read(path, -1).root
            held = root if isinstance(root, dict) else {path.name: root}
            beside = [name for name in held if name not in trained]
            if beside or not held:
                what = f"'{show_key(beside[0])}'" if beside else "nothing"
                message = f"{path}: has {what}, and not trained weights of an expert alone"
                raise UnsupportedError(f"{message}: frozen weights and buffers are not exported")
