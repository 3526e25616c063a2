"""Universal checkpoints that DeepSpeed's own converters made go to native files of any ranks.

Engines of three versions train and save, the converter of the same version makes a universal
checkpoint, and all else is removed. The installed version resumes from what we make of the rest,
and must hold all that was saved: also what DeepSpeed itself does not restore of these files.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import streamshard
from tests.oracle.cases import ALIGNED, BF16, BF16_OPTIMIZER, FP16, ROUND_ROBIN, SUB_GROUPS
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.models import Case
from tests.oracle.ranks import older_deepspeed, require_success, run_jobs
from tests.oracle.reshardings import Resharding
from tests.oracle.test_old_versions import VERSIONS, Between
from tests.oracle.test_universal_export import AMSGRAD
from tests.oracle.truth import Truth
from tests.oracle.universal import universal_of

RESUMED_AT = 3
ONE_GROUP = replace(BF16[2], name="z3-one-group", one_group=True)
"""Older converters know one param group alone at stage 3."""


@dataclass(frozen=True)
class Import:
    """A job that saves, what converts its checkpoint, and the job that resumes."""

    case: Case
    resume: Case
    version: str = ""
    ranks: int = 2
    """Those that save. At stage 2 older converters fail with groups smaller than twice as many."""
    is_ours: bool = False
    """Whether `export` makes it, where DeepSpeed's converter fails or loses states."""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.version, self.case.name, "as", self.resume.name)))


IMPORTS = [
    Import(BF16[1], BF16[2], VERSIONS[0]),
    Import(ONE_GROUP, replace(BF16[1], one_group=True), VERSIONS[1], ranks=4),
    Import(BF16[0], BF16[0]),
    Import(BF16[2], BF16[1]),
    Import(SUB_GROUPS, BF16[2]),
    Import(ALIGNED, ALIGNED),
    Import(FP16[1], FP16[2]),
    Import(BF16_OPTIMIZER, BF16[2], is_ours=True),
    Import(AMSGRAD, AMSGRAD, is_ours=True),
    Import(ROUND_ROBIN, ROUND_ROBIN, is_ours=True),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every import trained, converted, repartitioned and loaded."""
    root = tmp_path_factory.mktemp("imports")
    for version, ranks in sorted({(one.version, one.ranks) for one in IMPORTS}):
        train = [
            Train(one.case, root / one.name, root / f"{one.name}.saved.pt")
            for one in IMPORTS
            if (one.version, one.ranks) == (version, ranks)
        ]
        at = older_deepspeed(version) if version else None
        require_success(run_jobs(ranks, train, root / "ranks", deepspeed_at=at))
    for one in IMPORTS:
        run = root / one.name
        tag = (run / "latest").read_text()
        if one.is_ours:
            streamshard.export(run, root / "export", format="universal")
            (root / "export" / tag).rename(run / f"{tag}_universal")
            (root / "export" / "latest_universal").unlink()
            (run / "latest_universal").write_text(f"{tag}_universal")
        else:
            universal_of(run, run / f"{tag}_universal", one.version)
        (run / "latest").unlink()
        shutil.rmtree(run / tag)
        config = root / f"{one.name}.json"
        config.write_text(json.dumps(one.resume.ds_config()))
        out = root / f"{one.name}-out"
        streamshard.repartition(run, out, world_size=RESUMED_AT, ds_config_file=config, verify=True)
    load = [
        Resume(
            one.resume, root / f"{one.name}{place}", root / f"{one.name}{place}.loaded.pt",
            reshards=not place,
        )
        for one in IMPORTS
        for place in ("-out", "")
    ]  # fmt: skip
    require_success(run_jobs(RESUMED_AT, load, root / "ranks"))
    return root


@pytest.mark.parametrize("place", ["-out", ""], ids=["written", "into-the-engine"])
@pytest.mark.parametrize("one", IMPORTS, ids=lambda one: one.name)
def test_the_engine_holds_what_was_saved(one: Import, place: str, root: Path) -> None:
    saved, found = (
        Truth.load(root / f"{one.name}{name}.pt") for name in (".saved", f"{place}.loaded")
    )
    kind = Between if one.version else Resharding
    resharding = kind(one.case, one.ranks, RESUMED_AT, one.resume)
    assert differences(*resharding.alike(saved, found)) == []
    assert saved.frozen
    assert saved.buffers
