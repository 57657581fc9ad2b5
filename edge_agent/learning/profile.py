"""SPRE: the ReLU-sparsity profile of a device (fedepc.md section 3, Eq. 1-2).

The profile is taken at the last ReLU before the output layer. Equality with zero is exact, so activations whose zero is
not exact (GELU, SiLU, leaky ReLU and the like) are refused.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_agent.privacy.answers import Noise
from fedge.errors import ConfigError
from fedge.models.network import listen_to_layers
from fedge.models.training import CHUNK, CPU, to_tensor
from fedge.steps.divergence import compute_divergence
from fedge.system.files import read_lasting, write_atomically

log = logging.getLogger("fedge.worker")

_EXACT: Final = (nn.ReLU, nn.ReLU6)
_INEXACT: Final = (
    nn.GELU,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.PReLU,
    nn.RReLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardswish,
    nn.Tanh,
    nn.Sigmoid,
)
MAX_UNITS: Final = 4096
"""Most units of a profile, since a message carries no longer one."""
DELTA: Final = 1e-5
"""delta of the (eps, delta) privacy of one sample that the log reports."""
NOISE_FILE: Final = "profile-noise.json"


@dataclass(frozen=True, slots=True)
class SparsityProfile:
    """A profile: `shares` (q,) of exact zeros per unit or channel, and `halves`, D_raw of even and odd samples."""

    shares: NDArray[np.float64]
    halves: float | None


def measure_sparsity(module: nn.Module, x: NDArray[np.float32], processor: torch.device = CPU) -> SparsityProfile:
    """Measure the profile of n >= 1 inputs (n, ...) in one pass; the module goes into evaluation mode.

    Raises:
        ConfigError: the network's last activation is not a ReLU module, or has more than 4096 units.
        ValueError: an activation is not finite.
    """
    return make_profile(sum_zeros(module, x, processor), len(x))


def sum_zeros(module: nn.Module, x: NDArray[np.float32], processor: torch.device = CPU) -> NDArray[np.float64]:
    """Sum the shares of zeros over the even and over the odd ones of n >= 1 inputs, (2, q); as `measure_sparsity`."""
    module.eval()
    inputs = to_tensor(x, processor)
    total: NDArray[np.float64] | float = 0.0
    with torch.inference_mode():
        layer = find_last_activation(module, inputs[:1])
        for start in range(0, len(x), CHUNK):  # CHUNK is even: a chunk's even samples are even in the whole
            zeros = _measure_zeros(module, layer, inputs[start : start + CHUNK])
            total = total + np.stack([zeros[::2].sum(axis=0), zeros[1::2].sum(axis=0)])
    return np.asarray(total)


def make_profile(sums: NDArray[np.float64], n: int) -> SparsityProfile:
    """Make the profile of n >= 1 inputs from the sums of their even and odd ones, (2, q)."""
    sizes = count_halves(n)
    halves = None if n < 2 else float(compute_divergence(*(sums / sizes)))
    return SparsityProfile(shares=np.asarray(sums.sum(axis=0) / n), halves=halves)


def count_halves(n: int) -> NDArray[np.int64]:
    """Count the even and the odd ones of n inputs, (2, 1)."""
    return np.array([[(n + 1) // 2], [n // 2]])


def randomise_sums(sums: NDArray[np.float64], n: int, noise: Noise) -> NDArray[np.float64]:
    """Return the sums with noise, within the range of such sums.

    A sample counts in one half, by shares less 1/2 of an L2 norm of at most sqrt(q)/2. So the profile comes with halves
    that differ by the noise, too, which sets the scale for the divergence of noisy profiles.
    """
    sizes, q = count_halves(n), sums.shape[1]
    centred = noise.add_to((sums - sizes / 2).ravel(), math.sqrt(q) / 2).reshape(sums.shape)
    return np.clip(centred + sizes / 2, 0, sizes)


class StoredNoise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The secret from which a device's noise is drawn, which never leaves the device."""

    seed: int
    sigma: float


def with_noise(found: SparsityProfile, n: int, *, sigma: float, home: Path) -> SparsityProfile:
    """Return S' = clip(s + z, 0, 1), z ~ N(0, sigma^2) drawn once for all and kept in `home`; no halves.

    Fresh noise in every report could be averaged away, so the first draw is used for ever, whatever `sigma` follows.
    The draw comes from the device's own random numbers, since the coordinator knows the order's seed.

    Raises:
        StoreError: the noise cannot be read or kept.
    """
    path = home / NOISE_FILE
    kept = read_lasting(path, msgspec.json.Decoder(StoredNoise).decode)
    if kept is None:
        kept = StoredNoise(seed=secrets.randbits(63), sigma=sigma)
        write_atomically(path, msgspec.json.encode(kept))
    z = kept.sigma * np.random.default_rng(kept.seed).standard_normal(len(found.shares))
    bound = compute_epsilon(n, len(found.shares), kept.sigma)
    if bound <= 1:
        log.info("event=profile_noise sigma=%g eps=%.2f delta=%g", kept.sigma, bound, DELTA)
    else:
        log.warning("event=profile_noise sigma=%g %d samples are too few for a guarantee", kept.sigma, n)
    return SparsityProfile(shares=np.clip(found.shares + z, 0.0, 1.0), halves=None)


def compute_epsilon(n: int, q: int, sigma: float) -> float:
    """Compute the eps of one of n samples, sqrt(q)/n * sqrt(2 ln(1.25/DELTA)) / sigma, valid for eps <= 1.

    Example:
        >>> round(compute_epsilon(2000, 64, 0.05), 2), round(compute_epsilon(30, 64, 0.05), 1)
        (0.39, 25.8)
    """
    return math.sqrt(q) / n * math.sqrt(2 * math.log(1.25 / DELTA)) / sigma


def find_last_activation(module: nn.Module, x: Tensor) -> nn.Module:
    """Return the ReLU module that ran last in a forward pass.

    Raises:
        ConfigError: the network has no ReLU module, or an activation without exact zeros ran after it.
    """
    ran: list[nn.Module] = []
    layers = [m for m in module.modules() if isinstance(m, _EXACT + _INEXACT)]
    with listen_to_layers(layers, lambda layer, *_: ran.append(layer)):
        module(x)
    if not ran:
        raise ConfigError("a sparsity profile needs a torch.nn.ReLU module in the network")
    if not isinstance(ran[-1], _EXACT):
        raise ConfigError(f"the zeros of {type(ran[-1]).__name__} are not exact: a sparsity profile needs ReLU")
    return ran[-1]


def _measure_zeros(module: nn.Module, layer: nn.Module, x: Tensor) -> NDArray[np.float64]:
    """Measure the share of zeros per sample and unit, (n, q)."""
    seen: list[Tensor] = []

    def on_output(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if not torch.isfinite(output).all():
            raise ValueError("an activation is not finite")
        seen.append((output == 0).to(torch.float64).reshape(*output.shape[:2], -1).mean(dim=2))

    with listen_to_layers([layer], on_output):
        module(x)
    shares = seen[-1].cpu().numpy()  # the last use of a module that is used several times
    if shares.shape[1] > MAX_UNITS:
        raise ConfigError(f"the last ReLU has {shares.shape[1]} units, a profile at most {MAX_UNITS}")
    return np.asarray(shares)
