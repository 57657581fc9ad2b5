"""Secure aggregation, step 1 of 4: a device makes two key pairs for one sum and publishes the public halves."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.messages import Id
from fedge.step import Action, Result, Reveals, require
from fedge.task import TaskSpec

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
Proof = Annotated[bytes, Meta(max_length=4096)]


class KeysMade(Result, frozen=True, kw_only=True):
    """X25519 keys: `encryption`, for shares that others send it, and `masking`.

    `proof`: of this device's ownership, for the rest of the cohort (`fedge.masking.require_genuine`); empty if messages
    are not signed.
    """

    REVEALS: ClassVar = {"encryption": Reveals.NOTHING, "masking": Reveals.NOTHING, "proof": Reveals.NOTHING}
    encryption: PublicKey
    masking: PublicKey
    proof: Proof = b""


class MaskStep(Action, frozen=True, kw_only=True):
    """Common part of the steps of a masked sum besides training; only devices that train are asked.

    `session`: name of the sum within the round, the same in all four.
    """

    TIMED: ClassVar = False
    session: Id

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Almost none: no sample is used."""
        return 1


class MaskKeys(MaskStep, frozen=True, kw_only=True):
    """Make keys."""

    STEP: ClassVar = "mask_keys"
    RESULT: ClassVar = KeysMade

    def check(self, result: KeysMade, task: TaskSpec) -> None:
        """Two valid public keys."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        require(result.encryption != result.masking, "one key for two purposes")
        for key in (result.encryption, result.masking):
            try:
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError:
                require(False, "a key that makes no secret")
