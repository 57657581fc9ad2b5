"""Secure aggregation, step 1 of 5: a device makes three key pairs for one sum and publishes the public halves."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.wire.messages import Id

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
"""An Ed25519 signature of a statement (`fedge.privacy.masked_sums`), by a device's key `signing`."""
Proof = Annotated[bytes, Meta(max_length=4096)]


class KeysMade(Result, frozen=True, kw_only=True):
    """A device's public keys: X25519 for shares from others (`encryption`) and for `masking`, Ed25519 for `signing`.

    `proof` shows the rest of the cohort that the keys are this device's (`fedge.privacy.masked_sums.require_genuine`);
    it is empty if messages are not signed.
    """

    REVEALS: ClassVar = dict.fromkeys(("encryption", "masking", "signing", "proof"), Reveals.NOTHING)
    encryption: PublicKey
    masking: PublicKey
    signing: PublicKey
    proof: Proof = b""


class MaskStep(Action, frozen=True, kw_only=True):
    """The base of the steps of a masked sum besides training; only devices that train are asked.

    `session` is the name of the sum within the round, the same in all five steps.
    """

    TIMED: ClassVar = False
    session: Id

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Return 1, the least possible, since no sample is used."""
        return 1


class MaskKeys(MaskStep, frozen=True, kw_only=True):
    """A request to make keys."""

    STEP: ClassVar = "mask_keys"
    VERSION: ClassVar = 2
    RESULT: ClassVar = KeysMade

    def check(self, result: KeysMade, task: TaskSpec) -> None:
        """Require three different keys, of which two can make shared secrets."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        require(len({result.encryption, result.masking, result.signing}) == 3, "two of the keys are the same")
        for key in (result.encryption, result.masking):
            try:
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError:
                require(False, "a key cannot make a shared secret")
