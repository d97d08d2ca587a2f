"""Finds llama.cpp's best setting whose whole process takes no more VRAM than a budget, by running it.

More layers on the GPU take more VRAM and are faster, so for each way to divide the model and each size of a ubatch the
most layers are looked for that fit. The ways are whole layers (``-ngl``, then experts by ``-ncmoe``) and, where keys
and values are large, the attention of all layers with some of the feed-forward networks (``-ot``). Of the settings
found the one with the shortest time for prompt and answer is the best. A run that takes too much is stopped at once. It
decodes few tokens, but has the row's context, which decides the peak. Of a long prompt the search reads one ubatch.
What is promising then is run again with the whole prompt. Where that takes more VRAM, fewer layers are tried.

In prompts llama.cpp copies the weights that it keeps on the CPU to the GPU, the largest tensor too. Where no setting
has room for that, it computes them on the CPU (``--no-op-offload``).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from frameshard.errors import FrameshardError
from frameshard.plan.memory import kv_bytes
from frameshard.plan.windows import sliding_cells
from frameshard.plan.workload import Workload

from . import common
from .upstream import UBATCH, AboveLimit, Placements, Setting, attention_on_gpu, cells, layers_on_gpu

if TYPE_CHECKING:
    from .upstream import Measured, Program

logger = logging.getLogger("frameshard")

UBATCHES = (UBATCH, 512)
LARGE_KV = 1 / 16
"""The share of the weights from which on keys and values decide where attention should be. With less, ``-ot`` leaves
about the same bytes to the CPU as ``-ngl``."""

GENERATED = 8
"""Tokens that a run decodes to estimate the rate."""

PROMISING = 1.5
"""How much longer than the fastest a setting may take, by its run with one ubatch, to be run with the whole prompt."""

OVERHEAD = 1536 << 20
"""The VRAM beside weights and KV that is assumed before a run has shown it. On an H100 0.8 to 1.3 GiB were measured.
The value is deliberately high, because a run that exceeds the budget tells the search less than one that fits."""


class Search:
    """Looks for the last of several settings that fits, with few runs. It runs nothing itself.

    After a run that fits, its peak says which setting is likely the last one. After one that does not, the setting
    before it is next, then the one 2 before that, 4, and so on.

    :param sizes: the bytes of weights and KV of each setting, ascending.
    :param overhead_bytes: what a run is expected to take in addition.
    """

    def __init__(self, sizes: Sequence[int], budget_bytes: int, overhead_bytes: int) -> None:
        self.best: int | None = None
        """The last setting that fits, of those that ran."""
        self._sizes = sizes
        self._budget = budget_bytes
        self._peak = overhead_bytes  # of the best; until there is one, of a setting with the size 0
        self._growth = 1.0  # of the peak, for each byte of a setting
        self._above = len(sizes)  # the first setting that does not fit
        self._step = 0  # back from it; 0 after a run that fits

    @property
    def next(self) -> int | None:
        """The setting to run next; ``None`` if :attr:`best` is the result."""
        least = 0 if self.best is None else self.best + 1
        if least == self._above:
            return None
        if self._step:
            likely = self._above - self._step
        else:
            size = 0 if self.best is None else self._sizes[self.best]
            likely = bisect.bisect_right(self._sizes, size + (self._budget - self._peak) / self._growth) - 1
        return min(max(likely, least), self._above - 1)

    def fits(self, index: int, peak_bytes: int) -> None:
        """Setting ``index`` fits, and its run took ``peak_bytes``."""
        if self.best is not None and self._sizes[index] > self._sizes[self.best]:
            growth = (peak_bytes - self._peak) / (self._sizes[index] - self._sizes[self.best])
            self._growth = min(max(growth, 0.5), 2.0)
        self.best = index
        self._peak = peak_bytes
        self._step = 0

    def does_not_fit(self, index: int) -> None:
        """Setting ``index`` takes more than the budget."""
        self._above = index
        self._step = max(1, 2 * self._step)


class Finder:
    """Finds settings for one workload at several budgets."""

    def __init__(self, program: Program, workload: Workload) -> None:
        model, n_tokens = program.model, cells(workload) * workload.n_parallel
        n_sliding = sliding_cells(model, cells(workload), UBATCH, exact=False)  # llama.cpp's programs keep no more
        kv = kv_bytes(model, n_tokens, workload.n_parallel, workload.kv_type, n_sliding)
        layers = layers_on_gpu(model, kv)
        self._ways = [layers]
        if kv > LARGE_KV * sum(tensor.n_bytes for tensor in model.tensors):
            self._ways.append(attention_on_gpu(model, kv))
        self._without_copies: Placements = [((*args, "--no-op-offload"), n_bytes) for args, n_bytes in layers]
        self._program, self._workload = program, workload
        self._overheads: dict[int, int] = {}  # by ubatch, of the last run that fitted

    def find(self, budget_bytes: int) -> Setting | None:
        """The best setting within a budget; ``None`` if none fits.

        :raises FrameshardError: the program failed, or NVML does not count its VRAM.
        """
        ways = [(way, ubatch) for way in self._ways for ubatch in UBATCHES]
        return self._best(budget_bytes, ways) or self._best(budget_bytes, [(self._without_copies, min(UBATCHES))])

    def _best(self, budget_bytes: int, ways: Sequence[tuple[Placements, int]]) -> Setting | None:
        """The fastest of the settings with the most layers on the GPU that fit.

        :param ways: ways to divide the model, each with a size of a ubatch.
        """
        n_prompt = self._workload.n_prompt
        found = self._most(budget_bytes, ways, min(n_prompt, UBATCH))
        if found and n_prompt > UBATCH:
            promising = [(way, ubatch) for seconds, way, ubatch in found if seconds <= PROMISING * found[0][0]]
            rest = [(way, ubatch) for _, way, ubatch in found[len(promising) :]]
            found = self._most(budget_bytes, promising, n_prompt) or self._most(budget_bytes, rest, n_prompt)
        return Setting(found[0][1][-1][0], found[0][2]) if found else None

    def _most(
        self, budget_bytes: int, ways: Sequence[tuple[Placements, int]], n_prompt: int
    ) -> list[tuple[float, Placements, int]]:
        """For each way the most layers that fit with so many tokens of prompt: the estimated time of the workload, the
        placements up to this one, and the size of a ubatch. The fastest is first."""
        found = []
        for way, ubatch in ways:
            if most := self._search(budget_bytes, way, ubatch, n_prompt):
                index, measured = most
                found.append((self._seconds(measured, n_prompt), way[: index + 1], ubatch))
        return sorted(found, key=lambda each: each[0])

    def _search(self, budget_bytes: int, way: Placements, ubatch: int, n_prompt: int) -> tuple[int, Measured] | None:
        """The index of the last placement that fits with so many tokens of prompt, and its run."""
        overhead = self._overheads.get(ubatch, max(self._overheads.values(), default=OVERHEAD))
        sizes = [n_bytes for _, n_bytes in way]
        search, best = Search(sizes, budget_bytes, overhead), None
        while (index := search.next) is not None:
            measured = self._run(Setting(way[index][0], ubatch), budget_bytes, n_prompt)
            if measured is None:
                search.does_not_fit(index)
                continue
            assert measured.nvml_peak is not None
            search.fits(index, measured.nvml_peak)
            self._overheads[ubatch] = measured.nvml_peak - sizes[index]
            best = index, measured
        return best

    def _run(self, setting: Setting, budget_bytes: int, n_prompt: int) -> Measured | None:
        """A run with few tokens to decode; ``None`` if it takes more than the budget."""
        what = f"llama.cpp at {common.format_size(budget_bytes)}: {setting}"
        short = {"n_prompt": n_prompt, "n_generate": min(GENERATED, self._workload.n_generate)}
        try:
            measured = self._program.run(setting, self._workload, **short, limit_bytes=budget_bytes)
        except AboveLimit:
            logger.info("%s takes more", what)
            return None
        if measured.nvml_peak is None:
            raise FrameshardError(f"NVML does not count the VRAM of {self._program.binary}: add --vs-budget weights")
        logger.info("%s peaks at %s", what, common.format_size(measured.nvml_peak))
        return measured

    def _seconds(self, measured: Measured, n_prompt: int) -> float:
        """The time of the workload's prompts and answers, by the rates of a run with so many tokens of prompt."""
        n_tokens = self._workload.n_generate * self._workload.n_parallel
        return measured.ttft_s * self._workload.n_prompt / n_prompt + n_tokens / measured.decode_tps
