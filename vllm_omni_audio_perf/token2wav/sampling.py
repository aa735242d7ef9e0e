# SPDX-License-Identifier: Apache-2.0
"""From noise to the mels of several clips, in one solve."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs import Buckets, CaptureBudget, GraphBackend, GraphRunner
from vllm_omni_audio_perf.ops import Restricted, visibility_mask, visible_frames
from vllm_omni_audio_perf.token2wav.dit import BlockDiT, Conditions, Modulation, ModulationTable, Voice
from vllm_omni_audio_perf.token2wav.layout import Group
from vllm_omni_audio_perf.token2wav.solver import evaluation_times, solve, sway_time_grid

# Without guidance there is no unconditional half of the batch; upstream's threshold.
MIN_GUIDANCE_SCALE = 1e-5


def graph_blocks(largest: int) -> list[int]:
    """Numbers of blocks to capture, up to `largest`: each one up to 16, then steps that pad by at most an eighth."""
    sizes: list[int] = []
    size = 1
    while size < largest:
        sizes.append(size)
        size += max(1, size // 8)
    return [*sizes, largest] if largest > 0 else []


class Clip(NamedTuple):
    """What one mel is made of."""

    codes: Tensor
    """``[codes]`` int64 on the model's device, each below the size of the codebook."""
    speaker: Tensor
    """``[1, enc_emb_dim]`` float32, the speaker embedding."""
    reference_mel: Tensor
    """``[1, reference_frames, mel_dim]`` float32, log-mel of the reference voice."""
    noise: Tensor
    """``[1, codes * repeats, mel_dim]`` float32, the state at time 0."""


class Sampler:
    """Solves the ODE of a DiT for several clips at once. Each gets the mel that it gets alone.

    Args:
        dit: evaluates the network.
        num_steps: points of the time grid.
        solver: a `vllm_omni_audio_perf.token2wav.solver.Solver`.
        guidance_scale: weight of classifier-free guidance; below 1e-5 there is none, at half the cost.
        sway_coefficient: see `sway_time_grid`.

    Raises:
        ValueError: for fewer than two points or a solver that does not exist.
    """

    def __init__(
        self,
        dit: BlockDiT,
        *,
        num_steps: int = 10,
        solver: str = "rk4",
        guidance_scale: float = 0.5,
        sway_coefficient: float | None = -1.0,
    ) -> None:
        self.dit = dit
        self.num_steps = num_steps
        self.solver = solver
        self.guidance_scale = guidance_scale
        self.sway_coefficient = sway_coefficient
        self.graphs: GraphRunner | None = None
        self._table: ModulationTable | None = None
        self._settings_of_table: tuple[object, ...] = ()
        evaluation_times(self._grid(torch.device("cpu"), torch.float32), solver)  # refuses what cannot be solved

    @property
    def guided(self) -> bool:
        """Whether there are unconditional copies."""
        return self.guidance_scale >= MIN_GUIDANCE_SCALE

    def refresh(self) -> None:
        """Forget what was computed from the weights: to be called when they have changed. Captured graphs go, too."""
        self._table = None
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    @property
    def table(self) -> ModulationTable:
        """The modulations at the times of a solve, computed at first use and after a change of settings."""
        settings = (self.num_steps, self.solver, self.sway_coefficient, self.guidance_scale)
        if self._table is None or settings != self._settings_of_table:
            self.refresh()  # graphs hold the old one, and the weight of the guidance
            weight = self.dit.model.proj_out.weight
            self._table = self.dit.modulation_table(
                evaluation_times(self._grid(weight.device, weight.dtype), self.solver)
            )
            self._settings_of_table = settings
        return self._table

    @torch.inference_mode()
    def sample(self, clips: Sequence[Clip], *, group_mib: int | None = None) -> list[Tensor]:
        """Solve from noise to mels.

        Args:
            clips: at least one, each of at least one code.
            group_mib: memory that intermediates take at most, in MiB; None for what the DiT takes by default.

        Returns:
            Log-mels ``[1, mel_dim, frames]``, one a clip.

        Raises:
            ValueError: if a clip's noise does not fit its codes.
        """
        for clip in clips:
            expected = (1, clip.codes.shape[0] * self.dit.repeats, self.dit.mel_dim)
            if tuple(clip.noise.shape) != expected:
                raise ValueError(
                    f"noise for {clip.codes.shape[0]} codes must have shape {expected}, got {tuple(clip.noise.shape)}."
                )
        table = self.table
        layout = self.dit.layout([clip.noise.shape[1] for clip in clips], guided=self.guided, group_mib=group_mib)
        conditions = self.dit.conditions(
            layout, self._voices(clips), [clip.codes for clip in clips], guided=self.guided
        )

        def eager(index: int, state: Tensor) -> Tensor:
            return self.dit.velocity(state, table.at(index), conditions, layout.groups, self.guidance_scale)

        velocity = eager
        if self.graphs is not None:
            graphs, shape = self.graphs, (layout.blocks,)
            constant, unconditional, rotation = conditions
            positions = torch.arange(len(table.layers), device=constant.device)
            fixed = (constant, *(() if unconditional is None else (unconditional,)), rotation[: layout.blocks])

            def velocity(index: int, state: Tensor) -> Tensor:
                inputs = (state, *fixed, layout.block_frames, layout.clip, positions[index : index + 1])
                (out,) = graphs(shape, *inputs, eager=lambda: (eager(index, state),))
                return out

        initial = layout.pack([clip.noise[0] for clip in clips])
        solved = solve(velocity, initial, self._grid(initial.device, initial.dtype), self.solver)
        return [mel.T.unsqueeze(0) for mel in layout.unpack(solved)]

    @torch.inference_mode()
    def capture(self, blocks: Sequence[int], *, backend: GraphBackend, budget: CaptureBudget) -> GraphRunner:
        """Capture an evaluation in a graph for each of some numbers of blocks.

        Args:
            blocks: of all clips of a solve; what has more is evaluated without a graph.
            backend: what captures.
            budget: what the captures may cost.
        """
        dit, table = self.dit, self.table.layers
        device = table.device
        size, width = dit.block_size, dit.model.hidden_size

        def padding(value: complex, *shape: int, dtype: torch.dtype = table.dtype) -> Tensor:
            return torch.full((), value, dtype=dtype, device=device).expand(shape)

        def make_inputs(bucket: tuple[int, ...]) -> list[Tensor]:
            (count,) = bucket
            half = dit.model.rotary_embed.inv_freq.numel()
            return [
                padding(0, count, size, dit.mel_dim),
                padding(0, count, size, width),
                *([padding(0, count, 1, width)] if self.guided else []),
                padding(1, count, size, 1, half, dtype=table.dtype.to_complex()),
                padding(size, count, dtype=torch.long),
                padding(-1, count, dtype=torch.long),  # a clip of its own
                padding(0, 1, dtype=torch.long),
            ]

        runner = GraphRunner(
            "Token2Wav evaluation",
            self.velocity_fixed,
            make_inputs,
            lambda outputs, shape: tuple(output[: shape[0]] for output in outputs),
            buckets=Buckets([(count,) for count in blocks]),
            backend=backend,
            device=device,
            budget=budget,
        )
        runner.capture_all()
        self.graphs = runner
        return runner

    def velocity_fixed(self, *inputs: Tensor) -> tuple[Tensor]:
        """An evaluation as a function of fixed shape, which nothing but its inputs' content changes.

        Args:
            inputs: the noised mel ``[blocks, block_size, mel_dim]``; the `Conditions`, of one copy; valid frames of
                each block and to which clip it belongs, ``[blocks]`` int64 each; and the position of the time in the
                table, ``[1]`` int64.

        Returns:
            The velocity ``[blocks, block_size, mel_dim]``.
        """
        mel, constant, *optional, rotation, valid, clip, index = inputs
        unconditional = optional[0] if optional else None
        blocks = mel.shape[0]
        if self.guided:
            rotation, valid = rotation.repeat(2, 1, 1, 1), valid.repeat(2)
            clip = torch.cat([clip, clip + blocks + 1])  # clips are below the number of blocks, padding is -1
        restricted = {}
        for back, ahead in self.dit.neighbourhoods:
            window, frames = visible_frames(valid, clip, look_backward=back, look_ahead=ahead)
            restricted[back, ahead] = Restricted(None, window, visibility_mask(frames, self.dit.block_size))
        modulation = Modulation(*(rows.index_select(0, index).squeeze(0) for rows in self.table))
        conditions = Conditions(constant, unconditional, rotation)
        group = Group(0, valid.shape[0], restricted)
        return (self.dit.velocity(mel, modulation, conditions, [group], self.guidance_scale),)

    @torch.inference_mode()
    def evaluate_once(self, frames: int, speaker: Tensor, reference_mel: Tensor) -> None:
        """Run one evaluation of a clip of `frames` mel frames, without a graph, for a start-up run.

        It takes the memory that a solve of such a clip needs.
        """
        layout = self.dit.layout([frames], guided=self.guided)
        codes = torch.zeros(-(-frames // self.dit.repeats), dtype=torch.long, device=layout.clip.device)
        voice = self.dit.voice(speaker, reference_mel)
        conditions = self.dit.conditions(layout, [voice], [codes], guided=self.guided)
        mel = layout.pack([reference_mel.new_zeros(frames, self.dit.mel_dim)])
        self.dit.velocity(mel, self.table.at(0), conditions, layout.groups, self.guidance_scale)

    def _voices(self, clips: Sequence[Clip]) -> list[Voice]:
        """One a clip; clips that share their tensors share the computation."""
        voices: dict[tuple[int, int], Voice] = {}
        keys = [(id(clip.speaker), id(clip.reference_mel)) for clip in clips]
        for key, clip in zip(keys, clips, strict=True):
            if key not in voices:
                voices[key] = self.dit.voice(clip.speaker, clip.reference_mel)
        return [voices[key] for key in keys]

    def _grid(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return sway_time_grid(self.num_steps, self.sway_coefficient, device=device, dtype=dtype)
