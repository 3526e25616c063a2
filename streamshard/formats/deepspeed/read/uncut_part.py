"""Reads one model part without ZeRO (stage 0), which is not cut among ranks."""

from collections.abc import Mapping

from streamshard.errors import CorruptFileError, DisagreementError
from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.cut.zero_cutting import ModelPartMap
from streamshard.formats.deepspeed.read.model_files import ModelFile, read_models
from streamshard.formats.deepspeed.read.model_part import ModelPartReading, adopt_blobs
from streamshard.formats.deepspeed.read.module_reader import ModuleReader
from streamshard.formats.deepspeed.read.rank_files import ModelPartFiles, SourceFiles, require
from streamshard.formats.deepspeed.unsupported import Saved, refuse
from streamshard.formats.detect import is_stage_0
from streamshard.formats.pickle.inert import Node, show


def read_uncut_part(
    files: ModelPartFiles, sources: SourceFiles, *, name: str, first: int
) -> ModelPartReading:
    """Open the model file of one model part without ZeRO (stage 0), which is not cut among ranks.

    It holds the optimizer's state in the optimizer's own form. In fp32 that is torch's
    `state_dict`, by parameter number. In 16 bits `FP16_Optimizer` and `FP16_UnfusedOptimizer` add
    the master weights, flat per param group or by number. None of them records parameter names, or
    which weights are trained. So the state is copied as it is, like other training state, without
    being interpreted. This works for any optimizer, even one whose ZeRO files cannot be resharded.

    All data-parallel ranks hold the same state, and the first one saves it. `load_checkpoint`
    ignores `dp_world_size` at stage 0 (DeepSpeed 0.14.5, 0.16.9 and 0.19.8).

    `name`: name of the model part if the checkpoint has several, else empty.
    `first`: number of the model part's first logical tensor in the checkpoint.
    """
    (file,) = read_models(sources, files.model_files)
    model = file.root
    config = ds_config.config_in(model)
    if not is_stage_0(file.path):
        message = "holds no optimizer's state, as another part of the model does"
        raise DisagreementError(f"{message}: they are not of one run", path=file.path)
    refuse(Saved(0, config, (), (), [model], [file.path]))
    layout = ds_config.zero_layout(config, stage=0, world_size=recorded_ranks(file))
    module = ModuleReader([file], 0, {})
    entries = module.entries({})
    module.assign(entries, first=first, model_part=name)
    module.strip_module(entries)
    tensors, whole = list(module.tensors), dict(module.whole)
    adopt_blobs([model], tensors, whole, first=first, model_part=name)
    return ModelPartReading(
        model_part=ModelPart(name, (), entries, model, {}, {}),
        part_map=ModelPartMap(),
        layout=layout,
        tensors=tensors,
        whole=whole,
        shards={},
        module_dtype=ds_config.module_dtype(config),
        tied={},
        notes=(),
    )


def recorded_ranks(file: ModelFile) -> int:
    """Read the count of data-parallel ranks, which no other entry records."""
    model: Mapping[str, Node] = file.root
    count = require(model, names.DP_WORLD_SIZE, file.path)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        message = f"its '{names.DP_WORLD_SIZE}' is {show(count)}, which is not a count"
        raise CorruptFileError(message, path=file.path)
    return count
