"""Guards against hostile devices, and guards that hide devices from the server: settings and combinations.

All methods share `Protection`, and `COMBINATIONS` is the one table of what can be combined. A method lists in
`Method.REFUSED` which guards do not fit it. Invalid combinations are refused before a run, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Annotated, Final, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

from fedge.errors import ConfigError
from fedge.steps.contract import Action
from fedge.steps.masked.mask_shares import MIN_COHORT
from fedge.steps.noise import Privacy
from fedge.system.text import Heading
from fedge.tensors.layout import Codec

Rule = Literal["norm-clipped", "mean", "clipped", "median", "trimmed-mean", "multi-krum", "centred-clipping"]
"""A rule by which updates are averaged (`coordinator.aggregation.rules`)."""
SUMMABLE: Final[frozenset[Rule]] = frozenset({"norm-clipped", "mean", "clipped"})
"""Rules that need only each update's norm and then a weighted sum, so that a relay can add for its devices."""
Guard = Literal[
    "norm-clipped", "clipped", "median", "trimmed-mean", "multi-krum", "centred-clipping",
    "norm-limit", "dp", "masking", "top-k",
]  # fmt: skip
"""A guard: a rule other than the plain mean; the limit of an update's norm, which is always on
(`coordinator.fleet.update_norms`); DP-SGD on the devices; masked sums. top-k is no guard but the codec top1+zstd, which
some guards exclude."""

LARGEST_DELTA: Final = 1 / 20
"""Delta must be below this, which is 1 / samples of a device with 20 samples, few (`coordinator.service.samples.FEW`).
Only a device itself knows how many samples it has."""

AverageRule = Annotated[
    Rule,
    Heading.UPDATES,
    "Updates are averaged by this rule. With norm-clipped, none is longer than twice its cluster's median; with "
    "clipped, nor does any weigh more than twice the median.",
]
HostileShare = Annotated[
    float,
    Meta(ge=0, lt=0.5),
    Heading.UPDATES,
    "The rules trimmed-mean and multi-krum take this share of a cohort to be hostile.",
]
DpEpsilon = Annotated[
    Annotated[float, Meta(gt=0, le=10_000)] | None,
    Heading.PRIVACY,
    "By differential privacy the whole run, all campaigns together, tells at most this epsilon of a sample; each "
    "device adds noise.",
]
DpCampaigns = Annotated[
    int,
    Meta(ge=1, le=10_000),
    Heading.PRIVACY,
    "The epsilon is for this many campaigns together, each of as many rounds as the first.",
]
DpNoise = Annotated[
    Annotated[float, Meta(gt=0, le=1e6)] | None,
    Heading.PRIVACY,
    "Differential privacy has this noise instead: the standard deviation over --dp-clip, in each step.",
]
DpDelta = Annotated[
    float, Meta(gt=0, lt=1), Heading.PRIVACY, "This is the delta of --dp-epsilon, below 1 / samples of a device."
]
DpClip = Annotated[
    float, Meta(gt=0, le=1e6), Heading.PRIVACY, "A sample counts at most this much in a step, as an L2 norm."
]
Masking = Annotated[bool, Heading.PRIVACY, "The server sees sums of updates alone, no single one (docs/privacy.md)."]
MinCohort = Annotated[
    int,
    Meta(ge=2),
    Heading.PRIVACY,
    "A masked sum covers at least this many devices, and two sums of a run differ by as many.",
]
"""Settings that the commands share."""


class Answers(NamedTuple):
    """The most noisy answers of a device in a campaign, beside a training in each round (`fedge.steps.noise.Privacy`).

    `trainings`: those for a clustering.
    """

    descriptions: int = 0
    examinations: int = 0
    trainings: int = 0


NO_ANSWERS: Final = Answers()


class Protection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of all guards. `hostile`: f / n, for rules that must know it. `min_cohort`: fewest in a masked sum.

    Either `dp_epsilon` or `dp_noise` turns on differential privacy (`fedge.steps.training.train_dp`), with `dp_delta`
    and `dp_clip`. `dp_epsilon` is for `dp_campaigns` campaigns together.

    Raises:
        ConfigError: both of these are given, a setting has no effect, or `dp_delta` is too large.
    """

    average: AverageRule = "norm-clipped"
    hostile: HostileShare = 0.2
    dp_epsilon: DpEpsilon = None
    dp_campaigns: DpCampaigns = 1
    dp_noise: DpNoise = None
    dp_delta: DpDelta = 1e-5
    dp_clip: DpClip = 1.0
    masking: Masking = False
    min_cohort: MinCohort = MIN_COHORT

    def __post_init__(self) -> None:
        if self.min_cohort != MIN_COHORT and not self.masking:
            raise ConfigError("--min-cohort changes nothing without --masking: leave it out, or add --masking")
        if self.hostile != 0.2 and self.average not in {"trimmed-mean", "multi-krum"}:
            raise ConfigError(
                f"--hostile changes nothing with --average {self.average}: it is for trimmed-mean and multi-krum"
            )
        if self.dp_epsilon is not None and self.dp_noise is not None:
            raise ConfigError("--dp-noise says how strong the noise is, and so does --dp-epsilon: give one of them")
        if self.dp and self.dp_delta >= LARGEST_DELTA:
            below = "it must be well below 1 / samples of a device, as 1e-5 is"
            raise ConfigError(f"--dp-delta {self.dp_delta:g} promises nothing: {below}")
        if not self.dp and (self.dp_delta, self.dp_clip) != (1e-5, 1.0):
            raise ConfigError("--dp-delta and --dp-clip change nothing without --dp-epsilon or --dp-noise")
        if self.dp_campaigns > 1 and self.dp_epsilon is None:
            raise ConfigError("--dp-campaigns changes nothing without --dp-epsilon")

    @property
    def dp(self) -> bool:
        """Whether devices train with differential privacy."""
        return self.dp_epsilon is not None or self.dp_noise is not None

    def make_privacy(self, rounds: int, answers: Answers = NO_ANSWERS) -> Privacy | None:
        """Return what a run promises each sample; None without differential privacy.

        `rounds`, `answers`: of each campaign.
        """
        if not self.dp:
            return None
        return Privacy(
            clip_norm=self.dp_clip,
            delta=self.dp_delta,
            participations=max(1, (rounds + answers.trainings) * self.dp_campaigns),
            descriptions=answers.descriptions * self.dp_campaigns,
            examinations=answers.examinations * self.dp_campaigns,
            epsilon=self.dp_epsilon,
            noise_multiplier=self.dp_noise,
        )

    def describe_promise(self) -> str:
        """Describe what differential privacy promises each sample; empty without it."""
        if not self.dp:
            return ""
        what = f"noise {self.dp_noise:g} in each step" if self.dp_noise else f"epsilon at most {self.dp_epsilon:g}"
        if self.dp_campaigns > 1:
            what += f" in {self.dp_campaigns} campaigns together"
        return f"{what}, delta {self.dp_delta:g}; each agent's log says what it has spent"

    @property
    def guards(self) -> frozenset[Guard]:
        """The enabled optional guards."""
        found: dict[Guard, bool] = {"dp": self.dp, "masking": self.masking}
        if self.average != "mean":
            found[self.average] = True
        return frozenset(guard for guard, there in found.items() if there)


_ONE_RULE: Final = "one rule makes an average: choose one with --average"
_SINGLE: Final = "it needs each device's update, and masking shows the server sums alone: take --average mean"
_SPARSE: Final = "of most numbers only a few devices send other than 0"
_RULES: Final[tuple[Guard, ...]] = (
    "norm-clipped", "clipped", "median", "trimmed-mean", "multi-krum", "centred-clipping",
)  # fmt: skip

COMBINATIONS: Final[Mapping[frozenset[Guard], str]] = {
    **{frozenset(pair): _ONE_RULE for pair in combinations(_RULES, 2)},
    **{frozenset({rule, "masking"}): _SINGLE for rule in _RULES},
    **{frozenset({rule, "top-k"}): _SPARSE for rule in ("median", "trimmed-mean")},
    frozenset({"masking", "top-k"}): "masked updates are whole: one that leaves numbers out would show where",
    frozenset({"dp", "top-k"}): "what an update leaves out would come later, in one whose noise is not for it",
    frozenset({"dp", "masking"}): "masked training has no noise yet: noise protects samples, masking single devices",
}
"""Pairs of guards that do not combine, and why. A pair that is not listed combines."""

NOTES: Final[Mapping[frozenset[Guard], str]] = {
    frozenset({"norm-limit", "masking"}): "the limit does not see masked updates: one device can spoil the sum",
    frozenset({"multi-krum", "dp"}): "noise brings all updates about equally far apart, so that Krum chooses by chance",
}
"""Remarks on pairs of guards that combine."""


WITHOUT: Final = "fedavg, fedper, fedge and most other methods do without"


def explain_no_noise(*kinds: tuple[type[Action], str]) -> str:
    """Explain why a method that needs these fields of these steps cannot have differential privacy."""
    fields = ", ".join(f"{field} of step {step.STEP} ({step.RESULT.REVEALS[field].words})" for step, field in kinds)
    return f"it needs {fields}, which has no noise; " + WITHOUT


def require_combinable(
    protection: Protection, unfit: Mapping[str, str], method: str, codec: Codec = Codec.INT8
) -> None:
    """Refuse invalid combinations before a run.

    Args:
        protection: the settings.
        unfit: by guard, why it does not fit the method; other keys are ignored.
        method: the method's name.
        codec: the codec of the updates.

    Raises:
        ConfigError: two guards exclude each other, or one does not fit the method; the text has the reason.
    """
    sparse: frozenset[Guard] = frozenset({"top-k"}) if codec is Codec.TOP else frozenset()
    guards = sorted(protection.guards | sparse)
    for guard in guards:
        if guard in unfit:
            raise ConfigError(f"{method} cannot have {guard}: {unfit[guard]}")
    for pair in combinations(guards, 2):
        if why := COMBINATIONS.get(frozenset(pair)):
            raise ConfigError(f"{pair[0]} and {pair[1]} do not combine: {why}")


def format_table(guards: Collection[Guard] = get_args(Guard)) -> str:
    """Return the table of all pairs as Markdown: yes, a number for a remark, or a letter for a reason against."""
    reasons: dict[str, str] = {}
    notes: dict[str, str] = {}

    def format_cell(a: Guard, b: Guard) -> str:
        pair = frozenset({a, b})
        if a == b:
            return ""
        if why := COMBINATIONS.get(pair):
            return "no " + reasons.setdefault(why, f"({chr(ord('a') + len(reasons))})")
        return "yes" + (f" ({notes.setdefault(NOTES[pair], str(len(notes) + 1))})" if pair in NOTES else "")

    rows = [f"| {a} | " + " | ".join(format_cell(a, b) for b in guards) + " |" for a in guards]
    head = ["| | " + " | ".join(guards) + " |", "|" + "---|" * (len(guards) + 1)]
    why_not = [f"- {mark} {why}." for why, mark in reasons.items()]
    to_know = [f"- ({mark}) {note}." for note, mark in notes.items()]
    return "\n".join([*head, *rows, "", *why_not, *to_know])
