"""The layers of a decode step one after the other, by the kernels of a compiled model, without the model.

Each layer has its own weights and caches. The time of a kernel includes what it prefetches before the preceding kernel
has ended, and the room that it leaves to the following kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.passes.kernels.common.gpu_limits import gpu_limits
from piecegraph.passes.kernels.linear.linear_config import Config, LinearConfig
from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.passes.ops.linear import linear
from piecegraph.passes.ops.norm_linear import add_norm_linear, linear_add_norm_linear
from piecegraph.passes.ops.rms_norm import add_rms_norm
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig, decode_config, num_head_blocks
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.tools.command_line.shapes import SHAPES

EPS = 1e-6

BLOCK_SIZE = 16
"""The number of tokens in a block of the cache."""

NORMED = ("qkv", "gate_up")
"""The linears behind a norm."""

Layouts = Mapping[str, Config | SplitConfig]
"""The layouts that replace the default ones, by the linear's name in the `linear` bench."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The shape of a layer with gated linears and, where `has_head_norm`, a norm of query and key."""

    num_layers: int
    hidden: int
    inner: int
    heads: HeadShape
    has_head_norm: bool
    max_len: int
    is_share: bool = False  # of one of several ranks: each norm is a kernel of its own, as behind a sum over them

    @classmethod
    def of(cls, model: str, num_ranks: int = 1) -> LayerShape:
        """Return a layer of a model, or of several ranks the share of one, without the sums over them."""
        config: dict[str, Any] = SHAPES[model]
        heads = HeadShape(
            num_q_heads=config["num_attention_heads"] // num_ranks,
            num_kv_heads=config["num_key_value_heads"] // num_ranks,
            key_dim=config["head_dim"], value_dim=config["head_dim"], dtype=torch.bfloat16,
        )  # fmt: skip
        return cls(
            num_layers=config["num_hidden_layers"], hidden=config["hidden_size"],
            inner=config["intermediate_size"] // num_ranks, heads=heads,
            has_head_norm=config["model_type"].startswith("qwen3"), max_len=config["max_position_embeddings"],
            is_share=num_ranks > 1,
        )  # fmt: skip

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        """The rows and columns of each weight, with projections merged as the passes merge them."""
        attended = self.heads.num_q_heads * self.heads.value_dim
        return {
            "qkv": (attended + 2 * self.heads.num_kv_heads * self.heads.key_dim, self.hidden),
            "output": (self.hidden, attended),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def weight_bytes(self) -> int:
        """The bytes of one layer's weights in bfloat16."""
        return sum(rows * size * 2 for rows, size in self.weight_shapes.values())

    def kv_bytes(self, batch: int, context: int) -> int:
        """Return the bytes of one layer's keys and values in bfloat16."""
        return 2 * batch * context * self.heads.num_kv_heads * self.heads.key_dim * 2


class LayerChain:
    """Random weights and caches of a decode step of `batch` requests with `context` tokens each, the new one included.

    Tensors live on `device`; the caches are written at the new token's slots, and nothing else is changed.
    """

    def __init__(self, shape: LayerShape, batch: int, context: int, num_layers: int, device: torch.device) -> None:
        self.shape, self.batch, self.num_layers = shape, batch, num_layers
        random = torch.Generator(device=device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            made = torch.empty(size, dtype=torch.bfloat16, device=device)
            return made.normal_(std=size[-1] ** -0.5, generator=random)

        self.weights = [{name: normal(*size) for name, size in shape.weight_shapes.items()} for _ in range(num_layers)]
        self.x, self.residual = normal(2, batch, shape.hidden).unbind()
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        blocks = -(-context // BLOCK_SIZE)
        size = (batch * blocks, BLOCK_SIZE, shape.heads.num_kv_heads, shape.heads.key_dim)
        self.caches = [KVCache(normal(*size), normal(*size)) for _ in range(num_layers)]
        shuffled = torch.randperm(batch * blocks, generator=random, device=device).to(torch.int32)
        self.block_table = shuffled.view(batch, blocks)
        self.slots = self.block_table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        angles = torch.rand(batch, shape.heads.key_dim, generator=random, device=device)
        head_norm = torch.ones(shape.heads.key_dim, dtype=torch.bfloat16, device=device)
        self.rotary = Rotary(
            cos=angles.cos(), sin=angles.sin(),
            q_norm_weight=head_norm if shape.has_head_norm else None,
            k_norm_weight=head_norm if shape.has_head_norm else None,
            norm_eps=EPS if shape.has_head_norm else None,
        )  # fmt: skip
        self._device = device
        self._workspaces: dict[int, SplitWorkspace] = {}  # by partial results

    def attention_layout(self) -> DecodeConfig:
        """Return the layout that attention chooses by default."""
        gpu = gpu_limits(self._device.index or 0)
        return decode_config(
            self.shape.heads, num_reqs=self.batch, max_len=self.shape.max_len, num_sms=gpu.num_sms,
            shared_bytes=gpu.shared_bytes, can_overlap=gpu.can_overlap,
        )  # fmt: skip

    def run(self, attention: DecodeConfig | None, layouts: Layouts) -> torch.Tensor:
        """Run all layers, and return `[batch, rows of qkv]` of the layer after the last, which is the first.

        A rank's share returns `[batch, hidden]` of the last. Without a layout attention is left out, and a part of what
        it would have read is passed on instead.
        """
        if self.shape.is_share:
            return self._run_share(attention, layouts)
        first = self.weights[0]
        qkv, residual = add_norm_linear(self.x, self.residual, self.norm, EPS, 0.0, first["qkv"], None, "")
        for layer, weights in enumerate(self.weights):
            attended = self._attend(qkv, layer, attention)
            following = self.weights[(layer + 1) % self.num_layers]["qkv"]
            inner, residual = self._pair(attended, residual, weights, ("output", "gate_up"), "silu", layouts)
            named = {"down": weights["down"], "qkv": following}
            qkv, residual = self._pair(inner, residual, named, ("down", "qkv"), "", layouts)
        return qkv

    def _run_share(self, attention: DecodeConfig | None, layouts: Layouts) -> torch.Tensor:
        x, residual = self.x, self.residual
        for layer, weights in enumerate(self.weights):
            normed, residual = add_rms_norm(x, residual, self.norm, EPS, 0.0)
            attended = self._attend(self._linear("qkv", normed, weights, layouts), layer, attention)
            x = self._linear("output", attended, weights, layouts)
            normed, residual = add_rms_norm(x, residual, self.norm, EPS, 0.0)
            x = self._linear("down", self._linear("gate_up", normed, weights, layouts), weights, layouts)
        return x

    def _linear(
        self, name: str, x: torch.Tensor, weights: Mapping[str, torch.Tensor], layouts: Layouts
    ) -> torch.Tensor:
        activation, layout = "silu" if name == "gate_up" else "", layouts.get(name)
        if layout is None:
            return linear(x, weights[name], None, activation, is_normed=name in NORMED)
        return _whole(x, weights[name], activation, layout)

    def launch_attention(self, attention: DecodeConfig) -> None:
        """Launch attention once over the first layer's cache, to compile it."""
        self._attend(self.x.new_zeros(self.batch, self.shape.weight_shapes["qkv"][0]), 0, attention)

    def launch_linear(self, name: str, layout: Config | SplitConfig) -> None:
        """Launch the linear once, to compile it."""
        weight = self.weights[0][name]
        x = self.x.new_zeros(self.batch, weight.shape[1])
        if is_in_parts(layout):
            _parts(x, weight, layout)
        elif name in NORMED and self.batch == 1 and isinstance(layout, LinearConfig) and not self.shape.is_share:
            self._normed_row(x, x, weight, "silu" if name == "gate_up" else "", layout)
        else:
            _whole(x, weight, "silu" if name == "gate_up" else "", layout)

    def _attend(self, qkv: torch.Tensor, layer: int, attention: DecodeConfig | None) -> torch.Tensor:
        from piecegraph.runner.attention.triton.kernels.decode import decode_call

        heads = self.shape.heads
        attended = heads.num_q_heads * heads.value_dim
        if attention is None:
            return qkv[:, :attended].contiguous()
        query, key, value = qkv.view(self.batch, -1, heads.key_dim).split(
            [heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads], 1
        )
        partials = attention.num_partials(self.batch) * heads.num_q_heads
        workspace = self._workspaces.get(partials)
        if workspace is None:
            workspace = self._workspaces[partials] = SplitWorkspace.allocate(
                num_partials=partials, num_values=partials * heads.value_dim,
                num_counts=self.batch * num_head_blocks(heads), device=self._device,
            )  # fmt: skip
        out = qkv.new_empty(self.batch, heads.num_q_heads, heads.value_dim)
        decode_call(
            AttentionCall(query, key, value, out, heads.key_dim**-0.5, rotary=self.rotary), self.caches[layer],
            seq_lens=self.seq_lens, block_table=self.block_table, slot_mapping=self.slots, num_reqs=self.batch,
            workspace=workspace, config=attention,
        ).launch()  # fmt: skip
        return out.view(self.batch, attended)

    def _pair(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weights: Mapping[str, torch.Tensor],
        names: tuple[str, str],
        activation: str,
        layouts: Layouts,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `linear_add_norm_linear`; where a linear has another layout, run its parts one by one."""
        ahead, behind = (layouts.get(name) for name in names)
        before, weight = (weights[name] for name in names)
        if ahead is None and behind is None:
            return linear_add_norm_linear(x, before, None, residual, self.norm, EPS, 0.0, weight, None, activation)
        from piecegraph.passes.kernels.linear.linear_parts import parts_config
        from piecegraph.passes.kernels.norm.rms_norm import add_rms_norm_of_parts_on_gpu, add_rms_norm_on_gpu

        parts = ahead
        if ahead is None:
            gpu = gpu_limits(self._device.index or 0)
            parts = parts_config(self.batch, *before.shape, itemsize=2, gpu=gpu)
        if parts is not None and is_in_parts(parts):
            normed, total = add_rms_norm_of_parts_on_gpu(
                _parts(x, before, parts), None, residual, self.norm, EPS, 0.0
            )  # fmt: skip
        else:
            added = linear(x, before, None, "") if ahead is None else _whole(x, before, "", ahead)
            if self.batch == 1 and isinstance(behind, LinearConfig):
                return self._normed_row(added, residual, weight, activation, behind)
            if self.batch == 1 and behind is None:
                return add_norm_linear(added, residual, self.norm, EPS, 0.0, weight, None, activation)
            normed, total = add_rms_norm_on_gpu(added, residual, self.norm, EPS, 0.0)
        if behind is None:
            return linear(normed, weight, None, activation), total
        return _whole(normed, weight, activation, behind), total

    def _normed_row(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, activation: str, layout: LinearConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from piecegraph.passes.kernels.norm.norm_linear import add_norm_linear_on_gpu

        return add_norm_linear_on_gpu(x, residual, self.norm, EPS, 0.0, weight, None, activation, layout)


def is_in_parts(layout: Config | SplitConfig) -> bool:
    return isinstance(layout, SplitConfig) or (isinstance(layout, StreamedConfig) and layout.num_parts > 1)


def _parts(x: torch.Tensor, weight: torch.Tensor, layout: Config | SplitConfig) -> torch.Tensor:
    from piecegraph.passes.kernels.linear.linear_parts import linear_parts_on_gpu

    assert isinstance(layout, SplitConfig | StreamedConfig), layout
    return linear_parts_on_gpu(x, weight, layout)


def _whole(x: torch.Tensor, weight: torch.Tensor, activation: str, layout: Config | SplitConfig) -> torch.Tensor:
    from piecegraph.passes.kernels.linear.linear import linear_on_gpu

    assert not isinstance(layout, SplitConfig), layout
    return linear_on_gpu(x, weight, None, activation, layout)
