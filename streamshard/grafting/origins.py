"""Where each tensor of START gets its values from: the same name in SRC, or what a rule says."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, Self

from streamshard.errors import Option, UsageError
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed import names as deepspeed_names
from streamshard.grafting.advice import comment_on, lines_for, lines_of_moves, renames
from streamshard.grafting.rules import DROP, FREEZE, FRESH, MOVE, NEW, ROWS, THAW, Choice, Rules
from streamshard.model import MASTER, MODULE

Shape = tuple[int, ...]
_ADAPTER: Final = "lora_"
"""Beginning of a part of the names of PEFT's low-rank matrices."""
UNSAVED: Final = "unsaved"
"""What tables call frozen weights that SRC did not save."""
_OTHER_RANK: Final = (
    "# An adapter of another rank has no place for what was learned: 'new' begins it again. To "
    "keep it, merge the old one into the model, and save START with a new adapter on that."
)


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model part that have values of their own, by name."""

    trained: Mapping[str, Shape]
    untrained: Mapping[str, Shape]
    """Frozen weights and buffers whose values are saved."""
    unsaved: frozenset[str] = frozenset()
    """Frozen weights that are known to be left out when the checkpoint was saved."""
    frozen: frozenset[str] = frozenset()
    """Frozen weights whose values are saved."""
    lacks_frozen: bool = False
    """Whether frozen weights were left out, which the files do not name."""
    bare: frozenset[str] = frozenset()
    """Trained ones without the optimizer's states that their param group has."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of those that hold integers or flags, which are not converted."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors → the names that their values have here."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, part: ModelPart) -> Self:
        saved = {
            tensor.name: tensor.shape
            for tensor in checkpoint.tensors
            if tensor.state == MODULE and tensor.model_part == part.name
        }
        trained = checkpoint.master_shapes(part)
        entries = [e.name for e in part.module if e.kind not in ("param", "alias", "extra")]
        unsaved = frozenset(entries) - saved.keys() - trained.keys()
        untrained = {name: shape for name, shape in saved.items() if name not in trained}
        frozen = frozenset(entry.name for entry in part.module if entry.kind == "frozen")
        # Stage 1 lists none of them: if it has none, nobody knows whether they were left out.
        lists = part.model_state.get(deepspeed_names.FROZEN_SHAPES, {})
        lacks_frozen = lists is None and not frozen & saved.keys()
        stored = {(t.state, t.name) for t in checkpoint.tensors if t.model_part == part.name}
        states = ((key, n) for g in part.groups for key in g.cut_states for n in g.params)
        bare = frozenset(name for key, name in states if (key, name) not in stored)
        exact = exact_dtypes((t.name, t.dtype) for t in checkpoint.tensors if t.state == MODULE)
        tied = {entry.name: entry.alias_of for entry in part.module if entry.alias_of}
        return cls(trained, untrained, unsaved, frozen, lacks_frozen, bare, exact, tied)

    def leaves_out(self, name: str, start: "Inventory") -> bool:
        """Tell whether this source has no value of a tensor that is frozen in START."""
        is_held = name in self.trained or name in self.untrained
        is_missing = self.lacks_frozen and name in start.frozen and not is_held
        return name in self.unsaved or is_missing

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return the names and shapes of all parts; a name in several has the last one's shape."""
        trained, untrained, tied = dict[str, Shape](), dict[str, Shape](), dict[str, str]()
        unsaved, frozen, lacks_frozen, exact = set[str](), set[str](), False, dict[str, str]()
        for part in parts:
            trained |= part.trained
            untrained |= part.untrained
            tied |= part.tied
            unsaved |= part.unsaved
            frozen |= part.frozen
            lacks_frozen |= part.lacks_frozen
            exact |= part.exact
        sets = frozenset(unsaved), frozenset(frozen)
        return cls(trained, untrained, *sets, lacks_frozen, exact=exact, tied=tied)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {**self.trained, **self.untrained}


Sides = tuple[Inventory, Inventory]
"""SRC's and START's, of one model part."""


def exact_dtypes(tensors: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return those of names with dtypes that are integers or flags."""
    return {name: dtype for name, dtype in tensors if "int" in dtype or dtype == "bool"}


@dataclass(frozen=True)
class Origin:
    """Where one tensor of START gets its values from."""

    label: str
    """Its rules, or `kept`."""
    source: str | None = None
    """The tensor of SRC; None if the value is START's."""
    state: str = MASTER
    """Which of SRC's tensors of that name: the master weights, or the module's."""
    keeps_states: bool = False
    """Whether the optimizer's states come with it."""
    rows: int | None = None
    """How many leading rows come from SRC; None for all."""
    is_warm: bool = False

    def kept_numel(self, shape: Shape) -> int:
        """Count the leading elements of a tensor of START that come from SRC."""
        return prod(shape if self.rows is None else (self.rows, *shape[1:]))


@dataclass
class Matching:
    """Finds what each tensor of START has its values from, and what needs a rule."""

    source: Inventory
    start: Inventory
    rules: Rules
    needed: dict[str, dict[str, None]] = field(default_factory=dict)
    """Rule → names that need it, of all parts of the model."""
    has_other_rank: bool = False
    """Whether an adapter has another rank."""

    def need(self, word: str, name: str) -> None:
        names = self.needed.setdefault(word, {})
        names[name] = None

    def origins(self) -> dict[str, Origin]:
        """Match all tensors of START; differences without a rule are in `needed` then."""
        origins = {
            name: self._origin(name, shape, is_trained=is_trained)
            for shapes, is_trained in ((self.start.trained, True), (self.start.untrained, False))
            for name, shape in shapes.items()
        }
        self._find_unused(origins)
        return origins

    def _origin(self, name: str, shape: Shape, *, is_trained: bool) -> Origin:
        choice = self.rules.choice(name)
        is_unsaved = not is_trained and self.source.leaves_out(choice.source, self.start)
        taken = None if NEW in choice.words or is_unsaved else self._taken(choice, name)
        if taken is None:
            if not (NEW in choice.words or is_unsaved):
                self.need(NEW, name)
            label = UNSAVED if is_unsaved and NEW not in choice.words else choice.label
            return Origin(label, is_warm=choice.is_warm)
        if not self._fits_dtype(name, choice.source):
            self.need(NEW, name)
            return Origin(choice.label)
        state, old_shape = taken
        turned = {(True, MODULE): THAW, (False, MASTER): FREEZE}.get((is_trained, state))
        if turned is not None and turned not in choice.words:
            self.need(turned, name)
        is_begun_again = self.rules.is_fresh or FRESH in choice.words
        keeps_states = is_trained and state == MASTER and not is_begun_again
        if keeps_states and choice.source in self.source.bare:
            self.need(FRESH, name)
        rows = self._rows(choice, name, old_shape, shape)
        of_use = {turned, FRESH if is_trained else None, None if rows is None else ROWS}
        return Origin(
            label=replace(choice, words=choice.words & of_use).label,
            source=choice.source,
            state=state,
            keeps_states=keeps_states,
            rows=rows,
            is_warm=choice.is_warm,
        )

    def _taken(self, choice: Choice, name: str) -> tuple[str, Shape] | None:
        """Return which tensor of SRC a name gets its values from, and its shape; None if none."""
        if choice.source in self.source.trained:
            return MASTER, self.source.trained[choice.source]
        if choice.source in self.source.untrained:
            return MODULE, self.source.untrained[choice.source]
        if choice.naming or (THAW in choice.words and choice.source in self.source.unsaved):
            saved, advice = "has no", f"'new {name}'"
            if choice.source in self.source.unsaved:
                saved = "did not save"
            elif choice.source in self.source.tied:
                saved, advice = "has tied", f"'{self.source.tied[choice.source]}' in its place"
            message = f"'{name}' would be '{choice.source}', which SRC {saved}; give {advice}"
            raise UsageError(message)
        return None

    def _rows(self, choice: Choice, name: str, old: Shape, new: Shape) -> int | None:
        """Return how many leading rows come from SRC; None where the shapes are equal."""
        if old == new:
            return None
        is_adapter = any(part.startswith(_ADAPTER) for part in name.split("."))
        self.has_other_rank |= is_adapter and not choice.words
        if not new or not old or new[1:] != old[1:] or (is_adapter and not choice.words):
            self.need(NEW, name)
        elif ROWS not in choice.words:
            self.need(ROWS, name)
        return min((*new, 0)[0], (*old, 0)[0])

    def _find_unused(self, origins: Mapping[str, Origin]) -> None:
        """Find tensors of SRC that START lacks; refuse those that would be used up twice."""
        uses = Counter(origin.source for origin in origins.values() if origin.source is not None)
        for name in self.start.shapes:
            choice = self.rules.choice(name)
            if choice.naming == MOVE and uses[choice.source] > 1:
                message = (
                    f"'{choice.source}' is moved to '{name}', and used once more: give 'new' for"
                )
                raise UsageError(f"{message} the other one, or 'copy' in place of 'move'")
        here = {*self.start.shapes, *self.start.unsaved}
        kept_names = {name for name in here if not self.rules.choice(name).naming}
        for name in self.source.shapes:
            is_dropped = self.rules.drops(name)
            if is_dropped and uses[name]:
                raise UsageError(f"'{name}' is dropped, and START has its values: leave one out")
            if not (is_dropped or uses[name] or name in kept_names):
                self.need(DROP, name)

    def _copies_and_moves(self) -> tuple[dict[str, str], dict[str, str]]:
        """Take from what is needed the pairs that are, or look like, one parameter by two names."""
        new_shapes, old_shapes = self.start.shapes, self.source.shapes
        new, old = self._unmatched()
        # No file says which frozen weights SRC left out: it may have these by other names.
        new |= {name: new_shapes[name] for name in new_shapes if self._may_be_renamed(name)}
        copies = {name: tie for name in new if (tie := self._tied_to(name)) is not None}
        for side, names in ((new, copies.keys()), (old, {*copies.values()})):
            for name in side.keys() & names:
                del side[name]
        moves = renames(new, old)
        # A wrapper may have untied what it renamed, as PEFT's modules_to_save does.
        unmoved = {name: shape for name, shape in new.items() if name not in moves}
        ties = {tie: old_shapes[n] for tie, n in self.source.tied.items() if n in old_shapes}
        copies |= {name: self.source.tied[tie] for name, tie in renames(unmoved, ties).items()}
        copies |= {name: other for name, other in moves.items() if other in copies.values()}
        pairs = {n: other for n, other in {**moves, **copies}.items() if self._fits_dtype(n, other)}
        for name, other in pairs.items():
            self.needed.get(NEW, {}).pop(name, None)
            self.needed.get(DROP, {}).pop(other, None)
            if (name in self.start.trained) != (other in self.source.trained):
                self.need(THAW if name in self.start.trained else FREEZE, name)
            if new_shapes[name] != old_shapes[other]:
                self.need(ROWS, name)
        copies = {name: other for name, other in pairs.items() if name in copies}
        return copies, {name: other for name, other in pairs.items() if name not in copies}

    def _unmatched(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Return what is new in START without a rule, and what SRC alone has, with their shapes."""
        new_shapes, old_shapes = self.start.shapes, self.source.shapes
        unnamed = (n for n in self.needed.get(NEW, ()) if not self.rules.choice(n).naming)
        new = {name: new_shapes[name] for name in unnamed if name in new_shapes}
        return new, {
            name: old_shapes[name] for name in self.needed.get(DROP, ()) if name in old_shapes
        }

    def _may_be_renamed(self, name: str) -> bool:
        """Tell whether a frozen weight is taken for unsaved, though no file names it."""
        choice = self.rules.choice(name)
        is_named = NEW in choice.words or choice.naming or name in self.source.unsaved
        return not is_named and self.source.leaves_out(name, self.start)

    def _tied_to(self, name: str) -> str | None:
        """Return the tensor of SRC with which a name shares its values there, or in START."""
        shape, shapes = self.start.shapes[name], self.source.shapes
        ties = (tie for tie, tensor in self.start.tied.items() if tensor == name)
        for other in filter(shapes.__contains__, (self.source.tied.get(name, ""), *ties)):
            is_alike = len(shapes[other]) == len(shape) and shapes[other][1:] == shape[1:]
            if is_alike and self._fits_dtype(name, other):
                return other
        return None

    def _fits_dtype(self, name: str, other: str) -> bool:
        """Tell whether a tensor of START may have the values of one of SRC, as far as dtypes go."""
        return self.source.exact.get(other) == self.start.exact.get(name)

    def refusal(self) -> UsageError:
        """Return an error whose notes are the rules that would name all differences."""
        for word in (ROWS, THAW, FREEZE, FRESH):  # what is new has no other rule
            for name in self.needed.get(NEW, ()):
                self.needed.get(word, {}).pop(name, None)
        count = sum(map(len, self.needed.values()))
        start, source = [*self.start.shapes], [*self.source.shapes]
        copies, moves = self._copies_and_moves()
        lines = [f"copy {name} <- {other}" for name, other in copies.items()]
        lines += lines_of_moves(moves, start)
        names = {word: source if word == DROP else start for word in self.needed}
        lines += lines_for(self.needed, names)
        lines += comment_on(*self._unmatched())
        lines += [_OTHER_RANK] * self.has_other_rank
        message = f"{count:,} tensors of SRC and START differ, and no rule names them. Look at each"
        error = UsageError(f"{message} of these lines, and put them into a file of rules:")
        for line in lines:
            error.add_note(line)
        return error


def origins_of(parts: Sequence[Sides], rules: Rules) -> list[dict[str, Origin]]:
    """Decide where each tensor of each model part of START gets its values from.

    Raises
    ------
    UsageError
        If there is a difference that no rule names; its notes are the rules that would. If rules
        exclude each other, or name something that is not there; if SRC has a tensor in another part
        of the model.
    """
    source, start = (Inventory.joined(sides) for sides in zip(*parts, strict=True))
    rules.require_used([*source.shapes], [*start.shapes, *start.unsaved], source.tied, start.tied)
    for sides in parts:
        _require_same_part(source, *sides, rules)
    whole = Matching(source, start, rules)
    matchings = [Matching(*sides, rules, whole.needed) for sides in parts]
    origins = [matching.origins() for matching in matchings]
    if whole.needed:
        whole.has_other_rank = any(matching.has_other_rank for matching in matchings)
        raise whole.refusal()
    return origins


def _require_same_part(whole: Inventory, source: Inventory, start: Inventory, rules: Rules) -> None:
    """Refuse a tensor whose values are in another part of SRC's model: on another stage."""
    elsewhere = whole.shapes.keys() - source.shapes.keys()
    for name in start.shapes if elsewhere else ():
        choice = rules.choice(name)
        if choice.source in elsewhere and NEW not in choice.words:
            message = f"'{name}' of START is on another stage of the pipeline than SRC's"
            message = f"{message} '{choice.source}', and a graft goes stage by stage. Take both to"
            message = f"{message} one stage first, with 'streamshard repartition' and"
            message = f"{message} {Option('pipeline_parallel', 1)}, and then what is grafted back"
            raise UsageError(f"{message} to START's stages, with START as {Option('like')}")


def names_of(origins: Mapping[str, Origin]) -> dict[str, Sequence[str]]:
    """Return the tensors of START by what their rules are called, `kept` first."""
    labels = sorted({origin.label for origin in origins.values()}, key=lambda x: (x != "kept", x))
    return {label: [n for n, o in origins.items() if o.label == label] for label in labels}
