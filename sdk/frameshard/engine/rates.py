"""The rates that a model's plans are made with: the machine's profile, its disk, and what serving has shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from frameshard.engine import diskprobe
from frameshard.engine.practice import Practice
from frameshard.engine.probe import Measurements
from frameshard.native import ShardDevice
from frameshard.plan.corrections import NONE, Corrections
from frameshard.plan.model import Model
from frameshard.plan.plans import GraphSize, Plan
from frameshard.plan.profile import Profile
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")


class Rates:
    """The rates of one machine, device, model, and the model's disk. Only the thread that decodes may change them.

    :param device_name: the device's name in the launch options.
    :param measure: measure at the load what the kept profile lacks. If false, the load plans from an estimate and
        leaves that to :attr:`measurements`.
    :param on_loading: called when a profile is loaded, measured or estimated, and when that is done.
    """

    def __init__(
        self,
        device: ShardDevice,
        device_name: str,
        model: Model,
        config: EngineConfig,
        n_threads: int,
        *,
        measure: bool,
        on_loading: Callable[[int], None],
    ) -> None:
        self.measurements: Measurements | None = None
        """The measurements that the profile in use lacks; ``None`` if it is measured."""
        self._device, self._device_name, self._model = device, device_name, model
        self._n_threads, self._kv_type, self._mode = n_threads, config.kv_type, config.mode
        self._measure, self._on_loading = measure, on_loading
        self._profile: Profile | None = None
        self._practice: Practice | None = None  # a profile that is an estimate has none
        self._knows_disk = False  # it was measured, or cannot be

    @property
    def profile(self) -> Profile:
        """[any thread] The machine's profile; loaded, measured or estimated at the first use."""
        if self._profile is None:
            self._on_loading(0)
            measurements = Measurements(
                self._device,
                self._model,
                device_name=self._device_name,
                n_threads=self._n_threads,
                kv_type=self._kv_type,
            )
            of_disk = diskprobe.recall(self._model.path, self._device_name)
            if self._measure or measurements.complete:
                self._profile = replace(measurements.run(), disk=of_disk)
                self._practice = Practice(self._model, self._profile, self._mode, self._device.stats)
                logger.info("plans are made from the measured profile of this machine")
            else:
                self._profile = replace(measurements.estimate(), disk=of_disk)
                self.measurements = measurements
                logger.info("plans are made from an estimate of this machine, until an idle moment to measure it")
            self._on_loading(1)
        return self._profile

    def adopt_profile(self, profile: Profile) -> None:
        """Uses a measured profile. The next plan is made with it."""
        self._profile, self.measurements = replace(profile, disk=self.profile.disk), None
        self._practice = Practice(self._model, self._profile, self._mode, self._device.stats)

    @property
    def lacks_disk(self) -> bool:
        """[any thread] Whether plans need rates of the disk that were not measured yet. Until then they take all
        weights to be in host memory."""
        return not (self._knows_disk or self.profile.disk) and self._device.stats().host_budget_bytes > 0

    def measure_disk(self) -> diskprobe.Rates:
        """[any thread] Measures the model's disk; takes about a second. Empty if it cannot be measured."""
        return diskprobe.measure_model(self._model.path, self._device_name)

    def adopt_disk(self, rates: diskprobe.Rates) -> None:
        """Uses measured rates of the disk; empty if it cannot be measured. The next plan is made with them."""
        self._knows_disk, self._profile = True, replace(self.profile, disk=rates)

    @property
    def corrections(self) -> Corrections:
        """[any thread] What serving has shown."""
        return NONE if self._practice is None else self._practice.corrections

    def observe(self, plan: Plan, graphs: Sequence[GraphSize], seconds: float) -> None:
        """Compares the time of graphs with its prediction by the plan in force."""
        if self._practice is not None:
            self._practice.observe(plan, graphs, seconds)

    def keep(self) -> None:
        """Keeps for the next launch what serving has shown. It writes a file: call it when no job waits."""
        if self._practice is not None:
            self._practice.keep()
