"""What a policy is to the rest of the system. Nothing outside a policy's own folder knows which one it is.

    act(seen, draws, greedy)   inference: an action chunk for each row, and the record of how it was chosen
    forward(seen, record)      learning: log-probability of what was recorded, entropy, value
    encode(actions)            cloning: the record of an action chunk that was demonstrated

The same weights give the same log-probabilities in both (up to rounding): they use the same temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from vla_rl.core.records import Array, Record
from vla_rl.policies.base.value_head import ValueHead


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """N observations as tensors, on the policy's device: fields and shapes of ``Observation``."""

    images: Tensor
    proprio: Tensor
    task: Tensor  # integers, indices into the policy's instructions
    elapsed: Tensor  # read by the value head alone


@dataclass(frozen=True)  # no slots: ZeRO-3 looks for the output's tensors in its __dict__
class PolicyOutput:
    """Result of one forward pass for N observations."""

    logprobs: Tensor  # float32 [N, K, A], of the record
    entropy: Tensor  # float32 [N, K, A], nats
    values: Tensor  # float32 [N]
    features: Tensor  # [N, F], what the value head reads of the state, without gradient
    means: Tensor | None = None  # float32 [N, K, A], the most likely normalized actions, if the policy regresses them
    deviations: Tensor | None = None  # float32 [N, K, A], of normal distributions around them, if that is what it draws


@dataclass(frozen=True, slots=True)
class Decisions:
    """Action chunks for N observations, in the policy's own terms."""

    record: dict[str, Tensor]  # [N, ...] each, as in ``PolicySpec.record``
    logprobs: Tensor  # float32 [N, K, A], under sampling, also where the row is greedy
    values: Tensor  # float32 [N]


class Policy(nn.Module, ABC):
    """Maps observations to distributions over action chunks, and to values.

    Call ``set_instructions``, which defines the task numbers, before the first forward pass.
    """

    instructions: tuple[str, ...] = ()
    value_head: ValueHead  # of ``PolicyOutput.features`` and the elapsed time (0 with ``policy.value_time=false``)

    @abstractmethod
    def set_instructions(self, instructions: Sequence[str]) -> None:
        """Task number i becomes ``instructions[i]``. Raises ValueError for none."""

    def learn_words(self, texts: Sequence[str]) -> None:
        """Let a small vocabulary grow by the words of ``texts``. One that can spell any word needs nothing.

        Raises ValueError for too many words.
        """

    def tells_apart(self, texts: Sequence[str]) -> bool:
        """Whether no two of these different texts are the same to the policy."""
        return True

    @abstractmethod
    def set_statistics(self, actions: Array, proprio: Array) -> None:
        """Scale actions and proprioception by those of a data set, as ``encode`` and ``decode`` do from then on.

        ``actions`` [n, A] and ``proprio`` [n, P], in physical units, are those of all its steps; P may be 0.
        """

    @abstractmethod
    def act(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """Choose an action chunk for each row; without gradients.

        Args:
            seen: N observations.
            draws: float32 [N, ...] each, as in ``PolicySpec.draws``. They settle the sample, so that a row's actions
                depend neither on the rest of its batch nor on a global random state.
            greedy: bool [N]; these rows take the most likely actions.
            temperature: of the sampling distribution.

        Raises as ``forward``.
        """

    @abstractmethod
    def forward(
        self, seen: PolicyInput, record: Mapping[str, Tensor], temperature: float, detach_value: bool = True
    ) -> PolicyOutput:
        """Rate recorded decisions, with gradients.

        Args:
            seen: N observations.
            record: [N, ...] each, as in ``PolicySpec.record``.
            temperature: sampling and learning must use the same one.
            detach_value: stop gradients of the values at the value head.

        Raises ValueError for wrong shapes, RuntimeError before ``set_instructions``.
        """

    @abstractmethod
    def imitation_loss(
        self, seen: PolicyInput, actions: Array, mask: Tensor, rng: np.random.Generator, smoothing: float
    ) -> Tensor:
        """The loss of behaviour cloning, a scalar: the mean over demonstrated action numbers.

        Args:
            seen: N observations.
            actions: float [N, K, A], demonstrated, in physical units.
            mask: bool [N, K], false after the end of the demonstration.
            rng: for losses that are estimated by sampling.
            smoothing: ``sft.bin_smoothing``.
        """

    @abstractmethod
    def encode(self, actions: Array, rng: np.random.Generator) -> Record:
        """A record of demonstrated actions, float [n, K, A] in physical units; a higher log-probability clones them."""

    @abstractmethod
    def decode(self, record: Mapping[str, Array]) -> Array:
        """The actions of recorded decisions: float32 [n, K, A], in physical units."""

    @abstractmethod
    def normalized_actions(self, record: Mapping[str, Array]) -> Array:
        """The actions of recorded decisions as a network reads them: float32 [n, K, A], about -1 to 1."""

    def action_limits(self, ends: Array) -> Array | None:
        """What ``normalized_actions`` are of the simulator's lowest and highest actions: both are float32 [2, K, A].

        None where they are nothing that a simulator limits.
        """
        return self.normalized_actions(self.encode(ends, np.random.default_rng(0)))

    @property
    def has_reference(self) -> bool:
        """Whether the policy still holds the weights that it began with, next to those it trains."""
        return False

    def reference(self) -> AbstractContextManager[None]:
        """Inside the block, the policy acts as before training; the value head does not change.

        Raises RuntimeError without ``has_reference``, because training then overwrites the weights it started from.
        """
        raise RuntimeError("this policy has no adapters to switch off: set policy.lora, or keep a copy of it")

    def prepare_to_act(self) -> None:
        """Make ``act`` faster, by whatever means. A process that only acts calls it after each change of the weights.

        It may change weights that are not trained, if ``PolicyConfigBase.own_weights_key`` names a key.
        """

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the value head."""
        return self.value_head.parameters()

    def embedded(self, seen: PolicyInput) -> Tensor | None:
        """[n, E]: what frozen weights make of the images of n observations. It may stand for them in ``PolicyInput``.

        None where no weights are frozen between the images and the rest.
        """
        return None

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name. A weight sync transfers these."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def trunk_parameters(self) -> Iterator[nn.Parameter]:
        """All trainable parameters that are not of the value head."""
        of_value = set(map(id, self.value_parameters()))
        return (parameter for parameter in self.trained_parameters().values() if id(parameter) not in of_value)
