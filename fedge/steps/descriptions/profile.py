"""Contract of the step that measures the ReLU-sparsity profile (SPRE) of a device's non-sensitive samples."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Result, Reveals, require
from fedge.steps.noise import Noisy
from fedge.wire.messages import BlobRef, Count, Digest, NonNegative, Share


class Profiled(Result, frozen=True, kw_only=True):
    """A device's profile: for each unit of a network, the share of its outputs that are exactly 0, in [0, 1].

    `extractor` is the digest of the network that made the profile. `halves` is the raw divergence D_raw (fedepc.md
    section 4.1) between the profiles of the even and the odd samples; None with `noise` or fewer than 2 samples.
    """

    REVEALS: ClassVar = {
        "extractor": Reveals.NOTHING,
        "profile": Reveals.PROFILE,
        "halves": Reveals.PROFILE,
        "n_samples": Reveals.COUNT,
    }
    extractor: Digest
    profile: Annotated[tuple[Share, ...], Meta(min_length=1, max_length=4096)]
    halves: NonNegative | None = None
    n_samples: Count


class Profile(Noisy, frozen=True, kw_only=True):
    """A request for the profile. `noise`: standard deviation sigma_dp of Gaussian noise, drawn once and stored.

    With `privacy` the profiles of both halves have noise, of which the answer is made.
    """

    STEP: ClassVar = "profile"
    RESULT: ClassVar = Profiled

    extractor: BlobRef
    noise: NonNegative = 0.0

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count one forward pass of each sample in D_L."""
        return n_shared

    def check(self, result: Profiled, task: TaskSpec) -> None:
        """Require a profile by this extractor, without halves if noise is requested."""
        require(result.extractor == self.extractor.digest, "the profile is by another extractor")
        require(not self.noise or result.halves is None, "the report has halves, which have no noise")
